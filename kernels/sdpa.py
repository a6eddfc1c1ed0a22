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

from kernels.inputs import check_inputs

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

    None for the math backend, whose temporaries are PyTorch's affair. The default counts as fused, which
    it is on a GPU for the dtypes accepted here unless no fused backend takes the shape. Left out: fp32
    row statistics (4 bytes a row and head) and workspaces.
    """
    if _pinned(backend) is SDPBackend.MATH:
        return None
    query = problem.batch * problem.heads * problem.seq_len_q * problem.head_dim
    key = problem.batch * problem.kv_heads * problem.seq_len_k * problem.head_dim
    return int(2 * (2 * query + 2 * key))


def _pinned(backend: str) -> SDPBackend | None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: expected one of {', '.join(BACKENDS)}")
    return BACKENDS[backend]


def _params(problem: Any, device: str) -> Any:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[problem.dtype]
    query_shape = (problem.batch, problem.heads, problem.seq_len_q, problem.head_dim)
    key_shape = (problem.batch, problem.kv_heads, problem.seq_len_k, problem.head_dim)
    q, k, v = (
        torch.empty(shape, dtype=dtype, device=device) for shape in (query_shape, key_shape, key_shape)
    )
    gqa = problem.heads != problem.kv_heads
    return torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, problem.causal, gqa)


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
