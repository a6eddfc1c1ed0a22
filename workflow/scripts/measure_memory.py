"""Measure the peak memory of one implementation at one seq_len: --spec JSON --output RECORD."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.command import job_arguments
from harness.job import Bench, run_job
from harness.memory import measure_memory
from harness.problem import Problem
from harness.record import OK, write_record
from harness.supervisor import Outcome, ReportStep

arguments = job_arguments(__doc__)
problem = Problem.from_dict(arguments.spec["problem"])


def work(bench: Bench, task: Problem, report_step: ReportStep) -> dict[str, object]:
    return measure_memory(bench.kernel, task, bench.device, report_step)


def finish(outcomes: list[Outcome]) -> dict[str, object]:
    (outcome,) = outcomes
    marks = ["interpreted"] if outcome.status == OK and outcome.result["interpreted"] else []
    return {"status": outcome.status, "reason": outcome.reason, "values": outcome.result, "marks": marks}


record = run_job(
    arguments.spec, ROOT, [problem], work, finish, time_limit_s=arguments.time_limit_s, timed=True
)
write_record(record, arguments.output)
