"""What kernels share that split the keys of a cache over several programs: the way to a tile, and launches.

A sequence's tiles of keys are dealt out to its splits in turn. The last program of a group to end merges what
the splits found; it knows itself by a counter.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.inputs import is_plain

VECTOR_ELEMENTS = 8  # of fp16 or bf16 in the 16 bytes that one load instruction of a thread can fetch
# Without a GPU: few, so that the interpreter visits several splits and not hundreds.
INTERPRETED_MULTIPROCESSORS = 8
COUNTERS = 2**16  # of a device in one allocation, 4 bytes each


MAX_GRID = 65535  # programs along the second and third axis of a grid
TILE_OPTIONS = ("tile_k", "num_warps", "num_stages")
SPLIT_OPTIONS = ("splits", "split_keys")


@triton.jit  # type: ignore[untyped-decorator]
def sequence_split(
    seq_lens_pointer: tl.tensor,
    batch: tl.tensor,
    context: tl.tensor,
    max_splits: tl.tensor,
    SPLIT_KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The length of a sequence, and over how many programs its keys are split: its length alone decides."""
    seq_len = context
    if seq_lens_pointer is not None:
        seq_len = tl.minimum(tl.maximum(tl.load(seq_lens_pointer + batch), 0), context)
    splits = tl.minimum(tl.maximum(tl.cdiv(seq_len, SPLIT_KEYS), 1), max_splits)
    return seq_len, splits


