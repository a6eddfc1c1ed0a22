"""A disk that is full, read-only or has something else in the way: nothing that was there is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.forkserver import ADDRESS_VARIABLE, ForkServer
from harness.lock import FOLDER_VARIABLE, LockFault, device_lock, hold_checkout
from harness.record import Record, WriteError, history_folder, read_record, write_record
from tests.faults.bench import Bench, assert_kept, assert_measured
from tests.workflow.checkout import small_config
from workflow.config import load_config
from workflow.plan import CORRECTNESS, MEMORY, Plan
from workflow.session import begin_run
from workflow.tables import load, stale_records

ROOT = Path(__file__).parents[2]


def record(number: int) -> Record:
    values = {"latency_ms": float(number)}
    return Record(
        phase="timing", spec={"phase": "timing"}, status="ok", values=values, started_at=f"{number}"
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "results" / "environment" / "timing" / "512.json"
    write_record(record(1), path)
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- full ----

STEPS = [(os, "fsync"), (os, "chmod"), (os, "replace"), (tempfile, "mkstemp"), (os, "fdopen")]


@pytest.mark.parametrize(("module", "step"), STEPS, ids=[step for _, step in STEPS])
@pytest.mark.parametrize("file", ["history", "record"])
def test_a_disk_that_is_full_at_any_step_of_writing_leaves_what_was_there(
    path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, step: str, file: str
) -> None:
    before = files(path.parents[2])
    real = getattr(module, step)
    calls = 0

    def fail(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == {"history": 1, "record": 2}[file]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **options)

    monkeypatch.setattr(module, step, fail)
    with pytest.raises(WriteError) as caught:
        write_record(record(2), path)
    monkeypatch.undo()
    named = path if file == "record" else history_folder(path)
    assert str(caught.value).startswith(str(named))
    assert str(caught.value).endswith(
        "cannot be written: No space left on device. What was there is untouched."
        " Free some space, and run the same command again."
    )
    after = files(path.parents[2])
    assert after | before == after
    assert len(after) == len(before) + (file == "record")  # the copy in the history is whole by then
    assert read_record(path) == record(1)

    write_record(record(3), path)
    assert read_record(path) == record(3)


def test_a_limit_on_the_size_of_files_is_met_half_way_through_the_text(path: Path) -> None:
    """By the kernel, in the middle of a write: a part of the text is in the file already."""
    before = files(path.parents[2])
    samples = {"cold_ms": [[0.5] * 10_000]}
    long = Record(phase="timing", spec={}, status="ok", values={"latency_ms": 0.5}, samples=samples)
    said, saying = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
            write_record(long, path)
        except WriteError as fault:
            os.write(saying, str(fault).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(saying)
    with os.fdopen(said) as stream:
        text = stream.read()
    assert "cannot be written: File too large" in text
    assert "Free some space" in text
    assert files(path.parents[2]) == before
    write_record(long, path)
    assert read_record(path) == long


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount a file system: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_job_whose_disk_is_full_says_so_and_goes_on_once_there_is_space(bench: Bench) -> None:
    """A real file system of 256 KiB, filled to the last byte."""
    job = bench.job(MEMORY)
    results = bench.folder / "results"
    with mounted(results, "-t", "tmpfs", "-o", "size=256k", "tmpfs"):
        assert bench.run(job).code == 0
        before = bench.kept()
        filling = results / "filling"
        with contextlib.suppress(OSError), filling.open("wb", buffering=0) as stream:
            while True:
                stream.write(b"\0" * 512)
        ended = bench.run(job)
        assert ended.code != 0
        assert "No space left on device" in ended.said
        assert "Free some space, and run the same command again." in ended.said
        assert bench.kept() == before
        filling.unlink()
        ended = bench.run(job)
        assert ended.code == 0
        assert ended.record is not None
        assert ended.record.status == "ok"
        assert len(bench.kept()) == len(before) + 1
        assert_kept(before, bench.kept(), job)


# ---- not writable ----


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """For root too, whom permissions do not stop."""
    root = os.geteuid() == 0
    lock, unlock = (["chattr", "+i"], ["chattr", "-i"]) if root else (["chmod", "555"], ["chmod", "755"])
    done = subprocess.run([*lock, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this file system cannot make a folder read-only for root: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run([*unlock, str(folder)], check=True)


@pytest.mark.parametrize("what", ["record", "history"])
def test_a_folder_that_cannot_be_written_is_found_before_anything_is_measured(
    bench: Bench, what: str
) -> None:
    job = bench.job(MEMORY)
    assert bench.run(job).code == 0
    before = bench.kept()
    path = bench.path(job)
    folder = path.parent if what == "record" else history_folder(path)
    with read_only(folder):
        ended = bench.run(job, FAULT="hang")
    assert ended.code == 2
    assert f"error: --output: {folder.relative_to(bench.folder)}" in ended.said
    assert "Let this user write there, and run the same command again." in ended.said
    assert bench.kept() == before
    ended = bench.run(job)
    assert ended.record is not None
    assert ended.record.status == "ok"
    assert_kept(before, bench.kept(), job)


def test_a_record_that_is_a_folder_is_found_before_anything_is_measured(bench: Bench) -> None:
    job = bench.job(MEMORY)
    assert bench.run(job).code == 0
    before = {name: content for name, content in bench.kept().items() if name != job.path}
    bench.path(job).unlink()
    bench.path(job).mkdir()
    ended = bench.run(job, FAULT="hang")
    assert ended.code == 2
    assert f"{job.path} cannot be written: Is a directory" in ended.said
    assert "Move away what is in its place, and run the same command again." in ended.said
    assert load(job, bench.folder).status == "error"
    bench.path(job).rmdir()
    ended = bench.run(job)
    assert ended.record is not None
    assert ended.record.status == "ok"
    assert_kept(before, bench.kept())


def test_a_lock_that_cannot_be_taken_is_one_line(tmp_path: Path, bench: Bench) -> None:
    (tmp_path / "file").write_text("not a folder\n")
    before = bench.kept()
    ended = bench.run(bench.job(), **{FOLDER_VARIABLE: str(tmp_path / "file")})
    assert ended.code == 1
    assert "Traceback" not in ended.said
    assert len(ended.said.splitlines()) == 1
    assert str(tmp_path / "file") in ended.said
    assert_kept(before, bench.kept())


def test_a_file_where_the_results_folder_should_be(tmp_path: Path, bench: Bench) -> None:
    (tmp_path / "results").write_text("not a folder\n")
    with pytest.raises(LockFault) as caught:
        hold_checkout(tmp_path, pytest.fail)
    assert str(caught.value) == (
        f"{tmp_path}/results can take no results (File exists): it must be a folder this user can write to"
    )
    assert (tmp_path / "results").read_text() == "not a folder\n"
    (tmp_path / "results").unlink()
    os.close(hold_checkout(tmp_path, pytest.fail))


@pytest.mark.parametrize("what", ["results", "results/history"])
def test_a_run_does_not_begin_where_its_results_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.delenv("ATTENTION_BENCH_RUN", raising=False)
    folder = tmp_path / what
    folder.mkdir(parents=True)
    pid = os.fork  # the lock is the process's: each begin in one of its own

    def begin() -> tuple[int, str]:
        reading, writing = os.pipe()
        child = pid()
        if child == 0:
            code = 1
            try:
                os.close(reading)
                begin_run(tmp_path)
                code = 0
            except SystemExit as end:
                os.write(writing, str(end.code).encode())
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading) as stream:
            said = stream.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said

    with read_only(folder):
        code, said = begin()
        assert code == 1
        assert str(folder) in said
        assert "Operation not permitted" in said or "Permission denied" in said
    assert begin() == (0, "")


# ---- what is there is not what it should be ----

DAMAGE: dict[str, Callable[[str], bytes]] = {
    "half": lambda text: text[: len(text) // 2].encode(),
    "empty": lambda text: b"",
    "zeros": lambda text: b"\0" * len(text),  # what a crash of the machine can leave of a file
    "binary": lambda text: b"\xff\xfe" + text.encode(),
    "another version": lambda text: text.replace('"schema_version": 1', '"schema_version": 2').encode(),
    "nested": lambda text: b"[" * 100_000,
    "no object": lambda text: text.replace('"circumstances": {', '"circumstances": [], "x": {').encode(),
    "values a list": lambda text: b'{"schema_version":1,"phase":"p","spec":{},"status":"ok","values":[]}',
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_an_error_that_names_it_and_is_measured_again(bench: Bench, damage: str) -> None:
    job = bench.job(CORRECTNESS)
    path = bench.path(job)
    if not path.exists() or load(job, bench.folder).status != "ok":
        assert bench.run(job).code == 0
    assert job.path not in stale_records(bench.plan, bench.folder)
    history = {name: content for name, content in bench.kept().items() if name != job.path}
    path.write_bytes(DAMAGE[damage](path.read_text()))
    found = load(job, bench.folder)
    assert (found.status, found.values, found.cells) == ("error", {}, [])
    assert str(found.reason).startswith(f"{path}: ")
    assert job.path in stale_records(bench.plan, bench.folder)
    ended = bench.run(job)
    assert ended.record is not None
    assert ended.record.status == "ok"
    assert_kept(history, bench.kept())
    assert job.path not in stale_records(bench.plan, bench.folder)


@pytest.mark.parametrize("text", ['{"options":', "", "[]", '{"winner": 1}', '{"options": 3}'])
def test_a_winner_file_that_cannot_be_read_is_tuned_again(tmp_path: Path, text: str) -> None:
    config = small_config(triton="triton_flash")
    config["device"] = "cuda"
    plan = Plan(load_config(config, ROOT / "kernels"), "cuda", "gpu", ROOT)
    tuning = next(job for job in plan.jobs() if job.phase == "tuning")
    winner = tmp_path / str(plan.winner_file("tiny", "triton", tuning.seq_len or 0))
    tuned = Record(phase="tuning", spec=tuning.spec, status="ok", started_at="1")
    write_record(tuned, tmp_path / tuning.path)
    winner.write_text('{"options":{}}\n')
    assert tuning.path not in stale_records(plan, tmp_path)
    winner.write_text(text)
    assert tuning.path in stale_records(plan, tmp_path)


# ---- locks and sockets ----


def test_where_there_can_be_no_lock_nothing_is_measured(bench: Bench, tmp_path: Path) -> None:
    job = bench.job()
    before = bench.kept()
    (tmp_path / "locks").write_text("a file\n")
    ended = bench.run(job, **{FOLDER_VARIABLE: str(tmp_path / "locks")})
    assert ended.code == 1
    assert (
        f"nothing can be measured on cpu without its lock, and {tmp_path}/locks gives none (File exists):"
        f" remove it, or name in {FOLDER_VARIABLE} a folder that all users of this machine can write to"
    ) in ended.said
    assert bench.kept() == before
    assert_measured(bench.run(job))


def test_a_lock_file_that_was_cleaned_away_does_not_let_two_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits on the file that is gone must not take it for the one that others lock."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    hold = (
        "import sys; from harness.lock import device_lock\n"
        "with device_lock('cpu', waiting=lambda text: print(text, flush=True)):\n"
        "    print('held', flush=True); sys.stdin.readline()\n"
    )

    def holder() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", hold],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hears(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    with holder() as waiter, holder() as third:
        with device_lock("cpu"):
            for process in (waiter, third):
                heard = hears(process)
                assert heard.startswith("waiting")
            (tmp_path / "cpu.lock").unlink()
        # Both wake, and both find that their file is gone: one of them may have the new one.
        first, second = (waiter, third) if _readable(waiter, third) is waiter else (third, waiter)
        assert hears(first) == "held"
        assert _readable(second, seconds=0.3) is None
        assert first.stdin is not None
        first.stdin.write("\n")
        first.stdin.flush()
        assert hears(second) == "held"
        second.communicate("\n")


def _readable(*processes: subprocess.Popen[str], seconds: float = 10.0) -> subprocess.Popen[str] | None:
    ready = select.select([process.stdout for process in processes], [], [], seconds)[0]
    return next((process for process in processes if process.stdout in ready), None)


@pytest.mark.parametrize("folder", ["much too long a name " * 8, "none"])
def test_a_fork_server_without_a_place_for_its_socket_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    place = tmp_path / folder.strip()
    if folder != "none":
        place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv(ADDRESS_VARIABLE, "left over")
    server = ForkServer(ROOT)
    server.start()
    assert ADDRESS_VARIABLE not in os.environ  # a job would look for it there
    assert capsys.readouterr().err.startswith("no fork server (")
    server.stop()
    assert not place.exists() or list(place.iterdir()) == []
