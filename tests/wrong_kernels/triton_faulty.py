"""A plug-in in Triton whose option `fault` chooses what is wrong; 0 is right."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TAIL_NOT_MASKED, NOT_RESCALED, STORED_WITHOUT_MASK = 1, 2, 3
KINDS = {TAIL_NOT_MASKED: "inaccurate", NOT_RESCALED: "inaccurate", STORED_WITHOUT_MASK: "wrote_outside"}


@triton.jit
def _forward(
    q_pointer, k_pointer, v_pointer, o_pointer, seq_len, scale,
    TILE: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * seq_len * HEAD_DIM
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_DIM)
    places = head + rows[:, None] * HEAD_DIM + dims[None, :]
    in_rows = rows[:, None] < seq_len
    q = tl.load(q_pointer + places, mask=in_rows, other=0.0).to(tl.float32)
    maximum = tl.full([TILE], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE, HEAD_DIM], tl.float32)
    for start in range(0, seq_len, TILE):
        columns = start + tl.arange(0, TILE)
        keys = head + columns[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_pointer + keys, mask=columns[:, None] < seq_len, other=0.0).to(tl.float32)
        v = tl.load(v_pointer + keys, mask=columns[:, None] < seq_len, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k)) * scale
        if FAULT != 1:
            scores = tl.where(columns[None, :] < seq_len, scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(columns[None, :] <= rows[:, None], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        rescale = tl.exp(maximum - higher)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        if FAULT != 2:
            weighted = weighted * rescale[:, None]
        weighted += tl.dot(weights, v)
        maximum = higher
    output = (weighted / row_sum[:, None]).to(o_pointer.dtype.element_ty)
    if FAULT == 3:
        tl.store(o_pointer + places, output)
    else:
        tl.store(o_pointer + places, output, mask=in_rows)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    fault: int = 0,
) -> torch.Tensor:
    """softmax(scale * Q K^T) V for contiguous q, k and v of one shape, with that fault."""
    batch, heads, seq_len, head_dim = q.shape
    assert q.shape == k.shape == v.shape
    output = torch.empty_like(q)
    scale = head_dim**-0.5 if scale is None else scale
    grid = (triton.cdiv(seq_len, 32), batch * heads)
    _forward[grid](q, k, v, output, seq_len, scale, TILE=32, HEAD_DIM=head_dim, CAUSAL=causal, FAULT=fault)
    return output
