"""The judge's own attention is PyTorch's, in exact enough arithmetic and for every kind of problem."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from harness import reference
from harness.problem import Problem
from harness.reference import reference_fp64, reference_same_dtype
from harness.tensors import make_inputs

SHAPES = [
    {},
    {"seq_len_q": 9, "seq_len_k": 30},
    {"seq_len_q": 30, "seq_len_k": 9},
    {"kv_heads": 2},
    {"kv_heads": 1, "seq_len_q": 1},
    {"head_dim": 7, "dtype": "bf16"},
]


def make_problem(**changes: Any) -> Problem:
    values = {
        "batch": 2,
        "heads": 4,
        "kv_heads": 4,
        "seq_len_q": 20,
        "seq_len_k": 20,
        "head_dim": 16,
        "causal": False,
        "dtype": "fp16",
        "seed": 3,
    }
    return Problem(**{**values, **changes})


def torch_attention(problem: Problem, dtype: torch.dtype) -> torch.Tensor:
    q, k, v = (tensor.to(dtype) for tensor in make_inputs(problem, "cpu"))
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fp64_reference_is_pytorchs(shape: dict[str, Any], causal: bool) -> None:
    problem = make_problem(causal=causal, **shape)
    found = reference_fp64(make_inputs(problem, "cpu"), problem)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch_attention(problem, torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_dtype_reference_is_near_the_exact_one(shape: dict[str, Any], causal: bool) -> None:
    problem = make_problem(causal=causal, **shape)
    found = reference_same_dtype(make_inputs(problem, "cpu"), problem)
    assert found.dtype == problem.torch_dtype()
    near = {"fp16": 4e-3, "bf16": 3e-2}[problem.dtype]
    exact = torch_attention(problem, torch.float64)
    torch.testing.assert_close(found.double(), exact, rtol=near, atol=near)


@pytest.mark.parametrize("elements", [1, 4 * 20 * 3, 4 * 20 * 7])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, causal: bool, elements: int) -> None:
    problem = make_problem(causal=causal, kv_heads=2)
    inputs = make_inputs(problem, "cpu")
    whole = reference_fp64(inputs, problem)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", elements)
    torch.testing.assert_close(reference_fp64(inputs, problem), whole, rtol=1e-13, atol=1e-13)


def test_row_0_of_a_causal_problem_copies_the_first_value() -> None:
    problem = make_problem(causal=True)
    inputs = make_inputs(problem, "cpu")
    for output in (reference_fp64(inputs, problem), reference_same_dtype(inputs, problem)):
        assert torch.equal(output[:, :, 0].to(torch.float16), inputs.v[:, :, 0])


def test_the_inputs_are_left_alone() -> None:
    problem = make_problem(causal=True)
    inputs = make_inputs(problem, "cpu")
    copies = [tensor.clone() for tensor in inputs]
    reference_fp64(inputs, problem)
    reference_same_dtype(inputs, problem)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))
