"""Whatever a task does is an outcome, and no process is left behind."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.supervisor import (
    Outcome,
    ReportStep,
    Supervised,
    Verdict,
    describe_exception,
    is_out_of_memory,
    supervise,
    supervise_side_by_side,
)

Task = Callable[[], Any]
WAIT_S = 10.0


def start() -> tuple[str, dict[str, Any]]:
    return "the context", {"started_in": os.getpid()}


def work(context: str, task: Task, report_step: ReportStep) -> dict[str, Any]:
    report_step("doing it")
    return {"value": task(), "pid": os.getpid(), "context": context}


def run(*tasks: Task, time_limit_s: float = 30.0, **options: Any) -> Supervised:
    return supervise(tasks, start, work, time_limit_s=time_limit_s, **options)


def one() -> int:
    return 1


def two() -> int:
    return 2


def raise_error() -> None:
    raise ValueError("a message\nof two lines")


def leave() -> None:
    os._exit(7)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    time.sleep(600)


def statuses(supervised: Supervised) -> list[str]:
    return [outcome.status for outcome in supervised.outcomes]


def eventually(condition: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


def test_results_come_in_order_from_one_child() -> None:
    found = run(one, two, one)
    assert statuses(found) == ["ok"] * 3
    assert [outcome.result["value"] for outcome in found.outcomes] == [1, 2, 1]
    assert all(outcome.reason is None for outcome in found.outcomes)
    assert {outcome.result["context"] for outcome in found.outcomes} == {"the context"}
    pids = {outcome.result["pid"] for outcome in found.outcomes}
    assert pids == {found.account["started_in"]}
    assert os.getpid() not in pids


def test_no_tasks_need_no_child() -> None:
    assert run() == Supervised([], {})


def test_fresh_child_each_gives_each_task_its_own_process() -> None:
    found = run(one, two, one, fresh_child_each=True)
    assert [outcome.result["value"] for outcome in found.outcomes] == [1, 2, 1]
    assert len({outcome.result["pid"] for outcome in found.outcomes}) == 3
    assert found.account["started_in"] == found.outcomes[0].result["pid"]


def test_what_a_task_changes_stays_in_its_child() -> None:
    run(lambda: os.environ.update(LEFT_BY_A_TASK="1"))
    assert "LEFT_BY_A_TASK" not in os.environ


def test_an_exception_is_an_error_in_one_line_and_the_rest_goes_on_in_a_new_child() -> None:
    found = run(one, raise_error, two)
    assert statuses(found) == ["ok", "error", "ok"]
    assert found.outcomes[1].reason == "ValueError: a message of two lines"
    assert found.outcomes[1].step == "doing it"
    assert found.outcomes[0].result["pid"] != found.outcomes[2].result["pid"]


@pytest.mark.parametrize(
    ("raised", "reason"),
    [(SystemExit(3), "SystemExit: 3"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_an_exception_that_ends_a_program_is_an_error_too(raised: BaseException, reason: str) -> None:
    def task() -> None:
        raise raised

    found = run(task, one)
    assert statuses(found) == ["error", "ok"]
    assert found.outcomes[0].reason == reason


def test_memory_that_runs_out_is_out_of_memory_and_no_reason_for_a_new_child() -> None:
    def raise_memory_error() -> None:
        raise MemoryError

    found = run(raise_memory_error, lambda: torch.empty(1 << 50), one)
    assert statuses(found) == ["out_of_memory", "out_of_memory", "ok"]
    assert found.outcomes[0].reason == "MemoryError"
    assert "can't allocate memory" in str(found.outcomes[1].reason)
    assert found.outcomes[2].result["pid"] == found.account["started_in"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_only_what_says_so_is_out_of_memory(fault: Exception, expected: bool) -> None:
    assert is_out_of_memory(fault) == expected


def test_an_exit_names_its_code_and_the_rest_goes_on_in_a_new_child() -> None:
    found = run(one, leave, two)
    assert statuses(found) == ["ok", "error", "ok"]
    assert found.outcomes[1].reason == "the process exited with code 7 (in step: doing it)"
    assert found.outcomes[2].result["pid"] != found.outcomes[0].result["pid"]


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGSEGV, "killed by SIGSEGV (in step: doing it)"),
        (signal.SIGKILL, "killed by SIGKILL, perhaps by the system when memory ran out"),
        (signal.SIGTERM, "killed by SIGTERM"),
        (signal.SIGRTMIN + 1, "killed by signal 35"),
    ],
)
def test_a_signal_is_named_and_the_rest_goes_on(number: int, name: str) -> None:
    found = run(lambda: os.kill(os.getpid(), number), two)
    assert statuses(found) == ["error", "ok"]
    assert name in str(found.outcomes[0].reason)


def test_a_real_segmentation_fault_is_an_error() -> None:
    found = run(lambda: ctypes.string_at(0))
    assert "SIGSEGV" in str(found.outcomes[0].reason)


def test_a_hang_is_a_timeout_and_the_rest_is_not_started() -> None:
    found = run(one, hang, two, time_limit_s=0.6)
    assert statuses(found) == ["ok", "timeout", "timeout"]
    assert found.outcomes[1].reason == "did not finish within 0.6 s (in step: doing it)"
    assert str(found.outcomes[2].reason).startswith("not started: the job's time limit of 0.6 s was used up")


def test_a_hang_in_c_that_ignores_signals_is_a_timeout() -> None:
    def ignore_and_hang() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).sleep(600)

    assert statuses(run(ignore_and_hang, time_limit_s=0.4)) == ["timeout"]


def test_after_a_timeout_the_child_and_its_own_processes_are_gone(
    tmp_path: Path, is_running: Callable[[int], bool]
) -> None:
    pids = tmp_path / "pids"

    def hang_with_a_subprocess() -> None:
        below = subprocess.Popen(["sleep", "600"])
        pids.write_text(f"{os.getpid()} {below.pid}")
        hang()

    assert statuses(run(hang_with_a_subprocess, time_limit_s=1.0)) == ["timeout"]
    child, below = map(int, pids.read_text().split())
    assert not Path(f"/proc/{child}").exists()  # reaped, no zombie
    assert eventually(lambda: not is_running(below))


def test_a_process_that_a_task_left_behind_neither_delays_the_job_nor_survives_it(
    tmp_path: Path, is_running: Callable[[int], bool]
) -> None:
    pid = tmp_path / "pid"

    def leave_one_behind() -> None:
        pid.write_text(str(subprocess.Popen(["sleep", "600"]).pid))

    assert statuses(run(leave_one_behind, leave)) == ["ok", "error"]
    assert eventually(lambda: not is_running(int(pid.read_text())))


def test_a_crash_is_found_though_a_forked_process_holds_the_pipe() -> None:
    def fork_and_crash() -> None:
        if os.fork() == 0:
            hang()
        leave()

    found = run(fork_and_crash, time_limit_s=20.0)
    assert found.outcomes[0].reason == "the process exited with code 7 (in step: doing it)"


def test_a_copy_that_a_task_forks_of_itself_gives_no_result() -> None:
    def come_back_in_both() -> int:
        if (pid := os.fork()) != 0:
            os.waitpid(pid, 0)
        return 1

    found = run(two, come_back_in_both, one)
    assert statuses(found) == ["ok", "error", "ok"]
    assert str(found.outcomes[1].reason).startswith("a copy of the process that it forked measured beside it")
    assert [found.outcomes[index].result["value"] for index in (0, 2)] == [2, 1]


def test_a_process_that_a_task_forked_and_waited_for_is_no_matter() -> None:
    def fork_and_wait() -> int:
        if (pid := os.fork()) == 0:
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    assert statuses(run(fork_and_wait, one)) == ["ok", "ok"]


def test_where_no_process_can_be_forked_each_task_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", refuse)
    for outcomes in (run(one, two).outcomes, side_by_side(one, two)):
        assert [outcome.status for outcome in outcomes] == ["error", "error"]
        assert "(Resource temporarily unavailable); end others, and run again" in str(outcomes[0].reason)
    monkeypatch.undo()
    assert statuses(run(one)) == ["ok"]
    assert sorted(os.listdir("/proc/self/fd")) == before


SUPERVISING = """
import os, sys, time
from harness.supervisor import supervise

