"""Tying a process's life to its parent's, and finding what a process has started."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, how: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends; exit if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans(adopt: bool) -> None:
    """Whether a process whose parent ends becomes a child of this one, if this one is its ancestor."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


def child_processes(*, running: bool = False) -> set[int]:
    """The ids of this process's children; those alone that are `running` and no zombies, if so asked."""
    own = os.getpid()
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    state, parent = stream.read().rsplit(b")", 1)[1].split()[:2]
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            if int(parent) == own and not (running and state in (b"Z", b"X")):
                found.add(int(name))
    return found
