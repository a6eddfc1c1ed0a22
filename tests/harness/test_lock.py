"""One measurement at a time on a device, and a killed one leaves nothing to clean up."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.lock import FOLDER_VARIABLE, any_device_lock, device_lock

ROOT = Path(__file__).parents[2]
HOLD = """
import os, sys
from harness.lock import device_lock

if len(sys.argv) > 3:
    os.setuid(int(sys.argv[3]))
with device_lock(sys.argv[1], shared=sys.argv[2] == "shared", waiting=lambda text: print(text, flush=True)):
    print("held", flush=True)
    sys.stdin.readline()
print("released", flush=True)
"""


class Holder:
    """Another process that asks for a lock, and holds it until told."""

    def __init__(self, name: str, *, shared: bool = False, uid: int | None = None) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", HOLD, name, "shared" if shared else "exclusive"),
                *([] if uid is None else [str(uid)]),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def release(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def holder(name: str, *, shared: bool = False, uid: int | None = None) -> Iterator[Holder]:
    held = Holder(name, shared=shared, uid=uid)
    try:
        yield held
    finally:
        held.process.kill()
        held.process.communicate()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "locks"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


@pytest.mark.parametrize(("first", "second"), [(False, False), (False, True), (True, False)])
def test_a_lock_held_alone_keeps_others_out_and_they_say_so_once(first: bool, second: bool) -> None:
    with holder("GPU-1", shared=first) as one:
        assert one.says() == "held"
        with holder("GPU-1", shared=second) as two:
            assert two.says() == "waiting: another process is measuring on GPU-1"
            one.release()
            assert one.says() == "released"
            assert two.says() == "held"


def test_shared_holders_work_side_by_side() -> None:
    with holder("cpu", shared=True) as one, holder("cpu", shared=True) as two:
        assert one.says() == "held"
        assert two.says() == "held"


def test_two_devices_do_not_wait_for_each_other() -> None:
    with holder("GPU-1") as one, holder("GPU-2") as two:
        assert one.says() == "held"
        assert two.says() == "held"


def test_a_killed_holder_leaves_the_lock_free() -> None:
    with holder("cpu") as one:
        assert one.says() == "held"
        with holder("cpu") as two:
            assert two.says().startswith("waiting")
            one.process.send_signal(signal.SIGKILL)
            assert two.says() == "held"


def test_of_several_devices_the_first_that_is_free_is_held_and_where_none_is_it_waits_for_any() -> None:
    said: list[str] = []
    names = ["GPU-1", "GPU-2"]
    with any_device_lock(names, waiting=said.append) as first:
        with any_device_lock(names, waiting=said.append) as second:
            assert (first, second, said) == ("GPU-1", "GPU-2", [])
        with holder("GPU-2") as other:
            assert other.says() == "held"

            def free(sentence: str) -> None:
                said.append(sentence)
                other.release()

            with any_device_lock(names, waiting=free) as third:
                assert third == "GPU-2"
    assert said == ["waiting: other processes are measuring on GPU-1, GPU-2"]
    with any_device_lock(names, waiting=said.append) as again:
        assert again == "GPU-1"


def test_a_lock_is_free_after_its_block_raised() -> None:
    said: list[str] = []
    with pytest.raises(RuntimeError), device_lock("cpu", waiting=said.append):
        raise RuntimeError
    with device_lock("cpu", waiting=said.append):
        pass
    assert said == []


def test_a_forked_child_keeps_the_lock_while_it_lives() -> None:
    """The supervisor's child still uses the device when the supervisor has just been killed."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(reading)
        with device_lock("cpu"):
            child = os.fork()
            if child != 0:
                os.write(writing, str(child).encode())
            time.sleep(600)
        os._exit(1)
    os.close(writing)
    child = int(os.read(reading, 100))
    os.close(reading)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    with holder("cpu") as other:
        try:
            assert other.says().startswith("waiting")
        finally:
            os.kill(child, signal.SIGKILL)
        assert other.says() == "held"


def test_the_folder_is_where_the_variable_says(folder: Path) -> None:
    with device_lock("GPU-1"):
        assert [path.name for path in folder.iterdir()] == ["GPU-1.lock"]


def test_folder_and_file_are_open_to_every_user_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        with device_lock("cpu"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE((folder / "cpu.lock").stat().st_mode) == 0o666


@pytest.mark.usefixtures("as_root")
def test_two_users_keep_each_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's folder is closed to others.
    shared = Path(f"/tmp/attention-bench-test-{os.getpid()}")
    monkeypatch.setenv(FOLDER_VARIABLE, str(shared))
    try:
        with holder("cpu") as one:
            assert one.says() == "held"
            with holder("cpu", uid=65534) as two:
                assert two.says().startswith("waiting")
                one.release()
                assert two.says() == "held"
                with holder("cpu", uid=65533) as three:
                    assert three.says().startswith("waiting")
                    two.release()
                    assert three.says() == "held"
    finally:
        for path in shared.iterdir():
            path.unlink()
        shared.rmdir()