def work(context, task, report_step):
    print(os.getpid(), flush=True)
    time.sleep(600)

supervise([0], lambda: (None, {}), work, time_limit_s=600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_child_dies_with_its_parent(number: int, is_running: Callable[[int], bool]) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISING],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.send_signal(number)
        parent.wait(WAIT_S)
    assert eventually(lambda: not is_running(child))


def test_a_verdict_carries_its_status_reason_and_result() -> None:
    def judge() -> None:
        raise Verdict("wrong", "off by one", {"max_abs_error": 0.5})

    found = run(judge, one)
    assert found.outcomes[0] == Outcome("wrong", "off by one", {"max_abs_error": 0.5}, "doing it")
    assert found.outcomes[1].result["pid"] == found.account["started_in"]


def test_an_outcome_says_how_long_each_step_of_its_own_task_took() -> None:
    def wait() -> None:
        time.sleep(0.2)

    waited, after = run(wait, one).outcomes
    assert list(waited.step_seconds) == ["start", "doing it"]
    assert waited.step_seconds["doing it"] >= 0.2
    assert after.step_seconds["doing it"] < waited.step_seconds["doing it"]


def test_results_and_reasons_of_any_size_and_content_arrive_whole() -> None:
    text = 'line\nline "quoted" \\ Straße \0 \ud800'
    numbers = [n / 7 for n in range(200_000)]

    def judge() -> None:
        raise Verdict("wrong", text * 10_000)

    found = run(lambda: {"text": text, "numbers": numbers}, judge, one)
    assert statuses(found) == ["ok", "wrong", "ok"]
    assert found.outcomes[0].result["value"] == {"text": text, "numbers": numbers}
    assert found.outcomes[1].reason == text.replace("\ud800", "\\ud800") * 10_000


