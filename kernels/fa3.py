"""FlashAttention-3, the authors' own kernel for Hopper, where PyPI's `fa3-fwd` is installed: a baseline."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

from kernels.cache import gather_pages
from kernels.inputs import check_decode_inputs, check_inputs

PACKAGE = "fa3-fwd"
INTERFACE = "fa3_fwd_interface"
MAX_HEAD_DIM = 256
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale * Q K^T) V by FlashAttention-3.

    q is (batch, heads, seq_len_q, head_dim), k and v are (batch, kv_heads, seq_len_k, head_dim);
    consecutive heads // kv_heads query heads share one head of k and v. A causal mask is aligned to the
    top left: row i sees keys 0 to i. scale is 1 / sqrt(head_dim) unless given. Returns a tensor of q's shape
    and dtype, laid out as (batch, seq_len_q, heads, head_dim).

    Raises ValueError for a bad argument (see `check_inputs`) and for what this build of
    FlashAttention-3 lacks (`unsupported` says so beforehand), ImportError where it is not installed.
    """
    check_inputs(q, k, v, scale=scale, forward_only=True)
    seq_len_q, seq_len_k = q.shape[2], k.shape[2]
    reason = _lacks(DTYPE_NAMES[q.dtype], q.shape[3]) or _mask(causal, seq_len_q, seq_len_k)
    if reason is not None:
        raise ValueError(reason)
    if causal:
        # FlashAttention-3 aligns the mask to the bottom right: the same, without the keys that no row sees.
        k, v = k[:, :, :seq_len_q], v[:, :, :seq_len_q]
    forward = importlib.import_module(INTERFACE).flash_attn_func
    # Its layout is (batch, seq_len, heads, head_dim); only the last stride must be 1.
    output: torch.Tensor = forward(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale, causal=bool(causal)
    )
    return output.transpose(1, 2)


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seq_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale * Q K^T) V by FlashAttention-3 for the newest tokens of each sequence against its cache.

    q is (batch, heads, queries, head_dim), 1 to 8 queries, k and v are (batch, kv_heads, context,
    head_dim), or with block_table, (batch, pages_per_sequence) int32, pages of 16, 64 or 128 tokens, (pages,
    kv_heads, page_size, head_dim); a build without paging, as PyPI's is, gets them copied into a row first.
    seq_lens, (batch,) int32, counts the queries' own keys; None: the cache is full. The mask is aligned to
    the bottom right; a query that sees no key gives 0. FlashAttention-3 chooses the number of splits.
    Returns a contiguous tensor of q's shape and dtype.

    Raises ValueError for a bad argument (see `check_decode_inputs`) and for what this build of
    FlashAttention-3 lacks (`unsupported` says so beforehand), ImportError where it is not installed.
    """
    check_decode_inputs(q, k, v, seq_lens=seq_lens, block_table=block_table, scale=scale)
    reason = _lacks(DTYPE_NAMES[q.dtype], q.shape[3])
    if reason is not None:
        raise ValueError(reason)
    if block_table is not None and _build_flags().get("FLASHATTENTION_DISABLE_PAGEDKV"):
        k, v, block_table = gather_pages(k, block_table), gather_pages(v, block_table), None
    forward = importlib.import_module(INTERFACE).flash_attn_with_kvcache
    output: torch.Tensor = forward(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)),
        cache_seqlens=seq_lens,
        page_table=block_table,
        softmax_scale=scale,
        causal=True,
    )
    return output.transpose(1, 2).contiguous()


def unsupported(problem: Any, target: Any) -> str | None:
    """Why the problem cannot run on the target; None if it can."""
    if not target.is_cuda or target.compute_capability != (9, 0):
        found = "compute capability {}.{}".format(*target.compute_capability) if target.is_cuda else "a CPU"
        return f"{found}: FlashAttention-3 is written for Hopper, compute capability 9.0"
    if importlib.util.find_spec(INTERFACE) is None:
        return f"PyPI's {PACKAGE} is not installed (pip install {PACKAGE}==0.0.3)"
    reason = _lacks(problem.dtype, problem.head_dim)
    if reason is None and not _is_decode(problem):
        reason = _mask(problem.causal, problem.seq_len_q, problem.seq_len_k)
    return reason


def memory_law(problem: Any) -> int | None:
    """Bytes that a call peaks at, the inputs included: Q, K, V and O, and one fp32 number a row.

    None for a decode problem, whose keys FlashAttention-3 splits as it likes.
    """
    if _is_decode(problem):
        return None
    rows = problem.batch * problem.heads * problem.seq_len_q
    key = problem.batch * problem.kv_heads * problem.seq_len_k * problem.head_dim
    return int(2 * (2 * rows * problem.head_dim + 2 * key) + 4 * rows)


def _is_decode(problem: Any) -> bool:
    return bool(getattr(problem, "workload", "attention") == "decode")


def _mask(causal: bool, seq_len_q: int, seq_len_k: int) -> str | None:
    if causal and seq_len_q > seq_len_k:
        return (
            f"FlashAttention-3 aligns a causal mask to the bottom right: expected no more queries "
            f"({seq_len_q}) than keys ({seq_len_k})"
        )
    return None


def _lacks(dtype: str, head_dim: int) -> str | None:
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim}: FlashAttention-3 takes multiples of 8 up to {MAX_HEAD_DIM}"
    if dtype == "fp16" and _build_flags().get("FLASHATTENTION_DISABLE_FP16"):
        return f"the installed {PACKAGE} was built without fp16"
    return None


@functools.cache
def _build_flags() -> dict[str, bool]:
    """What the wheel was built without, in its own words."""
    flags: dict[str, bool] = importlib.import_module("fa3_fwd_config").CONFIG["build_flags"]
    return flags
