"""What kernels share that split the keys of a sequence over several programs: counters, sizes, launches."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

VECTOR_ELEMENTS = 8  # of fp16 or bf16 in the 16 bytes that one load instruction of a thread can fetch
# Without a GPU: few, so that the interpreter visits several splits and not hundreds.
INTERPRETED_MULTIPROCESSORS = 8
COUNTERS = 2**16  # of a device in one allocation, 4 bytes each


class CompileUnit(NamedTuple):
    """What `triton.compile` needs for a target that need not be there.

    `triton.compile(ASTSource(function, signature, constexprs, attrs), target=..., options=options)`, in
    a process without TRITON_INTERPRET.
    """

    function: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]


def split_count(context: int, groups: int, multiprocessors: int, tile_k: int) -> int:
    """Into how many parts to split the keys so that each multiprocessor has one program, if there are tiles.

    groups is the number of programs without a split.
    """
    tiles = -(-context // tile_k)
    return max(1, min(multiprocessors // max(1, groups), tiles))


def launch(
    function: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Launch a jitted function on the current stream; a call like an earlier one takes a short cut.

    The function's constants come after its arguments, in this order, and none of its integers may be
    specialized. Triton's launcher binds and inspects every argument in every call, which takes longer than
    a short sequence. Which compiled kernel it finds depends on nothing but the key below.
    """
    if not hasattr(function, "device_caches"):  # the interpreter's
        function[grid](*arguments, **constants, **options)
        return
    key = (
        function,
        torch.cuda.current_device(),
        *map(_kind, arguments),
        *constants.values(),
        *options.values(),
    )
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = function[grid](*arguments, **constants, **options)
    else:
        compiled[grid](*arguments, *constants.values())


_compiled: dict[tuple[Any, ...], Any] = {}


def _kind(argument: Any) -> Any:
    """What of an argument decides which compiled kernel it needs."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return -(2**31) <= argument < 2**31
    return type(argument)


class _Counters:
    """Counters of one device that hold 0 whenever no call is under way.

    Calls of one stream follow each other and share theirs. A captured call may be replayed beside
    anything, so it has counters of its own, for good, out of what was zeroed before the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.int32, device=device)
        self._of_stream: dict[int, torch.Tensor] = {}

    def get(self, count: int) -> torch.Tensor | None:
        """So many counters for a call on the current stream; None where a capture finds too few."""
        if torch.cuda.is_current_stream_capturing():
            with self._lock:
                return self._take(count)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        held = self._of_stream.get(stream)
        # What captures took is replaced here, outside of them.
        if held is None or held.numel() < count or self._free.numel() < COUNTERS // 2:
            with self._lock:
                if self._free.numel() < max(count, COUNTERS // 2):
                    size = max(2 * count, COUNTERS)
                    self._free = torch.zeros(size, dtype=torch.int32, device=self._device)
                    # Zero before any stream, or graph, can count with them.
                    torch.cuda.current_stream(self._device).synchronize()
                if held is None or held.numel() < count:
                    held = self._take(count)
                    assert held is not None
                    self._of_stream[stream] = held
        return held

    def _take(self, count: int) -> torch.Tensor | None:
        if self._free.numel() < count:
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return taken


@functools.cache
def _counters_of(device: torch.device) -> _Counters:
    return _Counters(device)


def counters(device: torch.device, count: int) -> torch.Tensor | None:
    """So many int32 zeros that a call counts in, and leaves as zeros.

    They belong to the current stream, or in a graph's capture to the captured call. None in a capture
    where no call before it has allocated them, or earlier captures have used them up. Two calls on one
    stream that overlap all the same (which takes two streams of one handle) are not provided for.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32)
    return _counters_of(device).get(count)


def counter_bytes(count: int) -> int:
    """Bytes that the first call of a process allocates for counters, and keeps."""
    return 4 * max(2 * count, COUNTERS)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the device has; on the CPU what the interpreter takes for one."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """The device's compute capability; None on the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device the current one, on which Triton launches; free of charge when it is already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
