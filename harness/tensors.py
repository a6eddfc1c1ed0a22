"""Inputs with poisoned surroundings, and guard zones around everything a kernel allocates."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.problem import Problem

GUARD_BYTES = 4096
# Every byte of a guard zone: 0xFF is NaN in each floating dtype, and no count or index.
GUARD_BYTE = 0xFF
POISONED_BLOCKS = 3


def make_inputs(
    problem: Problem, device: str, *, guarded: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeded standard normal Q, K, V on the device, `guarded` by zones full of NaN around each.

    A kernel that reads past the end of a tensor and lets what it read into a result gives NaN.
    """
    query_shape = (problem.batch, problem.heads, problem.seq_len_q, problem.head_dim)
    key_shape = (problem.batch, problem.kv_heads, problem.seq_len_k, problem.head_dim)
    tensors = []
    for shape in (query_shape, key_shape, key_shape):
        dtype = problem.torch_dtype()
        if guarded:
            tensor = _guarded(shape, dtype, torch.device(device))
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        tensors.append(tensor)
    q, k, v = tensors
    fill(q, k, v, seed=problem.seed)
    return q, k, v


def fill(*tensors: torch.Tensor, seed: int) -> None:
    """Write standard normal values into the tensors, one after the other, the same for the same seed."""
    generator = torch.Generator(device=tensors[0].device).manual_seed(seed)
    for tensor in tensors:
        tensor.normal_(generator=generator)


def _guarded(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, contents: int = GUARD_BYTE
) -> torch.Tensor:
    """A contiguous tensor with GUARD_BYTES of guard before and behind it, each of its bytes `contents`."""
    item = dtype.itemsize
    count = 1
    for length in shape:
        count *= length
    storage = torch.empty(2 * GUARD_BYTES + count * item, dtype=torch.uint8, device=device)
    storage.fill_(GUARD_BYTE)
    inside = storage[GUARD_BYTES : GUARD_BYTES + count * item]
    if contents != GUARD_BYTE:
        inside.fill_(contents)
    return inside.view(dtype).view(shape)


def guards_touched(tensor: torch.Tensor) -> bool:
    """Whether a byte of the guard zones around a tensor made here has changed."""
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    zones = (storage[:GUARD_BYTES], storage[-GUARD_BYTES:])
    return any(bool((zone != GUARD_BYTE).any()) for zone in zones)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and one dtype of 2 bytes are the same, NaN and signs of 0 included."""
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


def poison_free_memory(like: torch.Tensor, contents: int) -> None:
    """Fill blocks as large as a tensor with a byte, and free them.

    PyTorch's caching allocator hands them out again, also to an operator that allocates out of the sight
    of GuardedAllocations: a result that it does not write then shows.
    """
    blocks = [
        torch.full((like.numel() * like.itemsize,), contents, dtype=torch.uint8, device=like.device)
        for _ in range(POISONED_BLOCKS)
    ]
    del blocks


class GuardedAllocations(TorchDispatchMode):
    """While active, every empty or zero tensor a kernel asks PyTorch for lies between guard zones.

    The bytes of an empty one are `contents`, by default those of NaN, so that an output which is not
    written shows. `touched` tells afterwards whether something was written outside. What an operator
    that is registered with PyTorch allocates for itself does not pass here.
    """

    def __init__(self, contents: int = GUARD_BYTE) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._contents = contents
        self._allocated: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise PyTorch imports its compiler on first use, which takes longer than a job's measurements.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _UNINITIALISED | _ZEROED or not _replaceable(result):
            return result
        dense = _guarded(
            (result.untyped_storage().nbytes() // result.dtype.itemsize,),
            result.dtype,
            result.device,
            self._contents,
        )
        if func.overloadpacket in _ZEROED:
            dense.zero_()
        self._allocated.append(dense)
        return dense.as_strided(result.shape, result.stride(), dense.storage_offset())

    @property
    def touched(self) -> bool:
        return any(guards_touched(tensor) for tensor in self._allocated)


_ZEROED = {torch.ops.aten.zeros, torch.ops.aten.zeros_like, torch.ops.aten.new_zeros}
_UNINITIALISED = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_strided,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


def _replaceable(result: Any) -> bool:
    return (
        isinstance(result, torch.Tensor)
        and result.layout == torch.strided
        and result.numel() > 0
        and not result.is_pinned()
        and result.device.type in ("cpu", "cuda")
    )


def first_location(mask: torch.Tensor) -> tuple[int, ...]:
    """The index of the first true element of a mask that has one."""
    return location(int(mask.flatten().to(torch.uint8).argmax()), mask.shape)


def location(flat_index: int, shape: torch.Size) -> tuple[int, ...]:
    """The index tuple of an element of a contiguous tensor of that shape."""
    index = []
    for length in reversed(shape):
        flat_index, remainder = divmod(flat_index, length)
        index.append(remainder)
    return tuple(itertools.chain(reversed(index)))
