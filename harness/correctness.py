"""Is an output right? The judge, and the cells of the correctness grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.device import Device
from harness.plugin import Kernel
from harness.problem import MANTISSA_BITS, SMALLEST_NORMAL_EXPONENT, Problem
from harness.record import ERROR, OK, OUT_OF_MEMORY, TIMEOUT, UNSUPPORTED, WRONG
from harness.reference import reference_fp64, reference_same_dtype
from harness.supervisor import Outcome, Verdict
from harness.tensors import GuardedAllocations, fill, first_location, guards_touched, location, make_inputs


@dataclass(frozen=True)
class Tolerance:
    """`torch.allclose`'s two tolerances, for one dtype."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class Judgement:
    """What the judge found in one output.

    Errors are absolute. `error_row` and its siblings locate the largest error against the same-dtype
    reference, `unit_in_last_place` is the spacing of the dtype's numbers at the reference there, and
    `error_in_units` the error over it. `max_abs_error_fp64` is held against `bound_fp64` =
    2 * `reference_error_fp64` + floor, as FlashAttention's tests do.
    """

    faults: list[str]
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
    allclose: bool | None = None

    @property
    def right(self) -> bool:
        return not self.faults

    @property
    def reason(self) -> str | None:
        return "; ".join(self.faults) or None


class Judge:
    """Knows the right answer to one problem with one set of inputs, and judges outputs against it.

    The references are computed once, so that an implementation can be judged before and after it was
    timed. Inputs are kept as copies too: a kernel that writes into them is found.
    """

    def __init__(
        self, problem: Problem, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tolerance: Tolerance
    ) -> None:
        self.problem = problem
        self.tolerance = tolerance
        self.inputs = inputs
        self._learn()

    def renew(self, seed: int) -> None:
        """Put other values into the same input buffers, and learn what is right for them.

        A kernel that returns what it computed before, or is right only the first times, is then found.
        """
        del self._copies, self._exact, self._same_dtype  # long cells have no room for both
        fill(*self.inputs, seed=seed)
        self._learn()

    def _learn(self) -> None:
        inputs, problem = self.inputs, self.problem
        self._copies = tuple(tensor.clone() for tensor in inputs)
        self._exact = reference_fp64(*inputs, problem)
        self._same_dtype = reference_same_dtype(*inputs, problem)
        self._reference_error = _max_abs_difference(self._same_dtype, self._exact)
        shifted = (self._same_dtype + 0.3) - 0.3
        self._floor = 2 * _max_abs_difference(shifted, self._same_dtype)
        if not math.isfinite(self._reference_error + self._floor):
            raise ValueError("the same-dtype reference is not finite for these inputs: nothing to judge by")

    def judge(self, output: Any) -> Judgement:
        """Judge an output for these inputs; never raises for a bad output."""
        faults = self._form_faults(output) + self._input_faults()
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
            faults.append(f"{count} values are not finite, the first at {_place(where)}")
            return Judgement(faults)
        return self._compare(output, faults)

    def _form_faults(self, output: Any) -> list[str]:
        if not isinstance(output, torch.Tensor):
            return [f"returned {type(output).__name__}, not a tensor"]
        expected = self._same_dtype
        faults = []
        for name in ("shape", "dtype", "device"):
            found, wanted = getattr(output, name), getattr(expected, name)
            if found != wanted:
                faults.append(f"{name} is {_plain(found)}, expected {_plain(wanted)}")
        return faults

    def _input_faults(self) -> list[str]:
        faults = []
        for name, tensor, copy in zip("qkv", self.inputs, self._copies, strict=True):
            if not torch.equal(tensor, copy):
                faults.append(f"the input {name} was changed")
                tensor.copy_(copy)
            if guards_touched(tensor):
                faults.append(f"wrote outside the input {name}")
        return faults

    def _compare(self, output: torch.Tensor, faults: list[str]) -> Judgement:
        expected = self._same_dtype.to(output.dtype)
        errors = (output.double() - expected.double()).abs()
        worst = location(int(errors.flatten().argmax()), errors.shape)
        max_error = float(errors[worst])
        # The reference's value there: that of the output is the kernel's own, and may be anything.
        value = float(expected[worst])
        unit = unit_in_last_place(value, self.problem.dtype)
        close = errors <= self.tolerance.absolute + self.tolerance.relative * expected.double().abs()
        all_close = bool(close.all())
        if not all_close:
            count = int((~close).sum())
            faults.append(
                f"{count} of {close.numel()} values differ beyond the tolerance from same-dtype attention,"
                f" the first at {_place(first_location(~close))},"
                f" the largest error {max_error:.3g} at {_place(worst)}"
            )
        del errors, close
        exact_error = _max_abs_difference(output, self._exact)
        bound = 2 * self._reference_error + self._floor
        if exact_error > bound:
            faults.append(f"error against fp64 {exact_error:.3g} exceeds {bound:.3g}")
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
            max_abs_error_fp64=exact_error,
            reference_error_fp64=self._reference_error,
            bound_fp64=bound,
            allclose=all_close,
        )


def check_problem(kernel: Kernel, problem: Problem, device: Device, tolerance: Tolerance) -> dict[str, Any]:
    """Judge one call on fresh inputs, its inputs and all it allocates lying between guard zones.

    Returns the judgement's figures; raises Verdict with `unsupported` or `wrong`.
    """
    reason = kernel.unsupported(problem, device.target())
    if reason:
        raise Verdict(UNSUPPORTED, reason)
    inputs = make_inputs(problem, device.kind)
    judge = Judge(problem, inputs, tolerance)
    with GuardedAllocations() as allocations:
        output = kernel.attention(*inputs, causal=problem.causal)
    judgement = judge.judge(output)
    if allocations.touched:
        judgement.faults.append("wrote outside a tensor it allocated")
    figures = {name: value for name, value in asdict(judgement).items() if name != "faults"}
    if not judgement.right:
        raise Verdict(WRONG, str(judgement.reason), figures)
    return figures


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


def _max_abs_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    # Batch by batch: an fp64 copy of a whole long output is as large as the scores' chunk.
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(left, right, strict=True))


def _place(index: tuple[int, ...]) -> str:
    batch, head, row, column = index
    return f"batch {batch}, head {head}, row {row}, column {column}"


def _plain(value: Any) -> str:
    if isinstance(value, torch.Size):
        return str(tuple(value))
    return str(value).removeprefix("torch.")
