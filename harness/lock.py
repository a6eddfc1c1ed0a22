"""One measurement at a time on one device, whoever asks: file locks outside the checkout.

The operating system drops a held lock with the last process that holds it, so a killed run leaves
nothing to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FOLDER_VARIABLE = "ATTENTION_BENCH_LOCKS"
DEFAULT_FOLDER = "/tmp/attention-bench-locks"
SECONDS_BETWEEN_TRIES = 0.05


class LockFault(Exception):
    """A lock that cannot be had, whoever holds it; the message is one line for a person."""


@contextmanager
def device_lock(name: str, *, shared: bool = False, waiting: Callable[[str], None] = print) -> Iterator[None]:
    """Hold the lock of the device called `name` (a GPU's UUID, or "cpu").

    A `shared` holder tolerates other shared ones: checks that are not timed may run side by side.
    `waiting` is told once, in a sentence, when the lock is taken by another process. Raises LockFault where
    there can be no lock: without one nothing is measured.
    """
    with _device_locks(name):
        descriptor = _hold(
            _lock_file(name),
            fcntl.LOCK_SH if shared else fcntl.LOCK_EX,
            lambda: waiting(f"waiting: another process is measuring on {name}"),
        )
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def any_device_lock(names: Sequence[str], *, waiting: Callable[[str], None] = print) -> Iterator[str]:
    """Hold the lock of one of these devices, the first that is free, and say which.

    As `device_lock` in all else.
    """
    if len(names) == 1:
        with device_lock(names[0], waiting=waiting):
            yield names[0]
        return
    with _device_locks(", ".join(names)):
        name, descriptor = _hold_any(
            names, lambda: waiting(f"waiting: other processes are measuring on {', '.join(names)}")
        )
    try:
        yield name
    finally:
        os.close(descriptor)


@contextmanager
def _device_locks(name: str) -> Iterator[None]:
    """See to the folder of the devices' locks, and say what to do where it cannot be used."""
    folder = _lock_file(name).parent
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            # As /tmp itself: each user of the machine takes part.
            folder.chmod(0o1777)
        yield
    except OSError as fault:
        raise LockFault(
            f"nothing can be measured on {name} without its lock, and {folder} gives none ({fault.strerror}):"
            f" remove it, or name in {FOLDER_VARIABLE} a folder that all users of this machine can write to"
        ) from fault


def _lock_file(name: str) -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE, DEFAULT_FOLDER)) / f"{name}.lock"


def hold_checkout(root: Path, waiting: Callable[[str], None]) -> int:
    """Hold the lock of a checkout's results until this process ends; returns the open descriptor.

    Two runs in one checkout would delete each other's records. The second waits here, before it looks
    at what there is to do, and finds the first one's work done. The lock goes with the process, also
    when it is killed; processes started from it do not inherit it. Raises LockFault where there is no
    folder for it.
    """
    folder = root / "results"
    try:
        folder.mkdir(exist_ok=True)
        return _hold(
            folder / ".run.lock",
            fcntl.LOCK_EX,
            lambda: waiting("waiting: another run is going on in this checkout"),
        )
    except OSError as fault:
        raise LockFault(
            f"{folder} can take no results ({fault.strerror}): it must be a folder this user can write to"
        ) from fault


def _hold_any(names: Sequence[str], waiting: Callable[[], None]) -> tuple[str, int]:
    """The first device that is free, and an open descriptor of its lock's file, locked."""
    waited = False
    while True:
        for name in names:
            with contextlib.suppress(_Taken):
                return name, _hold(_lock_file(name), fcntl.LOCK_EX, _do_not_wait)
        if not waited:
            with contextlib.suppress(OSError):  # whoever reads this may be gone
                waiting()
        waited = True
        time.sleep(SECONDS_BETWEEN_TRIES)  # the system waits for one lock alone


class _Taken(Exception):
    """A lock that another process holds, for who does not wait."""


def _do_not_wait() -> None:
    raise _Taken


def _hold(path: Path, kind: int, waiting: Callable[[], None]) -> int:
    """An open descriptor of the file, locked; `waiting` is called once if that takes a while."""
    waited = False
    while True:
        descriptor = _open(path)
        try:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waited:
                    with contextlib.suppress(OSError):  # whoever reads this may be gone
                        waiting()
                waited = True
                fcntl.flock(descriptor, kind)
            if _is_still(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # somebody cleaned up: others lock the file that is there now


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    try:
        # Without O_CREAT first: Linux refuses it for another user's file in a sticky folder.
        # Read-only is enough for flock, and all that another user's umask may have left us.
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with contextlib.suppress(PermissionError):  # another user made it at the same moment
            os.fchmod(descriptor, 0o666)
        return descriptor
