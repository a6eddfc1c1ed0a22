"""Runs measurements in forked children, so that whatever a kernel does becomes a status.

The supervising process may import torch but never touches CUDA: a child forked from it starts with
a fresh CUDA context in about a second, and its memory is nobody else's. A child that crashes, exits,
hangs or is killed is an outcome with a reason; the tasks behind it go on in a new child.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from harness.process import die_with_parent
from harness.record import ERROR, OK, OUT_OF_MEMORY, TIMEOUT

Context = TypeVar("Context")
Task = TypeVar("Task")
ReportStep = Callable[[str], None]

SECONDS_TO_DIE = 20.0
SECONDS_BETWEEN_LOOKS = 1.0


class Verdict(Exception):
    """Raised by the work of a task to end it with a status other than `ok`, and a reason."""

    def __init__(self, status: str, reason: str, result: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.result = result or {}


@dataclass(frozen=True)
class Outcome:
    """How one task ended; `step` is the last step it reported and `result` what it returned."""

    status: str
    reason: str | None
    result: dict[str, Any]
    step: str


@dataclass(frozen=True)
class Supervised:
    """An outcome for every task, in order, and the account that the first child's start gave."""

    outcomes: list[Outcome]
    account: dict[str, Any]


Start = Callable[[], tuple[Context, dict[str, Any]]]
Work = Callable[[Context, Task, ReportStep], dict[str, Any]]


def supervise(
    tasks: Sequence[Task],
    start: Start[Context],
    work: Work[Context, Task],
    *,
    time_limit_s: float,
    fresh_child_each: bool = False,
) -> Supervised:
    """Do every task in a forked child and return an outcome for each, in order.

    `start` runs once in each child: it initialises the device and gives the context for the work and an
    account of it for the record. `work` runs once for each task; what both return must be JSON. A child
    goes on to the next task unless one ended in an error, or `fresh_child_each` asks for a process per
    task. `time_limit_s` bounds all tasks together.
    """
    deadline = time.monotonic() + time_limit_s
    outcomes: list[Outcome] = []
    account: dict[str, Any] = {}
    while len(outcomes) < len(tasks):
        first = len(outcomes)
        if time.monotonic() >= deadline:
            outcomes += [_not_started(time_limit_s)] * len(tasks[first:])
            break
        batch = tasks[first : first + 1] if fresh_child_each else tasks[first:]
        child = _Child(batch, start, work)
        try:
            outcomes.extend(child.collect(deadline, time_limit_s))
        finally:
            child.kill()
        account = account or child.account
    return Supervised(outcomes, account)


def supervise_side_by_side(
    tasks: Sequence[Task],
    start: Start[Context],
    work: Work[Context, Task],
    *,
    time_limit_s: float,
    at_most: int,
) -> list[Outcome]:
    """Do every task in a child of its own, up to `at_most` of them at once; outcomes in the tasks' order.

    For work that is not timed, such as compiling.
    """
    deadline = time.monotonic() + time_limit_s
    outcomes: list[Outcome] = []
    running: deque[_Child] = deque()
    waiting = deque(tasks)
    try:
        while waiting or running:
            while waiting and len(running) < at_most and time.monotonic() < deadline:
                running.append(_Child([waiting.popleft()], start, work))
            if not running:
                outcomes += [_not_started(time_limit_s)] * len(waiting)
                break
            outcomes += running[0].collect(deadline, time_limit_s)
            running.popleft().kill()
    finally:
        for child in running:
            child.kill()
    return outcomes


def _not_started(time_limit_s: float) -> Outcome:
    reason = f"not started: the job's time limit of {time_limit_s:g} s was used up before it"
    return Outcome(TIMEOUT, reason, {}, "")


