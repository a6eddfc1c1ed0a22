"""One measurement at a time on one device, whoever asks: file locks outside the checkout.

The operating system drops a held lock with the last process that holds it, so a killed run leaves
nothing to clean up.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER_VARIABLE = "ATTENTION_BENCH_LOCKS"
DEFAULT_FOLDER = "/tmp/attention-bench-locks"


@contextmanager
def device_lock(name: str, *, shared: bool = False, waiting: Callable[[str], None] = print) -> Iterator[None]:
    """Hold the lock of the device called `name` (a GPU's UUID, or "cpu").

    A `shared` holder tolerates other shared ones: checks that are not timed may run side by side.
    `waiting` is told once, in a sentence, when the lock is taken by another process.
    """
    descriptor = _open(name)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting(f"waiting: another process is measuring on {name}")
            fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def _open(name: str) -> int:
    folder = Path(os.environ.get(FOLDER_VARIABLE, DEFAULT_FOLDER))
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        # As /tmp itself: each user of the machine takes part.
        folder.chmod(0o1777)
    path = folder / f"{name}.lock"
    try:
        # Without O_CREAT first: Linux refuses it for another user's file in a sticky folder.
        # Read-only is enough for flock, and all that another user's umask may have left us.
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.fchmod(descriptor, 0o666)
        return descriptor


def hold_checkout(root: Path, waiting: Callable[[str], None]) -> int:
    """Hold the lock of a checkout's results until this process ends; returns the open descriptor.

    Two runs in one checkout would delete each other's records. The second waits here, before it looks
    at what there is to do, and finds the first one's work done. The lock goes with the process, also
    when it is killed; processes started from it do not inherit it.
    """
    path = root / "results" / ".run.lock"
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting("waiting: another run is going on in this checkout")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor
