"""What no time may beat, by the values of a roofline record."""

from __future__ import annotations

from typing import Any

# A measured bound is itself a measurement: a time counts as impossible where it beats it by this much.
MARGIN = 1.1
# The flush counts as proven where a buffer of half the cache takes this much longer after it than warm,
# and one of four times the cache, of which nothing stays in it, takes no longer than this.
COLD_OVER_WARM = 1.1
CLEAN_OVER_WARM = 1.05


def flush_proven(values: dict[str, Any]) -> bool:
    """Whether the controls show that the flush leaves the cache cold, and clean."""
    cold = values["flush_cold_over_warm"] >= COLD_OVER_WARM
    return bool(cold and values["flush_clean_over_warm"] <= CLEAN_OVER_WARM)


def impossible(latency_ms: float, minimal_bytes: int, flop_count: int, values: dict[str, Any]) -> str | None:
    """Why a cold latency cannot have been, by a roofline record's values; None if it can.

    The bound by bytes holds only where the flush is proven: what is in the cache need not be read.
    """
    bytes_ms = minimal_bytes / (MARGIN * values["read_bytes_per_second"]) * 1e3
    if values["flush_proven"] and latency_ms < bytes_ms:
        return (
            f"withheld: {latency_ms:.4g} ms is impossible: its {minimal_bytes} bytes take at least"
            f" {bytes_ms:.4g} ms at {MARGIN} times the bandwidth measured in this run"
        )
    rate = MARGIN * values["matrix_teraflops_per_second"] * 1e12
    flop_ms = flop_count / rate * 1e3
    if latency_ms < flop_ms:
        return (
            f"withheld: {latency_ms:.4g} ms is impossible: its {flop_count} operations take at least"
            f" {flop_ms:.4g} ms at {MARGIN} times the matrix rate measured in this run"
        )
    return None
