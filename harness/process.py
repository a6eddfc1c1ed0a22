"""Tying a process's life to its parent's."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, how: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends; exit if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os._exit(1)
