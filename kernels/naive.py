"""Attention as the formula is written: the whole score matrix in memory, four times over."""

from __future__ import annotations

from typing import Any

import torch

from kernels.cache import gather_pages, visible_keys
from kernels.inputs import check_decode_inputs, check_inputs


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale * Q K^T) V, one PyTorch operation after another.

    q is (batch, heads, seq_len_q, head_dim), k and v are (batch, kv_heads, seq_len_k, head_dim), fp16 or
    bf16; consecutive heads // kv_heads query heads share one head of k and v. A causal mask is aligned to
    the top left, as SDPA's `is_causal`: row i sees keys 0 to i. scale is 1 / sqrt(head_dim) unless given.
    The softmax is taken in fp32. The scores are in the inputs' dtype before they are scaled, so in fp16
    they overflow above 65504. Returns a contiguous tensor of q's shape and dtype. Differentiable.

    Raises ValueError for a bad argument (see `check_inputs`).
    """
    check_inputs(q, k, v, scale=scale)
    batch, heads, seq_len_q, head_dim = q.shape
    kv_heads, seq_len_k = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale

    # The query heads that share a head of K and V become rows of one matrix: K and V are not copied.
    rows = q.reshape(batch, kv_heads, heads // kv_heads * seq_len_q, head_dim)
    scores = rows @ k.transpose(-1, -2)
    scaled = scores * scale
    if causal:
        # In place, so that the mask is all it needs; a view, because the rows of a group share it.
        scaled.view(batch, heads, seq_len_q, seq_len_k).masked_fill_(
            _hidden(seq_len_q, seq_len_k, q.device), float("-inf")
        )
    weights = torch.softmax(scaled, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).view(batch, heads, seq_len_q, head_dim)


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seq_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale * Q K^T) V for the newest tokens of each sequence, one PyTorch operation after another.

    q is (batch, heads, queries, head_dim), 1 to 8 queries, k and v are (batch, kv_heads, context,
    head_dim), or with block_table, (batch, pages_per_sequence) int32, pages of 16, 64 or 128 tokens, (pages,
    kv_heads, page_size, head_dim), which are copied into a row first. fp16 or bf16; consecutive heads //
    kv_heads query heads share one head of k and v, which are not expanded. seq_lens, (batch,) int32, counts
    the queries' own keys; None: the cache is full. The mask is aligned to the bottom right: query i
    of L sees keys j < seq_len - (L - 1 - i); one that sees none gives 0. Softmax and scale as in
    `attention`. Where there are lengths, V is copied with zeros beyond them: what lies there may be NaN.
    Returns a contiguous tensor of q's shape and dtype.

    Raises ValueError for a bad argument (see `check_decode_inputs`).
    """
    check_decode_inputs(q, k, v, seq_lens=seq_lens, block_table=block_table, scale=scale)
    if block_table is not None:
        k, v = gather_pages(k, block_table), gather_pages(v, block_table)
    batch, heads, queries, head_dim = q.shape
    kv_heads, context = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale

    # The query heads that share a head of K and V become rows of one matrix: K and V are not copied.
    rows = q.reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
    scaled = (rows @ k.transpose(-1, -2)) * scale
    if queries == 1 and seq_lens is None:
        weights = torch.softmax(scaled, dim=-1, dtype=torch.float32).to(q.dtype)
        return (weights @ v).view(batch, heads, queries, head_dim)
    hidden = ~visible_keys(seq_lens, batch, queries, context, q.device)[:, None]
    # In place, through a view: the rows of a group share the mask.
    scaled.view(batch, heads, queries, context).masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scaled, dim=-1, dtype=torch.float32).to(q.dtype)
    # A row without a key is NaN until here.
    weights.view(batch, heads, queries, context).masked_fill_(hidden, 0.0)
    if seq_lens is not None:
        v = v.masked_fill(hidden[:, :, -1, :, None], 0.0)
    return (weights @ v).view(batch, heads, queries, head_dim)


def memory_law(problem: Any, **options: Any) -> int | None:
    """Bytes that a call peaks at on a GPU, the inputs included, for inputs that are contiguous.

    For a decode problem None where pages are copied or a mask is made, whose temporaries come and go.

    10 bytes a score while the weights are cast back (scores 2, scaled scores 2, fp32 softmax 4, cast 2)
    on top of Q, K and V; in bf16 12 bytes, before that, because only fp16 scores go into PyTorch's fp32
    softmax without a copy of 4 bytes (scores 2, scaled scores 2, fp32 scores 4, fp32 softmax 4). The
    output comes after the fp32 softmax has gone, and exceeds that peak only where head_dim is more than
    twice seq_len_k. The causal mask is gone before the softmax. In decode the unscaled scores are gone by
    then too: 2 bytes less. Left out: cuBLAS's workspace, and what autograd keeps. A CPU peaks at 12 bytes
    a score in both dtypes.
    """
    is_decode = getattr(problem, "workload", "attention") == "decode"
    if is_decode and (problem.page_size or problem.lengths != "equal" or problem.seq_len_q > 1):
        return None
    query = problem.batch * problem.heads * problem.seq_len_q * problem.head_dim
    key = problem.batch * problem.kv_heads * problem.seq_len_k * problem.head_dim
    scores = problem.batch * problem.heads * problem.seq_len_q * problem.seq_len_k
    unscaled = 0 if is_decode else 2 * scores
    at_softmax = unscaled + (8 * scores if problem.dtype == "fp16" else 10 * scores)
    at_output = unscaled + 4 * scores + 2 * query
    return int(2 * query + 2 * 2 * key + max(at_softmax, at_output))


def _hidden(seq_len_q: int, seq_len_k: int, device: torch.device) -> torch.Tensor:
    """(seq_len_q, seq_len_k) bool, true where the key comes after the query; made in place, 1 byte a pair."""
    return torch.ones(seq_len_q, seq_len_k, dtype=torch.bool, device=device).triu_(1)
