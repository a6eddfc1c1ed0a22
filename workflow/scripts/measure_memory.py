"""Measure the peak memory of one implementation at one seq_len: --spec JSON --output RECORD."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.forkserver import run_in_fork_server

run_in_fork_server(__file__)

from harness.command import job_arguments
from harness.job import Bench, Supervision
from harness.memory import measure_memory
from harness.problem import Problem
from harness.record import OK, canonical_json, write_record
from harness.supervisor import Outcome, ReportStep

arguments = job_arguments(__doc__)
problem = Problem.from_dict(arguments.spec["problem"])


def work(bench: Bench, task: Problem, report_step: ReportStep) -> dict[str, object]:
    return measure_memory(bench.kernel, task, bench.device, report_step)


def finish(outcomes: list[Outcome]) -> dict[str, object]:
    (outcome,) = outcomes
    marks = ["interpreted"] if outcome.status == OK and outcome.result["interpreted"] else []
    values = {"options": canonical_json(arguments.options), **outcome.result}
    return {"status": outcome.status, "reason": outcome.reason, "values": values, "marks": marks}


with Supervision(
    arguments.spec,
    ROOT,
    time_limit_s=arguments.time_limit_s,
    timed=True,
    options=arguments.options,
    kept_gpu=arguments.kept_gpu,
) as job:
    outcomes = job.run([problem], work)
write_record(job.record(**finish(outcomes)), arguments.output)
