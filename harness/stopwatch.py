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
from harness.statistics import summarize
from harness.supervisor import ReportStep, Verdict
from harness.tensors import make_inputs

# The warm-up takes this share of the samples a series, and looks at this many series in a row.
WARM_UP_SHARE = 5
STEADY_SERIES = 3


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
    """What one process measured; samples in milliseconds, host time of a call in microseconds."""

    cold_ms: list[float]
    warm_ms: list[float]
    host_us: list[float]
    interpreted: bool
    steady: bool
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
        return kernel.attention(*inputs, causal=problem.causal)

    report_step("references")
    judge = Judge(problem, inputs, tolerance)
    report_step("first call")
    output = call()
    device.synchronize()
    report_step("check before timing")
    judgement = judge.judge(output)
    if not judgement.right:
        raise Verdict(WRONG, f"before timing: {judgement.reason}")
    del output

    interpreted = kernel.interpreted
    count = settings.count(interpreted)
    report_step("warm-up")
    warm_up_s, steady = _warm_up(call, device, count, settings)
    report_step("samples")
    monitor = watch()
    with monitor:
        cold = device.series(call, count, cold=True)
        warm = device.series(call, count, cold=False)
    for name, series in (("cold", cold), ("warm", warm)):
        _require_trustworthy(name, series)

    report_step("check after timing")
    after = judge.judge(call())
    if not after.right:
        raise Verdict(WRONG, f"after timing: {after.reason}")
    return TimedProcess(
        cold_ms=cold.latencies_ms,
        warm_ms=warm.latencies_ms,
        host_us=warm.host_us,
        interpreted=interpreted,
        steady=steady,
        warm_up_s=warm_up_s,
        timer=device.timer,
        cache_bytes=device.cache_bytes,
        judgement={name: value for name, value in asdict(after).items() if name != "faults"},
        monitor=monitor.summary(),
    )


def _warm_up(
    call: Callable[[], Any], device: Device, count: int, settings: TimingSettings
) -> tuple[float, bool]:
    """Run the whole measured loop, flush and timers included, until its medians agree.

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
        last = medians[-STEADY_SERIES:]
        steady = len(last) == STEADY_SERIES and max(last) <= min(last) * (1 + device.steady_tolerance)
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


def timing_values(processes: list[TimedProcess], problem: Problem) -> dict[str, Any]:
    """The scalars of a timing record; the headline is the cold cache's median over all samples."""
    cold = summarize([sample for process in processes for sample in process.cold_ms])
    warm = summarize([sample for process in processes for sample in process.warm_ms])
    host = [sample for process in processes for sample in process.host_us]
    first = processes[0]
    values: dict[str, Any] = {
        "latency_ms": cold.median,
        "latency_p20_ms": cold.p20,
        "latency_p80_ms": cold.p80,
        "latency_low_ms": cold.low,
        "latency_high_ms": cold.high,
        "interval_coverage": cold.coverage,
        "warm_latency_ms": warm.median,
        "warm_latency_low_ms": warm.low,
        "warm_latency_high_ms": warm.high,
        "host_time_us": summarize(host).median if host else None,
        "teraflops_per_second": problem.flop_count / cold.median / 1e9,
        "flop_count": problem.flop_count,
        "sample_count": cold.count,
        "process_count": len(processes),
        "timer": first.timer,
        "warm_up_s": max(process.warm_up_s for process in processes),
        "working_set_bytes": problem.minimal_bytes,
        "cache_bytes": first.cache_bytes,
    }
    values.update({f"check_{name}": value for name, value in first.judgement.items()})
    values.update(_merge_monitors([process.monitor for process in processes]))
    return values


def _merge_monitors(monitors: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in monitors[0]:
        found = [monitor[name] for monitor in monitors if monitor[name] is not None]
        if name == "throttle_reasons":
            merged[name] = ", ".join(
                sorted({text for reasons in found for text in reasons.split(", ") if text})
            )
        elif not found:
            merged[name] = None
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
    if not all(process.steady for process in processes):
        marks.append("not_steady")
    if values.get("throttle_reasons"):
        marks.append("throttled")
    host_us = values["host_time_us"]
    if host_us is not None and host_us > values["warm_latency_ms"] * 1e3:
        marks.append("launch_bound")
    return marks
