"""What every kernel here accepts, checked once and refused with a message that names the argument."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch.autograd import forward_ad

DTYPES = (torch.float16, torch.bfloat16)
MAX_QUERIES = 8  # of a sequence in a decode call
PAGE_SIZES = (16, 64, 128)


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
    for heads, kv_heads and head_dim. scale is a finite number or None. With forward_only, for kernels that
    read memory themselves, a tensor is refused that is not what lies there, or that derivatives are to be
    taken by: see `is_plain`, and one that asks for a gradient while gradients are recorded.

    Raises ValueError that names the argument, says what it was and what was expected.
    """
    _check_tensors(q, k, v, forward_only)
    for name, tensor in (("k", k), ("v", v)):
        _check_batch(name, tensor, q)
    _check_heads(q, k, v)
    _check_scale(scale)


def check_decode_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seq_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
) -> None:
    """Check the arguments of a decode call, forward only; what lies in the index tensors is not read.

    q is (batch, heads, queries, head_dim) with 1 to 8 queries, the newest tokens of each sequence; k and v
    are (batch, kv_heads, context, head_dim), or with a block_table pages, (pages, kv_heads, page_size,
    head_dim) with a page_size of 16, 64 or 128. For the rest q, k and v are as in `check_inputs`. seq_lens
    is (batch,) int32, contiguous; block_table is (batch, pages_per_sequence) int32 with a last stride of 1.
    Both are on q's device, or None.

    Raises ValueError that names the argument, says what it was and what was expected.
    """
    _check_tensors(q, k, v, forward_only=True)
    if not 1 <= q.shape[2] <= MAX_QUERIES:
        raise ValueError(f"q has {q.shape[2]} queries a sequence: expected 1 to {MAX_QUERIES}")
    if block_table is None:
        for name, tensor in (("k", k), ("v", v)):
            _check_batch(name, tensor, q)
    _check_heads(q, k, v)
    if block_table is not None:
        if k.shape[2] not in PAGE_SIZES:
            expected = ", ".join(str(size) for size in PAGE_SIZES)
            raise ValueError(f"k has pages of {k.shape[2]} tokens: expected one of {expected}")
        _check_index("block_table", block_table, q, 2)
    if seq_lens is not None:
        _check_index("seq_lens", seq_lens, q, 1)
    _check_scale(scale)


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether the tensors are what lies in memory, and no more.

    Else one is a negative view (the imaginary part of a conjugate), carries a tangent of forward-mode
    differentiation, or stands for many in a transformation of torch.func.
    """
    return not any(tensor.is_neg() or _is_transformed(tensor) for tensor in tensors) and (
        forward_ad._current_level < 0 or not any(_has_tangent(tensor) for tensor in tensors)
    )


_is_transformed: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_only: bool) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, forward_only)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {_short(tensor.dtype)}: expected q's dtype, {_short(q.dtype)}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}: expected q's device, {q.device}")
        if tensor.shape[3] != q.shape[3]:
            raise ValueError(f"{name} has head_dim {tensor.shape[3]}: expected q's head_dim, {q.shape[3]}")


def _check_batch(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    if tensor.shape[0] != q.shape[0]:
        raise ValueError(f"{name} has batch {tensor.shape[0]}: expected q's batch, {q.shape[0]}")


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}: expected k's shape, {tuple(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads: expected a multiple of the {k.shape[1]} heads of k and v"
        )


def _check_scale(scale: float | None) -> None:
    # bool is an int in Python, and True as a scale is a misplaced `causal`.
    if scale is not None and (
        isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale)
    ):
        raise ValueError(f"scale is {scale!r}: expected a finite number or None")


def fp32(number: float) -> float:
    """The number as a kernel gets it: 0 where it is too small for fp32, and infinite where too large."""
    return ctypes.c_float(number).value


def _check_index(name: str, tensor: torch.Tensor, q: torch.Tensor, dimensions: int) -> None:
    """Check seq_lens or block_table: int32, one row a sequence, on q's device."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor or None")
    expected = "(batch,)" if dimensions == 1 else "(batch, pages_per_sequence)"
    if tensor.dim() != dimensions or tensor.shape[0] != q.shape[0]:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: expected {expected}, with q's batch, {q.shape[0]}"
        )
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} is {_short(tensor.dtype)}: expected int32")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}: expected q's device, {q.device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} has a last stride of {tensor.stride(-1)}: expected 1 (call {name}.contiguous() first)"
        )


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
    if forward_only and not is_plain(tensor):
        if _is_transformed(tensor):
            raise ValueError(
                f"{name} is transformed by torch.func (vmap, jvp, grad): expected a tensor in memory, this "
                "kernel is forward only and takes a batch as a dimension"
            )
        if tensor.is_neg():
            raise ValueError(
                f"{name} is a negative view: expected what lies in memory (call {name}.resolve_neg() first)"
            )
        raise ValueError(
            f"{name} has a tangent (forward-mode differentiation): expected none, this kernel is forward only"
        )
    if forward_only and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient: expected none, this kernel is forward only "
            "(call it under torch.no_grad(), or detach the tensor)"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
