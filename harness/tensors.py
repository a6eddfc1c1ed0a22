"""Inputs with poisoned surroundings, and guard zones around everything a kernel allocates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.problem import DECODE, Problem

GUARD_BYTES = 4096
# Every byte of a guard zone: 0xFF is NaN in each floating dtype, and no count or index.
GUARD_BYTE = 0xFF
POISONED_BLOCKS = 3
# The unused room of a decode problem's cache holds finite garbage: a key so large that its score would
# take the whole softmax, a value that no result could hide. (NaN would be unfair: a mask multiplies by 0.)
GARBAGE_KEY = 60.0
GARBAGE_VALUE = 3000.0


@dataclass(frozen=True)
class Inputs:
    """What a call gets: Q, K and V, and by name what else its workload needs.

    `extras` holds of a decode problem `seq_lens`, (batch,) int32, where the kernel is told the lengths,
    and `block_table`, (batch, pages_per_sequence) int32, where the cache is paged. Iterating gives q, k, v.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    extras: dict[str, torch.Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.q, self.k, self.v))

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Every tensor, by its name as an argument."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.extras}


def make_inputs(problem: Problem, device: str, *, guarded: bool = True) -> Inputs:
    """Seeded standard normal Q, K, V on the device, `guarded` by zones full of NaN around each.

    A kernel that reads past the end of a tensor and lets what it read into a result gives NaN. The pages
    of a paged cache lie in random order; the room that no sequence uses holds garbage.
    """

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if guarded:
            return _guarded(shape, dtype, torch.device(device))
        return torch.empty(shape, dtype=dtype, device=device)

    dtype = problem.torch_dtype()
    q = allocate((problem.batch, problem.heads, problem.seq_len_q, problem.head_dim), dtype)
    k, v = (allocate(problem.key_shape, dtype) for _ in range(2))
    extras = {
        name: allocate(tuple(values.shape), values.dtype).copy_(values)
        for name, values in _indices(problem).items()
    }
    inputs = Inputs(q, k, v, extras)
    fill(inputs, problem, seed=problem.seed)
    return inputs


def fill(inputs: Inputs, problem: Problem, seed: int) -> None:
    """Write standard normal values into Q, K and V, the same for the same seed.

    Lengths and block table stay. What no sequence uses of a decode problem's cache holds garbage.
    """
    generator = torch.Generator(device=inputs.q.device).manual_seed(seed)
    for tensor in inputs:
        tensor.normal_(generator=generator)
    if problem.workload == DECODE:
        for index, length in enumerate(problem.sequence_lengths):
            for tensor, garbage in ((inputs.k, GARBAGE_KEY), (inputs.v, GARBAGE_VALUE)):
                for room in _unused(tensor, problem, inputs.extras.get("block_table"), index, length):
                    room.fill_(garbage)


def _indices(problem: Problem) -> dict[str, torch.Tensor]:
    """The tensors of integers that a kernel is given beside Q, K and V, on the CPU."""
    indices = {}
    if problem.states_lengths:
        indices["seq_lens"] = torch.tensor(problem.sequence_lengths, dtype=torch.int32)
    if problem.page_size:
        shape = (problem.batch, problem.pages_per_sequence)
        order = torch.Generator().manual_seed(problem.seed)
        pages = torch.randperm(shape[0] * shape[1], generator=order)
        indices["block_table"] = pages.to(torch.int32).view(shape)
    return indices


def _unused(
    cache: torch.Tensor, problem: Problem, block_table: torch.Tensor | None, index: int, length: int
) -> list[torch.Tensor]:
    """Views of the room in the cache that a sequence of the batch has and does not use."""
    if block_table is None:
        return [cache[index, :, length:]]
    rooms = []
    for place, page in enumerate(block_table[index].tolist()):
        begin = max(0, length - place * problem.page_size)
        rooms.append(cache[page, :, begin:])
    return rooms


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
