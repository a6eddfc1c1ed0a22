"""The latency of one implementation at one problem, judged before and after it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.correctness import Judge, Tolerance
from harness.device import Device, Series, finite
from harness.monitor import Monitor
from harness.plugin import Kernel
from harness.problem import Problem
from harness.record import ERROR, UNSUPPORTED, WRONG
from harness.statistics import Summary, count_outliers, percentile, summarize, trend
from harness.supervisor import ReportStep, Verdict
from harness.tensors import make_inputs

# The warm-up takes this share of the samples a series, and looks at this many series in a row.
WARM_UP_SHARE = 5
STEADY_SERIES = 3
# A trend counts as one where chance would give it once in a thousand processes, and where it matters.
TREND_Z = 3.3
# On an H200 whose clock stood still the metered clock spread by 3 to 4.5 %, meter noise included.
CLOCK_SPREAD_LIMIT = 0.05


@dataclass(frozen=True)
class TimingSettings:
    """How samples are taken: the config's `timing` section, units in the names."""

    samples: int
    samples_interpreted: int
    warm_up_min_s: float
    warm_up_max_s: float

    def count(self, interpreted: bool) -> int:
        return self.samples_interpreted if interpreted else self.samples


@dataclass(frozen=True)
class TimedProcess:
    """What one process measured; samples in milliseconds, host time of a call in microseconds.

    `sm_clock_mhz` has the clock right behind each cold sample, and is empty where there is none to read.
    """

    cold_ms: list[float]
    warm_ms: list[float]
    host_us: list[float]
    sm_clock_mhz: list[float]
    interpreted: bool
    is_attention: bool
    steady: bool
    drifting: bool
    warm_up_s: float
    timer: str
    cache_bytes: int
    judgement: dict[str, Any]
    monitor: dict[str, Any]


def time_attention(
    kernel: Kernel,
    problem: Problem,
    device: Device,
    tolerance: Tolerance,
    settings: TimingSettings,
    watch: Callable[[], Monitor],
    report_step: ReportStep,
) -> TimedProcess:
    """Time a kernel in this process.

    Raises Verdict with `unsupported`, `wrong` (its own output, before or after the samples) or `error`
    (the queue ran dry, a time that cannot be).
    """
    report_step("inputs")
    reason = kernel.unsupported(problem, device.target())
    if reason:
        raise Verdict(UNSUPPORTED, reason)
    inputs = make_inputs(problem, device.kind)

    def call() -> torch.Tensor:
        return kernel.answer(inputs, problem)

    report_step("references")
    judge = Judge(problem, inputs, tolerance, kernel)
    report_step("first call")
    output = call()
    device.synchronize()
    report_step("check before timing")
    judgement = judge.judge(output)
    if not judgement.right:
        raise Verdict(WRONG, f"before timing: {judgement.reason}", judgement.figures)
    del output

    interpreted = kernel.interpreted
    count = settings.count(interpreted)
    report_step("warm-up")
    warm_up_s, steady = _warm_up(
        call, device, count, settings, series_needed=1 if interpreted else STEADY_SERIES
    )
    report_step("samples")
    monitor = watch()
    with monitor:
        cold = device.series(call, count, cold=True)
        warm = device.series(call, count, cold=False)
    for name, series in (("cold", cold), ("warm", warm)):
        _require_trustworthy(name, series)

    report_step("check after timing")
    # Other values in the same buffers: a kernel that returns what it had computed before is found.
    judge.renew(problem.seed + 1)
    after = judge.judge(call())
    if not after.right:
        raise Verdict(WRONG, f"after timing: {after.reason}", after.figures)
    return TimedProcess(
        cold_ms=cold.latencies_ms,
        warm_ms=warm.latencies_ms,
        host_us=warm.host_us,
        sm_clock_mhz=cold.sm_clocks_mhz,
        interpreted=interpreted,
        is_attention=kernel.is_attention,
        steady=steady,
        drifting=_drifting(cold.latencies_ms, device.trend_tolerance),
        warm_up_s=warm_up_s,
        timer=device.timer,
        cache_bytes=device.cache_bytes,
        judgement={name: value for name, value in asdict(after).items() if name != "faults"},
        monitor=monitor.summary(),
    )


