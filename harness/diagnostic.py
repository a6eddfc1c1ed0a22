"""Why would one call of one implementation read differently from run to run? A process of the diagnostic.

A stopwatch that warms up until it is steady hides what this looks for. So here every process is fresh, does
one thing or nothing before, keeps the time of the first call apart, and takes samples twice: right after
the first call, and again when it has been warm for a while. The SM clock is metered beside each sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.correctness import Judge, Tolerance
from harness.device import Call, Device, NotAvailable, Series, finite
from harness.monitor import Monitor
from harness.plugin import Kernel
from harness.problem import Problem
from harness.record import ERROR, UNSUPPORTED, WRONG
from harness.statistics import percentile
from harness.stopwatch import CLOCK_SPREAD_LIMIT
from harness.supervisor import ReportStep, Verdict
from harness.tensors import Inputs, make_inputs

# What a process does before the first call. The second name of the first one is its A/A twin.
ISOLATED = "isolated"
ISOLATED_AGAIN = "isolated_again"
AFTER_NAIVE = "after_naive"
AFTER_MATMUL = "after_matmul"
PRIMINGS = (ISOLATED, ISOLATED_AGAIN, AFTER_NAIVE, AFTER_MATMUL)
MATMUL_SIZE = {"cuda": 4096, "cpu": 128}
PROFILED_CALLS = 5
SEPARATOR = " | "


@dataclass(frozen=True)
class DiagnosticSettings:
    """Samples of each of the two series, seconds of priming before the first call and of warm-up after it."""

    samples: int
    priming_s: float
    warm_up_s: float


@dataclass(frozen=True)
class Diagnosis:
    """What one process measured; `early` right after the first call, `late` after the warm-up.

    Times in milliseconds, the first call's by the host's clock until the device was done, clocks in MHz
    beside each sample and empty where there are none. `kernel_names` are those of one call, or None where
    no profiler tells them, with `kernel_names_reason`.
    """

    first_call_ms: float
    early_ms: list[float]
    early_sm_clock_mhz: list[float]
    late_ms: list[float]
    late_sm_clock_mhz: list[float]
    kernel_names: str | None
    kernel_names_reason: str | None
    timer: str
    monitor: dict[str, Any]


def diagnose(
    kernel: Kernel,
    primer: Kernel | None,
    priming: str,
    problem: Problem,
    device: Device,
    tolerance: Tolerance,
    settings: DiagnosticSettings,
    watch: Callable[[], Monitor],
    report_step: ReportStep,
) -> Diagnosis:
    """Measure a kernel in this process, which must have done nothing yet on the device.

    `primer` is the kernel to run before it where the priming is `after_naive`. Raises Verdict with
    `unsupported`, `wrong` (its output, looked at when all samples are taken) or `error` (a queue that ran
    dry, a time that cannot be).
    """
    report_step("inputs")
    reason = kernel.unsupported(problem, device.target())
    if reason:
        raise Verdict(UNSUPPORTED, reason)
    inputs = make_inputs(problem, device.kind)
    device.synchronize()

    def call() -> torch.Tensor:
        return kernel.answer(inputs, problem)

    report_step("priming")
    prime(_primer(primer, priming, problem, device, inputs), device, settings.priming_s)
    report_step("first call")
    began = time.perf_counter_ns()
    call()
    device.synchronize()
    first_call_ms = (time.perf_counter_ns() - began) / 1e6
    monitor = watch()
    with monitor:
        report_step("early samples")
        early = _samples(call, device, settings)
        report_step("warm-up")
        warm = time.monotonic() + settings.warm_up_s
        while time.monotonic() < warm:
            device.series(call, settings.samples, cold=True)
        report_step("late samples")
        late = _samples(call, device, settings)
    report_step("kernel names")
    names, names_reason = _kernel_names(call, device)
    report_step("check after timing")
    judgement = Judge(problem, inputs, tolerance, kernel).judge(call())
    if not judgement.right:
        raise Verdict(WRONG, f"after timing: {judgement.reason}")
    return Diagnosis(
        first_call_ms=first_call_ms,
        early_ms=early.latencies_ms,
        early_sm_clock_mhz=early.sm_clocks_mhz,
        late_ms=late.latencies_ms,
        late_sm_clock_mhz=late.sm_clocks_mhz,
        kernel_names=names,
        kernel_names_reason=names_reason,
        timer=device.timer,
        monitor=monitor.summary(),
    )


def prime(call: Call | None, device: Device, seconds: float) -> int:
    """Call again and again for so long, at least once, and tell how often; nothing where there is no call."""
    if call is None:
        return 0
    until, count = time.monotonic() + seconds, 0
    while count == 0 or time.monotonic() < until:
        call()
        device.synchronize()
        count += 1
    return count


def _primer(
    primer: Kernel | None,
    priming: str,
    problem: Problem,
    device: Device,
    inputs: Inputs,
) -> Call | None:
    if priming in (ISOLATED, ISOLATED_AGAIN):
        return None
    if priming == AFTER_NAIVE:
        if primer is None:
            raise ValueError(f"priming = {priming}: needs a kernel to run before")
        return lambda: primer.answer(inputs, problem)
    if priming == AFTER_MATMUL:
        size = MATMUL_SIZE[device.kind]
        left, right = (
            torch.randn(size, size, device=device.kind).to(problem.torch_dtype()) for _ in range(2)
        )
        return lambda: torch.mm(left, right)
    raise ValueError(f"priming = {priming}: must be one of {', '.join(PRIMINGS)}")


def _samples(call: Call, device: Device, settings: DiagnosticSettings) -> Series:
    series = device.series(call, settings.samples, cold=True)
    if series.starved:
        raise Verdict(ERROR, "samples withheld: the GPU's queue ran dry, so they would hold host time")
    if not finite(series.latencies_ms):
        raise Verdict(ERROR, "samples withheld: one is not a positive finite time")
    return series


def _kernel_names(call: Call, device: Device) -> tuple[str | None, str | None]:
    try:
        return "; ".join(device.kernel_spans(call, PROFILED_CALLS).kernel_names), None
    except NotAvailable as fault:
        return None, str(fault)


def diagnosis_samples(processes: Sequence[Diagnosis]) -> dict[str, list[list[float]]]:
    """The samples of the record, a list for each process."""
    names = ("early_ms", "early_sm_clock_mhz", "late_ms", "late_sm_clock_mhz")
    columns = {name: [list(asdict(process)[name]) for process in processes] for name in names}
    return {"first_call_ms": [[process.first_call_ms] for process in processes], **columns}


def diagnosis_values(processes: Sequence[Diagnosis]) -> dict[str, Any]:
    """The scalars of the record.

    `kernel_names` are those of every process, or of each that had others, apart by ` | `.
    """
    names = list(dict.fromkeys(process.kernel_names for process in processes if process.kernel_names))
    reasons = [process.kernel_names_reason for process in processes if process.kernel_names_reason]
    clocks = sorted(mhz for process in processes for mhz in process.late_sm_clock_mhz)
    values: dict[str, Any] = {
        "process_count": len(processes),
        "kernel_names": SEPARATOR.join(names) or None,
        "kernel_names_reason": reasons[0] if reasons else None,
        "timer": processes[0].timer,
    }
    for name in ("throttle_reasons", "other_processes"):
        found = [process.monitor.get(name) for process in processes]
        values[name] = ", ".join(sorted({text for text in found if text})) or None
    if clocks:
        spread = percentile(clocks, 0.95) - percentile(clocks, 0.05)
        values["sm_clock_spread"] = spread / percentile(clocks, 0.5)
    return values


def diagnosis_marks(values: dict[str, Any]) -> list[str]:
    """What a reader must know about the numbers."""
    found = {
        "one_process": values["process_count"] == 1,
        "throttled": bool(values["throttle_reasons"]),
        "clock_moved": values.get("sm_clock_spread", 0.0) > CLOCK_SPREAD_LIMIT,
        "gpu_shared": bool(values["other_processes"]),
    }
    return [mark for mark, holds in found.items() if holds]
