"""What the tests of the harness share: one thread (they fork), and a stand-in for NVML."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from harness.environment import find_gpus

# A child forked after PyTorch started its threads could wait for them forever.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)  # describe() takes every thread


Handle = int | tuple[int, int]  # a GPU, or a place on a divided one


class NVMLError(Exception):
    pass


class StandInNvml(ModuleType):
    """As much of pynvml as the harness calls, for machines without an NVIDIA GPU."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, gpus: Sequence[tuple[str, str]], driver: str = "580.65.06") -> None:
        super().__init__("pynvml")
        self.gpus = list(gpus)  # (UUID, name)
        self.slices: dict[str, list[tuple[str, str] | None]] = {}  # of a divided GPU, by its UUID
        self.driver = driver
        self.opened = 0
        self.readings: dict[str, list[Any]] = {}

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle:  # noqa: N802
        for index, (known, _) in enumerate(self.gpus):
            if known == uuid:
                return index
            for place, one in enumerate(self.slices.get(known, [])):
                if one is not None and one[0] == uuid:
                    return index, place
        raise NVMLError("Not Found")

    def _of(self, handle: Handle) -> tuple[str, str]:
        if isinstance(handle, int):
            return self.gpus[handle]
        one = self.slices[self.gpus[handle[0]][0]][handle[1]]
        if one is None:
            raise NVMLError("Not Found")
        return one

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:  # noqa: N802
        return self._of(handle)[0]

    def nvmlDeviceGetName(self, handle: Handle) -> str:  # noqa: N802
        return self._of(handle)[1]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        if not self.slices:
            raise NVMLError("Not Supported")
        return [int(self.gpus[handle][0] in self.slices)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:  # noqa: N802
        return len(self.slices[self.gpus[handle][0]])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> Handle:  # noqa: N802
        self._of((handle, place))
        return handle, place

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: tuple[int, int]) -> int:  # noqa: N802
        return handle[0]

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.driver

    def _next(self, what: str) -> Any:
        """The next scripted reading; the last one stays."""
        values = self.readings[what]
        value = values.pop(0) if len(values) > 1 else values[0]
        if value is None:
            raise NVMLError("Not Supported")
        return value

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self._next("processes")]

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802
        return int(self._next("clock"))

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        return int(self._next("temperature"))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return int(self._next("power"))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:  # noqa: N802
        return int(self._next("reasons"))


@pytest.fixture
def install_nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StandInNvml]]:
    """Make `import pynvml` find these GPUs; CUDA_VISIBLE_DEVICES is unset."""

    def install(*gpus: tuple[str, str], driver: str = "580.65.06") -> StandInNvml:
        module = StandInNvml(gpus, driver)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        find_gpus.cache_clear()
        return module

    yield install
    find_gpus.cache_clear()


def running(pid: int) -> bool:
    """Whether a process is there and is not a zombie that waits to be reaped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stream:
            return stream.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def is_running() -> Callable[[int], bool]:
    return running


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
