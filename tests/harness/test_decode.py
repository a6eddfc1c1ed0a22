"""A decode problem's inputs, reference and judge: lengths, pages, garbage behind them, newest tokens."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.correctness import Tolerance, check_problem
from harness.device import CpuDevice
from harness.plugin import Kernel
from harness.problem import Problem
from harness.reference import reference_fp64, reference_same_dtype
from harness.supervisor import Verdict
from harness.tensors import GARBAGE_KEY, GARBAGE_VALUE, make_inputs

TOLERANCE = Tolerance(absolute=0.002, relative=0.002)
Decode = Callable[..., Any]


def make_problem(**changes: Any) -> Problem:
    values: dict[str, Any] = {
        "workload": "decode",
        "batch": 3,
        "heads": 4,
        "kv_heads": 2,
        "seq_len_q": 2,
        "seq_len_k": 50,
        "head_dim": 16,
        "causal": True,
        "dtype": "fp16",
        "lengths": "uneven",
        "seed": 3,
    }
    return Problem(**{**values, **changes})


def kernel_of(decode: Decode, **members: Any) -> Kernel:
    module = ModuleType("kernel_of_a_test")
    for name, member in {"decode": decode, **members}.items():
        setattr(module, name, member)
    return Kernel(module, {})


def right(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seq_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    later: int = 0,
) -> Tensor:
    """One query after the other; `later` moves the mask."""
    output = torch.zeros_like(q)
    for batch in range(q.shape[0]):
        keys, values = k[batch], v[batch]
        if block_table is not None:
            pages = block_table[batch].tolist()
            keys, values = (torch.cat([cache[page] for page in pages], dim=1) for cache in (k, v))
        length = keys.shape[1] if seq_lens is None else int(seq_lens[batch])
        for query in range(q.shape[2]):
            seen = length - (q.shape[2] - 1 - query) + later
            for head in range(q.shape[1]) if seen > 0 else ():
                group = head // (q.shape[1] // k.shape[1])
                scores = keys[group, :seen].double() @ q[batch, head, query].double()
                weights = torch.softmax(scores * q.shape[3] ** -0.5, dim=0)
                output[batch, head, query] = (weights @ values[group, :seen].double()).to(q.dtype)
    return output


PROBLEMS = {
    "equal": {"lengths": "equal"},
    "uneven": {},
    "some empty": {"lengths": "some_empty"},
    "pages": {"page_size": 16},
    "pages, equal": {"page_size": 16, "lengths": "equal"},
    "pages that divide the context": {"page_size": 25, "lengths": "equal"},
    "shorter than its queries": {"seq_len_q": 4, "seq_len_k": 3, "lengths": "some_empty"},
    "one query, bf16": {"seq_len_q": 1, "dtype": "bf16"},
}


@pytest.mark.parametrize("changes", PROBLEMS.values(), ids=PROBLEMS)
def test_a_right_kernel_is_right_and_the_references_agree_with_it(changes: dict[str, Any]) -> None:
    problem = make_problem(**changes)
    tolerance = TOLERANCE if problem.dtype == "fp16" else Tolerance(absolute=0.016, relative=0.016)
    figures = check_problem(kernel_of(right), problem, CpuDevice(), tolerance)
    assert figures["judged_calls"] == 3
    inputs = make_inputs(problem, "cpu")
    near = 2e-3 if problem.dtype == "fp16" else 2e-2
    answer = right(*inputs, **inputs.extras).double()
    torch.testing.assert_close(reference_fp64(inputs, problem), answer, rtol=near, atol=near)
    torch.testing.assert_close(reference_same_dtype(inputs, problem).double(), answer, rtol=near, atol=near)


def test_an_empty_sequence_has_the_answer_zero() -> None:
    problem = make_problem(lengths="some_empty")
    output = reference_fp64(make_inputs(problem, "cpu"), problem)
    empty = problem.sequence_lengths.index(0)
    assert bool((output[empty] == 0).all())
    assert bool((output[problem.sequence_lengths.index(50)] != 0).all())


@pytest.mark.parametrize("page_size", [0, 16])
def test_what_no_sequence_uses_of_the_cache_is_garbage(page_size: int) -> None:
    problem = make_problem(page_size=page_size)
    inputs = make_inputs(problem, "cpu")
    used = sum(problem.sequence_lengths) * problem.kv_heads * problem.head_dim
    for cache, garbage in ((inputs.k, GARBAGE_KEY), (inputs.v, GARBAGE_VALUE)):
        assert int((cache == garbage).sum()) == cache.numel() - used
        assert float(cache[cache != garbage].abs().max()) < 6


def test_kernels_are_told_lengths_and_pages_only_where_there_are_any() -> None:
    assert set(make_inputs(make_problem(), "cpu").extras) == {"seq_lens"}
    assert not make_inputs(make_problem(lengths="equal"), "cpu").extras
    paged = make_inputs(make_problem(page_size=16), "cpu").extras
    assert set(paged) == {"seq_lens", "block_table"}
    assert sorted(paged["block_table"].flatten().tolist()) == list(range(3 * 4))
    assert paged["block_table"].flatten().tolist() != list(range(3 * 4))


def ignores_the_lengths(q: Tensor, k: Tensor, v: Tensor, **extras: Tensor) -> Tensor:
    return right(q, k, v)


def reads_pages_in_their_order_in_memory(q: Tensor, k: Tensor, v: Tensor, **extras: Tensor) -> Tensor:
    table = torch.arange(len(k), dtype=torch.int32).view(extras["block_table"].shape)
    return right(q, k, v, seq_lens=extras["seq_lens"], block_table=table)


def gives_nan_for_an_empty_sequence(q: Tensor, k: Tensor, v: Tensor, **extras: Tensor) -> Tensor:
    output = right(q, k, v, **extras)
    output[extras["seq_lens"] == 0] = float("nan")
    return output


def changes_the_lengths(q: Tensor, k: Tensor, v: Tensor, **extras: Tensor) -> Tensor:
    output = right(q, k, v, **extras)
    extras["seq_lens"][0] += 1
    return output


WRONG: dict[str, tuple[Decode, dict[str, Any], str]] = {
    "ignores the lengths": (ignores_the_lengths, {}, "inaccurate"),
    "one key too few": (lambda *qkv, **extras: right(*qkv, **extras, later=-1), {}, "inaccurate"),
    "one key too many": (lambda *qkv, **extras: right(*qkv, **extras, later=1), {}, "inaccurate"),
    "pages in their order in memory": (
        reads_pages_in_their_order_in_memory,
        {"page_size": 16},
        "inaccurate",
    ),
    "NaN for an empty sequence": (gives_nan_for_an_empty_sequence, {"lengths": "some_empty"}, "not_finite"),
    "changes the lengths": (changes_the_lengths, {}, "inputs_changed"),
}


@pytest.mark.parametrize(("decode", "changes", "kind"), WRONG.values(), ids=WRONG)
def test_a_wrong_decode_is_caught(decode: Decode, changes: dict[str, Any], kind: str) -> None:
    with pytest.raises(Verdict) as caught:
        check_problem(kernel_of(decode), make_problem(**changes), CpuDevice(), TOLERANCE)
    assert caught.value.result["fault_kind"].split(", ")[0] == kind


def test_a_kernel_without_the_workload_is_unsupported() -> None:
    module = ModuleType("kernels.prefill")
    module.attention = lambda *qkv, causal: qkv[0]  # type: ignore[attr-defined]
    with pytest.raises(Verdict) as caught:
        check_problem(Kernel(module, {}), make_problem(), CpuDevice(), TOLERANCE)
    assert (caught.value.status, caught.value.reason) == (
        "unsupported",
        "kernels/prefill.py defines no decode()",
    )


def mean(q: Tensor, k: Tensor, v: Tensor, *, seq_lens: Tensor, factor: float = 1.0) -> Tensor:
    means = [
        factor * (k[batch, :, :length].double() + v[batch, :, :length].double()).mean(dim=1)
        for batch, length in enumerate(seq_lens.tolist())
    ]
    rows = torch.stack(means).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return rows[:, :, None].expand(q.shape).contiguous()


def test_a_floor_is_held_against_what_it_says_that_it_computes() -> None:
    def floor(*qkv: Tensor, seq_lens: Tensor, factor: float = 1.0) -> Tensor:
        return mean(*qkv, seq_lens=seq_lens, factor=factor).to(qkv[0].dtype)

    members = {"NOT_ATTENTION": "adds K and V up", "reference": mean}
    assert not kernel_of(floor, **members).is_attention
    check_problem(kernel_of(floor, **members), make_problem(), CpuDevice(), TOLERANCE)

    def does_not_read_all(*qkv: Tensor, seq_lens: Tensor) -> Tensor:
        return floor(*qkv, seq_lens=(seq_lens - 1).clamp(min=1))

    for wrong in (does_not_read_all, right):
        with pytest.raises(Verdict) as caught:
            check_problem(kernel_of(wrong, **members), make_problem(), CpuDevice(), TOLERANCE)
        assert caught.value.status == "wrong"
