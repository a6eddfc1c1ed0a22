"""The device measured on: a CUDA GPU or the CPU, behind one small interface. Both are real."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

import torch

from harness.environment import cpu_name, find_gpus
from harness.supervisor import describe_exception
from harness.target import Target

Call = Callable[[], Any]
Flush = Literal["read", "write"]


@dataclass(frozen=True)
class Series:
    """Samples taken one after the other: device time and host time of each call.

    `starved` says that the device may have waited for the host while the series ran, so that the
    samples may hold launch time. `sm_clocks_mhz` has the GPU's clock right after each sample of a cold
    series, and is empty where there is none to read.
    """

    latencies_ms: list[float]
    host_us: list[float]
    starved: bool
    sm_clocks_mhz: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class KernelSpans:
    """What a profiler saw of some calls: of each the time from its first kernel's start to its last
    kernel's end, and the names of the kernels of a call in their order."""

    spans_ms: list[float]
    kernel_names: list[str]


class NotAvailable(Exception):
    """A measurement that this device, or this kernel on it, does not offer; says why."""


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
    trend_tolerance: float
    cache_bytes: int

    def target(self) -> Target: ...

    def synchronize(self) -> None: ...

    def series(self, call: Call, count: int, *, cold: bool, flush: Flush = "read") -> Series:
        """Time `count` calls; with a `cold` cache, or one that the call before has warmed.

        The `flush` that makes it cold reads, and leaves clean lines behind; one that writes is there for
        the control that shows what it would do to the samples.
        """

    def replayed_ms(self, call: Call) -> float:
        """Milliseconds a call takes when a CUDA graph replays it, without the host; or NotAvailable."""

    def kernel_spans(self, call: Call, count: int) -> KernelSpans:
        """What a second timer, independent of events, says of `count` warm calls; or NotAvailable."""

    def peak_memory(self, make_call: Callable[[], Call]) -> Peak:
        """The memory one call of `make_call()` peaks at, inputs included, after a warm-up of its own."""


# The spin kernel must outlast the enqueueing of a batch by this factor, and by these milliseconds.
SPIN_MARGIN = 2.0
SPIN_EXTRA_MS = 1.0
SPIN_FIRST_MS = 50.0
SPIN_TRIES = 6
# Behind each cold sample a spin of known length in SM cycles, timed by events, tells the clock.
METER_CYCLES = 100_000
METER_CALIBRATIONS = 20
# Calls captured in a graph: many where a call is short, so that the replay's own launch does not count.
GRAPH_MS = 2.0
GRAPH_CALLS_MAX = 20
GRAPH_REPLAYS = 15