def test_a_result_that_is_not_json_is_an_error() -> None:
    found = run(lambda: torch.zeros(1), one)
    assert statuses(found) == ["error", "ok"]
    assert str(found.outcomes[0].reason).startswith("TypeError: ")


def test_a_long_message_is_cut_to_300_characters() -> None:
    text = describe_exception(ValueError("x y\n" * 1000))
    assert len(text) == 300
    assert text.startswith("ValueError: x y x y")
    assert text.endswith("...")


def test_an_exception_whose_message_cannot_be_had_is_an_error() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def task() -> None:
        raise Unspeakable

    assert statuses(run(task, one)) == ["error", "ok"]


def test_what_a_task_prints_is_no_result() -> None:
    def chatter() -> int:
        print('{"status": "ok"}\n' * 3)
        os.write(2, b"\n\xff\n")
        return 3

    assert run(chatter).outcomes[0].result["value"] == 3


def test_a_start_that_raises_is_every_tasks_error() -> None:
    def start_badly() -> tuple[str, dict[str, Any]]:
        raise RuntimeError("no device")

    found = supervise([one, two], start_badly, work, time_limit_s=30.0)
    assert [(o.status, o.reason, o.step) for o in found.outcomes] == [
        ("error", "RuntimeError: no device", "start")
    ] * 2
    assert found.account == {}


def test_a_verdict_at_the_start_is_every_tasks_outcome() -> None:
    def start_elsewhere() -> tuple[str, dict[str, Any]]:
        raise Verdict("error", "another machine")

    found = supervise([one, two], start_elsewhere, work, time_limit_s=30.0)
    assert [(o.status, o.reason) for o in found.outcomes] == [("error", "another machine")] * 2


def test_the_account_outlives_a_crash_of_the_first_task() -> None:
    found = run(leave, two)
    assert found.account["started_in"] != found.outcomes[1].result["pid"]


STRAYING = """
import sys
from harness.supervisor import supervise

def work(context, task, report_step):
    sys.stderr.close()
    raise ValueError("nowhere to print this")

try:
    found = supervise([0], lambda: (None, {}), work, time_limit_s=60)
    status = found.outcomes[0].reason
except BaseException as fault:
    status = repr(fault)
with open(sys.argv[1], "a") as stream:
    print(status, file=stream)
"""


def test_a_child_never_goes_on_in_its_parents_code(tmp_path: Path) -> None:
    """A task closed stderr, so that printing and flushing fail when the child ends."""
    said = tmp_path / "said"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", STRAYING, said], cwd=root, timeout=60, check=False)
    assert eventually(said.exists)
    time.sleep(0.2)
    assert said.read_text() == "ValueError: nowhere to print this\n"


def test_no_descriptor_is_left_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    run(one, leave, raise_error, two, fresh_child_each=True)
    run(hang, time_limit_s=0.1)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_an_outcome_is_json() -> None:
    found = run(one, leave)
    json.dumps([vars(outcome) for outcome in found.outcomes])


def side_by_side(*tasks: Task, time_limit_s: float = 30.0, at_most: int = 2) -> list[Outcome]:
    return supervise_side_by_side(tasks, start, work, time_limit_s=time_limit_s, at_most=at_most)


def test_tasks_side_by_side_come_back_in_order_each_from_its_own_child() -> None:
    found = side_by_side(one, leave, two, raise_error, one)
    assert [outcome.status for outcome in found] == ["ok", "error", "ok", "error", "ok"]
    assert [outcome.result["value"] for outcome in found if outcome.result] == [1, 2, 1]
    assert len({outcome.result["pid"] for outcome in found if outcome.result}) == 3


def test_tasks_side_by_side_run_at_the_same_time_and_no_more_than_allowed(tmp_path: Path) -> None:
    def meet() -> int:
        """Wait until another task is there too; the most that were there at once."""
        (tmp_path / str(os.getpid())).touch()
        assert eventually(lambda: len(list(tmp_path.iterdir())) > 1)
        return len(list(tmp_path.iterdir()))

    assert [outcome.result["value"] for outcome in side_by_side(meet, meet)] == [2, 2]
    assert side_by_side() == []


def test_a_hang_side_by_side_costs_only_its_own_result() -> None:
    found = side_by_side(hang, one, two, one, time_limit_s=1.0)
    assert [outcome.status for outcome in found] == ["timeout", "ok", "ok", "ok"]


def test_what_waits_behind_two_hangs_side_by_side_is_not_started() -> None:
    found = side_by_side(hang, hang, one, time_limit_s=0.5)
    assert [outcome.status for outcome in found] == ["timeout"] * 3
    assert str(found[2].reason).startswith("not started")


def test_no_child_side_by_side_survives_a_fault_of_the_supervisor(
    tmp_path: Path, is_running: Callable[[int], bool]
) -> None:
    def note_and_hang() -> None:
        (tmp_path / str(os.getpid())).touch()
        hang()

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            side_by_side(note_and_hang, note_and_hang)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)
