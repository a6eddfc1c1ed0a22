"""Attention functions for the tests: one that is right, and one for each way of being wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from harness.plugin import Kernel
from harness.problem import Problem

Tensor = torch.Tensor
Attention = Callable[..., Any]


def make_problem(**changes: Any) -> Problem:
    values = {
        "batch": 2,
        "heads": 2,
        "kv_heads": 2,
        "seq_len_q": 48,
        "seq_len_k": 48,
        "head_dim": 16,
        "causal": True,
        "dtype": "fp16",
    }
    return Problem(**{**values, **changes})


def kernel_of(attention: Attention, options: dict[str, Any] | None = None, **hooks: Any) -> Kernel:
    """What the harness makes of a kernel file with this attention() and these hooks."""
    module = ModuleType("kernel_of_a_test")
    module.attention = attention  # type: ignore[attr-defined]
    for name, hook in hooks.items():
        setattr(module, name, hook)
    return Kernel(module, options or {})


def right(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    return _attention(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale)


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, diagonal: int = 1) -> Tensor:
    group = q.shape[1] // k.shape[1]
    keys, values = (tensor.float().repeat_interleave(group, dim=1) for tensor in (k, v))
    scores = q.float() @ keys.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ values).to(q.dtype)


def writes_its_output(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Right, by way of an output that it allocates."""
    output = torch.empty_like(q)
    output.copy_(right(q, k, v, causal=causal))
    return output


def zeros(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return torch.zeros_like(q)


def one_nan(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    output = right(q, k, v, causal=causal)
    output[1, 0, 7, 3] = float("nan")
    return output


def one_infinity(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    output = right(q, k, v, causal=causal)
    output[0, 1, 5, 2] = float("inf")
    return output


def one_value_off(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    output = right(q, k, v, causal=causal)
    output[1, 1, 40, 9] += 0.5
    return output


def transposed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return right(q, k, v, causal=causal).transpose(1, 2)


def last_row_missing(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return right(q, k, v, causal=causal)[:, :, :-1]


def single_precision(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return right(q.float(), k.float(), v.float(), causal=causal)


def integers(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return right(q, k, v, causal=causal).to(torch.int32)


def on_no_device(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return torch.zeros_like(q, device="meta")


def nothing(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
    return None


def pair(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, None]:
    return right(q, k, v, causal=causal), None


def scales_q_in_place(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    q *= q.shape[-1] ** -0.5
    return _attention(q, k, v, causal, 1.0)


def returns_v_overwritten(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return v.copy_(right(q, k, v, causal=causal))


def writes_behind_its_output(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return _poke(writes_its_output(q, k, v, causal=causal), q.numel())


def writes_before_its_output(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return _poke(writes_its_output(q, k, v, causal=causal), -1)


def writes_behind_k(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    _poke(k, k.numel())
    return right(q, k, v, causal=causal)


def writes_before_v(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    _poke(v, -1)
    return right(q, k, v, causal=causal)


def _poke(tensor: Tensor, element: int) -> Tensor:
    """Write one element at a distance from the tensor's first, as a stray pointer would."""
    tensor.as_strided((1,), (1,), tensor.storage_offset() + element).fill_(0.0)
    return tensor


def output_not_written(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return torch.empty_like(q)


def last_rows_not_written(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    output = q.new_empty(q.shape)
    output[:, :, :-3] = right(q, k, v, causal=causal)[:, :, :-3]
    return output


def reads_behind_v(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """One row of padding too much goes into the product, with a weight of zero."""
    batch, heads, rows, width = v.shape
    padded = v.as_strided((batch, heads, rows + 1, width), v.stride())
    scores = (q.float() @ k.float().transpose(-1, -2)) * width**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
    weights = torch.nn.functional.pad(torch.softmax(scores, dim=-1), (0, 1))
    return (weights @ padded.float()).to(q.dtype)


def sees_one_key_too_many(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return _attention(q, k, v, causal, q.shape[-1] ** -0.5, diagonal=2)


def sees_one_key_too_few(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    output = right(q, k, v, causal=causal)
    output[:, :, 1:] = _attention(q, k, v, causal, q.shape[-1] ** -0.5, diagonal=0)[:, :, 1:]
    return output


def ignores_the_mask(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return right(q, k, v, causal=False)


def forgets_the_scale(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return right(q, k, v, causal=causal, scale=1.0)


def scale_one_percent_off(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return right(q, k, v, causal=causal, scale=1.01 * q.shape[-1] ** -0.5)


def swaps_heads(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return right(q, k, v, causal=causal).flip(1)


def shares_heads_in_another_order(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Query head h takes K and V of head h % kv_heads, not of h // group."""
    group = q.shape[1] // k.shape[1]
    return right(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), causal=causal)


def drops_the_last_key(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return right(q, k[:, :, :-1], v[:, :, :-1], causal=causal)


class RightOnlyAtFirst:
    """Right for some calls, zeros ever after."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        self.left -= 1
        return right(q, k, v, causal=causal) if self.left >= 0 else torch.zeros_like(q)


class ChangesInputsLater:
    """Right for one call, then writes into K after each."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        output = right(q, k, v, causal=causal)
        self.calls += 1
        if self.calls > 1:
            k.zero_()
        return output
