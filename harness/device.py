"""The device measured on: a CUDA GPU or the CPU, behind one small interface. Both are real."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from harness.environment import cpu_name
from harness.target import Target

Call = Callable[[], Any]


@dataclass(frozen=True)
class Series:
    """Samples taken one after the other: device time and host time of each call.

    `starved` says that the device may have waited for the host while the series ran, so that the
    samples may hold launch time.
    """

    latencies_ms: list[float]
    host_us: list[float]
    starved: bool


@dataclass(frozen=True)
class Peak:
    """Memory at the peak of one call, in bytes; `workspace_bytes` is what the warm-up left allocated."""

    peak_bytes: int
    workspace_bytes: int
    reserved_bytes: int | None
    method: str


class Device(Protocol):
    """What a measurement asks of a device."""

    kind: str
    timer: str
    # Successive warm-up series whose medians agree this well count as steady.
    steady_tolerance: float
    cache_bytes: int

    def target(self) -> Target: ...

    def synchronize(self) -> None: ...

    def series(self, call: Call, count: int, *, cold: bool) -> Series:
        """Time `count` calls; with a `cold` cache, or one that the call before has warmed."""

    def peak_memory(self, make_call: Callable[[], Call]) -> Peak:
        """The memory one call of `make_call()` peaks at, inputs included, after a warm-up of its own."""


# The spin kernel must outlast the enqueueing of a batch by this factor, and by these milliseconds.
SPIN_MARGIN = 2.0
SPIN_EXTRA_MS = 1.0
SPIN_FIRST_MS = 50.0
SPIN_TRIES = 6


class CudaDevice:
    """A GPU, timed by CUDA events around the call only, enqueued behind a spin kernel.

    The spin holds the GPU back until every sample of a batch is in its queue: a short kernel is then
    not timed waiting for the host. It is verified to have run until the last one was enqueued.
    """

    kind = "cuda"
    timer = "cuda_event"
    steady_tolerance = 0.03

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device")
        properties = torch.cuda.get_device_properties(0)
        self.cache_bytes = properties.L2_cache_size
        self._properties = properties
        self._flush_source: torch.Tensor | None = None
        self._flush_result: torch.Tensor | None = None
        self._cycles_per_ms = 0.0
        self._spin_ms = SPIN_FIRST_MS
        self._batch = 1 << 30

    def target(self) -> Target:
        shared = getattr(self._properties, "shared_memory_per_block_optin", None)
        return Target(
            device="cuda",
            name=self._properties.name,
            compute_capability=(self._properties.major, self._properties.minor),
            multiprocessors=self._properties.multi_processor_count,
            shared_memory_bytes=shared,
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def series(self, call: Call, count: int, *, cold: bool) -> Series:
        self._prepare()
        for _ in range(SPIN_TRIES):
            collecting = gc.isenabled()
            gc.disable()  # a collection would stop the enqueueing for longer than the spin lasts
            try:
                series = self._series(call, count, cold)
            finally:
                if collecting:
                    gc.enable()
            if not series.starved:
                return series
            self._spin_ms *= 2
            self._batch = max(1, min(self._batch, count) // 2)
        return series

    def _series(self, call: Call, count: int, cold: bool) -> Series:
        latencies: list[float] = []
        host: list[float] = []
        starved = False
        slowest_ms = 0.0
        while len(latencies) < count:
            size = min(self._batch, count - len(latencies))
            starts = [torch.cuda.Event(enable_timing=True) for _ in range(size)]
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(size)]
            spin_end = torch.cuda.Event()
            began = time.perf_counter_ns()
            torch.cuda._sleep(int(self._spin_ms * self._cycles_per_ms))
            spin_end.record()
            for start, end in zip(starts, ends, strict=True):
                if cold:
                    self._flush()
                start.record()
                before = time.perf_counter_ns()
                call()
                host.append((time.perf_counter_ns() - before) / 1e3)
                end.record()
            starved = starved or spin_end.query()
            slowest_ms = max(slowest_ms, (time.perf_counter_ns() - began) / 1e6)
            torch.cuda.synchronize()
            latencies += [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
        if not starved:
            self._spin_ms = SPIN_MARGIN * slowest_ms + SPIN_EXTRA_MS
        return Series(latencies, host, starved)

    def _prepare(self) -> None:
        """Buffers and calibration, made once, before the first warm-up series."""
        if self._flush_source is not None:
            return
        elements = 2 * self.cache_bytes // 4
        # Written once here. Each flush only reads: a flush that writes leaves dirty lines behind,
        # whose eviction then costs bandwidth inside the timed call.
        self._flush_source = torch.rand(elements, device="cuda")
        self._flush_result = torch.empty((), device="cuda")
        self._flush()
        cycles = 20_000_000
        for _ in range(2):  # the first spin loads its kernel
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            torch.cuda.synchronize()
            self._cycles_per_ms = cycles / start.elapsed_time(end)

    def _flush(self) -> None:
        """Evict the L2 cache by reading twice its size: cold for the next call, and clean."""
        assert self._flush_source is not None  # _prepare() made it
        torch.sum(self._flush_source, dim=0, out=self._flush_result)

    def peak_memory(self, make_call: Callable[[], Call]) -> Peak:
        call = make_call()
        inputs_only = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        gc.collect()
        workspace = torch.cuda.memory_allocated() - inputs_only
        # The warm-up is over and its result freed: from here on the counter sees one call.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
        del result
        return Peak(peak, workspace, reserved, "torch.cuda.max_memory_allocated")


# A cloud machine can report a last-level cache of hundreds of MiB that it shares with its neighbours.
CPU_FLUSH_LIMIT_BYTES = 256 << 20
M_MMAP_THRESHOLD = -3
PROC = Path("/proc/self")


class CpuDevice:
    """The host's processor, timed by the wall clock; its memory is the resident set."""

    kind = "cpu"
    timer = "perf_counter"
    steady_tolerance = 0.1

    def __init__(self) -> None:
        self.cache_bytes = _last_level_cache_bytes()
        self._flush_source: torch.Tensor | None = None

    def target(self) -> Target:
        return Target(device="cpu", name=cpu_name())

    def synchronize(self) -> None:
        pass

    def series(self, call: Call, count: int, *, cold: bool) -> Series:
        latencies = []
        for _ in range(count):
            if cold:
                self._flush()
            before = time.perf_counter_ns()
            call()
            latencies.append((time.perf_counter_ns() - before) / 1e6)
        return Series(latencies, [], starved=False)

    def _flush(self) -> None:
        if self._flush_source is None:
            flush_bytes = min(2 * self.cache_bytes, CPU_FLUSH_LIMIT_BYTES)
            self._flush_source = torch.rand(flush_bytes // 4)
        self._flush_source.sum()

    def peak_memory(self, make_call: Callable[[], Call]) -> Peak:
        libc = ctypes.CDLL(None)
        # Give every block above 64 KiB its own mapping, so that freeing it gives the memory back.
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
        make_call()()
        gc.collect()
        libc.malloc_trim(0)
        baseline = _status_bytes("VmRSS")
        call = make_call()
        # The kernel forgets the former peak: from here on it sees one call.
        (PROC / "clear_refs").write_text("5")
        result = call()
        peak = _status_bytes("VmHWM") - baseline
        del result
        return Peak(max(peak, 0), 0, None, "peak resident set (VmHWM)")


def _status_bytes(key: str) -> int:
    for line in (PROC / "status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _last_level_cache_bytes() -> int:
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]] if text[-1] in "KM" else int(text))
    return max(sizes, default=32 << 20)


def open_device(kind: str) -> Device:
    """The device of that kind, initialised; raises ValueError for another word than cuda or cpu."""
    if kind == "cuda":
        return CudaDevice()
    if kind == "cpu":
        return CpuDevice()
    raise ValueError(f"device = {kind}: must be cuda or cpu")


def pin_to_gpu(uuid: str) -> None:
    """Let this process see that GPU only; must come before CUDA is initialised."""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid


def finite(values: list[float]) -> bool:
    """Whether every value is a positive finite number: a time that can have passed."""
    return all(math.isfinite(value) and value > 0 for value in values)
