"""A GPU's clock is locked when asked for, and never stays locked; by a stand-in for nvidia-smi."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import clocks
from harness.clocks import Clock, marker_of, undo_leftover_if_free
from harness.environment import Gpu
from harness.job import Supervision
from harness.lock import FOLDER_VARIABLE, device_lock
from harness.plugin import Kernel
from harness.supervisor import ReportStep, supervise

ROOT = Path(__file__).parents[2]
GPU = "GPU-1"
LOCK, UNDO = f"-i {GPU} -lgc 1500,1500", f"-i {GPU} -rgc"
LOCKED = ({"locked_sm_clock_mhz": 1500}, [])

# Records how it is called, and keeps a file for as long as the clock is locked. How it fares is up to
# the variables LOCKING and UNDOING.
STAND_IN = """#!/bin/sh
fare() {
    case "$1" in
        refuse) echo "The current user does not have permission to change clocks for GPU 00000000:01:00.0."
                echo "Terminating early due to previous errors."; exit 4;;
        lack) echo "Setting locked GPU clocks is not supported for GPU 00000000:01:00.0."
              echo "Treating as warning and moving on."; exit 0;;
        hang) sleep 600;;
        slow) sleep 0.5;;
        fail) echo "Unknown Error"; exit 255;;
    esac
}
echo "$*" >> "$STAND_IN/calls"
case "$3" in
    -lgc) if [ "$LOCKING" = half ]; then touch "$STAND_IN/locked"; fare fail; fi
          fare "$LOCKING"; touch "$STAND_IN/locked";;
    -rgc) fare "$UNDOING"; rm -f "$STAND_IN/locked";;
esac
echo "All done."
"""


class StandIn:
    """The nvidia-smi of these tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def locked(self) -> bool:
        return (self.folder / "locked").exists()


