"""Watches a GPU's clocks, temperature, power and throttle reasons while samples are taken."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from harness.neighbours import Neighbours

INTERVAL_S = 0.002
# Every so many readings, a look at who else has the GPU open; it takes longer than a reading.
READINGS_A_LOOK = 50
# NVML's clock event reasons; those that say that the clock is held below what was asked for.
THROTTLE_REASONS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "software thermal",
    0x0000000000000040: "hardware thermal",
    0x0000000000000080: "power brake",
}


class Monitor(Protocol):
    """Used in a `with` around the samples; `summary()` afterwards gives scalars for the record."""

    def __enter__(self) -> Monitor: ...

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def summary(self) -> dict[str, Any]: ...


class NoMonitor:
    """For a device that reports none of this."""

    def __enter__(self) -> NoMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def summary(self) -> dict[str, Any]:
        return {}


class GpuMonitor:
    """Polls NVML in a thread; a reading takes about 20 us, and moved no median when it was tried."""

    def __init__(self, uuid: str, neighbours: Neighbours | None = None) -> None:
        import pynvml

        self._neighbours = neighbours

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._readings: dict[str, list[float]] = {"sm_clock_mhz": [], "temperature_c": [], "power_w": []}
        self._reasons = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> GpuMonitor:
        self._read()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        if self._neighbours is not None:
            self._neighbours.look()
        with contextlib.suppress(self._nvml.NVMLError):  # what CUDA says of a lost GPU counts
            self._nvml.nvmlShutdown()

    def _poll(self) -> None:
        readings = 0
        while not self._stop.is_set():
            self._read()
            if self._neighbours is not None and readings % READINGS_A_LOOK == 0:
                self._neighbours.look()
            readings += 1
            time.sleep(INTERVAL_S)

    def _read(self) -> None:
        nvml, handle = self._nvml, self._handle
        self._add("sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        self._add("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        self._add("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        with contextlib.suppress(nvml.NVMLError):
            self._reasons |= nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)

    def _add(self, name: str, read: Callable[[], float]) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._readings[name].append(read())

    def summary(self) -> dict[str, Any]:
        """Minimum and maximum of each reading, how many there were, and the throttle reasons seen."""
        result: dict[str, Any] = {"monitor_readings": len(self._readings["sm_clock_mhz"])}
        for name, values in self._readings.items():
            result[f"{name}_min"] = min(values, default=None)
            result[f"{name}_max"] = max(values, default=None)
        reasons = [text for bit, text in THROTTLE_REASONS.items() if self._reasons & bit]
        result["throttle_reasons"] = ", ".join(reasons)
        if self._neighbours is not None:
            result["other_processes"] = self._neighbours.summary()
        return result
