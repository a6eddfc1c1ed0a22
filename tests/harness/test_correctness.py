"""The judge lets right outputs pass, catches each way of being wrong, and says where and how much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.correctness import Judge, Tolerance, check_problem, grid_status, unit_in_last_place
from harness.device import CpuDevice
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
