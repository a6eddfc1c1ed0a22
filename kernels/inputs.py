"""What every kernel here accepts, checked once and refused with a message that names the argument."""

from __future__ import annotations

import math

import torch

DTYPES = (torch.float16, torch.bfloat16)


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    forward_only: bool = False,
) -> None:
    """Check the arguments of an attention call.

    q is (batch, heads, seq_len_q, head_dim); k and v are (batch, kv_heads, seq_len_k, head_dim), and
    heads is a multiple of kv_heads. All three share one dtype, fp16 or bf16, and one device, and lie
    in memory with a last stride of 1; the other strides are free. A length of 0 is accepted, except
    for heads, kv_heads and head_dim. scale is a finite number or None. With forward_only, a tensor
    that asks for a gradient is refused while gradients are recorded.

    Raises ValueError that names the argument, says what it was and what was expected.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, forward_only)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {_short(tensor.dtype)}: expected q's dtype, {_short(q.dtype)}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}: expected q's device, {q.device}")
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch {tensor.shape[0]}: expected q's batch, {q.shape[0]}")
        if tensor.shape[3] != q.shape[3]:
            raise ValueError(f"{name} has head_dim {tensor.shape[3]}: expected q's head_dim, {q.shape[3]}")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}: expected k's shape, {tuple(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads: expected a multiple of the {k.shape[1]} heads of k and v"
        )
    # bool is an int in Python, and True as a scale is a misplaced `causal`.
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale)
    ):
        raise ValueError(f"scale is {scale!r}: expected a finite number or None")


def _check_tensor(name: str, tensor: torch.Tensor, forward_only: bool) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor")
    if tensor.dim() != 4:
        raise ValueError(
            f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}: "
            "expected 4, (batch, heads, seq_len, head_dim)"
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} is {_short(tensor.dtype)}: expected float16 or bfloat16")
    if tensor.shape[1] == 0 or tensor.shape[3] == 0:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: expected at least one head and head_dim >= 1"
        )
    if tensor.stride(3) != 1 and tensor.shape[3] != 1:
        raise ValueError(
            f"{name} has a last stride of {tensor.stride(3)}: expected 1 (call {name}.contiguous() first)"
        )
    if forward_only and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient: expected none, this kernel is forward only "
            "(call it under torch.no_grad(), or detach the tensor)"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