class CudaDevice:
    """A GPU, timed by CUDA events around the call only, enqueued behind a spin kernel.

    The spin holds the GPU back until every sample of a batch is in its queue: a short kernel is then
    not timed waiting for the host. It is verified to have run until the last one was enqueued.
    """

    kind = "cuda"
    timer = "cuda_event"
    steady_tolerance = 0.03
    trend_tolerance = 0.02

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device")
        properties = torch.cuda.get_device_properties(0)
        self.cache_bytes = properties.L2_cache_size
        self._properties = properties
        self._flush_source: torch.Tensor | None = None
        self._flush_result: torch.Tensor | None = None
        self._cycles_per_ms = 0.0
        self._meter_overhead_ms = 0.0
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

    def series(self, call: Call, count: int, *, cold: bool, flush: Flush = "read") -> Series:
        self._prepare()
        for _ in range(SPIN_TRIES):
            collecting = gc.isenabled()
            gc.disable()  # a collection would stop the enqueueing for longer than the spin lasts
            try:
                series = self._series(call, count, self._flush if flush == "read" else self._dirty, cold)
            finally:
                if collecting:
                    gc.enable()
            if not series.starved:
                return series
            self._spin_ms *= 2
            self._batch = max(1, min(self._batch, count) // 2)
        return series

    def _series(self, call: Call, count: int, flush: Callable[[], None], cold: bool) -> Series:
        latencies: list[float] = []
        host: list[float] = []
        clocks: list[float] = []
        starved = False
        slowest_ms = 0.0
        while len(latencies) < count:
            size = min(self._batch, count - len(latencies))
            starts = [torch.cuda.Event(enable_timing=True) for _ in range(size)]
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(size)]
            meters = [torch.cuda.Event(enable_timing=True) for _ in range(size if cold else 0)]
            spin_end = torch.cuda.Event()
            began = time.perf_counter_ns()
            torch.cuda._sleep(int(self._spin_ms * self._cycles_per_ms))
            spin_end.record()
            for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
                if cold:
                    flush()
                start.record()
                before = time.perf_counter_ns()
                call()
                host.append((time.perf_counter_ns() - before) / 1e3)
                end.record()
                if cold:
                    torch.cuda._sleep(METER_CYCLES)
                    meters[index].record()
            starved = starved or spin_end.query()
            slowest_ms = max(slowest_ms, (time.perf_counter_ns() - began) / 1e6)
            torch.cuda.synchronize()
            latencies += [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
            clocks += [self._sm_clock_mhz(end, meter) for end, meter in zip(ends, meters, strict=False)]
        if not starved:
            self._spin_ms = SPIN_MARGIN * slowest_ms + SPIN_EXTRA_MS
        return Series(latencies, host, starved, clocks)

    def _sm_clock_mhz(self, end: torch.cuda.Event, meter: torch.cuda.Event) -> float:
        return float(METER_CYCLES / (end.elapsed_time(meter) - self._meter_overhead_ms) / 1e3)

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
        # What a spin costs besides its cycles: the time of one less half of what twice more cycles add.
        overheads = []
        for _ in range(METER_CALIBRATIONS):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda._sleep(cycles // 10)  # the rest is in the queue before it ends
            events[0].record()
            torch.cuda._sleep(METER_CYCLES)
            events[1].record()
            torch.cuda._sleep(3 * METER_CYCLES)
            events[2].record()
            torch.cuda.synchronize()
            once, thrice = events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])
            overheads.append(once - (thrice - once) / 2)
        self._meter_overhead_ms = sorted(overheads)[METER_CALIBRATIONS // 2]

    def _dirty(self) -> None:
        """Evict the L2 cache the wrong way, for the control: what was written is still to be evicted."""
        assert self._flush_source is not None  # _prepare() made it
        self._flush_source.add_(0.0)

    def _flush(self) -> None:
        """Evict the L2 cache by reading twice its size: cold for the next call, and clean."""
        assert self._flush_source is not None  # _prepare() made it
        torch.sum(self._flush_source, dim=0, out=self._flush_result)

    def replayed_ms(self, call: Call) -> float:
        self._prepare()
        warm_ms = min(self.series(call, 5, cold=False).latencies_ms)
        calls = max(1, min(GRAPH_CALLS_MAX, int(GRAPH_MS / warm_ms)))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    call()
        except Exception as fault:
            raise NotAvailable(f"a CUDA graph cannot capture it: {describe_exception(fault)}") from fault
        graph.replay()
        torch.cuda.synchronize()
        replays = self.series(graph.replay, GRAPH_REPLAYS, cold=False)
        return float(median(replays.latencies_ms)) / calls

    def kernel_spans(self, call: Call, count: int) -> KernelSpans:
        from torch.profiler import ProfilerActivity, profile

        self._prepare()
        call()
        torch.cuda.synchronize()
        try:
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
                torch.cuda._sleep(int(self._spin_ms * self._cycles_per_ms))
                for _ in range(count):
                    call()
                torch.cuda.synchronize()
            events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
        except RuntimeError as fault:
            raise NotAvailable(f"torch.profiler: {describe_exception(fault)}") from fault
        events.sort(key=lambda event: event.time_range.start)
        kernels = [event for event in events if "spin_kernel" not in event.name]
        if not kernels or len(kernels) % count:
            raise NotAvailable(f"torch.profiler saw {len(kernels)} kernels in {count} calls")
        each = len(kernels) // count
        calls = [kernels[index : index + each] for index in range(0, len(kernels), each)]
        spans = [(group[-1].time_range.end - group[0].time_range.start) / 1e3 for group in calls]
        return KernelSpans(spans, [event.name for event in calls[0]])

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
    trend_tolerance = 0.1

    def __init__(self) -> None:
        self.cache_bytes = _last_level_cache_bytes()
        self._flush_source: torch.Tensor | None = None

    def target(self) -> Target:
        return Target(device="cpu", name=cpu_name())

    def synchronize(self) -> None:
        pass

    def series(self, call: Call, count: int, *, cold: bool, flush: Flush = "read") -> Series:
        latencies = []
        for _ in range(count):
            if cold:
                self._flush()
                if flush == "write":
                    self._flush_source.add_(0.0)  # type: ignore[union-attr]  # _flush() made it
            before = time.perf_counter_ns()
            call()
            latencies.append((time.perf_counter_ns() - before) / 1e6)
        return Series(latencies, [], starved=False)

    def replayed_ms(self, call: Call) -> float:
        raise NotAvailable("a CPU has no CUDA graphs")

    def kernel_spans(self, call: Call, count: int) -> KernelSpans:
        raise NotAvailable("there is no second timer for the CPU")

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
    find_gpus.cache_clear()


def finite(values: list[float]) -> bool:
    """Whether every value is a positive finite number: a time that can have passed."""
    return all(math.isfinite(value) and value > 0 for value in values)
