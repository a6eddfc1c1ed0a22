"""The judge lets right outputs pass, catches each way of being wrong, and says where and how much."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness import correctness
from harness.correctness import (
    FAULT_KINDS,
    LARGE_QUERY,
    Judge,
    Tolerance,
    check_problem,
    grid_cells,
    grid_status,
    unit_in_last_place,
)
from harness.device import CpuDevice
from harness.record import NOT_DETERMINISTIC
from harness.supervisor import Outcome, Verdict
from harness.tensors import make_inputs
from tests.harness import attentions
from tests.harness.attentions import Attention, kernel_of, make_problem

TOLERANCES = {"fp16": Tolerance(1e-2, 1e-2), "bf16": Tolerance(3e-2, 3e-2)}
# A tolerance nobody can miss: what is caught under it is caught by the bound against fp64 or by form.
LOOSE = Tolerance(100.0, 0.0)


def check(attention: Attention, tolerance: Tolerance | None = None, **changes: Any) -> dict[str, Any]:
    problem = make_problem(**changes)
    chosen = tolerance or TOLERANCES[problem.dtype]
    return check_problem(kernel_of(attention), problem, CpuDevice(), chosen)


def reason_against(attention: Attention, tolerance: Tolerance | None = None, **changes: Any) -> str:
    with pytest.raises(Verdict) as caught:
        check(attention, tolerance, **changes)
    assert caught.value.status == "wrong"
    return caught.value.reason


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [{}, {"kv_heads": 1}, {"seq_len_q": 5}, {"seq_len_k": 9}, {"seq_len_q": 1, "seq_len_k": 1}],
)
@pytest.mark.parametrize("attention", [attentions.right, attentions.writes_its_output])
def test_a_right_output_passes(attention: Attention, shape: dict[str, Any], causal: bool, dtype: str) -> None:
    figures = check(attention, causal=causal, dtype=dtype, **shape)
    assert figures["allclose"] is True
    assert figures["max_abs_error_fp64"] <= figures["bound_fp64"]


@pytest.mark.parametrize(
    ("attention", "says"),
    [
        (attentions.nothing, "returned NoneType, not a tensor"),
        (attentions.pair, "returned tuple, not a tensor"),
        (attentions.transposed, "shape is (2, 48, 2, 16), expected (2, 2, 48, 16)"),
        (attentions.last_row_missing, "shape is (2, 2, 47, 16), expected (2, 2, 48, 16)"),
        (attentions.single_precision, "dtype is float32, expected float16"),
        (attentions.integers, "dtype is int32, expected float16"),
        (attentions.on_no_device, "device is meta, expected cpu"),
        (attentions.one_nan, "1 values are not finite, the first at batch 1, head 0, row 7, column 3"),
        (attentions.one_infinity, "1 values are not finite, the first at batch 0, head 1, row 5, column 2"),
        (attentions.output_not_written, "3072 values are not finite"),
        (attentions.last_rows_not_written, "the first at batch 0, head 0, row 45, column 0"),
        (attentions.reads_behind_v, "not finite"),
        (attentions.scales_q_in_place, "the input q was changed"),
        (attentions.returns_v_overwritten, "the input v was changed"),
        (attentions.writes_behind_k, "wrote outside the input k"),
        (attentions.writes_before_v, "wrote outside the input v"),
        (attentions.writes_behind_its_output, "wrote outside a tensor it allocated"),
        (attentions.writes_before_its_output, "wrote outside a tensor it allocated"),
    ],
)
def test_a_fault_of_form_is_named(attention: Attention, says: str) -> None:
    assert says in reason_against(attention, LOOSE)


@pytest.mark.parametrize("tolerance", [None, LOOSE], ids=["tolerance", "bound"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "attention",
    [
        attentions.zeros,
        attentions.one_value_off,
        attentions.sees_one_key_too_many,
        attentions.sees_one_key_too_few,
        attentions.ignores_the_mask,
        attentions.forgets_the_scale,
        attentions.swaps_heads,
    ],
)
def test_a_wrong_value_is_caught_by_the_tolerance_and_by_the_bound(
    attention: Attention, dtype: str, tolerance: Tolerance | None
) -> None:
    says = "beyond the tolerance" if tolerance is None else "error against fp64"
    assert says in reason_against(attention, tolerance, dtype=dtype)


@pytest.mark.parametrize(
    ("attention", "kinds"),
    [
        (attentions.pair, "form"),
        (attentions.single_precision, "form"),
        (attentions.on_no_device, "form"),
        (attentions.one_nan, "not_finite"),
        (attentions.reads_behind_v, "not_finite"),
        (attentions.output_not_written, "not_finite, uninitialised, inaccurate"),
        (attentions.scales_q_in_place, "inputs_changed"),
        (attentions.writes_behind_k, "wrote_outside"),
        (attentions.writes_behind_its_output, "wrote_outside"),
        (attentions.zeros, "inaccurate"),
        (attentions.swaps_heads, "inaccurate"),
    ],
)
def test_a_fault_has_a_kind_in_the_figures_and_in_the_reason(attention: Attention, kinds: str) -> None:
    with pytest.raises(Verdict) as caught:
        check(attention)
    assert caught.value.result["fault_kind"] == kinds
    for kind in kinds.split(", "):
        assert kind in FAULT_KINDS
        assert f"({kind})" in caught.value.reason


def test_a_right_cell_has_no_kind_and_says_how_often_it_was_called() -> None:
    figures = check(attentions.right)
    assert "fault_kind" not in figures
    assert figures["judged_calls"] == 3
    problem = make_problem()
    once_less = check_problem(
        kernel_of(attentions.right), problem, CpuDevice(), TOLERANCES["fp16"], renewed=False
    )
    assert once_less["judged_calls"] == 2


class InterpretedFunction:
    """What Triton's interpreter makes of a kernel, by its name."""


