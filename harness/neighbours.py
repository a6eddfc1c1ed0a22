"""Who else has the GPU open: a number measured beside another process is not this kernel's."""

from __future__ import annotations

import contextlib
import os
from typing import Any


class Neighbours:
    """The compute processes on a GPU that are not this one, seen before it was opened and since.

    Made before this process opens the device. In a container NVML may give process numbers of the host, or
    none: then the one that appeared when this process opened the device is taken for it, and if none
    appeared nothing is known.
    """

    def __init__(self, uuid: str) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._uuid = uuid
        self._before = self._processes()
        self._own: int | None = None
        self._others: set[int] = set(self._before or ())

    def opened(self) -> None:
        """To be called right after this process has opened the device, to know its own number."""
        now = self._processes()
        if now is None:
            return
        new = now - (self._before or set())
        if os.getpid() in now:
            self._own = os.getpid()
        elif len(new) == 1:
            (self._own,) = new
        self.look()

    def look(self) -> None:
        """Add whoever is there now."""
        now = self._processes()
        if now is not None and self._own is not None:
            self._others |= now - {self._own}

    def summary(self) -> str | None:
        """The others' process numbers and names, in one line; empty if there were none, None if unknown."""
        if self._own is None:
            return None
        return ", ".join(f"{pid} ({self._name(pid)})" for pid in sorted(self._others))

    def _processes(self) -> set[int] | None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return None
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            return {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        except nvml.NVMLError:
            return None
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _name(self, pid: int) -> str:
        try:
            with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
                return stream.read().strip()
        except OSError:
            return "not of this machine or container"
