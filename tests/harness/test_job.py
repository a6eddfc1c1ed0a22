"""A job's record holds its spec, its outcome and what it was measured on, whatever happened."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.environment import environment_key
from harness.job import Bench, Supervision
from harness.lock import FOLDER_VARIABLE
from harness.memory import measure_memory
from harness.plugin import Kernel
from harness.problem import Problem
from harness.record import Record
from harness.supervisor import ReportStep, Verdict
from tests.harness.attentions import kernel_of, make_problem, right, zeros

ROOT = Path(__file__).parents[2]
PROBLEM = make_problem(heads=4, kv_heads=4, seq_len_q=512, seq_len_k=512, causal=False)


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    # The child asks for Triton's interpreter, which another test may have loaded here already.
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def make_spec(**changes: Any) -> dict[str, Any]:
    return {
        "phase": "memory",
        "device": "cpu",
        "environment": environment_key("cpu"),
        "implementation": {"name": "mine", "kernel": "naive", "options": {}},
        "problem": PROBLEM.to_dict(),
        **changes,
    }


def run(
    spec: dict[str, Any],
    work: Callable[..., dict[str, Any]],
    time_limit_s: float = 60.0,
    options: dict[str, Any] | None = None,
) -> Record:
    with Supervision(spec, ROOT, time_limit_s=time_limit_s, timed=True, options=options) as job:
        (outcome,) = job.run([PROBLEM], work)
    return job.record(status=outcome.status, reason=outcome.reason, values=outcome.result)


def measure(bench: Bench, problem: Problem, report_step: ReportStep) -> dict[str, Any]:
    return measure_memory(bench.kernel, problem, bench.device, report_step)


def answer(bench: Bench, problem: Problem, report_step: ReportStep) -> dict[str, Any]:
    return {"answer": 42}


def test_a_job_gives_a_record_with_its_spec_and_circumstances() -> None:
    spec = make_spec()
    record = run(spec, measure)
    assert (record.status, record.reason) == ("ok", None)
    assert record.spec == spec
    assert record.circumstances["key"] == spec["environment"]
    assert record.duration_s > 0
    assert record.started_at.endswith("Z")


def test_the_memory_of_a_real_kernel_is_at_least_its_tensors() -> None:
    values = run(make_spec(), measure).values
    scores = PROBLEM.batch * PROBLEM.heads * 512 * 512
    assert values["peak_memory_bytes"] >= PROBLEM.input_bytes + 10 * scores
    assert values["input_bytes"] + values["output_bytes"] == PROBLEM.minimal_bytes
    parts = ("input_bytes", "output_bytes", "workspace_bytes", "extra_bytes")
    assert values["peak_memory_bytes"] == sum(values[part] for part in parts)
    assert not values["interpreted"]


def test_memory_of_what_a_kernel_does_not_support_is_not_measured() -> None:
    kernel = kernel_of(zeros, unsupported=lambda problem, target: "too long")

    def work(bench: Bench, problem: Problem, report_step: ReportStep) -> dict[str, Any]:
        return measure_memory(kernel, problem, bench.device, report_step)

    record = run(make_spec(), work)
    assert (record.status, record.reason) == ("unsupported", "too long")


def test_a_kernel_without_a_law_has_none_in_its_record() -> None:
    def work(bench: Bench, problem: Problem, report_step: ReportStep) -> dict[str, Any]:
        return measure_memory(kernel_of(right), problem, bench.device, report_step)

    assert run(make_spec(), work).values["law_bytes"] is None


def test_a_job_for_another_machine_is_not_measured_here() -> None:
    record = run(make_spec(environment="nvidia-h200_elsewhere"), answer)
    assert record.status == "error"
    assert "nvidia-h200_elsewhere" in str(record.reason)
    assert environment_key("cpu") in str(record.reason)
    assert record.values == {}


def test_a_job_for_a_gpu_that_is_not_there_is_an_error_in_its_record(
    install_nvml: Callable[..., Any],
) -> None:
    install_nvml()
    record = run(make_spec(device="cuda"), answer)
    assert record.status == "error"
    assert str(record.reason).startswith("device = cuda: NVML finds no NVIDIA GPU")


def test_a_kernel_that_does_not_load_is_an_error_in_its_record() -> None:
    implementation = {"name": "mine", "kernel": "not_there", "options": {}}
    record = run(make_spec(implementation=implementation), answer)
    assert record.status == "error"
    assert "kernels/not_there.py does not import" in str(record.reason)


def test_tuned_options_reach_the_kernel_and_leave_the_spec_alone() -> None:
    def work(bench: Bench, problem: Problem, report_step: ReportStep) -> dict[str, Any]:
        return bench.kernel.options

    assert run(make_spec(), work).values == {}
    spec = make_spec()
    record = run(spec, work, options={"tile": 64})
    assert record.values == {"tile": 64}
    assert record.spec == spec == make_spec()


def test_tasks_without_the_device_have_processes_of_their_own() -> None:
    def work(kernel: Kernel, task: int, report_step: ReportStep) -> dict[str, Any]:
        return {"task": task, "pid": os.getpid(), "kernel": kernel.module.__name__}

    with Supervision(make_spec(), ROOT, time_limit_s=60.0, timed=False) as job:
        outcomes = job.run_without_device([1, 2, 3], work)
    assert [outcome.result["task"] for outcome in outcomes] == [1, 2, 3]
    assert len({outcome.result["pid"] for outcome in outcomes} | {os.getpid()}) == 4
    assert {outcome.result["kernel"] for outcome in outcomes} == {"kernels.naive"}


def test_a_verdict_is_the_records_status() -> None:
    def work(bench: Bench, problem: Problem, report_step: ReportStep) -> dict[str, Any]:
        raise Verdict("wrong", "off by one", {"max_abs_error": 1.0})

    record = run(make_spec(), work)
    assert (record.status, record.reason, record.values) == ("wrong", "off by one", {"max_abs_error": 1.0})


HOLD = """
import time
from harness.lock import device_lock

with device_lock("cpu"):
    print("held", flush=True)
    time.sleep(4.5)
"""


def test_waiting_for_the_device_is_not_part_of_the_time_limit() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        began = time.monotonic()
        record = run(make_spec(), answer, time_limit_s=4.0)
        waited = time.monotonic() - began
    assert record.status == "ok", record.reason
    assert waited > 4.0 > record.duration_s
