"""What NVML said while samples were taken is summed up, and what it did not say is not made up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from harness.monitor import GpuMonitor, NoMonitor

InstallNvml = Callable[..., Any]
READINGS = {"clock": [1980, 1845, 1920], "temperature": [40, 41], "power": [80_000, 687_500], "reasons": [0]}


@pytest.fixture
def nvml(install_nvml: InstallNvml) -> Any:
    module = install_nvml(("GPU-aaaa", "NVIDIA H200"))
    module.readings = {name: list(values) for name, values in READINGS.items()}
    return module


def watch() -> dict[str, Any]:
    with GpuMonitor("GPU-aaaa") as monitor:
        time.sleep(0.05)
    return monitor.summary()


def test_extremes_of_all_readings_are_kept(nvml: Any) -> None:
    summary = watch()
    assert (summary["sm_clock_mhz_min"], summary["sm_clock_mhz_max"]) == (1845, 1980)
    assert (summary["temperature_c_min"], summary["temperature_c_max"]) == (40, 41)
    assert (summary["power_w_min"], summary["power_w_max"]) == (80.0, 687.5)
    assert summary["monitor_readings"] >= 3
    assert summary["throttle_reasons"] == ""
    json.dumps(summary)


def test_a_throttle_reason_seen_once_is_told(nvml: Any) -> None:
    nvml.readings["reasons"] = [0, 0x4 | 0x1, 0x40, 0]
    assert watch()["throttle_reasons"] == "power cap, hardware thermal"


def test_an_idle_gpu_or_set_clocks_are_no_throttling(nvml: Any) -> None:
    nvml.readings["reasons"] = [0x1 | 0x2]
    assert watch()["throttle_reasons"] == ""


def test_what_nvml_does_not_say_is_none(nvml: Any) -> None:
    nvml.readings.update(power=[None], reasons=[None])
    summary = watch()
    assert summary["power_w_min"] is None
    assert summary["power_w_max"] is None
    assert summary["sm_clock_mhz_max"] == 1980


def test_a_block_too_short_for_the_thread_is_read_before_and_after(nvml: Any) -> None:
    with GpuMonitor("GPU-aaaa") as monitor:
        pass
    assert monitor.summary()["monitor_readings"] >= 2


def test_nvml_is_closed_and_the_thread_ended_though_the_block_raised(nvml: Any) -> None:
    monitor = GpuMonitor("GPU-aaaa")
    with pytest.raises(RuntimeError), monitor:
        raise RuntimeError
    assert nvml.opened == 0
    before = monitor.summary()["monitor_readings"]
    time.sleep(0.02)
    assert monitor.summary()["monitor_readings"] == before


def test_a_device_that_reports_nothing_adds_nothing() -> None:
    with NoMonitor() as monitor:
        pass
    assert monitor.summary() == {}
