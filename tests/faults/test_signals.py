"""Killed at any moment: what was there is whole, the device is free, and the next job is well."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from harness import job as job_module
from harness.forkserver import ADDRESS_VARIABLE, ForkServer
from harness.job import Supervision
from harness.lock import FOLDER_VARIABLE, hold_checkout
from harness.record import history_folder, read_record, write_record
from tests.faults.bench import Bench, assert_kept, assert_measured, until
from workflow.plan import CORRECTNESS, MEMORY

ROOT = Path(__file__).parents[2]


def family(pid: int) -> list[int]:
    """A process and all that came from it, the oldest first."""
    parents: dict[int, list[int]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(process.name))
    found = [pid]
    for member in found:
        found += sorted(parents.get(member, []))
    return found


def jobs_of(bench: Bench) -> list[int]:
    """The processes that the fork server has started: jobs, then their measuring children."""
    assert bench.server is not None
    assert bench.server._process is not None
    return family(bench.server._process.pid)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(10))
def test_a_job_that_is_killed_at_a_random_moment(bench: Bench, moment: int) -> None:
    """SIGKILL to the asking script, to the job or to the process that measures, whichever it hits."""
    chance = random.Random(moment)
    job = bench.job(MEMORY)
    if moment == 0:
        bench.run(job)
    before = bench.kept()
    process = bench.start(job)
    time.sleep(chance.uniform(0.0, 0.45))
    victims = [process.pid, *jobs_of(bench)]
    for victim in chance.sample(victims, chance.randint(1, len(victims))):
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate(timeout=60)
    until(lambda: not jobs_of(bench))
    after = bench.kept()
    assert_kept(before, after, job)
    left = read_record(bench.path(job))  # whole: the former one, or a new one
    # Only the death of the process that measures alone leaves a job that can write down what happened.
    assert left.status == "ok" or "killed by SIGKILL" in str(left.reason)
    assert left.status == "ok" or "peak_memory_bytes" not in left.values
    ended = bench.run(job)
    assert ended.record is not None
    assert ended.record.status == "ok"
    assert "waiting" not in ended.said
    assert_kept(after, bench.kept(), job)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_job_that_is_told_to_end_leaves_no_record_and_no_process(bench: Bench, how: signal.Signals) -> None:
    job = bench.job(CORRECTNESS)
    bench.run(job)
    before = bench.kept()
    process = bench.start(job, FAULT="hang")
    until(lambda: len(jobs_of(bench)) == 2)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    until(lambda: not jobs_of(bench))
    assert bench.kept() == before
    ended = bench.run(job)
    assert ended.record is not None
    assert ended.record.status == "ok"


@pytest.fixture
def another_server(bench: Bench) -> Iterator[str]:
    """The address of a fork server for the same checkout, which a test may kill; it is told by `address`."""
    server = ForkServer(bench.folder)
    server.start()
    address = os.environ.pop(ADDRESS_VARIABLE)
    assert server._process is not None
    yield f"{server._process.pid} {address}"
    server.stop()


@pytest.mark.slow
def test_a_fork_server_that_is_killed_in_mid_run(bench: Bench, another_server: str) -> None:
    pid, address = another_server.split(" ", 1)
    job = bench.job(CORRECTNESS)
    bench.run(job)
    before = bench.kept()
    process = bench.start(job, FAULT="hang", **{ADDRESS_VARIABLE: address})
    until(lambda: len(family(int(pid))) == 3)
    os.kill(int(pid), signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.endswith("the fork server ended before the job did; run the same command again\n")
    assert bench.kept() == before

    ended = bench.run(job, **{ADDRESS_VARIABLE: address})  # which imports torch itself
    assert ended.record is not None
    assert ended.record.status == "ok"
    assert "waiting" not in ended.said


def test_a_lock_whose_holder_is_killed_is_free_for_who_waits(bench: Bench) -> None:
    job = bench.job()
    holder = bench.start(bench.job(MEMORY), FAULT="hang")
    until(lambda: len(jobs_of(bench)) == 2)
    waiter = bench.start(job)
    until(lambda: len(jobs_of(bench)) == 3)
    time.sleep(0.3)
    assert waiter.poll() is None
    holder.kill()
    holder.communicate()
    said, _ = waiter.communicate(timeout=60)
    assert "waiting: another process is measuring on cpu" in said
    assert_measured(bench.ended(job, waiter.returncode, said))


def test_jobs_for_one_device_never_overlap_though_some_are_killed(bench: Bench, tmp_path: Path) -> None:
    """Timing and memory, asked for at once by five scripts, two of which die; `right` notes its calls."""
    log = tmp_path / "calls"
    phases = ("timing", "memory", "timing", "memory", "memory")
    scripts = [bench.start(bench.job(phase, "right"), CALL_LOG=str(log)) for phase in phases]
    until(lambda: log.exists() and len(log.read_text().splitlines()) > 3)
    for script in scripts[:2]:
        script.kill()
    for script in scripts:
        script.communicate(timeout=60)
    assert [script.returncode for script in scripts[2:]] == [0, 0, 0]
    spans: dict[str, list[float]] = {}
    for line in log.read_text().splitlines():
        pid, began, ended = line.split()
        spans.setdefault(pid, []).extend((float(began), float(ended)))
    assert len(spans) >= 3
    in_order = sorted((min(times), max(times)) for times in spans.values())
    for (_, ended_at), (began_at, _) in itertools.pairwise(in_order):
        assert ended_at < began_at


# ---- two users ----

WAIT_AS = """
import os, sys
from pathlib import Path
from harness.lock import hold_checkout

