"""The machine's own bounds: measured on random data, and what beats them is withheld."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from harness import roofline
from harness.bounds import flush_proven, impossible
from harness.device import CpuDevice
from harness.monitor import NoMonitor
from harness.roofline import Sizes, measure_roofline

VALUES: dict[str, Any] = {
    "read_bytes_per_second": 4e12,
    "matrix_teraflops_per_second": 800.0,
    "flush_cold_over_warm": 1.23,
    "flush_clean_over_warm": 1.003,
    "flush_proven": True,
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(roofline.SIZES, "cpu", Sizes(1 << 22, (64, 128), ("float32",), 3, 3))
    device = CpuDevice()
    device.cache_bytes = 1 << 20
    return measure_roofline(device, NoMonitor, lambda step: None)


def test_every_bound_is_measured(measured: dict[str, Any]) -> None:
    for name in ("read_bytes_per_second", "copy_bytes_per_second", "matrix_float32_teraflops_per_second"):
        assert measured[name] > 0
    assert measured["matrix_teraflops_per_second"] == measured["matrix_float32_teraflops_per_second"]
    assert measured["flush_proven"] == flush_proven(measured)
    assert measured["timer"] == "perf_counter"
    json.dumps(measured, allow_nan=False)


def test_a_dtype_that_the_cpu_emulates_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    multiply = torch.mm

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return multiply(*arguments, **options)

    monkeypatch.setattr(torch, "mm", counted)
    monkeypatch.setattr(roofline, "SLOW_MS", 0.0)
    assert roofline._matrix_rate(CpuDevice(), "float32", Sizes(1 << 20, (64, 128), ("float32",), 3, 3)) > 0
    assert len(calls) == 1


def test_a_time_below_its_bytes_over_the_bandwidth_is_impossible() -> None:
    # 4.4e6 bytes at 1.1 x 4e12 bytes a second take 1 us.
    assert impossible(0.00101, 4_400_000, 1, VALUES) is None
    reason = impossible(0.00099, 4_400_000, 1, VALUES)
    assert reason is not None
    assert "0.00099 ms is impossible: its 4400000 bytes take at least 0.001 ms" in reason


def test_a_time_below_its_operations_over_the_matrix_rate_is_impossible() -> None:
    assert impossible(0.00101, 1, 880_000_000, VALUES) is None
    reason = impossible(0.00099, 1, 880_000_000, VALUES)
    assert reason is not None
    assert "operations take at least 0.001 ms" in reason


def test_what_may_have_been_in_the_cache_is_not_held_against_the_bandwidth() -> None:
    assert impossible(0.00099, 4_400_000, 1, {**VALUES, "flush_proven": False}) is None


@pytest.mark.parametrize(
    ("cold", "clean", "proven"), [(1.23, 1.003, True), (1.02, 1.003, False), (1.23, 1.13, False)]
)
def test_a_flush_is_proven_by_both_controls(cold: float, clean: float, proven: bool) -> None:
    values = {"flush_cold_over_warm": cold, "flush_clean_over_warm": clean}
    assert flush_proven(values) is proven
