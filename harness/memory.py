"""The memory one call peaks at, in a process that does nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness.device import Device
from harness.plugin import Kernel
from harness.problem import Problem
from harness.record import UNSUPPORTED
from harness.supervisor import ReportStep, Verdict
from harness.tensors import make_inputs


def measure_memory(
    kernel: Kernel, problem: Problem, device: Device, report_step: ReportStep
) -> dict[str, Any]:
    """The scalars of a memory record, in bytes.

    `peak_memory_bytes` counts Q, K, V, the output and everything else alive at the peak, also a
    library's workspace, which `workspace_bytes` gives apart; `extra_bytes` is what is neither of these.
    `law_bytes` is the kernel's own arithmetic, without workspace. Raises Verdict with `unsupported`.
    """
    report_step("inputs")
    reason = kernel.unsupported(problem, device.target())
    if reason:
        raise Verdict(UNSUPPORTED, reason)

    def make_call() -> Callable[[], torch.Tensor]:
        inputs = make_inputs(problem, device.kind, guarded=False)  # guard zones would be counted
        return lambda: kernel.answer(inputs, problem)

    report_step("warm-up and measured call")
    peak = device.peak_memory(make_call)
    return {
        "peak_memory_bytes": peak.peak_bytes,
        "input_bytes": problem.input_bytes,
        "output_bytes": problem.output_bytes,
        "workspace_bytes": peak.workspace_bytes,
        "extra_bytes": peak.peak_bytes - problem.input_bytes - problem.output_bytes - peak.workspace_bytes,
        "reserved_bytes": peak.reserved_bytes,
        "law_bytes": kernel.memory_law(problem),
        "method": peak.method,
        "interpreted": kernel.interpreted,
    }
