"""Only a kernel that is right before and after its samples gets a time, and the time says how it was had."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from harness.correctness import Tolerance
from harness.device import Call, CpuDevice, Series
from harness.monitor import NoMonitor
from harness.record import MARKS
from harness.stopwatch import TimedProcess, TimingSettings, time_attention, timing_marks, timing_values
from harness.supervisor import Verdict
from tests.harness import attentions
from tests.harness.attentions import Attention, ChangesInputsLater, RightOnlyAtFirst, kernel_of, make_problem

TOLERANCE = Tolerance(1e-2, 1e-2)
SETTINGS = TimingSettings(samples=6, samples_interpreted=2, warm_up_min_s=0.0, warm_up_max_s=0.05)
PROBLEM = make_problem()


def cpu() -> CpuDevice:
    device = CpuDevice()
    device.cache_bytes = 1 << 20  # a short flush
    return device


def measure(
    attention: Attention,
    *,
    device: CpuDevice | None = None,
    settings: TimingSettings = SETTINGS,
    steps: list[str] | None = None,
    **hooks: Any,
) -> TimedProcess:
    kernel = kernel_of(attention, **hooks)
    report = [] if steps is None else steps
    return time_attention(kernel, PROBLEM, device or cpu(), TOLERANCE, settings, NoMonitor, report.append)


def verdict_on(attention: Attention, **options: Any) -> tuple[str, str]:
    with pytest.raises(Verdict) as caught:
        measure(attention, **options)
    return caught.value.status, caught.value.reason


def test_a_right_kernel_gets_all_its_samples() -> None:
    steps: list[str] = []
    timed = measure(attentions.right, steps=steps)
    assert len(timed.cold_ms) == len(timed.warm_ms) == 6
    assert min(timed.cold_ms + timed.warm_ms) > 0
    assert timed.timer == "perf_counter"
    assert timed.cache_bytes == 1 << 20
    assert not timed.interpreted
    assert timed.judgement["allclose"] is True
    assert steps[0] == "inputs"
    assert steps[-1] == "check after timing"
    assert timed.sm_clock_mhz == []  # a CPU has none to meter
    assert TimedProcess(**json.loads(json.dumps(asdict(timed)))) == timed


def test_a_wrong_kernel_is_not_timed() -> None:
    steps: list[str] = []
    status, reason = verdict_on(attentions.zeros, steps=steps)
    assert status == "wrong"
    assert reason.startswith("before timing: ")
    assert "samples" not in steps


@pytest.mark.parametrize("calls", [1, 3])
def test_a_kernel_that_is_right_only_at_first_is_wrong(calls: int) -> None:
    status, reason = verdict_on(RightOnlyAtFirst(calls))
    assert status == "wrong"
    assert reason.startswith("after timing: ")


def test_a_kernel_that_changes_its_inputs_is_wrong() -> None:
    assert verdict_on(attentions.scales_q_in_place)[1].startswith("before timing: the input q was changed")
    assert verdict_on(ChangesInputsLater())[1].startswith("after timing: the input k was changed")


def test_a_kernel_that_writes_outside_its_inputs_is_wrong() -> None:
    status, reason = verdict_on(attentions.writes_behind_k)
    assert status == "wrong"
    assert reason == "before timing: wrote outside the input k (wrote_outside)"


def test_what_a_kernel_does_not_support_is_not_run() -> None:
    found = verdict_on(attentions.zeros, unsupported=lambda problem, target: f"not on {target.device}")
    assert found == ("unsupported", "not on cpu")


class DryQueue(CpuDevice):
    """As a GPU whose queue ran dry."""

    def series(self, call: Call, count: int, *, cold: bool) -> Series:
        return replace(super().series(call, count, cold=cold), starved=True)


class StandingClock(CpuDevice):
    def series(self, call: Call, count: int, *, cold: bool) -> Series:
        found = super().series(call, count, cold=cold)
        return replace(found, latencies_ms=[*found.latencies_ms[:-1], 0.0])


def test_samples_that_hold_host_time_are_withheld() -> None:
    status, reason = verdict_on(attentions.right, device=DryQueue())
    assert status == "error"
    assert reason.startswith("cold series withheld: the GPU's queue ran dry")


def test_a_time_that_cannot_have_passed_is_withheld() -> None:
    found = verdict_on(attentions.right, device=StandingClock())
    assert found == ("error", "cold series withheld: a sample is not a positive finite time")


class Slowing(CpuDevice):
    """Each series twice as slow as the one before."""

    factor = 1.0

    def series(self, call: Call, count: int, *, cold: bool) -> Series:
        call()
        self.factor *= 2
        return Series([self.factor] * count, [], starved=False)


class Even(CpuDevice):
    def series(self, call: Call, count: int, *, cold: bool) -> Series:
        call()
        return Series([1.0] * count, [], starved=False)


def test_a_warm_up_ends_at_its_limit_and_says_that_it_was_not_steady() -> None:
    timed = measure(attentions.right, device=Slowing())
    assert not timed.steady
    assert timed.warm_up_s >= SETTINGS.warm_up_max_s
    assert timing_marks([timed], timing_values([timed], PROBLEM)) == ["not_steady", "one_process"]


def test_a_warm_up_that_is_steady_lasts_its_minimum() -> None:
    settings = replace(SETTINGS, warm_up_min_s=0.05, warm_up_max_s=60.0)
    timed = measure(attentions.right, device=Even(), settings=settings)
    assert timed.steady
    assert 0.05 <= timed.warm_up_s < 60
    assert timing_marks([timed], timing_values([timed], PROBLEM)) == ["one_process"]


class Ramping(Even):
    """A clock that still rises while the samples are taken; the warm-up before it looked steady."""

    def series(self, call: Call, count: int, *, cold: bool) -> Series:
        call()
        if count < SETTINGS.samples * 5:
            return super().series(call, count, cold=cold)
        return Series([1.0 - 0.01 * index for index in range(count)], [], starved=False)


def test_samples_that_fall_while_they_are_taken_are_not_steady() -> None:
    settings = replace(SETTINGS, samples=SETTINGS.samples * 5)
    timed = measure(attentions.right, device=Ramping(), settings=settings)
    assert timed.steady
    assert timed.drifting
    assert "not_steady" in timing_marks([timed], timing_values([timed], PROBLEM))


class CachesByAddress:
    """Right, and instant the second time: it knows the buffers by their addresses."""

    def __init__(self) -> None:
        self.known: dict[int, torch.Tensor] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool,
        scale: float | None = None,
    ) -> torch.Tensor:
        if q.data_ptr() not in self.known:
            self.known[q.data_ptr()] = attentions.right(q, k, v, causal=causal)
        return self.known[q.data_ptr()]


def test_a_kernel_that_returns_what_it_computed_before_is_wrong() -> None:
    status, reason = verdict_on(CachesByAddress())
    assert status == "wrong"
    assert reason.startswith("after timing: ")


def test_an_interpreted_kernel_takes_its_own_number_of_samples() -> None:
    assert SETTINGS.count(interpreted=True) == 2
    assert SETTINGS.count(interpreted=False) == 6


PROCESS = TimedProcess(
    cold_ms=[1.0, 2.0, 3.0],
    warm_ms=[0.5, 0.6, 0.7],
    host_us=[40.0, 50.0, 60.0],
    sm_clock_mhz=[1980.0, 1980.0, 1960.0],
    interpreted=False,
    is_attention=True,
    steady=True,
    drifting=False,
    warm_up_s=0.3,
    timer="cuda_event",
    cache_bytes=60 << 20,
    judgement={"max_abs_error": 0.001},
    monitor={
        "monitor_readings": 10,
        "sm_clock_mhz_min": 1845,
        "sm_clock_mhz_max": 1980,
        "power_w_max": None,
        "throttle_reasons": "power cap",
        "other_processes": "",
    },
)
OTHER = replace(
    PROCESS,
    cold_ms=[4.0, 5.0, 60.0],
    warm_up_s=0.5,
    monitor={
        "monitor_readings": 5,
        "sm_clock_mhz_min": 1800,
        "sm_clock_mhz_max": 1950,
        "power_w_max": 650.0,
        "throttle_reasons": "hardware thermal, power cap",
        "other_processes": "4711 (python)",
    },
)


def test_the_values_of_two_processes_are_those_of_their_medians() -> None:
    values = timing_values([PROCESS, OTHER], PROBLEM)
    assert values["latency_ms"] == 3.5
    assert (values["latency_low_ms"], values["latency_high_ms"]) == (2.0, 5.0)
    assert values["interval_coverage"] == 0.5  # two experiments, whatever the number of samples
    assert values["latency_cycles"] == pytest.approx(3.5e-3 * 1980e6)
    assert values["metered_sm_clock_mhz"] == 1980
    assert values["sm_clock_spread"] == pytest.approx(20 / 1980)
    assert (values["outlier_count_mild"], values["outlier_count_severe"]) == (0, 0)
    assert values["working_set_over_cache"] == PROBLEM.minimal_bytes / (60 << 20)
    assert values["other_processes"] == "4711 (python)"
    assert values["warm_latency_ms"] == 0.6
    assert values["host_time_us"] == 50.0
    assert values["sample_count"] == 6
    assert values["process_count"] == 2
    assert values["warm_up_s"] == 0.5
    assert values["teraflops_per_second"] == pytest.approx(PROBLEM.flop_count / 3.5e-3 / 1e12)
    assert values["check_max_abs_error"] == 0.001
    assert (values["sm_clock_mhz_min"], values["sm_clock_mhz_max"]) == (1800, 1980)
    assert values["power_w_max"] == 650.0
    assert values["monitor_readings"] == 15
    assert values["throttle_reasons"] == "hardware thermal, power cap"


def test_a_timing_record_has_these_values() -> None:
    timed = measure(attentions.right)
    values = timing_values([timed], PROBLEM)
    assert {name for name in values if not name.startswith("check_")} == {
        "latency_ms",
        "latency_p20_ms",
        "latency_p80_ms",
        "latency_low_ms",
        "latency_high_ms",
        "interval_coverage",
        "warm_latency_ms",
        "warm_latency_low_ms",
        "warm_latency_high_ms",
        "host_time_us",
        "teraflops_per_second",
        "flop_count",
        "key_value_bytes_per_second",
        "sample_count",
        "process_count",
        "outlier_count_mild",
        "outlier_count_severe",
        "timer",
        "warm_up_s",
        "working_set_bytes",
        "cache_bytes",
        "working_set_over_cache",
    }
    assert values["host_time_us"] is None  # a CPU call is host time
    json.dumps(values, allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "marks"),
    [
        ({"monitor": {}}, []),
        ({}, ["throttled"]),
        ({"monitor": {}, "interpreted": True}, ["interpreted"]),
        ({"monitor": {}, "steady": False}, ["not_steady"]),
        ({"monitor": {}, "host_us": [601.0] * 3}, ["launch_bound"]),
        ({"monitor": {}, "host_us": []}, []),
        ({"monitor": {}, "drifting": True}, ["not_steady"]),
        ({"monitor": {}, "sm_clock_mhz": [1980.0, 1500.0, 1980.0]}, ["clock_moved"]),
        ({"monitor": {"other_processes": "4711 (python)"}}, ["gpu_shared"]),
        ({"monitor": {"other_processes": None}}, []),
    ],
)
def test_a_number_is_marked_with_what_a_reader_must_know(changes: dict[str, Any], marks: list[str]) -> None:
    process = replace(PROCESS, **changes)
    processes = [process, process]
    found = timing_marks(processes, timing_values(processes, PROBLEM))
    assert found == marks
    assert set(found) <= set(MARKS)


def test_an_outlier_is_counted_and_stays_in_the_numbers() -> None:
    samples = [1.0, 1.1, 1.2, 1.3, 1.4, 9.0]
    process = replace(PROCESS, cold_ms=samples, sm_clock_mhz=[1980.0] * 6)
    values = timing_values([process], PROBLEM)
    assert values["outlier_count_severe"] == 1
    assert values["sample_count"] == 6
    assert values["latency_high_ms"] == 9.0


def test_one_process_is_marked_as_one() -> None:
    assert "one_process" in timing_marks([PROCESS], timing_values([PROCESS], PROBLEM))
    assert "one_process" not in timing_marks([PROCESS, OTHER], timing_values([PROCESS, OTHER], PROBLEM))


def test_one_process_that_was_not_steady_marks_the_number() -> None:
    processes = [PROCESS, replace(PROCESS, steady=False)]
    assert "not_steady" in timing_marks(processes, timing_values(processes, PROBLEM))