@triton.jit  # type: ignore[untyped-decorator]
def page_entries(
    table: tl.tensor,
    start: tl.tensor,
    columns: tl.tensor,
    seq_len: tl.tensor,
    TILE_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
) -> tl.tensor:
    """The page of the tile that begins at start, or where it has several the page of each key."""
    places = start + columns if TILE_K > PAGE_SIZE else start
    return tl.load(table + places // PAGE_SIZE, mask=places < seq_len, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of_cache(
    head: tl.tensor,
    page: tl.tensor,
    start: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    page_stride: tl.tensor,
    TILE_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A pointer to a tile of K or V, and how far from it each key's row lies.

    64 bits to the tile: it can lie more than 2^31 elements behind its head, or its page behind the first.
    """
    if PAGE_SIZE == 0:
        tile = head + tl.cast(start, tl.int64) * row_stride
        rows = columns * row_stride
    elif TILE_K > PAGE_SIZE:
        tile = head
        rows = tl.cast(page, tl.int64) * page_stride + (start + columns) % PAGE_SIZE * row_stride
    else:
        tile = head + (tl.cast(page, tl.int64) * page_stride + start % PAGE_SIZE * row_stride)
        rows = columns * row_stride
    return tile, rows


# ---- on the host ----

INTERPRETED = not isinstance(sequence_split, triton.JITFunction)


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


def compile_unit(
    function: Any, pointers: Mapping[str, str], constants: Mapping[str, Any], options: dict[str, Any]
) -> CompileUnit:
    """A unit of a jitted function: pointers by name with their type, constants by name with their value.

    What is neither is the `scale`, fp32, or else an int32. Names that the function lacks are left out.
    """
    signature = {}
    for name in function.arg_names:
        if name in pointers:
            signature[name] = pointers[name]
        elif name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    # PyTorch's allocations are aligned to 16 bytes and more, and the launcher tells the compiler so.
    aligned: dict[tuple[int, ...], list[list[Any]]] = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if name in pointers
    }
    constexprs = {name: constants[name] for name in function.arg_names if name in constants}
    return CompileUnit(function, signature, constexprs, aligned, options)


def pointer_types(problem: Any, max_splits: int, counts: bool) -> tuple[dict[str, str], dict[str, None]]:
    """The types of a decode kernel's pointers by name, and the names of those that a call leaves out."""
    element = {"fp16": "*fp16", "bf16": "*bf16"}[problem.dtype]
    pointers = dict.fromkeys(("q_pointer", "k_pointer", "v_pointer", "o_pointer"), element)
    absent: dict[str, None] = {}
    for name, type_name, present in (
        ("partial_pointer", "*fp32", max_splits > 1),
        ("counter_pointer", "*i32", counts),
        ("seq_lens_pointer", "*i32", getattr(problem, "states_lengths", problem.lengths != "equal")),
        ("block_table_pointer", "*i32", bool(problem.page_size)),
    ):
        if present:
            pointers[name] = type_name
        else:
            absent[name] = None
    return pointers, absent


def check_options(options: Mapping[str, Any], others: Mapping[str, tuple[str, ...]]) -> None:
    """Check a launch's options: tile_k, num_warps, num_stages; splits or split_keys or neither; and others.

    others says by name which values an option has that only this kernel knows; None is one of them. Raises
    ValueError.
    """
    for name in TILE_OPTIONS:
        value = options.get(name)
        if not isinstance(value, int):
            raise ValueError(f"{name} is {value!r}: expected a number; give all of {', '.join(TILE_OPTIONS)}")
    if unknown := set(options) - {*TILE_OPTIONS, *SPLIT_OPTIONS, *others}:
        raise ValueError(f"{sorted(unknown)[0]} is not a launch option of this kernel")
    tile_k, splits, split_keys = options["tile_k"], options.get("splits"), options.get("split_keys")
    if tile_k < 16 or tile_k & (tile_k - 1):
        raise ValueError(f"tile_k is {tile_k}: expected a power of two, 16 or more")
    if splits is not None and (not isinstance(splits, int) or splits < 1):
        raise ValueError(f"splits is {splits!r}: expected a number, 1 or more")
    if split_keys is not None:
        if splits is not None:
            raise ValueError("splits and split_keys are given: expected one of them")
        if not isinstance(split_keys, int) or split_keys < 1 or split_keys % tile_k:
            raise ValueError(f"split_keys is {split_keys!r}: expected a multiple of tile_k, {tile_k}")
    for name, values in others.items():
        if options.get(name) not in (None, *values):
            raise ValueError(f"{name} is {options[name]!r}: expected one of {', '.join(values)}")


def most_splits(options: Mapping[str, Any], groups: int, context: int, multiprocessors: int) -> int:
    """The splits of a sequence that fills the cache; groups is the number of programs without a split.

    Where the options do not say: so many that each multiprocessor has a program, if there are tiles.
    """
    if options.get("split_keys") is not None:
        return int(triton.cdiv(context, options["split_keys"]))
    splits = options.get("splits") or max(1, multiprocessors // max(1, groups))
    return int(min(splits, triton.cdiv(context, options["tile_k"])))


def split_constants(
    options: Mapping[str, Any], page_size: int, max_splits: int, counts: bool, strides: list[int]
) -> dict[str, Any]:
    """The constants of a kernel that say how it walks over the cache."""
    return {
        "TILE_K": options["tile_k"],
        "SPLIT_KEYS": options.get("split_keys") or options["tile_k"],
        "PAGE_SIZE": page_size,
        "SPLIT": max_splits > 1,
        "LAST_PROGRAM": counts,
        "STRIDE_UNIT": 1 if any(stride % VECTOR_ELEMENTS for stride in strides) else VECTOR_ELEMENTS,
        # 64-bit offsets inside a tile cost registers: only for rows that lie very far apart.
        "OFFSET": tl.int32 if options["tile_k"] * max(map(abs, strides)) < 2**31 else tl.int64,
        "INTERPRETED": INTERPRETED,
    }


def room(problem: Any) -> int:
    """How many keys the cache of a sequence has room for: whole pages."""
    page = problem.page_size or 1
    return int(triton.cdiv(problem.seq_len_k, page) * page)


def multiprocessors_of(target: Any) -> int:
    """How many multiprocessors a target has; an H200's where it does not say."""
    if not target.is_cuda:
        return INTERPRETED_MULTIPROCESSORS
    return int(getattr(target, "multiprocessors", None) or 132)


def cannot_run(target: Any) -> str | None:
    """Why Triton cannot run on the target; None if it can."""
    if not target.is_cuda:
        return None if INTERPRETED else "Triton runs on a CPU only with TRITON_INTERPRET=1"
    if target.compute_capability < (7, 5):
        major, minor = target.compute_capability
        return f"compute capability {major}.{minor} is below 7.5, the oldest that Triton compiles for"
    return None


class Launch:
    """A launch of a jitted function whose calls differ in nothing but what their tensors hold and where.

    Triton's own launcher binds and inspects every argument in every call, which takes longer than a short
    sequence. Which compiled kernel it finds depends on the alignment of the tensors alone, when all else
    is fixed; so later calls go to that kernel directly. The function's parameters are tensors (or None), then
    integers and floats that are not specialized, then constants, in the order given here.
    """

    def __init__(
        self,
        function: Any,
        grid: tuple[int, int, int],
        scalars: tuple[int | float, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self.function = function
        self.grid = grid
        self.scalars = scalars
        self.constants = dict(constants)
        self.options = dict(options)
        self._rest = (*scalars, *constants.values())
        self._kernels: dict[tuple[bool, ...], Callable[..., object]] = {}

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch on the current stream of the current device, which is the same in all calls."""
        aligned = tuple([tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors])
        kernel = self._kernels.get(aligned)
        if kernel is not None:
            kernel(*tensors, *self._rest)
            return
        compiled = self.function[self.grid](*tensors, *self.scalars, **self.constants, **self.options)
        if not INTERPRETED:
            self._kernels[aligned] = compiled[self.grid]


def call_key(
    tensors: tuple[torch.Tensor | None, ...], scale: float | None, options: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """All that decides how a call is checked and launched; None where an argument is not even a tensor."""
    try:
        described = [
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors
        ]
        plain = is_plain(*(t for t in tensors if t is not None))
        key = (*described, plain, torch.is_grad_enabled(), type(scale), scale, options)
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key


MAX_PLANS = 1024  # of one kernel, remembered by their keys


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
                if self._free.numel() < max(count + 32, COUNTERS // 2):
                    size = counter_bytes(count) // 4
                    self._free = torch.zeros(size, dtype=torch.int32, device=self._device)
                    # Zero before any stream, or graph, can count with them.
                    torch.cuda.current_stream(self._device).synchronize()
                if held is None or held.numel() < count:
                    held = self._take(count)
                    assert held is not None
                    self._of_stream[stream] = held
        return held

    def _take(self, count: int) -> torch.Tensor | None:
        # Whole cache lines: aligned, as a kernel is told that its pointers are.
        count = -(-count // 32) * 32
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
    return 4 * max(2 * (-(-count // 32) * 32), COUNTERS)


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
