"""The CPU as a device: real times, and a peak of memory that is one call's and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.device import Call, CpuDevice, finite, open_device
from harness.supervisor import ReportStep, supervise

MIB = 1 << 20


def touched(mebibytes: int) -> torch.Tensor:
    """So much memory, and used: untouched pages are not resident."""
    return torch.ones(mebibytes * MIB, dtype=torch.uint8)


def peak_mebibytes(make_call: Callable[[], Call]) -> float:
    """The peak in a process of its own, as every measurement has it."""

    def work(device: CpuDevice, task: Callable[[], Call], report_step: ReportStep) -> dict[str, Any]:
        return vars(device.peak_memory(task))

    found = supervise([make_call], lambda: (CpuDevice(), {}), work, time_limit_s=60.0)
    (outcome,) = found.outcomes
    assert outcome.status == "ok", outcome.reason
    assert outcome.result["workspace_bytes"] == 0
    return float(outcome.result["peak_bytes"]) / MIB


def test_the_cpu_is_opened_by_name() -> None:
    device = open_device("cpu")
    assert (device.kind, device.target().device) == ("cpu", "cpu")
    assert not device.target().is_cuda
    assert device.cache_bytes > 0


def test_another_word_than_cuda_or_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="device = tpu: must be cuda or cpu"):
        open_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_an_error_that_says_so() -> None:
    with pytest.raises(RuntimeError, match="no CUDA device"):
        open_device("cuda")


@pytest.mark.parametrize("cold", [False, True])
def test_a_series_has_a_positive_time_for_each_call(cold: bool) -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    device = CpuDevice()
    device.cache_bytes = MIB  # a short flush
    series = device.series(call, 7, cold=cold)
    assert calls == 7
    assert len(series.latencies_ms) == 7
    assert finite(series.latencies_ms)
    assert not series.starved


def test_a_fault_of_the_call_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        CpuDevice().series(lambda: 1 / 0, 3, cold=False)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([0.1, 2.0], True),
        ([0.1, 0.0], False),
        ([-1.0], False),
        ([float("nan")], False),
        ([float("inf")], False),
    ],
)
def test_only_a_time_that_can_have_passed_counts(times: list[float], expected: bool) -> None:
    assert finite(times) == expected


def test_the_peak_counts_inputs_temporary_and_result() -> None:
    def make_call() -> Call:
        inputs = touched(32)

        def call() -> torch.Tensor:
            temporary = touched(64)
            return inputs + temporary[: inputs.numel()]

        return call

    assert 32 + 64 + 32 <= peak_mebibytes(make_call) + 1 < 32 + 64 + 32 + 32


def test_the_peak_sees_a_temporary_that_is_gone_when_the_call_returns() -> None:
    def make_call() -> Call:
        inputs = touched(16)
        return lambda: touched(64).max() + inputs[0]

    above_inputs = peak_mebibytes(make_call) - 16
    assert 63 < above_inputs < 96


def test_the_peak_does_not_count_what_only_a_first_call_allocates() -> None:
    """The article's table held such memory: one implementation's warm-up in another's row."""
    calls = 0

    def make_call() -> Call:
        def call() -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 1:
                touched(256)
            return touched(64)

        return call

    assert 63 < peak_mebibytes(make_call) < 96


def test_the_peak_does_not_count_memory_that_was_there_before() -> None:
    held = touched(128)

    def make_call() -> Call:
        return lambda: touched(32) + held[0]

    assert 31 < peak_mebibytes(make_call) < 96


def test_the_peak_of_one_measurement_is_not_in_the_next() -> None:
    def work(device: CpuDevice, size: int, report_step: ReportStep) -> dict[str, Any]:
        return {"peak": device.peak_memory(lambda: lambda: touched(size)).peak_bytes / MIB}

    found = supervise([200, 20], lambda: (CpuDevice(), {}), work, time_limit_s=60.0)
    large, small = (outcome.result["peak"] for outcome in found.outcomes)
    assert 199 < large < 232
    assert 19 < small < 52
