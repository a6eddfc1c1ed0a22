"""Whatever a kernel does to its process, there is a reason and no number, and the next job is well."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.forkserver import ADDRESS_VARIABLE
from harness.supervisor import NO_FORKS
from tests.faults.bench import KERNELS, Bench, assert_kept, assert_measured, assert_no_number, until
from workflow.plan import CORRECTNESS

# What the kernel does, and the status and the reason that its row then has.
FAULTS = {
    "sigkill": (
        "error",
        "the process was killed by SIGKILL, perhaps by the system when memory ran out (in step: first call)",
    ),
    "sigsegv": ("error", "the process was killed by SIGSEGV (in step: first call)"),
    "abort": ("error", "the process was killed by SIGABRT (in step: first call)"),
    "os_exit": ("error", "the process exited with code 3 (in step: first call)"),
    "exit_as_if_well": ("error", "the process exited with code 0 (in step: first call)"),
    "sys_exit": ("error", "SystemExit: 4"),
    "memory_error": ("out_of_memory", "MemoryError"),
    "cuda_memory": (
        "out_of_memory",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ),
    "odd_message": ("error", r"ValueError: caf\udce9 \udcff"),
    "lives_on": ("error", f"it left a process running that it had forked; {NO_FORKS}"),
    "closes_files": (
        "error",
        "its result pipe was closed, perhaps by the kernel, which must not close files it did not open",
    ),
    "writes_to_files": (
        "error",
        "something else than results came through its result pipe (in step: first call)",
    ),
    "swallows": ("wrong", "before timing: "),
}
HANGS = ("hang", "hang_on", "sigstop")


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_goes_wrong_has_a_reason_and_no_number(bench: Bench, pids: Path, fault: str) -> None:
    job = bench.job()
    before = bench.kept()
    ended = bench.run(job, FAULT=fault, PIDS=str(pids))
    status, reason = FAULTS[fault]
    assert ended.code == 0, ended.said
    assert_no_number(ended.record)
    assert ended.record is not None
    assert ended.record.status == status
    assert str(ended.record.reason).startswith(reason)
    assert_kept(before, bench.kept(), job)
    assert_measured(bench.run(job))


def test_a_kernel_that_forks_and_comes_back_in_both_processes_is_not_measured(bench: Bench) -> None:
    job = bench.job()
    ended = bench.run(job, FAULT="comes_back_twice")
    assert_no_number(ended.record)
    assert ended.record is not None
    assert NO_FORKS in str(ended.record.reason)
    assert_measured(bench.run(job))


@pytest.mark.parametrize("fault", HANGS)
def test_a_kernel_that_hangs_is_ended_in_time(bench: Bench, fault: str) -> None:
    job = bench.job()
    before = bench.kept()
    ended = bench.run(job, FAULT=fault, time_limit_s=1.5)
    assert_no_number(ended.record)
    assert ended.record is not None
    assert ended.record.status == "timeout"
    assert ended.record.reason == "did not finish within 1.5 s (in step: first call)"
    assert_kept(before, bench.kept(), job)
    assert_measured(bench.run(job))


def test_what_a_kernel_forked_is_gone_with_its_job(
    bench: Bench, pids: Path, is_running: Callable[[int], bool]
) -> None:
    bench.run(bench.job(), FAULT="lives_on", PIDS=str(pids))
    left = [int(pid) for pid in pids.read_text().split()]
    assert left
    assert not any(is_running(pid) for pid in left)


def test_a_daemon_that_a_kernel_starts_does_not_keep_the_device(
    bench: Bench, pids: Path, is_running: Callable[[int], bool]
) -> None:
    """It is in a session of its own and has the lock, which it inherited: the next job would wait forever."""
    bench.run(bench.job(CORRECTNESS), FAULT="daemon", PIDS=str(pids))
    left = [int(pid) for pid in pids.read_text().split()]
    assert left
    assert not any(is_running(pid) for pid in left)
    ended = bench.run(bench.job())
    assert_measured(ended)
    assert "waiting" not in ended.said


def test_a_kernel_that_prints_without_end_fills_its_log_and_nothing_else(
    bench: Bench, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w") as log:
        ended = bench.run(bench.job(CORRECTNESS), FAULT="prints_much", stdout=log)
    assert ended.record is not None
    assert ended.record.status == "ok"
    assert (tmp_path / "log").stat().st_size >= 4 * 1_000_000
    assert "as many lines" not in bench.path(bench.job(CORRECTNESS)).read_text()


def test_a_kernel_that_prints_where_no_space_is_left_has_a_reason(bench: Bench) -> None:
    job = bench.job()
    with open("/dev/full", "w") as log:
        ended = bench.run(job, FAULT="prints", stdout=log)
    assert_no_number(ended.record)
    assert ended.record is not None
    assert ended.record.reason == "OSError: [Errno 28] No space left on device"
    assert_measured(bench.run(job))


def test_a_kernel_that_changes_the_folder_does_not_move_its_record(bench: Bench) -> None:
    ended = bench.run(bench.job(), FAULT="chdir")
    assert_measured(ended)


def test_a_kernel_that_kills_its_job_leaves_no_record_and_no_process(
    bench: Bench, is_running: Callable[[int], bool]
) -> None:
    job = bench.job()
    before = bench.kept()
    process = bench.start(job, FAULT="kills_its_job")
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert bench.kept() == before
    ended = bench.run(job)
    assert_measured(ended)


# ---- the kernel's file ----


@contextmanager
def kernel_file(bench: Bench) -> Iterator[Path]:
    path = bench.folder / "kernels" / "faulty.py"
    try:
        yield path
    finally:
        shutil.copy(KERNELS / "faulty.py", path)


def test_a_kernel_that_was_deleted_after_its_job_was_planned(bench: Bench) -> None:
    job = bench.job()
    before = bench.kept()
    with kernel_file(bench) as path:
        path.unlink()
        ended = bench.run(job)
    assert_no_number(ended.record)
    assert ended.record is not None
    assert "kernels/faulty.py does not import: ModuleNotFoundError" in str(ended.record.reason)
    assert_kept(before, bench.kept(), job)
    assert_measured(bench.run(job))


def test_a_kernel_with_a_syntax_error(bench: Bench) -> None:
    job = bench.job()
    before = bench.kept()
    with kernel_file(bench) as path:
        path.write_text("def attention(q, k, v):\n    return (q\n")
        ended = bench.run(job)
    assert_no_number(ended.record)
    assert ended.record is not None
    assert "kernels/faulty.py does not import: SyntaxError: '(' was never closed" in str(ended.record.reason)
    assert "faulty.py, line 2" in str(ended.record.reason)
    assert_kept(before, bench.kept(), job)
    assert_measured(bench.run(job))


@pytest.mark.parametrize("name", ["faulty", "right"])
def test_a_kernel_that_was_edited_after_its_job_was_planned_is_not_measured(bench: Bench, name: str) -> None:
    """Its number would stand under the code before the edit. `right` is what `faulty` imports."""
    job = bench.job()
    path = bench.folder / "kernels" / f"{name}.py"
    source = path.read_text()
    try:
        path.write_text(source + "\nEDITED = True\n")
        ended = bench.run(job)
    finally:
        path.write_text(source)
    assert_no_number(ended.record)
    assert ended.record is not None
    assert ended.record.reason == (
        "kernels/faulty.py, or what it imports, was changed after this job was planned:"
        " run the same command again"
    )
    assert_measured(bench.run(job))


@pytest.mark.parametrize("server", [True, False])
def test_a_job_whose_streams_nobody_reads_any_more_measures_all_the_same(bench: Bench, server: bool) -> None:
    process = bench.start(bench.job(), **({} if server else {ADDRESS_VARIABLE: ""}))
    assert process.stdout is not None
    process.stdout.close()
    until(lambda: process.poll() is not None)
    ended = bench.ended(bench.job(), process.wait(), "")
    assert_measured(ended)
