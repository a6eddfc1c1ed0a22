"""Several GPUs of one machine: each job has one to itself, and sees no other."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import environment, job
from harness.device import CpuDevice
from harness.environment import environment_key, find_gpus, require_gpu
from harness.job import Bench, Supervision
from harness.lock import FOLDER_VARIABLE
from harness.supervisor import ReportStep
from tests.harness.conftest import StandInNvml

ROOT = Path(__file__).parents[2]
A, B, C = (("GPU-aaaa", "NVIDIA H200"), ("GPU-bbbb", "NVIDIA H200"), ("GPU-cccc", "NVIDIA H200"))
T4 = ("GPU-dddd", "Tesla T4")
SLICE = "NVIDIA H200 MIG 1g.18gb"
PATIENCE_S = 60.0


@pytest.fixture
def install(
    install_nvml: Callable[..., StandInNvml], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., StandInNvml]:
    """Install these GPUs, which the CPU stands in for when one is opened."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr(environment, "_version", lambda package: "2.13.0")  # as with CUDA
    monkeypatch.setattr(job, "open_device", lambda kind: CpuDevice())
    # What a record says of its GPU is what the measuring process sees.
    monkeypatch.setattr(job, "describe", lambda device, root: {"gpu": {"uuid": require_gpu().uuid}})

    def install(*gpus: tuple[str, str], slices: dict[str, list[Any]] | None = None) -> StandInNvml:
        nvml = install_nvml(*gpus)
        nvml.slices = slices or {}
        nvml.readings = {"clock": [1980], "temperature": [40], "power": [90_000], "reasons": [0]}
        nvml.readings["processes"] = [[]]
        return nvml

    return install


class Jobs:
    """Measuring jobs in processes of their own, started all at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: list[int] = []
        self.key = environment_key("cuda")

    def start(self, *, together: int = 1, kept_gpu: int | None = None, key: str | None = None) -> None:
        """Start a job, which measures until as many as `together` have begun to."""
        path = self.folder / f"{len(self.pids)}.json"
        pid = os.fork()
        if pid == 0:
            try:
                path.write_text(json.dumps(self._measure(together, kept_gpu, key or self.key)))
            finally:
                os._exit(0)
        self.pids.append(pid)

    def _measure(self, together: int, kept_gpu: int | None, key: str) -> dict[str, Any]:
        implementation = {"name": "mine", "kernel": "naive", "options": {}}
        spec = {"phase": "timing", "device": "cuda", "environment": key, "implementation": implementation}

        def work(bench: Bench, task: int, report_step: ReportStep) -> dict[str, Any]:
            began = time.monotonic()
            (self.folder / f"{os.getpid()}.begun").touch()
            give_up = began + PATIENCE_S
            while len(list(self.folder.glob("*.begun"))) < together and time.monotonic() < give_up:
                time.sleep(0.01)
            return {"seen": os.environ["CUDA_VISIBLE_DEVICES"], "began": began, "ended": time.monotonic()}

        find_gpus.cache_clear()
        with Supervision(spec, ROOT, time_limit_s=60.0, timed=True, kept_gpu=kept_gpu) as supervision:
            (outcome,) = supervision.run([0], work)
        record = supervision.record(status=outcome.status, reason=outcome.reason, values=outcome.result)
        return {"status": record.status, "reason": record.reason, **record.values, **record.circumstances}

    def ended(self) -> list[dict[str, Any]]:
        """What each job found, in the order in which they were started."""
        give_up = time.monotonic() + PATIENCE_S
        for pid in self.pids:
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > give_up:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
        found = [json.loads((self.folder / f"{n}.json").read_text()) for n in range(len(self.pids))]
        for one in found:
            assert one["status"] == "ok", one["reason"]
            assert one["seen"] == one["gpu"]["uuid"]
        return found


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["began"] < other["ended"] and other["began"] < one["ended"])


def test_as_many_measure_at_once_as_there_are_gpus_and_never_two_on_one(
    install: Callable[..., StandInNvml], tmp_path: Path
) -> None:
    install(A, B, C)
    jobs = Jobs(tmp_path)
    for _ in range(7):
        jobs.start(together=3)
    found = jobs.ended()
    on = {uuid: [job for job in found if job["seen"] == uuid] for uuid, _ in (A, B, C)}
    assert sum(len(jobs) for jobs in on.values()) == 7
    for jobs_of_one in on.values():
        assert not any(overlap(x, y) for n, x in enumerate(jobs_of_one) for y in jobs_of_one[:n])
    first_three = sorted(found, key=lambda job: job["began"])[:3]  # each waited for the two others
    assert {job["seen"] for job in first_three} == {"GPU-aaaa", "GPU-bbbb", "GPU-cccc"}


def test_jobs_that_are_to_keep_to_one_gpu_wait_for_it_though_others_are_free(
    install: Callable[..., StandInNvml], tmp_path: Path
) -> None:
    install(A, B, C)
    jobs = Jobs(tmp_path)
    for kept in (1, 1, 1, 4, 0):  # 4 is 1 again where there are three
        jobs.start(kept_gpu=kept)
    found = jobs.ended()
    assert [job["seen"] for job in found] == ["GPU-bbbb"] * 4 + ["GPU-aaaa"]
    assert not any(overlap(x, y) for n, x in enumerate(found[:4]) for y in found[:n])


def test_only_the_gpus_that_the_variable_lets_through_are_taken(
    install: Callable[..., StandInNvml], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(A, B, C)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-aaaa")
    find_gpus.cache_clear()
    jobs = Jobs(tmp_path)
    for _ in range(4):
        jobs.start(together=2)
    assert {job["seen"] for job in jobs.ended()} == {"GPU-cccc", "GPU-aaaa"}


def test_a_job_takes_no_gpu_of_another_kind_than_its_environments(
    install: Callable[..., StandInNvml], tmp_path: Path
) -> None:
    install(A, T4, C)
    jobs = Jobs(tmp_path)
    t4_key = environment_key("cuda", find_gpus()[1])
    assert t4_key.startswith("tesla-t4_driver")
    for key in (t4_key, jobs.key, jobs.key, t4_key):
        jobs.start(key=key, together=2)
    found = [job["seen"] for job in jobs.ended()]
    assert found[0] == found[3] == "GPU-dddd"
    assert set(found[1:3]) <= {"GPU-aaaa", "GPU-cccc"}


def test_slices_of_one_card_share_its_clock_and_so_take_turns(
    install: Callable[..., StandInNvml], tmp_path: Path
) -> None:
    slices = {"GPU-aaaa": [("MIG-a0", SLICE), None, ("MIG-a1", SLICE)], "GPU-bbbb": [("MIG-b0", SLICE)]}
    install(A, B, slices=slices)
    jobs = Jobs(tmp_path)
    assert jobs.key.startswith("nvidia-h200-mig-1g.18gb_driver")
    for kept in (0, 1, 2):  # both slices of the first card, and the one of the second
        jobs.start(kept_gpu=kept)
    one, other, elsewhere = jobs.ended()
    assert [job["seen"] for job in (one, other, elsewhere)] == ["MIG-a0", "MIG-a1", "MIG-b0"]
    assert not overlap(one, other)
    jobs = Jobs(tmp_path)
    for beginning in tmp_path.glob("*.begun"):
        beginning.unlink()
    for _ in range(2):
        jobs.start(together=2)  # two cards, so two at once
    assert {job["seen"] for job in jobs.ended()} == {"MIG-a0", "MIG-b0"}
