"""The judge's own attention: in the kernel's dtype and in fp64, chunked over query rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.problem import Problem

# Scores of one chunk, in elements; the fp64 softmax then needs about 3 x 8 times as many bytes.
CHUNK_ELEMENTS = 1 << 25


def reference_fp64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    """softmax(scale * Q K^T) V with every operation in fp64; returns fp64, shaped as Q."""
    return _chunked(q, k, v, problem, torch.float64)


def reference_same_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    """The textbook formula in the inputs' dtype: products in it, softmax in fp32, probabilities cast back."""
    return _chunked(q, k, v, problem, q.dtype)


def _chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, dtype: torch.dtype
) -> torch.Tensor:
    output = torch.empty(q.shape, dtype=dtype, device=q.device)
    group = problem.heads // problem.kv_heads
    for batch in range(problem.batch):
        keys = k[batch].to(dtype).repeat_interleave(group, dim=0)
        values = v[batch].to(dtype).repeat_interleave(group, dim=0)
        for rows in _row_chunks(problem):
            scores = q[batch, :, rows].to(dtype) @ keys.transpose(-1, -2)
            scores *= problem.scale
            if problem.causal:
                query_index = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
                key_index = torch.arange(problem.seq_len_k, device=q.device)[None, :]
                scores.masked_fill_(key_index > query_index, float("-inf"))
            softmax_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            output[batch, :, rows] = torch.softmax(scores, dim=-1, dtype=softmax_dtype).to(dtype) @ values
    return output


def _row_chunks(problem: Problem) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // (problem.heads * problem.seq_len_k))
    for start in range(0, problem.seq_len_q, rows):
        yield slice(start, min(start + rows, problem.seq_len_q))