@pytest.mark.parametrize(("seq_len", "calls"), [(48, 3), (400, 1)])
def test_an_interpreted_kernel_is_called_again_only_where_that_is_quick(seq_len: int, calls: int) -> None:
    kernel = kernel_of(attentions.right, function=InterpretedFunction())
    problem = make_problem(seq_len_q=seq_len, seq_len_k=seq_len)
    figures = check_problem(kernel, problem, CpuDevice(), TOLERANCES["fp16"])
    assert kernel.interpreted
    assert figures["judged_calls"] == calls


def kinds_against(attention: Attention, device: CpuDevice | None = None) -> tuple[str, str]:
    with pytest.raises(Verdict) as caught:
        check_problem(kernel_of(attention), make_problem(), device or CpuDevice(), TOLERANCES["fp16"])
    return caught.value.result["fault_kind"], caught.value.reason


def after(calls: int, fault: Attention) -> Attention:
    """Right for some calls, then faulty."""
    left = [calls]

    def attention(*inputs: torch.Tensor, causal: bool) -> Any:
        left[0] -= 1
        return (attentions.right if left[0] >= 0 else fault)(*inputs, causal=causal)

    return attention


def test_every_call_is_judged() -> None:
    kinds, reason = kinds_against(after(1, attentions.scales_q_in_place))
    assert kinds == "inputs_changed"
    assert reason.startswith("the second time, the input q was changed")
    kinds, reason = kinds_against(after(2, attentions.writes_behind_its_output))
    assert kinds == "wrote_outside"
    assert reason == "with other values, wrote outside a tensor it allocated (wrote_outside)"
    assert kinds_against(after(1, attentions.one_value_off))[0] == "not_deterministic, inaccurate"
    assert kinds_against(after(2, attentions.pair))[0] == "form"


def test_the_same_inputs_must_give_the_same_bits() -> None:
    calls = itertools.count()

    def differs(*inputs: torch.Tensor, causal: bool) -> torch.Tensor:
        output = attentions.right(*inputs, causal=causal)
        # 2^-10 is at least one unit in the last place of any fp16 number.
        output[0, 0, 20, 3] *= 1 + 2**-10 * min(next(calls), 1)
        return output

    figures = check(differs)
    assert figures["fault_kind"] == NOT_DETERMINISTIC
    assert figures["reason"] == (
        "the same inputs gave another output when it was called again (not_deterministic)"
    )


def test_what_gives_other_bits_is_wrong_once_it_leaves_its_bounds() -> None:
    calls = itertools.count()

    def leaves(*inputs: torch.Tensor, causal: bool) -> torch.Tensor:
        output = attentions.right(*inputs, causal=causal)
        output[0, 0, 20, 3] *= (1, 1 + 2**-10, 1 + 2**-10, 1)[next(calls)]
        return output

    # Twice with the same values, once more to see why they differ, and with other values.
    assert check(leaves)["fault_kind"] == NOT_DETERMINISTIC
    calls = itertools.count()

    def leaves_at_the_third(*inputs: torch.Tensor, causal: bool) -> torch.Tensor:
        output = attentions.right(*inputs, causal=causal)
        output[0, 0, 20] *= (1, 1 + 2**-10, 2, 1)[next(calls)]
        return output

    assert kinds_against(leaves_at_the_third)[0] == "not_deterministic, inaccurate"