@pytest.fixture(autouse=True)
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    folder = tmp_path / "stand-in"
    folder.mkdir()
    script = folder / "nvidia-smi"
    script.write_text(STAND_IN)
    script.chmod(0o755)
    monkeypatch.setenv("STAND_IN", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return StandIn(folder)


@contextmanager
def job(mhz: int | None = 1500, timeout_s: float = 10.0) -> Iterator[Clock]:
    """What a job does about the clock."""
    with device_lock(GPU, waiting=pytest.fail), Clock(GPU, mhz, timeout_s) as clock:
        yield clock


def leave_a_lock(smi: StandIn) -> None:
    """As a job does that was killed together with its keeper."""
    with device_lock(GPU):
        marker_of(GPU).write_text("locked at 1500 MHz by process 1\n")
    (smi.folder / "locked").touch()


def test_by_default_nothing_is_called(smi: StandIn) -> None:
    with job(None) as clock:
        pass
    assert smi.calls == []
    assert not marker_of(GPU).exists()
    assert clock.account({"sm_clock_mhz_max": 1980.0}) == ({}, [])


def test_the_clock_is_locked_during_the_job_and_undone_after_it(smi: StandIn) -> None:
    with job() as clock:
        assert smi.calls == [LOCK]
        assert smi.locked
        assert marker_of(GPU).exists()
    assert smi.calls == [LOCK, UNDO]
    assert not smi.locked
    assert not marker_of(GPU).exists()
    assert clock.account({}) == LOCKED


def test_it_is_undone_when_the_work_raises(smi: StandIn) -> None:
    with pytest.raises(RuntimeError), job():
        raise RuntimeError
    assert smi.calls == [LOCK, UNDO]
    assert not marker_of(GPU).exists()


def test_what_ends_a_measuring_child_does_not_end_the_lock(smi: StandIn) -> None:
    def work(context: None, task: int, report_step: ReportStep) -> dict[str, Any]:
        if task == 0:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        return {"calls": smi.calls}

    with job() as clock:
        killed, after = supervise([0, 1], lambda: (None, {}), work, time_limit_s=30.0).outcomes
        assert "SIGKILL" in str(killed.reason)
        assert after.result == {"calls": [LOCK]}
        assert smi.calls == [LOCK]
    assert smi.calls == [LOCK, UNDO]
    assert clock.account({}) == LOCKED


# ---- when the job dies ----

JOB = f"""
import os, time
from harness.clocks import Clock
from harness.lock import device_lock

with device_lock("{GPU}"), Clock("{GPU}", 1500) as clock:
    print(clock._keeper, flush=True)
    time.sleep(600)
"""
NEXT = f"""
import os, pathlib
from harness.lock import device_lock

with device_lock("{GPU}", waiting=lambda text: print(text, flush=True)):
    print("locked" if pathlib.Path(os.environ["STAND_IN"], "locked").exists() else "undone", flush=True)
"""


@contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()  # for it alone: a keeper that does not end has its output open
        assert process.stdout is not None
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def eventually(true: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + 10.0
    while not true() and time.monotonic() < give_up:
        time.sleep(0.01)
    return true()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_it_is_undone_after_the_job_was_killed(
    send: Callable[[int, int], None], how: signal.Signals, smi: StandIn, is_running: Callable[[int], bool]
) -> None:
    with python(JOB) as killed:
        keeper = int(line(killed))
        assert smi.locked
        send(killed.pid, how)
        assert eventually(lambda: not is_running(keeper))
    assert smi.calls == [LOCK, UNDO]
    assert not marker_of(GPU).exists()


def test_it_is_undone_when_the_job_was_killed_while_locking(
    smi: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKING", "slow")
    with python(JOB) as killed:
        assert eventually(lambda: smi.calls == [LOCK])
        killed.kill()
        assert eventually(lambda: smi.calls == [LOCK, UNDO] and not marker_of(GPU).exists())
    assert not smi.locked


def test_the_next_job_gets_the_device_only_when_it_is_undone(
    smi: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDOING", "slow")
    with python(JOB) as killed:
        line(killed)
        with python(NEXT) as waiting:
            assert line(waiting).startswith("waiting")
            killed.kill()
            assert line(waiting) == "undone"
    assert smi.calls == [LOCK, UNDO]


@pytest.mark.parametrize(("mhz", "calls"), [(None, [UNDO]), (1500, [UNDO, LOCK, UNDO])])
def test_the_next_job_undoes_what_a_killed_job_and_its_keeper_left(
    mhz: int | None, calls: list[str], smi: StandIn, is_running: Callable[[int], bool]
) -> None:
    with python(JOB) as killed:
        keeper = int(line(killed))
        os.kill(keeper, signal.SIGKILL)
        killed.kill()
        assert eventually(lambda: not is_running(keeper))
    assert smi.calls == [LOCK]
    assert marker_of(GPU).exists()
    with job(mhz) as clock:
        assert smi.calls[1:] == calls[: 1 if mhz is None else 2]
    assert smi.calls[1:] == calls
    assert not marker_of(GPU).exists()
    assert clock.account({})[1] == []


def test_a_job_whose_keeper_was_killed_undoes_the_lock_itself(smi: StandIn) -> None:
    with job() as clock:
        assert clock._keeper is not None
        os.kill(clock._keeper, signal.SIGKILL)
        os.waitid(os.P_PID, clock._keeper, os.WEXITED | os.WNOWAIT)
    assert smi.calls == [LOCK, UNDO]
    assert not marker_of(GPU).exists()
    assert clock.account({}) == LOCKED  # it was, to the end


def test_a_lock_that_was_undone_too_early_is_no_lock(smi: StandIn) -> None:
    with job() as clock:
        assert clock._keeper is not None
        os.kill(clock._keeper, signal.SIGTERM)
        os.waitid(os.P_PID, clock._keeper, os.WEXITED | os.WNOWAIT)
    assert smi.calls == [LOCK, UNDO]
    assert clock.account({}) == (
        {"clock_lock_reason": "the lock was undone before the measurement had ended"},
        ["clock_not_locked"],
    )


# ---- the next command ----


def test_a_command_without_a_job_undoes_what_is_left(smi: StandIn) -> None:
    undo_leftover_if_free(GPU)
    assert smi.calls == []
    leave_a_lock(smi)
    undo_leftover_if_free(GPU)
    assert smi.calls == [UNDO]
    assert not marker_of(GPU).exists()


def test_it_leaves_the_lock_of_a_job_that_is_running_alone(smi: StandIn) -> None:
    with python(JOB) as running:
        line(running)
        undo_leftover_if_free(GPU)
        assert smi.calls == [LOCK]
        assert smi.locked


def test_what_is_left_on_another_gpu_is_not_touched(smi: StandIn) -> None:
    with device_lock("GPU-2"):
        marker_of("GPU-2").write_text("")
    with job(None):
        pass
    assert smi.calls == []
    assert marker_of("GPU-2").exists()


# ---- when nvidia-smi does not do it ----


def not_locked(clock: Clock) -> str:
    values, marks = clock.account({})
    assert marks == ["clock_not_locked"]
    assert list(values) == ["clock_lock_reason"]
    return str(values["clock_lock_reason"])


def test_without_the_rights_the_job_goes_on_unlocked(
    smi: StandIn, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKING", "refuse")
    monkeypatch.setenv("UNDOING", "refuse")
    with job() as clock:
        assert smi.calls == [LOCK, UNDO]
        assert not marker_of(GPU).exists()  # no later job without the rights is to stumble over it
    assert smi.calls == [LOCK, UNDO]
    assert not_locked(clock) == (
        "nvidia-smi -lgc 1500,1500 ended with code 4: The current user does not have permission to change "
        "clocks for GPU 00000000:01:00.0. Terminating early due to previous errors."
    )
    assert capfd.readouterr().err.startswith("the SM clock is not locked at 1500 MHz: nvidia-smi -lgc")


def test_a_refusal_does_not_remove_the_marker_of_an_earlier_job(
    smi: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_a_lock(smi)
    monkeypatch.setenv("LOCKING", "refuse")
    monkeypatch.setenv("UNDOING", "refuse")
    with job() as clock:
        pass
    assert marker_of(GPU).exists()
    assert clock.account({})[1] == ["clock_not_locked", "clock_left_locked"]


def test_a_gpu_that_cannot_is_believed_though_nvidia_smi_calls_it_a_warning(
    smi: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKING", "lack")
    with job() as clock:
        pass
    assert "not supported" in not_locked(clock)
    assert not marker_of(GPU).exists()


def test_without_nvidia_smi_the_job_goes_on_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with job() as clock:
        pass
    assert not_locked(clock) == "there is no nvidia-smi here"
    assert not marker_of(GPU).exists()


def test_when_nvidia_smi_hangs_the_job_goes_on_unlocked(
    smi: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKING", "hang")
    began = time.monotonic()
    with job(timeout_s=0.5) as clock:
        assert time.monotonic() - began < 5.0
        assert smi.calls == [LOCK, UNDO]
    assert smi.calls == [LOCK, UNDO]
    assert not_locked(clock) == "nvidia-smi -lgc 1500,1500 did not end within 0.5 s"
    assert not marker_of(GPU).exists()


def test_what_failed_half_way_is_undone(smi: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKING", "half")
    with job() as clock:
        assert smi.calls == [LOCK, UNDO]
        assert not smi.locked
    assert not_locked(clock) == "nvidia-smi -lgc 1500,1500 ended with code 255: Unknown Error"
    assert not marker_of(GPU).exists()


def test_where_no_marker_can_be_left_the_clock_is_not_touched(
    smi: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(clocks, "write_atomically", refuse)
    with job() as clock:
        pass
    assert smi.calls == []
    assert not_locked(clock) == f"no marker can be left at {marker_of(GPU)}: Operation not permitted"


@pytest.mark.parametrize("how", ["fail", "hang"])
def test_an_undo_that_fails_is_said_and_left_to_the_next_command(
    how: str, smi: StandIn, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNDOING", how)
    with job(timeout_s=0.5) as clock:
        pass
    assert smi.locked
    assert marker_of(GPU).exists()
    assert f"the SM clock of {GPU} may still be locked" in capfd.readouterr().err
    assert clock.account({}) == LOCKED
    with job(None, timeout_s=0.5) as other:  # which measures under a lock nobody asked for
        pass
    values, marks = other.account({})
    assert marks == ["clock_left_locked"]
    assert values["clock_lock_reason"].startswith(
        "the lock of an earlier job could not be undone: nvidia-smi -rgc"
    )
    monkeypatch.setenv("UNDOING", "")
    with job(None) as third:
        pass
    assert not smi.locked
    assert not marker_of(GPU).exists()
    assert third.account({}) == ({}, [])


def test_a_lock_that_could_not_be_undone_is_no_matter_under_the_jobs_own(
    smi: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_a_lock(smi)
    monkeypatch.setenv("UNDOING", "fail")
    with job() as clock:
        assert smi.calls == [UNDO, LOCK]
    assert clock.account({}) == LOCKED
    assert marker_of(GPU).exists()


@pytest.mark.parametrize(
    ("seen", "marks"),
    [
        (1500.0, []),
        (1515.0, []),
        (1485.0, []),
        (1200.0, ["clock_not_locked"]),
        (1980.0, ["clock_not_locked"]),
    ],
)
def test_a_clock_seen_above_the_lock_or_only_below_it_was_not_locked(seen: float, marks: list[str]) -> None:
    with job() as clock:
        pass
    assert clock.account({"sm_clock_mhz_max": seen})[1] == marks
    assert clock.account({"sm_clock_mhz_max": None}) == LOCKED


# ---- in a job ----


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "phase": "timing",
        "device": "cuda",
        "environment": "somewhere",
        "implementation": {"name": "mine", "kernel": "naive", "options": {}},
        **changes,
    }


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(GPU, "NVIDIA H200", "580.65.06", card_uuid=GPU)
    monkeypatch.setattr("harness.job.gpus_of", lambda environment: [gpu])


def run(spec: dict[str, Any], smi: StandIn, **fields: Any) -> tuple[Any, list[str]]:
    """The record of a job, and the calls of nvidia-smi that there were when it did its work."""

    def work(kernel: Kernel, task: int, report_step: ReportStep) -> dict[str, Any]:
        return {"calls": smi.calls}

    with Supervision(spec, ROOT, time_limit_s=60.0, timed=True) as supervision:
        (outcome,) = supervision.run_without_device([1], work)
    return supervision.record(**{"status": outcome.status, **fields}), outcome.result["calls"]


@pytest.mark.usefixtures("gpu")
def test_a_job_whose_spec_asks_locks_the_clock_of_its_gpu(smi: StandIn) -> None:
    record, calls = run(spec(lock_sm_clock_mhz=1500), smi, values={"latency_ms": 1.0}, marks=["throttled"])
    assert calls == [LOCK]
    assert smi.calls == [LOCK, UNDO]
    assert record.values == {"latency_ms": 1.0, "locked_sm_clock_mhz": 1500}
    assert record.marks == ["throttled"]


@pytest.mark.usefixtures("gpu")
def test_a_job_whose_spec_does_not_ask_leaves_it_alone(smi: StandIn) -> None:
    record, _ = run(spec(), smi)
    assert smi.calls == []
    assert (record.values, record.marks) == ({}, [])


@pytest.mark.usefixtures("gpu")
def test_a_job_undoes_first_what_another_left(smi: StandIn) -> None:
    leave_a_lock(smi)
    record, calls = run(spec(phase="correctness"), smi)
    assert calls == smi.calls == [UNDO]
    assert (record.values, record.marks) == ({}, [])


@pytest.mark.usefixtures("gpu")
def test_the_record_of_a_job_that_could_not_lock_says_why(
    smi: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKING", "refuse")
    record, _ = run(spec(lock_sm_clock_mhz=1500), smi)
    assert record.marks == ["clock_not_locked"]
    assert "does not have permission" in record.values["clock_lock_reason"]
    failed, _ = run(spec(lock_sm_clock_mhz=1500), smi, status="error")
    assert failed.marks == []  # a mark is about a number
    assert "does not have permission" in failed.values["clock_lock_reason"]


def test_on_the_cpu_no_clock_is_locked(smi: StandIn) -> None:
    record, _ = run(spec(device="cpu", lock_sm_clock_mhz=1500), smi)
    assert smi.calls == []
    assert (record.values, record.marks) == ({}, [])
