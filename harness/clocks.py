"""A GPU's SM clock, locked while a job is timed, and let go of however the job ends.

`nvidia-smi -lgc` locks the clock of a GPU for everyone until somebody resets it (`-rgc`), so what must
not happen is that a job locks it and dies. The locking is therefore done by a process of its own, the
keeper, which the job forks while it holds the device's lock. The keeper

1. leaves a marker beside the device's lock file: from here on the clock may be locked;
2. locks the clock, and tells the job how that went; where it failed, perhaps half-way, it goes on with 4;
3. sleeps until it gets the one signal it waits for, from the job at its end, or from the kernel when the
   job is gone in whatever way (PR_SET_PDEATHSIG), SIGKILL included;
4. undoes the lock, removes the marker, and ends.

Why it cannot undo a lock that a later job has taken since: a forked process inherits the device's lock
and holds it until it ends, so that nobody gets the device before step 4 is done. Why nothing else ends
it: it is in a session of its own, out of reach of Ctrl-C and of the signal to a measuring child's group.
If it is killed all the same (the whole machine, a batch system's clean-up), the marker is still there,
and whoever takes the device next, locking or not, undoes the lock first.

What an administrator had set before cannot be asked for, and does not come back.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from harness.lock import DEFAULT_FOLDER, FOLDER_VARIABLE, LockFault, device_lock
from harness.process import die_with_parent
from harness.record import write_atomically

NVIDIA_SMI = "nvidia-smi"
NVIDIA_SMI_TIMEOUT_S = 10.0
SECONDS_TO_DIE = 2.0
STEP_MHZ = 15  # the distance of two clocks a GPU can run at: it takes the nearest one

NOT_LOCKED = "clock_not_locked"
LEFT_LOCKED = "clock_left_locked"

# How nvidia-smi says that it has not even tried: not available on this device, no permission; or it calls
# what the device cannot do a warning, and ends with 0.
REFUSAL_CODES = (3, 4)
REFUSAL_WORDS = ("not supported", "permission")


class Clock:
    """The SM clock of a GPU during a job: locked at `mhz`, or left alone where that is None.

    Used in a `with`, while the device's lock is held. Undoes what an earlier job left behind. Where the
    clock cannot be locked the job goes on without, and `account` says why.
    """

    def __init__(self, uuid: str, mhz: int | None, timeout_s: float = NVIDIA_SMI_TIMEOUT_S) -> None:
        self._uuid = uuid
        self._mhz = mhz
        self._timeout_s = timeout_s
        self._keeper: int | None = None
        self._failure: str | None = None
        self._left: str | None = None

    def __enter__(self) -> Clock:
        left = undo_leftover(self._uuid, self._timeout_s)
        self._left = left and f"the lock of an earlier job could not be undone: {left}"
        if self._mhz is not None:
            self._failure = self._lock(self._mhz)
            if self._failure is None:
                self._left = None  # it is our lock now
            else:
                _say(f"the SM clock is not locked at {self._mhz} MHz: {self._failure}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper is None:
            return
        if self._ended(within_s=0.0):
            if not marker_of(self._uuid).exists():
                self._failure = self._failure or "the lock was undone before the measurement had ended"
        else:
            os.kill(self._keeper, signal.SIGTERM)
            if not self._ended(within_s=self._patience_s):
                _say(f"process {self._keeper} does not end; the SM clock of {self._uuid} may still be locked")
                return
        undo_leftover(self._uuid, self._timeout_s)  # nothing, unless the keeper was killed or could not

    def account(self, values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """What a record with these values says of the clock: values to add, and marks."""
        failure = self._failure
        seen = values.get("sm_clock_mhz_max")
        if self._mhz is not None and failure is None and seen is not None:
            if seen > self._mhz + STEP_MHZ:
                failure = f"nvidia-smi locked it at {self._mhz} MHz, but it was seen at {seen:g} MHz"
            elif seen < self._mhz - STEP_MHZ:
                failure = f"nvidia-smi locked it at {self._mhz} MHz, but it never exceeded {seen:g} MHz"
        marks = [mark for mark, reason in ((NOT_LOCKED, failure), (LEFT_LOCKED, self._left)) if reason]
        if marks:
            return {"clock_lock_reason": "; ".join(filter(None, (failure, self._left)))}, marks
        return ({} if self._mhz is None else {"locked_sm_clock_mhz": self._mhz}), []

    @property
    def _patience_s(self) -> float:
        """How long the keeper may take: to lock and undo, each within its time."""
        return 2 * (self._timeout_s + SECONDS_TO_DIE) + SECONDS_TO_DIE

    def _lock(self, mhz: int) -> str | None:
        """Start a keeper; None once the clock is locked, or why it is not."""
        if shutil.which(NVIDIA_SMI) is None:
            return f"there is no {NVIDIA_SMI} here"
        sys.stdout.flush()
        sys.stderr.flush()
        job = os.getpid()
        reading, writing = os.pipe()
        # Blocked from before the start, so that no signal finds the keeper with this process's handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        self._keeper = os.fork()
        if self._keeper == 0:
            _be_the_keeper(job, writing, self._uuid, mhz, self._timeout_s)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writing)
        try:
            return self._hear(reading)
        finally:
            os.close(reading)

    def _hear(self, pipe: int) -> str | None:
        heard = b""
        deadline = time.monotonic() + self._patience_s
        while not heard.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return "the process that locks it does not answer"
            chunk = os.read(pipe, 4096)
            if not chunk:
                return "the process that locks it ended unexpectedly"
            heard += chunk
        return heard.decode().strip() or None

    def _ended(self, within_s: float) -> bool:
        assert self._keeper is not None
        give_up = time.monotonic() + within_s
        while os.waitpid(self._keeper, os.WNOHANG)[0] == 0:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.005)
        return True


def marker_of(uuid: str) -> Path:
    """The file that is there while the SM clock of that GPU may be locked by a job."""
    return Path(os.environ.get(FOLDER_VARIABLE, DEFAULT_FOLDER)) / f"{uuid}.clock"


def undo_leftover(uuid: str, timeout_s: float = NVIDIA_SMI_TIMEOUT_S) -> str | None:
    """Undo the lock that a killed job left on this GPU, if there is one; None, or why that failed.

    For a caller that holds the device's lock.
    """
    if not marker_of(uuid).exists():
        return None
    _say(f"undoing the lock of the SM clock that is left on {uuid}")
    return _undo(uuid, timeout_s)


def undo_leftover_if_free(uuid: str, timeout_s: float = NVIDIA_SMI_TIMEOUT_S) -> None:
    """The same for a caller without the device's lock; does nothing where that cannot be had now."""
    if not marker_of(uuid).exists():
        return
    with contextlib.suppress(_Busy, LockFault), device_lock(uuid, waiting=_do_not_wait):
        undo_leftover(uuid, timeout_s)


