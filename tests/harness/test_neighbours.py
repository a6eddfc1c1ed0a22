"""Another process on the GPU is seen, before the samples, while they are taken, and after."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from harness.monitor import GpuMonitor
from harness.neighbours import Neighbours

InstallNvml = Callable[..., Any]
OWN, OTHER = os.getpid(), 999_999


@pytest.fixture
def nvml(install_nvml: InstallNvml) -> Any:
    module = install_nvml(("GPU-aaaa", "NVIDIA H200"))
    module.readings = {"clock": [1980], "temperature": [40], "power": [80_000], "reasons": [0]}
    return module


def seen(nvml: Any, before: list[int], *since: list[int] | None) -> str | None:
    nvml.readings["processes"] = [before]
    neighbours = Neighbours("GPU-aaaa")
    nvml.readings["processes"] = [list(since[0]) if since[0] is not None else None]
    neighbours.opened()
    for now in since[1:]:
        nvml.readings["processes"] = [now]
        neighbours.look()
    return neighbours.summary()


def test_alone_is_said_to_be_alone(nvml: Any) -> None:
    assert seen(nvml, [], [OWN], [OWN]) == ""


@pytest.mark.parametrize(
    ("before", "since"),
    [
        ([OTHER], ([OWN, OTHER], [OWN])),  # gone when the samples began
        ([], ([OWN], [OWN, OTHER], [OWN])),  # came and went
        ([], ([OWN], [OWN, OTHER])),  # there at the end
    ],
)
def test_another_process_is_named_whenever_it_was_there(
    nvml: Any, before: list[int], since: tuple[list[int], ...]
) -> None:
    assert seen(nvml, before, *since) == f"{OTHER} (not of this machine or container)"


def test_a_process_of_this_machine_is_named_by_its_program(nvml: Any) -> None:
    found = seen(nvml, [os.getppid()], [OWN, os.getppid()])
    with open(f"/proc/{os.getppid()}/comm", encoding="utf-8") as stream:
        assert found == f"{os.getppid()} ({stream.read().strip()})"


def test_a_number_of_the_host_that_appeared_with_this_process_is_its_own(nvml: Any) -> None:
    assert seen(nvml, [], [OTHER], [OTHER]) == ""


def test_where_nvml_shows_no_processes_nothing_is_claimed(nvml: Any) -> None:
    assert seen(nvml, [], []) is None
    nvml.readings["processes"] = [None]
    neighbours = Neighbours("GPU-aaaa")
    neighbours.opened()
    assert neighbours.summary() is None


def test_the_monitor_tells_of_the_neighbours(nvml: Any) -> None:
    nvml.readings["processes"] = [[]]
    neighbours = Neighbours("GPU-aaaa")
    nvml.readings["processes"] = [[OWN]]
    neighbours.opened()
    nvml.readings["processes"] = [[OWN, OTHER]]
    with GpuMonitor("GPU-aaaa", neighbours) as monitor:
        pass
    assert str(OTHER) in monitor.summary()["other_processes"]
    assert nvml.opened == 0
