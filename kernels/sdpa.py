"""PyTorch's scaled_dot_product_attention, its choice of backend left alone or pinned."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.cache import gather_pages, visible_keys
from kernels.inputs import check_decode_inputs, check_inputs

Backend = Literal["default", "flash", "cudnn", "efficient", "math"]

BACKENDS: dict[str, SDPBackend | None] = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    backend: Backend = "default",
) -> torch.Tensor:
    """softmax(scale * Q K^T) V by PyTorch, with one backend or with the one it picks ("default").

    q is (batch, heads, seq_len_q, head_dim), k and v are (batch, kv_heads, seq_len_k, head_dim), fp16 or
    bf16; consecutive heads // kv_heads query heads share one head of k and v. A causal mask is aligned to
    the top left: row i sees keys 0 to i. scale is 1 / sqrt(head_dim) unless given. Returns a tensor of
    q's shape and dtype; its strides are the backend's choice. Differentiable.

    Raises ValueError for a bad argument (see `check_inputs`) or an unknown backend, and PyTorch's
    RuntimeError where the pinned backend cannot run (`unsupported` says so beforehand, and why).
    """
    check_inputs(q, k, v, scale=scale)
    pinned = _pinned(backend)
    with nullcontext() if pinned is None else sdpa_kernel(pinned):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seq_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
    backend: Backend = "default",
) -> torch.Tensor:
    """softmax(scale * Q K^T) V by PyTorch for the newest tokens of each sequence against its cache.

    q is (batch, heads, queries, head_dim), 1 to 8 queries, k and v are (batch, kv_heads, context,
    head_dim), or with block_table, (batch, pages_per_sequence) int32, pages of 16, 64 or 128 tokens, (pages,
    kv_heads, page_size, head_dim), which are copied into a row first. seq_lens, (batch,) int32, counts the
    queries' own keys; None: the cache is full. The mask is aligned to the bottom right. It is a boolean one
    where there are lengths or several queries, and none otherwise: a backend that takes no mask cannot run
    these. A query that sees no key gives 0. What lies beyond a length must be finite: PyTorch
    multiplies it by 0. For the rest as `attention`. Returns a contiguous tensor of q's shape and dtype.

    Raises ValueError for a bad argument (see `check_decode_inputs`) or an unknown backend, and PyTorch's
    RuntimeError where the pinned backend cannot run (`unsupported` says so beforehand, and why).
    """
    check_decode_inputs(q, k, v, seq_lens=seq_lens, block_table=block_table, scale=scale)
    pinned = _pinned(backend)
    if block_table is not None:
        k, v = gather_pages(k, block_table), gather_pages(v, block_table)
    batch, queries, context = q.shape[0], q.shape[2], k.shape[2]
    visible = None
    if queries > 1 or seq_lens is not None:
        visible = visible_keys(seq_lens, batch, queries, context, q.device)[:, None]
    with nullcontext() if pinned is None else sdpa_kernel(pinned):
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    if visible is not None:
        # Key 0 is the first that any query sees.
        output = output.masked_fill(~visible[..., :1], 0.0) if context else torch.zeros_like(q)
    return output.contiguous()


def unsupported(problem: Any, target: Any, backend: Backend = "default") -> str | None:
    """Why the pinned backend cannot run the problem on the target, in PyTorch's words; None if it can.

    For a GPU this asks PyTorch about tensors of the problem's shape, allocated on the current device and
    freed again; where the process has no GPU the answer is None: nothing is known against it. A CPU has
    the flash and the math backend.
    """
    pinned = _pinned(backend)
    if not target.is_cuda:
        if backend in ("cudnn", "efficient"):
            return f"PyTorch has no {backend} backend for the CPU (only flash and math)"
        return None
    if pinned in (None, SDPBackend.MATH) or not torch.cuda.is_available():
        return None
    can_use = {
        "flash": torch.backends.cuda.can_use_flash_attention,
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
    }[backend]
    params = _params(problem, "cuda")
    runs, said = _standard_error_of(lambda: can_use(params, debug=True))
    return None if runs else _one_line(said) or f"PyTorch's {backend} backend refuses it without a reason"


def memory_law(problem: Any, backend: Backend = "default") -> int | None:
    """Bytes that a call peaks at on a GPU, the inputs included: Q, K, V and O for the fused backends.

    None for the math backend, whose temporaries are PyTorch's affair, and for a decode problem, whose keys
    PyTorch splits as it likes. The default counts as fused, which
    it is on a GPU for the dtypes accepted here unless no fused backend takes the shape. Left out: fp32
    row statistics (4 bytes a row and head) and workspaces.
    """
    if _pinned(backend) is SDPBackend.MATH or _is_decode(problem):
        return None
    query = problem.batch * problem.heads * problem.seq_len_q * problem.head_dim
    key = problem.batch * problem.kv_heads * problem.seq_len_k * problem.head_dim
    return int(2 * (2 * query + 2 * key))


def _pinned(backend: str) -> SDPBackend | None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: expected one of {', '.join(BACKENDS)}")
    return BACKENDS[backend]


def _is_decode(problem: Any) -> bool:
    return bool(getattr(problem, "workload", "attention") == "decode")


def _params(problem: Any, device: str) -> Any:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[problem.dtype]
    context, causal, mask = problem.seq_len_k, problem.causal, None
    if _is_decode(problem):
        # As `decode` calls it: whole pages, and a mask only where there is something to hide.
        page = problem.page_size or 1
        context, causal = -(-context // page) * page, False
        if problem.seq_len_q > 1 or problem.lengths != "equal" or context > problem.seq_len_k:
            shape = (problem.batch, 1, problem.seq_len_q, context)
            mask = torch.empty(shape, dtype=torch.bool, device=device)
    query_shape = (problem.batch, problem.heads, problem.seq_len_q, problem.head_dim)
    key_shape = (problem.batch, problem.kv_heads, context, problem.head_dim)
    q, k, v = (
        torch.empty(shape, dtype=dtype, device=device) for shape in (query_shape, key_shape, key_shape)
    )
    gqa = problem.heads != problem.kv_heads
    return torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, causal, gqa)


def _standard_error_of(call: Callable[[], bool]) -> tuple[bool, str]:
    """Run the call and return its result and what was written to file descriptor 2 meanwhile.

    PyTorch gives its reasons from C++, past `sys.stderr` and `warnings`. Not for use beside other threads
    that write to stderr: their lines would be taken too.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with tempfile.TemporaryFile() as captured:
            os.dup2(captured.fileno(), 2)
            try:
                result = call()
            finally:
                os.dup2(saved, 2)
            captured.seek(0)
            return result, captured.read().decode(errors="replace")
    finally:
        os.close(saved)


def _one_line(said: str) -> str:
    """PyTorch's lines without their '[W1130 19:42:31.1 sdp_utils.cpp:123] ' and '(function ...)', joined."""
    lines = []
    for line in said.splitlines():
        text = re.sub(r"^\[?[WEIF]\d*[^\]]*\]\s*", "", line)
        text = re.sub(r"^Warning:\s*", "", text)
        text = re.sub(r"\s*\(function .*\)\s*$", "", text).strip()
        if text and text not in lines:
            lines.append(text)
    return " ".join(lines)