def test_what_depends_on_memory_that_was_not_written_is_found_though_it_is_right_at_first() -> None:
    def hides_nan(*inputs: torch.Tensor, causal: bool) -> torch.Tensor:
        output = attentions.right(*inputs, causal=causal)
        return output + torch.empty_like(output).nan_to_num(0.0, 0.0, 0.0) * 1e-6

    assert kinds_against(hides_nan)[0].split(", ")[0] == "uninitialised"


def test_an_output_that_a_later_call_overwrites_is_found() -> None:
    buffer = torch.empty(2, 2, 48, 16, dtype=torch.float16)

    def shares(*inputs: torch.Tensor, causal: bool) -> torch.Tensor:
        return buffer.copy_(attentions.right(*inputs, causal=causal))

    assert kinds_against(shares)[0] == "overwrote_output"


class LateDevice(CpuDevice):
    """As a GPU in that work may end as late as a synchronisation."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Callable[[], Any]] = []

    def synchronize(self) -> None:
        while self.pending:
            self.pending.pop()()


def test_an_output_that_is_only_there_after_a_synchronisation_is_found() -> None:
    device = LateDevice()

    def works_on_another_stream(*inputs: torch.Tensor, causal: bool) -> torch.Tensor:
        output = torch.empty_like(inputs[0])
        device.pending.append(lambda: output.copy_(attentions.right(*inputs, causal=causal)))
        return output

    kinds, reason = kinds_against(works_on_another_stream, device)
    assert kinds == "asynchronous"
    assert reason.startswith("the output was not there when the current stream came")


def test_a_kernel_that_returns_what_it_had_computed_is_called_stale() -> None:
    kept: list[torch.Tensor] = []

    def caches(*inputs: torch.Tensor, causal: bool) -> torch.Tensor:
        kept.append(attentions.right(*inputs, causal=causal))
        return kept[0]

    kinds, reason = kinds_against(caches)
    assert kinds == "stale_output"
    assert reason.startswith("with other values, returned what was right for the values")


def test_new_values_come_into_the_same_buffers_and_what_is_right_for_them() -> None:
    problem = make_problem()
    inputs = make_inputs(problem, "cpu")
    judge = Judge(problem, inputs, TOLERANCES["fp16"])
    before = [tensor.clone() for tensor in inputs]
    places = [tensor.data_ptr() for tensor in inputs]
    old = attentions.right(*inputs, causal=True)
    judge.renew(1)
    assert [tensor.data_ptr() for tensor in inputs] == places
    assert not any(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    assert judge.judge(attentions.right(*inputs, causal=True)).right
    assert judge.judge(old).fault_kinds == ["stale_output"]
    judge.renew(2)
    assert judge.judge(old).fault_kinds == ["inaccurate"]  # not those of the call before


def test_renewing_holds_no_two_exact_references(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(make_problem(), make_inputs(make_problem(), "cpu"), TOLERANCES["fp16"])
    old = weakref.ref(judge._exact)
    held: list[bool] = []

    def reference(*arguments: Any) -> torch.Tensor:
        held.append(old() is not None)
        return reference_fp64(*arguments)

    reference_fp64 = correctness.reference_fp64
    monkeypatch.setattr(correctness, "reference_fp64", reference)
    judge.renew(1)
    assert held == [False]


def test_a_softmax_without_its_maximum_overflows_with_the_large_query() -> None:
    def no_maximum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        weights = torch.exp(q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5)
        weights = weights.tril() if causal else weights
        return (weights @ v.float() / weights.sum(-1, keepdim=True)).to(q.dtype)

    problem = make_problem(causal=False)
    inputs = make_inputs(problem, "cpu")
    judge = Judge(problem, inputs, TOLERANCES["fp16"])
    assert judge.judge(no_maximum(*inputs, causal=False)).right
    judge.renew(1)
    assert float(inputs.q[:, :, -1].std()) > LARGE_QUERY / 2
    assert float(inputs.q[:, :, :-1].std()) < 2
    found = judge.judge(no_maximum(*inputs, causal=False))
    assert found.fault_kinds == ["not_finite"]
    assert "row 47" in str(found.reason)


def test_a_wrong_row_of_the_large_query_is_found_by_its_own_bound() -> None:
    problem = make_problem()
    inputs = make_inputs(problem, "cpu")
    judge = Judge(problem, inputs, LOOSE)
    judge.renew(1)
    output = attentions.right(*inputs, causal=True)
    output[0, 0, -1] += 5
    found = judge.judge(output)
    assert "in row 47, whose query is 60 times as large" in str(found.reason)
    assert len(found.faults) == 1


def test_a_single_query_is_not_made_large() -> None:
    problem = make_problem(seq_len_q=1)
    inputs = make_inputs(problem, "cpu")
    judge = Judge(problem, inputs, TOLERANCES["fp16"])
    judge.renew(1)
    assert float(inputs.q.abs().max()) < 6
    assert judge.judge(attentions.right(*inputs, causal=True)).right
    assert not judge.judge(attentions.zeros(*inputs, causal=True)).right


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [{}, {"seq_len_q": 1}, *({"seq_len_q": 40, "seq_len_k": n} for n in (128, 1000, 4096, 16384, 131072))],
)
def test_zeros_are_caught_at_every_length(shape: dict[str, Any], causal: bool, dtype: str) -> None:
    """Whatever the absolute tolerance: outputs are as small as 0.005 here."""
    problem = make_problem(batch=1, heads=1, kv_heads=1, causal=causal, dtype=dtype, **shape)
    judge = Judge(problem, make_inputs(problem, "cpu"), LOOSE)
    found = judge.judge(torch.zeros_like(judge.inputs.q))
    assert found.allclose
    assert found.fault_kinds == ["inaccurate"]


def test_an_error_that_is_small_but_not_for_small_outputs_is_caught() -> None:
    """In causal bf16 the first rows set the bound on absolute errors; the last ones are far smaller."""
    problem = make_problem(batch=1, heads=2, seq_len_q=1024, seq_len_k=1024, dtype="bf16")
    inputs = make_inputs(problem, "cpu")
    judge = Judge(problem, inputs, TOLERANCES["bf16"])
    output = attentions.right(*inputs, causal=True)
    assert judge.judge(output).right
    output[0, 1, 1008:] *= 0.85
    found = judge.judge(output)
    assert found.allclose
    assert found.max_abs_error_fp64 <= found.bound_fp64  # type: ignore[operator]
    assert found.relative_error > found.relative_bound  # type: ignore[operator]
    assert str(found.reason).startswith("error of 16 rows over their size 0.1")
    assert "at batch 0, head 1, from row 1008 (inaccurate)" in str(found.reason)


def test_the_error_of_the_reference_is_not_held_against_a_kernel_that_is_nearer() -> None:
    """Rounded scores of head_dim 2 take the same-dtype reference beyond the tolerance of what is right."""
    problem = make_problem(kv_heads=1, seq_len_q=97, seq_len_k=97, head_dim=2, causal=False, seed=217)
    inputs = make_inputs(problem, "cpu")
    judge = Judge(problem, inputs, Tolerance(0.002, 0.002))
    judge.renew(218)
    found = judge.judge(attentions.right(*inputs, causal=False))
    assert found.allclose is False
    assert found.right


def test_a_row_of_the_grid_names_the_cell_and_the_kind() -> None:
    problems = [make_problem(), make_problem(causal=False)]
    outcomes = [
        Outcome("ok", None, {"max_abs_error": 0.0}, ""),
        Outcome("wrong", "zeros (inaccurate)", {"fault_kind": "inaccurate"}, ""),
    ]
    right, wrong = grid_cells(problems, outcomes)
    assert right == {**problems[0].to_dict(), "status": "ok", "reason": None, "max_abs_error": 0.0}
    assert (wrong["causal"], wrong["status"], wrong["fault_kind"]) == (False, "wrong", "inaccurate")
    assert wrong["reason"] == "zeros (inaccurate)"


def test_a_scale_one_percent_off_is_caught() -> None:
    assert "error against fp64" in reason_against(attentions.scale_one_percent_off)


def test_zeros_are_caught_where_the_right_values_are_small() -> None:
    assert "error against fp64" in reason_against(attentions.zeros, causal=False, seq_len_k=2000)


def test_a_lost_last_key_is_caught() -> None:
    reason_against(attentions.drops_the_last_key, causal=False)


def test_shared_heads_in_another_order_are_caught() -> None:
    assert check(attentions.right, heads=4, kv_heads=2)
    reason_against(attentions.shares_heads_in_another_order, heads=4, kv_heads=2)


def test_a_changed_input_is_put_back_for_the_next_judgement() -> None:
    problem = make_problem()
    inputs = make_inputs(problem, "cpu")
    judge = Judge(problem, inputs, TOLERANCES["fp16"])
    assert not judge.judge(attentions.scales_q_in_place(*inputs, causal=True)).right
    assert judge.judge(attentions.right(*inputs, causal=True)).right


def test_the_largest_error_is_located_and_measured() -> None:
    problem = make_problem()
    inputs = make_inputs(problem, "cpu")
    judge = Judge(problem, inputs, TOLERANCES["fp16"])
    output = attentions.right(*inputs, causal=True)
    before = output.clone()
    output[0, 1, 30, 4] += 0.25
    output[1, 0, 20, 11] -= 0.5
    found = judge.judge(output)
    assert not found.right
    assert (found.error_batch, found.error_head, found.error_row, found.error_column) == (1, 0, 20, 11)
    assert found.max_abs_error == pytest.approx(0.5, abs=0.01)
    assert found.value_there == pytest.approx(float(before[1, 0, 20, 11]), abs=0.01)
    assert found.unit_in_last_place == unit_in_last_place(float(found.value_there or 0), "fp16")
    assert found.error_in_units == pytest.approx(0.5 / float(found.unit_in_last_place or 1), rel=0.02)
    assert found.allclose is False
    assert "2 of 3072 values" in str(found.reason)
    assert "the first at batch 0, head 1, row 30, column 4" in str(found.reason)
    assert "at batch 1, head 0, row 20, column 11" in str(found.reason)


def test_an_output_of_another_layout_is_judged_by_its_values() -> None:
    problem = make_problem()
    inputs = make_inputs(problem, "cpu")
    judge = Judge(problem, inputs, TOLERANCES["fp16"])
    output = attentions.right(*inputs, causal=True).transpose(1, 2).contiguous().transpose(1, 2)
    assert not output.is_contiguous()
    assert judge.judge(output).right
    output[1, 0, 20, 11] += 1
    found = judge.judge(output)
    assert (found.error_batch, found.error_head, found.error_row, found.error_column) == (1, 0, 20, 11)


def test_the_figures_of_a_wrong_output_are_kept() -> None:
    with pytest.raises(Verdict) as caught:
        check(attentions.one_value_off)
    figures = caught.value.result
    assert figures["max_abs_error"] == pytest.approx(0.5, abs=0.01)
    assert "faults" not in figures


def test_what_a_kernel_does_not_support_is_not_judged() -> None:
    kernel = kernel_of(attentions.zeros, unsupported=lambda problem, target: "head_dim 16 is too small")
    with pytest.raises(Verdict) as caught:
        check_problem(kernel, make_problem(), CpuDevice(), LOOSE)
    assert (caught.value.status, caught.value.reason) == ("unsupported", "head_dim 16 is too small")


@given(st.floats(-65000, 65000))
def test_the_unit_in_the_last_place_of_fp16_is_numpys(value: float) -> None:
    half = np.float16(value)
    assert unit_in_last_place(float(half), "fp16") == float(np.spacing(abs(half)))


@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_the_unit_in_the_last_place_of_bf16_is_the_way_to_the_next_number(value: float) -> None:
    number = torch.tensor(value, dtype=torch.bfloat16).abs()
    bits = int(number.view(torch.int16))
    following = torch.tensor(bits + 1, dtype=torch.int16).view(torch.bfloat16)
    assert unit_in_last_place(float(number), "bf16") == float(following.double() - number.double())


@pytest.mark.parametrize(
    ("value", "dtype", "unit"),
    [(2.0, "fp16", 2**-9), (2.0, "bf16", 2**-6), (-3.99, "fp16", 2**-9), (0.0, "fp16", 2**-24)],
)
def test_the_units_of_the_causal_error_floor(value: float, dtype: str, unit: float) -> None:
    assert unit_in_last_place(value, dtype) == unit


def test_a_grid_is_as_good_as_its_gravest_cell() -> None:
    def outcome(status: str) -> Outcome:
        return Outcome(status, f"because {status}" if status != "ok" else None, {}, "")

    good, bad = outcome("ok"), ["unsupported", "out_of_memory", "timeout", "error", "wrong"]
    assert grid_status([good, good]) == ("ok", None)
    seen = [good]
    for status in bad:
        seen.append(outcome(status))
        assert grid_status(seen) == (status, f"1 of {len(seen)} cells, the first: because {status}")
    status, reason = grid_status(
        [good, Outcome("wrong", "first", {}, ""), Outcome("wrong", "second", {}, "")]
    )
    assert (status, reason) == ("wrong", "2 of 3 cells, the first: first")
