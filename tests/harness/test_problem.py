"""A problem's cost is counted as a loop over its mask counts it, and the article's figures come out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.problem import PROBLEM_FIELDS, Problem

VALUES: dict[str, Any] = {
    "batch": 1,
    "heads": 4,
    "kv_heads": 2,
    "seq_len_q": 8,
    "seq_len_k": 16,
    "head_dim": 64,
    "causal": False,
    "dtype": "fp16",
}
ARTICLE: dict[str, Any] = {**VALUES, "heads": 16, "kv_heads": 16}


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kv_heads = draw(st.integers(1, 4))
    return Problem(
        batch=draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        seq_len_q=draw(st.integers(1, 40)),
        seq_len_k=draw(st.integers(1, 40)),
        head_dim=draw(st.sampled_from([1, 16, 64])),
        causal=draw(st.booleans()),
        dtype=draw(st.sampled_from(["fp16", "bf16"])),
    )


@given(problems())
def test_pairs_and_flop_are_those_of_the_mask(problem: Problem) -> None:
    pairs = sum(
        not problem.causal or key <= query
        for query in range(problem.seq_len_q)
        for key in range(problem.seq_len_k)
    )
    assert problem.unmasked_pairs == problem.batch * pairs
    # A multiplication and an addition for each element of a product; Q K^T, then P V.
    product = 2 * pairs * problem.head_dim
    assert problem.flop_count == problem.batch * problem.heads * (product + product)


@given(problems())
def test_bytes_are_those_of_the_tensors(problem: Problem) -> None:
    dtype = problem.torch_dtype()
    q = torch.empty(problem.batch, problem.heads, problem.seq_len_q, problem.head_dim, dtype=dtype)
    k = torch.empty(problem.batch, problem.kv_heads, problem.seq_len_k, problem.head_dim, dtype=dtype)
    assert problem.input_bytes == q.nbytes + 2 * k.nbytes
    assert problem.output_bytes == q.nbytes
    assert problem.minimal_bytes == 2 * q.nbytes + 2 * k.nbytes


def test_the_articles_speed_comes_out() -> None:
    problem = Problem(**{**ARTICLE, "seq_len_q": 512, "seq_len_k": 512})
    assert problem.flop_count == 4 * 16 * 512**2 * 64
    assert problem.flop_count / 0.616e-3 / 1e12 == pytest.approx(1.74, abs=0.005)


@pytest.mark.parametrize(("seq_len", "gibibytes"), [(512, "0.0039"), (2048, "0.0156"), (8192, "0.0625")])
def test_the_articles_memory_of_a_fused_kernel_comes_out(seq_len: int, gibibytes: str) -> None:
    problem = Problem(**{**ARTICLE, "seq_len_q": seq_len, "seq_len_k": seq_len})
    assert f"{problem.minimal_bytes / 2**30:.4f}" == gibibytes


def test_the_scale_is_that_of_sdpa() -> None:
    assert Problem(**VALUES).scale == 0.125


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch", 0, "batch = 0: must be at least 1"),
        ("heads", 0, "heads = 0: must be at least 1"),
        ("kv_heads", 0, "kv_heads = 0: must be at least 1"),
        ("seq_len_q", -1, "seq_len_q = -1: must be at least 1"),
        ("seq_len_k", 0, "seq_len_k = 0: must be at least 1"),
        ("head_dim", 0, "head_dim = 0: must be at least 1"),
        ("kv_heads", 3, "heads = 4: must be a multiple of kv_heads = 3"),
        ("dtype", "fp8", "dtype = fp8: must be one of fp16, bf16"),
        ("workload", "training", "workload = training: must be one of attention, decode"),
        ("lengths", "odd", "lengths = odd: must be one of equal, uneven, some_empty"),
        ("lengths", "uneven", "lengths and page_size are of decode problems only"),
        ("page_size", 16, "lengths and page_size are of decode problems only"),
        ("page_size", -1, "page_size = -1: must be at least 0"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(**{**VALUES, field: value})


@given(problems())
def test_a_problem_survives_its_way_through_a_spec(problem: Problem) -> None:
    assert Problem.from_dict(problem.to_dict()) == problem
    assert set(problem.to_dict()) == set(PROBLEM_FIELDS)


def test_an_unknown_key_of_a_spec_is_refused() -> None:
    with pytest.raises(TypeError, match="head_dimension"):
        Problem.from_dict({**VALUES, "head_dimension": 64})


@st.composite
def decode_problems(draw: st.DrawFn) -> Problem:
    kv_heads = draw(st.integers(1, 3))
    return Problem(
        workload="decode",
        batch=draw(st.integers(1, 5)),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        seq_len_q=draw(st.integers(1, 4)),
        seq_len_k=draw(st.integers(1, 70)),
        head_dim=16,
        causal=True,
        dtype=draw(st.sampled_from(["fp16", "bf16"])),
        lengths=draw(st.sampled_from(["equal", "uneven", "some_empty"])),
        page_size=draw(st.sampled_from([0, 16, 64])),
        seed=draw(st.integers(0, 3)),
    )


@given(decode_problems())
def test_the_queries_of_a_decode_problem_are_the_newest_tokens(problem: Problem) -> None:
    pairs = sum(
        key <= length - problem.seq_len_q + query
        for length in problem.sequence_lengths
        for query in range(problem.seq_len_q)
        for key in range(length)
    )
    assert problem.unmasked_pairs == pairs
    assert problem.flop_count == 4 * problem.heads * pairs * problem.head_dim


@given(decode_problems())
def test_the_lengths_of_a_decode_problem_reach_from_what_they_are_called_to_the_context(
    problem: Problem,
) -> None:
    lengths = sorted(problem.sequence_lengths)
    assert len(lengths) == problem.batch
    if problem.lengths == "equal":
        assert set(lengths) == {problem.seq_len_k}
    elif problem.lengths == "uneven":
        assert lengths[0] >= 1
        assert lengths[-1] == problem.seq_len_k
    else:
        assert lengths[0] == 0
        assert problem.batch == 1 or lengths[-1] == problem.seq_len_k
    assert problem.states_lengths == (
        problem.lengths != "equal" or bool(problem.page_size and problem.seq_len_k % problem.page_size)
    )


@given(decode_problems())
def test_a_decode_kernel_moves_what_the_sequences_have_and_not_the_whole_cache(problem: Problem) -> None:
    item, query = 2, problem.batch * problem.heads * problem.seq_len_q * problem.head_dim
    keys = sum(problem.sequence_lengths) * problem.kv_heads * problem.head_dim
    assert problem.key_value_bytes == 2 * keys * item
    assert problem.minimal_bytes == 2 * query * item + 2 * keys * item


def test_a_decode_problem_is_causal() -> None:
    with pytest.raises(ValueError, match="causal = False: a decode problem's mask is causal"):
        Problem(**{**VALUES, "workload": "decode", "causal": False})