def _warm_up(
    call: Callable[[], Any], device: Device, count: int, settings: TimingSettings, series_needed: int
) -> tuple[float, bool]:
    """Run the whole measured loop, flush and timers included, until so many of its medians in a row agree.

    A fixed number of calls is not enough: clocks ramp for longer, and kernels of the loop itself that
    load late would stall the first samples.
    """
    size = max(1, count // WARM_UP_SHARE)
    began = time.monotonic()
    medians: list[float] = []
    while True:
        medians.append(summarize(device.series(call, size, cold=True).latencies_ms).median)
        device.series(call, size, cold=False)
        elapsed = time.monotonic() - began
        last = medians[-series_needed:]
        steady = len(last) == series_needed and max(last) <= min(last) * (1 + device.steady_tolerance)
        if (steady and elapsed >= settings.warm_up_min_s) or elapsed >= settings.warm_up_max_s:
            return elapsed, steady


def _require_trustworthy(name: str, series: Series) -> None:
    if series.starved:
        raise Verdict(
            ERROR,
            f"{name} series withheld: the GPU's queue ran dry (does a call wait for the device?),"
            " so its samples would hold host time",
        )
    if not finite(series.latencies_ms):
        raise Verdict(ERROR, f"{name} series withheld: a sample is not a positive finite time")


def _drifting(samples: list[float], tolerance: float) -> bool:
    found = trend(samples)
    return abs(found.z) > TREND_Z and abs(found.change) > tolerance


def over_processes(samples: list[list[float]]) -> Summary:
    """What the processes' medians say, each process being one experiment; of one process, its samples.

    Samples of a process share its clock, its memory's place and its luck, so that the interval of many
    samples from one process is too narrow for the next process.
    """
    if len(samples) == 1:
        return summarize(samples[0])
    return summarize([summarize(process).median for process in samples])


def cycles(process: TimedProcess) -> list[float]:
    """Each cold sample in cycles of the SM clock metered right behind it: ms times MHz times 1000."""
    return [ms * mhz * 1e3 for ms, mhz in zip(process.cold_ms, process.sm_clock_mhz, strict=True)]


def timing_values(processes: list[TimedProcess], problem: Problem) -> dict[str, Any]:
    """The scalars of a timing record; the headline is the median of the processes' cold medians."""
    cold = over_processes([process.cold_ms for process in processes])
    warm = over_processes([process.warm_ms for process in processes])
    samples = summarize([sample for process in processes for sample in process.cold_ms])
    host = [sample for process in processes for sample in process.host_us]
    outliers = [count_outliers(process.cold_ms) for process in processes]
    first = processes[0]
    values: dict[str, Any] = {
        "latency_ms": cold.median,
        "latency_p20_ms": samples.p20,
        "latency_p80_ms": samples.p80,
        "latency_low_ms": cold.low,
        "latency_high_ms": cold.high,
        "interval_coverage": cold.coverage,
        "warm_latency_ms": warm.median,
        "warm_latency_low_ms": warm.low,
        "warm_latency_high_ms": warm.high,
        "host_time_us": summarize(host).median if host else None,
        "teraflops_per_second": problem.flop_count / cold.median / 1e9,
        "flop_count": problem.flop_count,
        "key_value_bytes_per_second": problem.key_value_bytes / cold.median * 1e3,
        "sample_count": samples.count,
        "process_count": len(processes),
        "outlier_count_mild": sum(found.mild for found in outliers),
        "outlier_count_severe": sum(found.severe for found in outliers),
        "timer": first.timer,
        "warm_up_s": max(process.warm_up_s for process in processes),
        "working_set_bytes": problem.minimal_bytes,
        "cache_bytes": first.cache_bytes,
        "working_set_over_cache": problem.minimal_bytes / first.cache_bytes,
    }
    if first.sm_clock_mhz:
        cycle = over_processes([cycles(process) for process in processes])
        clocks = sorted(mhz for process in processes for mhz in process.sm_clock_mhz)
        clock = percentile(clocks, 0.5)
        values |= {
            "latency_cycles": cycle.median,
            "latency_cycles_low": cycle.low,
            "latency_cycles_high": cycle.high,
            "metered_sm_clock_mhz": clock,
            "sm_clock_spread": (percentile(clocks, 0.95) - percentile(clocks, 0.05)) / clock,
        }
    values.update({f"check_{name}": value for name, value in first.judgement.items()})
    values.update(_merge_monitors([process.monitor for process in processes]))
    return values


def _merge_monitors(monitors: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in monitors[0]:
        found = [monitor[name] for monitor in monitors if monitor[name] is not None]
        if not found:
            merged[name] = None
        elif name in ("throttle_reasons", "other_processes"):
            merged[name] = ", ".join(
                sorted({text for reasons in found for text in reasons.split(", ") if text})
            )
        elif name.endswith("_min"):
            merged[name] = min(found)
        elif name.endswith("_max"):
            merged[name] = max(found)
        else:
            merged[name] = sum(found)
    return merged


def timing_marks(processes: list[TimedProcess], values: dict[str, Any]) -> list[str]:
    """What a reader must know about the number."""
    marks = []
    if any(process.interpreted for process in processes):
        marks.append("interpreted")
    if any(not process.is_attention for process in processes):
        marks.append("not_attention")
    if any(not process.steady or process.drifting for process in processes):
        marks.append("not_steady")
    if len(processes) == 1:
        marks.append("one_process")
    if values.get("throttle_reasons"):
        marks.append("throttled")
    if values.get("sm_clock_spread", 0.0) > CLOCK_SPREAD_LIMIT:
        marks.append("clock_moved")
    if values.get("other_processes"):
        marks.append("gpu_shared")
    host_us = values["host_time_us"]
    if host_us is not None and host_us > values["warm_latency_ms"] * 1e3:
        marks.append("launch_bound")
    return marks
