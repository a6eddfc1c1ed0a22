"""What the machine itself can do, measured in the same run: the bounds that no time may beat.

A time that is below the bytes of its problem over the bandwidth, or its operations over the matrix rate,
is no time of that problem (harness/bounds.py). Both are measured, on random data: a data sheet's figure
is never reached, and zeros run faster than numbers do. The controls show what the stopwatch's flush does
on this very GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from harness.bounds import flush_proven
from harness.device import Call, Device, Flush
from harness.monitor import Monitor
from harness.statistics import summarize
from harness.supervisor import ReportStep


@dataclass(frozen=True)
class Sizes:
    """How much work is large enough for the device to reach its rates, and how many samples to take."""

    stream_bytes: int
    matrix_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    samples: int
    matrix_samples: int


SIZES = {
    "cuda": Sizes(2 << 30, (2048, 4096, 8192), ("float16", "bfloat16"), 15, 20),
    "cpu": Sizes(256 << 20, (512, 1024), ("float32", "bfloat16", "float16"), 5, 3),
}
# A product that takes longer, as in a dtype that a CPU emulates, is not repeated, nor a larger one tried.
SLOW_MS = 50.0


def measure_roofline(device: Device, watch: Callable[[], Monitor], report_step: ReportStep) -> dict[str, Any]:
    """The scalars of the roofline record.

    Bandwidths in bytes a second, of reading and of copying (read and written bytes together); matrix rates
    in TFLOP/s, the best over some sizes; an empty call in milliseconds; and the ratios of the flush's
    controls.
    """
    sizes = SIZES[device.kind]
    monitor = watch()
    with monitor:
        report_step("empty call")
        values: dict[str, Any] = {"empty_call_ms": _median_ms(device, lambda: None, sizes.samples)}
        report_step("bandwidth")
        values |= _bandwidths(device, sizes)
        report_step("matrix rate")
        for name in sizes.dtypes:
            values[f"matrix_{name}_teraflops_per_second"] = _matrix_rate(device, name, sizes)
        report_step("flush controls")
        values |= _flush_controls(device, sizes)
    values["matrix_teraflops_per_second"] = max(
        values[f"matrix_{name}_teraflops_per_second"] for name in sizes.dtypes
    )
    values["flush_proven"] = flush_proven(values)
    return {**values, "cache_bytes": device.cache_bytes, "timer": device.timer, **monitor.summary()}


def _median_ms(device: Device, call: Call, count: int, *, cold: bool = False, flush: Flush = "read") -> float:
    device.series(call, max(2, count // 5), cold=cold, flush=flush)  # the warm-up: the same loop, in short
    return summarize(device.series(call, count, cold=cold, flush=flush).latencies_ms).median


def _random(device: Device, byte_count: int) -> torch.Tensor:
    return torch.randn(byte_count // 4, device=device.kind)


def _bandwidths(device: Device, sizes: Sizes) -> dict[str, float]:
    source = _random(device, sizes.stream_bytes)
    result = torch.empty((), device=device.kind)
    read_ms = _median_ms(device, lambda: torch.sum(source, dim=0, out=result), sizes.samples)
    target = torch.empty_like(source)
    copy_ms = _median_ms(device, lambda: target.copy_(source), sizes.samples)
    return {
        "read_bytes_per_second": sizes.stream_bytes / read_ms * 1e3,
        "copy_bytes_per_second": 2 * sizes.stream_bytes / copy_ms * 1e3,
    }


def _matrix_rate(device: Device, dtype_name: str, sizes: Sizes) -> float:
    """The best rate over the sizes: small ones do not fill a GPU, large ones run into its power limit."""
    best = 0.0
    for size in sizes.matrix_sizes:
        left, right = (
            torch.randn(size, size, device=device.kind).to(getattr(torch, dtype_name)) for _ in range(2)
        )
        result = torch.empty_like(left)

        def call(
            left: torch.Tensor = left, right: torch.Tensor = right, result: torch.Tensor = result
        ) -> None:
            torch.mm(left, right, out=result)

        milliseconds = device.series(call, 1, cold=False).latencies_ms[0]
        if milliseconds < SLOW_MS:
            milliseconds = _median_ms(device, call, sizes.matrix_samples)
        best = max(best, 2 * size**3 / milliseconds / 1e9)
        if milliseconds >= SLOW_MS:
            break
    return best


def _flush_controls(device: Device, sizes: Sizes) -> dict[str, float]:
    small = _random(device, device.cache_bytes // 2)
    large = _random(device, min(4 * device.cache_bytes, sizes.stream_bytes))
    result = torch.empty((), device=device.kind)

    def read_small() -> None:
        torch.sum(small, dim=0, out=result)

    def read_large() -> None:
        torch.sum(large, dim=0, out=result)

    warm = _median_ms(device, read_small, sizes.samples)
    cold = _median_ms(device, read_small, sizes.samples, cold=True)
    dirty = _median_ms(device, read_small, sizes.samples, cold=True, flush="write")
    large_warm = _median_ms(device, read_large, sizes.samples)
    large_cold = _median_ms(device, read_large, sizes.samples, cold=True)
    return {
        "flush_cold_over_warm": cold / warm,
        "flush_dirty_over_cold": dirty / cold,
        "flush_clean_over_warm": large_cold / large_warm,
    }
