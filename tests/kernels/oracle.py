"""What the kernels are judged by here: the formula in fp64, and how far its same-dtype twin is from it."""

from __future__ import annotations

import math

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def formula(q, k, v, causal, scale=None, dtype=torch.float64):
    """softmax(scale * Q K^T) V in one dtype, the softmax in fp32 at least; row i sees keys 0 to i."""
    group = q.shape[1] // k.shape[1]
    k = k.to(dtype).repeat_interleave(group, dim=1)
    v = v.to(dtype).repeat_interleave(group, dim=1)
    scores = (q.to(dtype) @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if causal:
        rows = torch.arange(q.shape[2], device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device)[None, :] > rows, -math.inf)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.softmax(scores, dim=-1, dtype=wide).to(dtype) @ v


def assert_close(output, q, k, v, causal, scale=None):
    """At most twice the error of the same formula in q's dtype, plus a few units in the last place."""
    exact = formula(q, k, v, causal, scale)
    assert output.shape == exact.shape
    assert output.dtype == q.dtype
    assert torch.isfinite(output).all()
    twin = formula(q, k, v, causal, scale, q.dtype).double()
    rounded = exact.to(q.dtype)
    floor = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    # An overflow of the twin's half-precision scores is the twin's: then only the floor counts.
    twin_error = (twin - exact).abs().max().item() if torch.isfinite(twin).all() else 0.0
    error = (output.double() - exact).abs().max().item()
    assert error <= 2 * twin_error + floor, f"error {error:.3g}, twin {twin_error:.3g}, floor {floor:.3g}"


def inputs(batch, heads, kv_heads, seq_len_q, seq_len_k, head_dim, dtype=torch.float16, seed=0):
    """Seeded standard normal q, k, v, contiguous."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, seq_len_q, head_dim), *[(batch, kv_heads, seq_len_k, head_dim)] * 2)
    return tuple(torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes)
