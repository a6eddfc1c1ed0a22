"""What two other ways of timing say of a row, in a process of their own after the timed ones.

Events time a call from the moment the device reaches it to the moment it is done, which for a short
kernel holds some of the launch. A CUDA graph replays the call without the host; a profiler, which reads
the kernels' own time stamps, is independent of events altogether. Neither replaces the measured number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from harness.device import Device, NotAvailable
from harness.kernel_names import short_kernel_name
from harness.plugin import Kernel
from harness.problem import Problem
from harness.supervisor import ReportStep
from harness.tensors import make_inputs

WARM_UP_CALLS = 20
PROFILED_CALLS = 15
# Timers disagree where they differ by more than both: a launch gap is a matter of microseconds.
LIMIT_SHARE = 0.10
LIMIT_MS = 0.005


@dataclass(frozen=True)
class Question:
    """Which of the two ways are asked."""

    graph: bool
    profiler: bool

    @property
    def any(self) -> bool:
        return self.graph or self.profiler

    def unanswered(self, reason: str) -> dict[str, Any]:
        """The values of an opinion that was not given."""
        asked = {"graph_reason": self.graph, "profiler_reason": self.profiler}
        return {name: reason for name, was in asked.items() if was}


def second_opinion(
    kernel: Kernel, problem: Problem, device: Device, question: Question, report_step: ReportStep
) -> dict[str, Any]:
    """Time warm calls by other ways; milliseconds a call, or the reason why there is none.

    Returns `graph_latency_ms` and `graph_reason`, `profiler_latency_ms` and `profiler_reason`, and
    `kernel_names`, each only where it was asked.
    """
    report_step("inputs")
    inputs = make_inputs(problem, device.kind)

    def call() -> torch.Tensor:
        return kernel.answer(inputs, problem)

    report_step("warm-up")
    for _ in range(WARM_UP_CALLS):
        call()
    device.synchronize()
    values: dict[str, Any] = {}
    if question.profiler:
        report_step("profiler")
        values |= _profiled(call, device)
    if question.graph:  # last: a kernel that cannot be captured may leave the stream unusable
        report_step("graph")
        values |= _replayed(call, device)
    return values


def _profiled(call: Callable[[], Any], device: Device) -> dict[str, Any]:
    try:
        spans = device.kernel_spans(call, PROFILED_CALLS)
    except NotAvailable as fault:
        return {"profiler_reason": str(fault)}
    return {
        "profiler_latency_ms": float(median(spans.spans_ms)),
        "kernel_names": "; ".join(map(short_kernel_name, spans.kernel_names)),
    }


def _replayed(call: Callable[[], Any], device: Device) -> dict[str, Any]:
    try:
        return {"graph_latency_ms": device.replayed_ms(call)}
    except NotAvailable as fault:
        return {"graph_reason": str(fault)}


def timers_disagree(warm_latency_ms: float, profiler_latency_ms: float) -> bool:
    """Whether the second timer contradicts the first one's warm latency."""
    difference_ms = abs(profiler_latency_ms - warm_latency_ms)
    return difference_ms > max(LIMIT_SHARE * warm_latency_ms, LIMIT_MS)
