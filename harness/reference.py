"""The judge's own attention: in the kernel's dtype and in fp64, chunked over query rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.problem import DECODE, Problem
from harness.tensors import Inputs

# Scores of one chunk, in elements; the fp64 softmax then needs about 3 x 8 times as many bytes.
CHUNK_ELEMENTS = 1 << 25


def reference_fp64(inputs: Inputs, problem: Problem) -> torch.Tensor:
    """softmax(scale * Q K^T) V with every operation in fp64; returns fp64, shaped as Q.

    A query that sees no key, as in an empty sequence of a decode problem, has the answer 0.
    """
    return _chunked(inputs, problem, torch.float64)


def reference_same_dtype(inputs: Inputs, problem: Problem) -> torch.Tensor:
    """The textbook formula in the inputs' dtype: products in it, softmax in fp32, probabilities cast back."""
    return _chunked(inputs, problem, inputs.q.dtype)


def _chunked(inputs: Inputs, problem: Problem, dtype: torch.dtype) -> torch.Tensor:
    q = inputs.q
    output = torch.zeros(q.shape, dtype=dtype, device=q.device)
    group = problem.heads // problem.kv_heads
    softmax_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for batch, length in enumerate(problem.sequence_lengths):
        keys, values = (
            _of_sequence(cache, inputs, batch, length).to(dtype).repeat_interleave(group, dim=0)
            for cache in (inputs.k, inputs.v)
        )
        # Aligned to the top left, query i sees keys 0 to i; the newest tokens see as many more.
        later = length - problem.seq_len_q if problem.workload == DECODE else 0
        for rows in _row_chunks(problem, length):
            scores = q[batch, :, rows].to(dtype) @ keys.transpose(-1, -2)
            scores *= problem.scale
            if problem.causal:
                query_index = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
                key_index = torch.arange(length, device=q.device)[None, :]
                scores.masked_fill_(key_index > query_index + later, float("-inf"))
            answer = torch.softmax(scores, dim=-1, dtype=softmax_dtype).to(dtype) @ values
            output[batch, :, rows] = answer
    return output


def _of_sequence(cache: torch.Tensor, inputs: Inputs, batch: int, length: int) -> torch.Tensor:
    """The keys, or values, of one sequence, (kv_heads, length, head_dim)."""
    block_table = inputs.extras.get("block_table")
    if block_table is None:
        return cache[batch, :, :length]
    pages = cache[block_table[batch].long()]  # (pages, kv_heads, page_size, head_dim)
    return pages.transpose(0, 1).flatten(1, 2)[:, :length]


def _row_chunks(problem: Problem, length: int) -> Iterator[slice]:
    """The rows that have an answer, so many at a time: of a short sequence the first queries see no key."""
    rows = max(1, CHUNK_ELEMENTS // (problem.heads * max(1, length)))
    first = max(0, problem.seq_len_q - length) if problem.workload == DECODE else 0
    for start in range(first, problem.seq_len_q, rows):
        yield slice(start, min(start + rows, problem.seq_len_q))