class _Busy(Exception):
    pass


def _do_not_wait(sentence: str) -> None:
    raise _Busy(sentence)


def _be_the_keeper(job: int, pipe: int, uuid: str, mhz: int, timeout_s: float) -> NoReturn:
    code = 1
    try:
        os.setsid()
        die_with_parent(job, signal.SIGTERM)
        failure = _try_to_lock(uuid, mhz, timeout_s)
        # Its other end is open here too, so this is no fault where the job is gone already.
        os.write(pipe, f"{failure or ''}\n".encode())
        os.close(pipe)
        if failure is None:
            signal.sigwait({signal.SIGTERM})
            _undo(uuid, timeout_s)
        code = 0
    finally:  # whatever happened, the keeper must not go on in the job's code
        os._exit(code)


def _try_to_lock(uuid: str, mhz: int, timeout_s: float) -> str | None:
    """Lock the clock; None, or in one line why it is not locked, with everything undone again."""
    marker = marker_of(uuid)
    marker_was_there = marker.exists()
    try:
        write_atomically(marker, f"locked at {mhz} MHz by process {os.getppid()}\n")
    except OSError as fault:
        return f"no marker can be left at {marker}: {fault.strerror}"
    failure, refused = _nvidia_smi(uuid, "-lgc", f"{mhz},{mhz}", timeout_s=timeout_s)
    if failure is None:
        return None
    # It may have taken effect all the same. After a refusal there is nothing to undo, and a marker that
    # no later job without the rights could ever get rid of would be left.
    _undo(uuid, timeout_s, needed=not refused or marker_was_there)
    return failure


def _undo(uuid: str, timeout_s: float, needed: bool = True) -> str | None:
    """Undo the lock and remove the marker; None, or why the clock may still be locked, which is also said.

    The marker stays where the undoing failed, unless it was not `needed`.
    """
    failure, _ = _nvidia_smi(uuid, "-rgc", timeout_s=timeout_s)
    if failure is None or not needed:
        try:
            marker_of(uuid).unlink(missing_ok=True)
            return None
        except OSError as fault:
            failure = f"{marker_of(uuid)} cannot be removed: {fault.strerror}"
    _say(f"the SM clock of {uuid} may still be locked; the next command will try again: {failure}")
    return failure


def _nvidia_smi(uuid: str, *change: str, timeout_s: float) -> tuple[str | None, bool]:
    """Change a setting of a GPU; None, or in one line why that failed, and whether it was only refused."""
    command = " ".join((NVIDIA_SMI, *change))
    try:
        process = subprocess.Popen(
            [NVIDIA_SMI, "-i", uuid, *change],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as fault:
        return f"{command} does not run: {fault.strerror}", False
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # One that hangs in the driver does not even die; it is not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_DIE)
        return f"{command} did not end within {timeout_s:g} s", False
    said = " ".join(output.decode(errors="replace").split())[:200]
    refused = process.returncode in REFUSAL_CODES or (
        process.returncode == 0 and any(word in said.lower() for word in REFUSAL_WORDS)
    )
    if process.returncode == 0 and not refused:
        return None, False
    return f"{command} ended with code {process.returncode}: {said or 'it says nothing'}", refused


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # whoever read this may be gone
        print(sentence, file=sys.stderr, flush=True)
