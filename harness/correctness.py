"""Is an output right? The judge, and the cells of the correctness grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from harness.device import Device
from harness.plugin import Kernel
from harness.problem import MANTISSA_BITS, SMALLEST_NORMAL_EXPONENT, Problem
from harness.record import ERROR, NOT_DETERMINISTIC, OK, OUT_OF_MEMORY, TIMEOUT, UNSUPPORTED, WRONG
from harness.reference import reference_fp64, reference_same_dtype
from harness.supervisor import Outcome, Verdict
from harness.tensors import (
    GUARD_BYTE,
    GuardedAllocations,
    Inputs,
    fill,
    first_location,
    guards_touched,
    location,
    make_inputs,
    poison_free_memory,
    same_bits,
)


@dataclass(frozen=True)
class Tolerance:
    """`torch.allclose`'s two tolerances, for one dtype."""

    absolute: float
    relative: float


# Every fault that the judge finds is of one of these kinds; a wrong cell's `fault_kind` names those found.
FAULT_KINDS = {
    "form": "what it returned is no tensor, or has another shape, dtype or device",
    "not_finite": "the output has NaN or infinite values",
    "uninitialised": "the output depends on memory that the kernel allocated and did not write",
    "wrote_outside": "it wrote outside its inputs or outside what it allocated",
    "inputs_changed": "it wrote into q, k or v, or into the lengths or the block table",
    "asynchronous": "it works on another stream, and the current one does not wait for it or it not for that",
    NOT_DETERMINISTIC: "the same inputs gave other bits; the only kind that alone makes no cell wrong",
    "stale_output": "other values in the same buffers gave the output of the values before",
    "overwrote_output": "a later call changed the output of an earlier one",
    "inaccurate": "values differ from what is right by more than is allowed",
}
# Rows of one head whose error is held against their own size: small outputs get a small bound.
BLOCK_ROWS = 16
# In renewed values the last query is so large that its scores overflow exp() in fp32.
LARGE_QUERY = 60.0
# What memory that a kernel allocates holds in a repeated call: huge in each floating dtype, and finite.
OTHER_CONTENTS = 0x7B
# Work that an interpreted kernel may have to do more than once; a call of the CPU's grid takes seconds.
INTERPRETED_REPEAT_FLOP = 1 << 23
# Cycles that inputs come late by, for a kernel that does not wait: about two milliseconds of a GPU.
LATE_CYCLES = 4_000_000


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, in words; `kind` is a key of FAULT_KINDS."""

    kind: str
    text: str


@dataclass(frozen=True)
class Judgement:
    """What the judge found in one output.

    Errors are absolute. `error_row` and its siblings locate the largest error against the same-dtype
    reference, `unit_in_last_place` is the spacing of the dtype's numbers at the reference there, and
    `error_in_units` the error over it. `max_abs_error_fp64` is held against `bound_fp64` =
    2 * `reference_error_fp64` + floor, as FlashAttention's tests do. `relative_error` is the largest
    norm of the error of BLOCK_ROWS rows of a head over the norm of those rows, in fp64, and is held
    against `relative_bound`, had from the same-dtype reference likewise.
    """

    faults: list[Fault]
    max_abs_error: float | None = None
    error_batch: int | None = None
    error_head: int | None = None
    error_row: int | None = None
    error_column: int | None = None
    value_there: float | None = None
    unit_in_last_place: float | None = None
    error_in_units: float | None = None
    max_abs_error_fp64: float | None = None
    reference_error_fp64: float | None = None
    bound_fp64: float | None = None
    relative_error: float | None = None
    relative_bound: float | None = None
    allclose: bool | None = None

    @property
    def right(self) -> bool:
        return not self.faults

    @property
    def fault_kinds(self) -> list[str]:
        """The kinds of the faults found, each once, in the order of FAULT_KINDS."""
        found = {fault.kind for fault in self.faults}
        return [kind for kind in FAULT_KINDS if kind in found]

    @property
    def reason(self) -> str | None:
        return "; ".join(f"{fault.text} ({fault.kind})" for fault in self.faults) or None

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of a record: all fields but the faults, and of a wrong output its `fault_kind`."""
        figures = {name: value for name, value in asdict(self).items() if name != "faults"}
        return figures if self.right else {**figures, "fault_kind": ", ".join(self.fault_kinds)}