os.setuid(int(sys.argv[2]))
hold_checkout(Path(sys.argv[1]), lambda text: print(text, flush=True))
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.mark.usefixtures("as_root")
def test_two_users_in_one_checkout_take_turns(is_running: Callable[[int], bool]) -> None:
    """The second cannot write the first one's lock file, and need not."""
    checkout = Path(f"/tmp/attention-bench-test-{os.getpid()}")  # pytest's own folder is closed to others
    (checkout / "results").mkdir(parents=True)
    before = os.umask(0o077)
    try:
        held = hold_checkout(checkout, pytest.fail)
    finally:
        os.umask(before)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", WAIT_AS, str(checkout), "65534"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting: another run is going on in this checkout\n"
            os.close(held)
            assert second.stdout.readline() == "held\n"
            second.communicate("\n")
    finally:
        shutil.rmtree(checkout)


# ---- the system's clock ----


def test_a_clock_that_goes_backwards_loses_no_record_and_spoils_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    path = tmp_path / "results" / "environment" / "timing" / "512.json"
    spec: dict[str, Any] = {"phase": "timing", "device": "cpu"}
    noon = datetime(2026, 3, 29, 12, tzinfo=UTC)

    class Backwards(datetime):
        """Each look at it is an hour before the one before; now and then it stands still."""

        looks = 0

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            cls.looks += 1
            return noon - timedelta(hours=cls.looks // 4)

    monkeypatch.setattr(job_module, "datetime", Backwards)
    monkeypatch.setattr(time, "time", lambda: (noon - timedelta(days=Backwards.looks)).timestamp())
    records = []
    for number in range(5):
        with Supervision(spec, ROOT, time_limit_s=60.0, timed=True) as supervision:
            time.sleep(0.01)
        records.append(supervision.record(status="ok", values={"number": number, "latency_ms": 1.0}))
        write_record(records[-1], path)
    assert read_record(path) == records[-1]
    kept = [read_record(copy) for copy in history_folder(path).iterdir()]
    assert sorted(kept, key=lambda record: record.values["number"]) == records
    assert all(0.01 <= record.duration_s < 10.0 for record in records)
    starts = [record.started_at for record in records]
    assert starts == sorted(starts, reverse=True)
