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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from harness.process import adopt_orphans, child_processes, die_with_parent
from harness.record import ERROR, OK, OUT_OF_MEMORY, TIMEOUT

Context = TypeVar("Context")
Task = TypeVar("Task")
ReportStep = Callable[[str], None]

SECONDS_TO_DIE = 20.0
SECONDS_BETWEEN_LOOKS = 1.0
CANNOT_REPORT = 113  # how a child exits that finds its result pipe closed
NO_FORKS = "no number can be trusted beside it, so a kernel must not fork, or must wait for what it forked"


class Verdict(Exception):
    """Raised by the work of a task to end it with a status other than `ok`, and a reason."""

    def __init__(self, status: str, reason: str, result: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.result = result or {}


@dataclass(frozen=True)
class Outcome:
    """How one task ended; `step` is the last step it reported and `result` what it returned.

    `step_seconds` says how long each step took, in their order.
    """

    status: str
    reason: str | None
    result: dict[str, Any]
    step: str
    step_seconds: dict[str, float] = field(default_factory=dict, compare=False)


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
    with _Nursery(start, work) as nursery:
        while len(outcomes) < len(tasks):
            rest = tasks[len(outcomes) :]
            if time.monotonic() >= deadline:
                outcomes += [_not_started(time_limit_s)] * len(rest)
                break
            try:
                child = nursery.bear(rest[:1] if fresh_child_each else rest)
            except OSError as fault:
                outcomes += [_not_forked(fault)] * len(rest)
                break
            while not child.over:
                _attend([child], deadline, time_limit_s)
            nursery.end(child)
            outcomes += child.outcomes
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
    outcomes: dict[int, Outcome] = {}
    waiting = deque(enumerate(tasks))
    running: dict[int, _Child] = {}
    with _Nursery(start, work) as nursery:
        while waiting or running:
            while waiting and len(running) < at_most and time.monotonic() < deadline:
                index, task = waiting.popleft()
                try:
                    running[index] = nursery.bear([task])
                except OSError as fault:
                    outcomes[index] = _not_forked(fault)
            if not running:
                outcomes.update((index, _not_started(time_limit_s)) for index, _ in waiting)
                break
            _attend(running.values(), deadline, time_limit_s)
            for index in [index for index, child in running.items() if child.over]:
                child = running.pop(index)
                nursery.end(child)
                (outcomes[index],) = child.outcomes
    return [outcomes[index] for index in range(len(tasks))]


def _not_started(time_limit_s: float) -> Outcome:
    reason = f"not started: the job's time limit of {time_limit_s:g} s was used up before it"
    return Outcome(TIMEOUT, reason, {}, "")


def _not_forked(fault: OSError) -> Outcome:
    reason = f"not started: the system gives no further process ({fault.strerror}); end others, and run again"
    return Outcome(ERROR, reason, {}, "")


def _attend(children: Collection[_Child], deadline: float, time_limit_s: float) -> None:
    """Wait until a child has something to say, has ended or has used up its time, and note that."""
    remaining = deadline - time.monotonic()
    ready = select.select(children, [], [], max(0.0, min(remaining, SECONDS_BETWEEN_LOOKS)))[0]
    for child in children:
        if child in ready:
            child.listen()
        elif remaining <= 0:
            child.expire(time_limit_s)
        else:
            child.look()


class _Nursery:
    """Forks the children, and sees to it that nothing a child started outlives it.

    A process that leaves its group or session, as a daemon does, is out of the group's reach, but would
    hold the device's lock, which it inherited. So this process adopts the orphans (it is their subreaper)
    and ends them.
    """

    def __init__(self, start: Start[Any], work: Work[Any, Any]) -> None:
        self._start = start
        self._work = work
        self._children: list[_Child] = []
        self._strangers: set[int] = set()

    def __enter__(self) -> _Nursery:
        self._strangers = child_processes()
        adopt_orphans(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for child in list(self._children):
                self.end(child)
        finally:
            adopt_orphans(False)

    def bear(self, tasks: Sequence[Any]) -> _Child:
        """Fork a child for these tasks; raises OSError where the system gives no process."""
        child = _Child(tasks, self._start, self._work)
        self._children.append(child)
        return child

    def end(self, child: _Child) -> None:
        """End a child and everything it started, and reap it."""
        child.kill()
        self._children.remove(child)
        own = self._strangers | {other.pid for other in self._children}
        give_up = time.monotonic() + SECONDS_TO_DIE
        while (strays := child_processes() - own) and time.monotonic() < give_up:
            for pid in strays:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.002)


class _Child:
    """A forked process that does tasks, and what it has said so far."""

    def __init__(
        self,
        tasks: Sequence[Task],
        start: Start[Context],
        work: Work[Context, Task],
    ) -> None:
        self._task_count = len(tasks)
        self._buffer = b""
        self._step = "start"
        self._step_began = time.monotonic()
        self._step_seconds: dict[str, float] = {}
        self._reaped: int | None = None
        self.account: dict[str, Any] = {}
        self.outcomes: list[Outcome] = []  # of the tasks it finished, and of the one it ended in
        self.over = False
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._pipe, writing_end = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self._pipe)
            os.close(writing_end)
            raise
        if self.pid == 0:
            os.close(self._pipe)
            _be_the_child(parent, writing_end, tasks, start, work)
        os.close(writing_end)

    def fileno(self) -> int:
        return self._pipe

    def listen(self) -> None:
        """Take in what has arrived; to be called when there is something, or the end."""
        chunk = os.read(self._pipe, 1 << 16)
        if not chunk:
            self._finish(ERROR, self._how_it_ended())
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            if not self.over:
                self._understand(line)

    def look(self) -> None:
        """Note the end of a child whose pipe is held open by a process that it forked."""
        if self._wait(0.0) is not None and not select.select([self], [], [], 0.0)[0]:
            self._finish(ERROR, self._how_it_ended())

    def expire(self, time_limit_s: float) -> None:
        """Note that the time is used up."""
        self._ask_where_it_hangs()
        self._finish(TIMEOUT, f"did not finish within {time_limit_s:g} s")

    def _understand(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        match message:
            case {"step": str(step)}:
                self._end_step()
                self._step = step
            case {"account": dict(account)}:
                self.account = account
            case {"status": str(status), "reason": str() | None as reason, "result": dict(result)}:
                self._note(status, encodable(reason), result)
                # After an error its device may be beyond use (a CUDA error stays): the rest gets a new child.
                self.over = status == ERROR or len(self.outcomes) == self._task_count
            case {"copy": True}:
                self._finish(ERROR, f"a copy of the process that it forked measured beside it; {NO_FORKS}")
            case _:
                self._finish(ERROR, "something else than results came through its result pipe")

    def _finish(self, status: str, reason: str) -> None:
        self._note(status, f"{reason} (in step: {self._step})", {})
        self.over = True

    def _note(self, status: str, reason: str | None, result: dict[str, Any]) -> None:
        self._end_step()
        self.outcomes.append(Outcome(status, reason, result, self._step, self._step_seconds))
        self._step_seconds = {}

    def _end_step(self) -> None:
        now = time.monotonic()
        self._step_seconds[self._step] = self._step_seconds.get(self._step, 0.0) + now - self._step_began
        self._step_began = now

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
        if code == CANNOT_REPORT:
            return (
                "its result pipe was closed, perhaps by the kernel,"
                " which must not close files it did not open"
            )
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
        """End the child and its process group, and reap it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._wait(SECONDS_TO_DIE) is None:
            print(f"process {self.pid} does not die; it may still use the device", file=sys.stderr)
        os.close(self._pipe)


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
    own = os.getpid()
    forks = 0

    def count_fork() -> None:
        nonlocal forks
        forks += 1

    os.register_at_fork(after_in_parent=count_fork)

    def send(message: dict[str, Any]) -> None:
        copy = os.getpid() != own  # the kernel forked this process, and came back in both
        data = (json.dumps({"copy": True} if copy else message, allow_nan=False) + "\n").encode()
        try:
            while data:
                data = data[os.write(pipe, data) :]
        except OSError:
            os._exit(CANNOT_REPORT)
        if copy:
            os._exit(1)

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
            before = forks
            result = work(context, task, report_step)  # type: ignore[arg-type]
            if forks > before and child_processes(running=True):
                raise Verdict(ERROR, f"it left a process running that it had forked; {NO_FORKS}")
            send({"status": OK, "reason": None, "result": result})
        except Verdict as verdict:
            send({"status": verdict.status, "reason": str(verdict.reason), "result": verdict.result})
            if verdict.status == ERROR:
                return
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


def encodable(text: str | None) -> str | None:
    """Text that can be written as UTF-8, whatever bytes a kernel or the system put into it."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()