class Judge:
    """Knows the right answer to one problem with one set of inputs, and judges outputs against it.

    The references are computed once for a set of values, so that an implementation can be judged before
    and after it was timed. Inputs are kept as copies too: a kernel that writes into them is found.
    """

    def __init__(
        self, problem: Problem, inputs: Inputs, tolerance: Tolerance, kernel: Kernel | None = None
    ) -> None:
        self.problem = problem
        # A kernel that is not attention, a floor, is held against what it says that it computes.
        self._kernel = kernel
        self.tolerance = tolerance
        self.inputs = inputs
        # Rows from here on have a large query: only their error against fp64 is judged.
        self._large_from = problem.seq_len_q
        self._former: torch.Tensor | None = None  # the right answer for the values before these
        self._learn()

    def renew(self, seed: int) -> None:
        """Put other values into the same input buffers, and learn what is right for them.

        A kernel that returns what it computed before, or is right only the first times, is then found.
        The last query, if there are others, is LARGE_QUERY times as large as the others: a softmax that
        does not subtract the maximum overflows there.
        """
        self._former = self._same_dtype
        del self._copies, self._exact, self._same_dtype  # long cells have no room for both
        fill(self.inputs, self.problem, seed=seed)
        if self.problem.seq_len_q > 1:
            self._large_from = self.problem.seq_len_q - 1
            self.inputs.q[:, :, self._large_from :] *= LARGE_QUERY
        self._learn()

    def deliver_late(self, device: Device) -> None:
        """On a GPU, have the current stream write the inputs after a spin; until then they are zero.

        A kernel that is called now and does not wait for the current stream reads zeros.
        """
        if device.kind != "cuda":
            return
        for tensor in self.inputs:
            tensor.zero_()
        device.synchronize()
        torch.cuda._sleep(LATE_CYCLES)
        for name, tensor in self.inputs.named.items():
            tensor.copy_(self._copies[name])

    def _learn(self) -> None:
        inputs, problem = self.inputs, self.problem
        self._copies = {name: tensor.clone() for name, tensor in inputs.named.items()}
        exact = None if self._kernel is None else self._kernel.exact(inputs, problem)
        if exact is None:
            self._exact = reference_fp64(inputs, problem)
            self._same_dtype = reference_same_dtype(inputs, problem)
        else:
            self._exact = exact
            self._same_dtype = exact.to(inputs.q.dtype)
        self._reference = _distance(self._usual(self._same_dtype), self._usual(self._exact))
        self._large_reference = _distance(self._large(self._same_dtype), self._large(self._exact))
        shifted = (self._same_dtype + 0.3) - 0.3
        self._floor = 2 * _distance(shifted, self._same_dtype).largest
        # What rounding may cost where the reference was lucky: a unit, more in a block of few numbers,
        # which may all be small by chance.
        numbers = min(BLOCK_ROWS, problem.seq_len_q) * problem.head_dim
        relative_floor = 2.0 ** -MANTISSA_BITS[problem.dtype] * (1 + 64 / numbers)
        self._relative_bound = 2 * self._reference.relative + relative_floor
        if not math.isfinite(self._reference.largest + self._large_reference.largest + self._floor):
            raise ValueError("the same-dtype reference is not finite for these inputs: nothing to judge by")

    def _usual(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, :, : self._large_from]

    def _large(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, :, self._large_from :]

    def judge(self, output: Any) -> Judgement:
        """Judge an output for these inputs; never raises for a bad output."""
        faults = self.form_faults(output) + self._input_faults()
        expected = self._exact
        if (
            not isinstance(output, torch.Tensor)
            or output.shape != expected.shape
            or output.device != expected.device
        ):
            return Judgement(faults)
        finite = torch.isfinite(output)
        if not bool(finite.all()):
            where = first_location(~finite)
            count = int((~finite).sum())
            faults.append(Fault("not_finite", f"{count} values are not finite, the first at {_place(where)}"))
            return Judgement(faults)
        return self._compare(output, faults)

    def form_faults(self, output: Any) -> list[Fault]:
        """What is wrong with an output before its values are looked at."""
        if not isinstance(output, torch.Tensor):
            return [Fault("form", f"returned {type(output).__name__}, not a tensor")]
        expected = self._same_dtype
        faults = []
        for name in ("shape", "dtype", "device"):
            found, wanted = getattr(output, name), getattr(expected, name)
            if found != wanted:
                faults.append(Fault("form", f"{name} is {_plain(found)}, expected {_plain(wanted)}"))
        return faults

    def _input_faults(self) -> list[Fault]:
        faults = []
        for name, tensor in self.inputs.named.items():
            if not torch.equal(tensor, self._copies[name]):
                faults.append(Fault("inputs_changed", f"the input {name} was changed"))
                tensor.copy_(self._copies[name])
            if guards_touched(tensor):
                faults.append(Fault("wrote_outside", f"wrote outside the input {name}"))
        return faults

    def _compare(self, output: torch.Tensor, faults: list[Fault]) -> Judgement:
        usual = self._usual(output)
        expected = self._usual(self._same_dtype).to(output.dtype)
        errors = (usual.double() - expected.double()).abs()
        worst = location(int(errors.flatten().argmax()), errors.shape)
        max_error = float(errors[worst])
        # The reference's value there: that of the output is the kernel's own, and may be anything.
        value = float(expected[worst])
        unit = unit_in_last_place(value, self.problem.dtype)
        all_close = bool(self._within_tolerance(errors, expected).all())
        # The reference's own error at a place is not held against a kernel that is nearer to what is right.
        close = self._within_tolerance(errors - self._reference_errors(), expected)
        exact = _distance(usual, self._usual(self._exact))
        bound = 2 * self._reference.largest + self._floor
        large_error = _distance(self._large(output), self._large(self._exact)).largest
        large_bound = 2 * self._large_reference.largest + self._floor
        said = []
        if not bool(close.all()):
            count = int((~close).sum())
            said.append(
                f"{count} of {close.numel()} values differ beyond the tolerance from same-dtype attention,"
                f" the first at {_place(first_location(~close))},"
                f" the largest error {max_error:.3g} at {_place(worst)}"
            )
        del errors, close
        if exact.largest > bound:
            said.append(f"error against fp64 {exact.largest:.3g} exceeds {bound:.3g}")
        if exact.relative > self._relative_bound:
            said.append(
                f"error of {BLOCK_ROWS} rows over their size {exact.relative:.3g} exceeds"
                f" {self._relative_bound:.3g},"
                f" at batch {exact.batch}, head {exact.head}, from row {exact.row}"
            )
        if large_error > large_bound:
            said.append(
                f"error against fp64 {large_error:.3g} exceeds {large_bound:.3g} in row {self._large_from},"
                f" whose query is {LARGE_QUERY:g} times as large"
            )
        if said and self._is_former(usual):
            said = ["returned what was right for the values that were in the same buffers before"]
            faults.append(Fault("stale_output", said[0]))
        else:
            faults += [Fault("inaccurate", text) for text in said]
        return Judgement(
            faults=faults,
            max_abs_error=max_error,
            error_batch=worst[0],
            error_head=worst[1],
            error_row=worst[2],
            error_column=worst[3],
            value_there=value,
            unit_in_last_place=unit,
            error_in_units=max_error / unit,
            max_abs_error_fp64=exact.largest,
            reference_error_fp64=self._reference.largest,
            bound_fp64=bound,
            relative_error=exact.relative,
            relative_bound=self._relative_bound,
            allclose=all_close,
        )

    def _within_tolerance(self, errors: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        return errors <= self.tolerance.absolute + self.tolerance.relative * expected.double().abs()

    def _reference_errors(self) -> torch.Tensor:
        return (self._usual(self._same_dtype).double() - self._usual(self._exact)).abs_()

    def _is_former(self, output: torch.Tensor) -> bool:
        if self._former is None:
            return False
        return _distance(output, self._usual(self._former)).relative <= self._relative_bound


def check_problem(
    kernel: Kernel, problem: Problem, device: Device, tolerance: Tolerance, *, renewed: bool = True
) -> dict[str, Any]:
    """Judge calls on fresh inputs, the inputs and all that a call allocates lying between guard zones.

    The second call has the same inputs and must give the same bits, though what it allocates holds other
    bytes and, on a GPU, its inputs are written just before it. The third, if `renewed`, has other values
    in the same buffers and must leave the outputs before it alone. An interpreted kernel is called once
    where a call takes seconds. Returns the judgement's figures and the `judged_calls`, and of a kernel that
    is right but not deterministic the `fault_kind` and the `reason`; raises Verdict with `unsupported` or
    `wrong`.
    """
    reason = kernel.unsupported(problem, device.target())
    if reason:
        raise Verdict(UNSUPPORTED, reason)
    judge = Judge(problem, make_inputs(problem, device.kind), tolerance, kernel)
    calls = [_call(kernel, judge, device)]
    found = calls[0].judgement
    faults = list(found.faults)
    again = not kernel.interpreted or problem.flop_count <= INTERPRETED_REPEAT_FLOP
    if again and calls[0].copy is not None:
        calls.append(_call(kernel, judge, device, contents=OTHER_CONTENTS, late=True))
        faults += _new(faults, calls[1].judgement.faults, "the second time, ")
        faults += _new(faults, _repeat_faults(kernel, judge, device, *calls))
        if renewed:
            judge.renew(problem.seed + 1)
            calls.append(_call(kernel, judge, device))
            faults += _new(faults, calls[2].judgement.faults, "with other values, ")
            faults += _new(faults, _overwritten(calls))
        found = next((call.judgement for call in calls if not call.judgement.right), found)
    found = replace(found, faults=faults)
    figures = {**found.figures, "judged_calls": len(calls)}
    if found.fault_kinds == [NOT_DETERMINISTIC]:
        return {**figures, "reason": found.reason}
    if not found.right:
        raise Verdict(WRONG, str(found.reason), figures)
    return figures


@dataclass(frozen=True)
class _Call:
    """A judged call; `copy` is the output as the current stream found it behind the call, if it has form."""

    judgement: Judgement
    output: Any
    copy: torch.Tensor | None


def _call(
    kernel: Kernel, judge: Judge, device: Device, *, contents: int = GUARD_BYTE, late: bool = False
) -> _Call:
    poison_free_memory(judge.inputs.q, contents)
    if late:
        judge.deliver_late(device)
    with GuardedAllocations(contents) as allocations:
        output = kernel.answer(judge.inputs, judge.problem)
    copy = None if judge.form_faults(output) else output.clone()
    device.synchronize()
    judgement = judge.judge(output)
    if allocations.touched:
        judgement.faults.append(Fault("wrote_outside", "wrote outside a tensor it allocated"))
    if copy is not None and not same_bits(output, copy):
        text = "the output was not there when the current stream came to the point behind the call"
        judgement.faults.append(Fault("asynchronous", text))
    return _Call(judgement, output, copy)


def _repeat_faults(kernel: Kernel, judge: Judge, device: Device, first: _Call, second: _Call) -> list[Fault]:
    """Why the second call gave other bits than the first, if it did."""
    if _same_output(first, second) or "asynchronous" in second.judgement.fault_kinds:
        return []
    third = _call(kernel, judge, device)
    if not _same_output(first, third):
        text = "the same inputs gave another output when it was called again"
        return [Fault(NOT_DETERMINISTIC, text), *third.judgement.faults]
    if not _same_output(first, _call(kernel, judge, device, contents=OTHER_CONTENTS)):
        text = (
            "the output changes with what is in the memory that it allocates: it reads what it did not write"
        )
        return [Fault("uninitialised", text)]
    if device.kind == "cuda":
        text = "the output changes when the current stream writes the inputs just before: it does not wait"
        return [Fault("asynchronous", text)]
    return [Fault(NOT_DETERMINISTIC, "the same inputs gave another output once")]


def _same_output(left: _Call, right: _Call) -> bool:
    return left.copy is not None and right.copy is not None and same_bits(left.copy, right.copy)


def _overwritten(calls: Sequence[_Call]) -> list[Fault]:
    for call in calls[:-1]:
        if (
            call.copy is not None
            and "asynchronous" not in call.judgement.fault_kinds
            and not same_bits(call.output, call.copy)
        ):
            return [Fault("overwrote_output", "the output of an earlier call was changed by a later one")]
    return []


def _new(known: Sequence[Fault], found: Sequence[Fault], when: str = "") -> list[Fault]:
    """The faults found of a kind that is not known yet, said to be of that call."""
    kinds = {fault.kind for fault in known}
    return [Fault(fault.kind, when + fault.text) for fault in found if fault.kind not in kinds]


def grid_cells(problems: Sequence[Problem], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The rows of a grid's record: each problem, how it ended and its figures, `fault_kind` if wrong."""
    return [
        {**asdict(problem), "status": outcome.status, "reason": outcome.reason, **outcome.result}
        for problem, outcome in zip(problems, outcomes, strict=True)
    ]


def grid_status(outcomes: Sequence[Outcome]) -> tuple[str, str | None]:
    """The status of a grid job: the gravest of its cells', and how many have it."""
    for status in (WRONG, ERROR, TIMEOUT, OUT_OF_MEMORY, UNSUPPORTED):
        found = [outcome for outcome in outcomes if outcome.status == status]
        if found:
            return status, f"{len(found)} of {len(outcomes)} cells, the first: {found[0].reason}"
    return OK, None


def unit_in_last_place(value: float, dtype: str) -> float:
    """The spacing of the dtype's numbers at a value: 2^(exponent - stored mantissa bits)."""
    exponent = SMALLEST_NORMAL_EXPONENT[dtype]
    if value != 0.0:
        exponent = max(exponent, math.frexp(abs(value))[1] - 1)
    return float(2.0 ** (exponent - MANTISSA_BITS[dtype]))


@dataclass(frozen=True)
class _Distance:
    """How far a tensor is from what is right: the largest absolute error, and the largest of a block of
    rows relative to that block, with its place."""

    largest: float = 0.0
    relative: float = 0.0
    batch: int = 0
    head: int = 0
    row: int = 0


def _distance(found: torch.Tensor, right: torch.Tensor) -> _Distance:
    """The distance of (batch, heads, rows, head_dim) tensors, in fp64; without rows it is none."""
    if not found.numel():
        return _Distance()
    distances = []
    # Batch by batch: an fp64 copy of a whole long output is as large as the scores' chunk.
    for batch, (a, b) in enumerate(zip(found, right, strict=True)):
        difference = a.double() - b.double()
        ratios = torch.nan_to_num(_block_norms(difference) / _block_norms(b.double()))
        head, block = location(int(ratios.flatten().argmax()), ratios.shape)
        largest = float(difference.abs_().max())
        row = max(0, min(block * BLOCK_ROWS, found.shape[2] - BLOCK_ROWS))
        distances.append(_Distance(largest, float(ratios[head, block]), batch, head, row))
    worst = max(distances, key=lambda distance: distance.relative)
    return replace(worst, largest=max(distance.largest for distance in distances))


def _block_norms(rows: torch.Tensor) -> torch.Tensor:
    """The norms of each head's blocks of rows: (heads, blocks) from (heads, rows, head_dim).

    The last block reaches back into the one before it, so that each has BLOCK_ROWS rows if there are as
    many.
    """
    squares = rows.square().sum(dim=-1)
    size = min(BLOCK_ROWS, squares.shape[1])
    whole = squares.shape[1] // size * size
    sums = squares[:, :whole].unflatten(1, (-1, size)).sum(dim=-1)
    if whole < squares.shape[1]:
        sums = torch.cat([sums, squares[:, -size:].sum(dim=-1, keepdim=True)], dim=1)
    return torch.sqrt(sums)


def _place(index: tuple[int, ...]) -> str:
    batch, head, row, column = index
    return f"batch {batch}, head {head}, row {row}, column {column}"


def _plain(value: Any) -> str:
    if isinstance(value, torch.Size):
        return str(tuple(value))
    return str(value).removeprefix("torch.")