class _Child:
    def __init__(
        self,
        tasks: Sequence[Task],
        start: Start[Context],
        work: Work[Context, Task],
    ) -> None:
        self._task_count = len(tasks)
        self._buffer = b""
        self._reaped: int | None = None
        self.account: dict[str, Any] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._pipe, writing_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            _be_the_child(parent, writing_end, tasks, start, work)
        os.close(writing_end)

    def collect(self, deadline: float, time_limit_s: float) -> list[Outcome]:
        """Outcomes of the tasks this child finished, and of the one it ended in."""
        outcomes: list[Outcome] = []
        step = "start"
        while len(outcomes) < self._task_count:
            message = self._read(deadline)
            if message is _EXPIRED:
                self._ask_where_it_hangs()
                reason = f"did not finish within {time_limit_s:g} s (in step: {step})"
                return [*outcomes, Outcome(TIMEOUT, reason, {}, step)]
            if message is None:
                reason = f"{self._how_it_ended()} (in step: {step})"
                return [*outcomes, Outcome(ERROR, reason, {}, step)]
            if "step" in message:
                step = message["step"]
                continue
            if "account" in message:
                self.account = message["account"]
                continue
            outcomes.append(Outcome(message["status"], message["reason"], message["result"], step))
            if message["status"] == ERROR:
                break  # its device may be beyond use (a CUDA error stays); the rest gets a new child
        return outcomes

    def _read(self, deadline: float) -> Any:
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if not self._readable(max(0.0, min(remaining, SECONDS_BETWEEN_LOOKS))):
                if remaining <= 0:
                    return _EXPIRED
                # A process that the child forked may hold the pipe open after the child's own end.
                if self._wait(0.0) is not None and not self._readable(0.0):
                    return None
                continue
            chunk = os.read(self._pipe, 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _readable(self, seconds: float) -> bool:
        return bool(select.select([self._pipe], [], [], seconds)[0])

    def _ask_where_it_hangs(self) -> None:
        """Have the child print its Python stack to the log (faulthandler answers this signal)."""
        try:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.2)
        except ProcessLookupError:
            pass

    def _how_it_ended(self) -> str:
        code = self._wait(SECONDS_TO_DIE)
        if code is None:
            return "closed its result pipe and went on running"
        if code >= 0:
            return f"the process exited with code {code}"
        name = _SIGNAL_NAMES.get(-code, f"signal {-code}")
        hint = ", perhaps by the system when memory ran out" if -code == signal.SIGKILL else ""
        return f"the process was killed by {name}{hint}"

    def _wait(self, seconds: float) -> int | None:
        """The child's exit code (negative: the signal), or None if it does not end in time."""
        give_up = time.monotonic() + seconds
        while self._reaped is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._reaped = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > give_up:
                return None
            else:
                time.sleep(0.005)
        return self._reaped

    def kill(self) -> None:
        """End the child and everything it started, and reap it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._wait(SECONDS_TO_DIE) is None:
            print(f"process {self.pid} does not die; it may still use the device", file=sys.stderr)
        os.close(self._pipe)


_EXPIRED = object()
_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}  # most real-time ones have none


def _be_the_child(
    parent: int,
    pipe: int,
    tasks: Sequence[Task],
    start: Start[Context],
    work: Work[Context, Task],
) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(parent, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        _work_through(pipe, tasks, start, work)
        code = 0
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # whatever happened, the child must not go on in its parent's code
            os._exit(code)


def _work_through(
    pipe: int,
    tasks: Sequence[Task],
    start: Start[Context],
    work: Work[Context, Task],
) -> None:
    def send(message: dict[str, Any]) -> None:
        data = (json.dumps(message, allow_nan=False) + "\n").encode()
        while data:
            data = data[os.write(pipe, data) :]

    def report_step(step: str) -> None:
        send({"step": step})

    context: Context | None = None
    started = False
    for task in tasks:
        try:
            if not started:
                report_step("start")
                context, account = start()
                started = True
                send({"account": account})
            result = work(context, task, report_step)  # type: ignore[arg-type]
            send({"status": OK, "reason": None, "result": result})
        except Verdict as verdict:
            send({"status": verdict.status, "reason": verdict.reason, "result": verdict.result})
        except BaseException as fault:
            with contextlib.suppress(Exception):  # the task may have closed stderr
                traceback.print_exc()
            status = OUT_OF_MEMORY if is_out_of_memory(fault) else ERROR
            send({"status": status, "reason": describe_exception(fault), "result": {}})
            if status == ERROR:
                return


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the GPU or on the host."""
    text = str(fault)
    return (
        isinstance(fault, MemoryError)
        or type(fault).__name__ == "OutOfMemoryError"
        or (
            isinstance(fault, RuntimeError)
            and ("can't allocate memory" in text or "CUDA out of memory" in text)
        )
        or (isinstance(fault, RuntimeError) and "CUBLAS_STATUS_ALLOC_FAILED" in text)
    )


def describe_exception(fault: BaseException) -> str:
    """An exception in one line of at most 300 characters: its type and the start of its message."""
    message = re.sub(r"\s+", " ", str(fault)).strip()
    text = f"{type(fault).__name__}: {message}" if message else type(fault).__name__
    return text if len(text) <= 300 else text[:297] + "..."
