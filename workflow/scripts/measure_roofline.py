"""Measure what the machine can do, and what the flush does on it: --spec JSON --output RECORD."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.forkserver import run_in_fork_server

run_in_fork_server(__file__)

from harness.command import job_arguments
from harness.job import Bench, Supervision
from harness.record import write_record
from harness.roofline import measure_roofline
from harness.supervisor import ReportStep

arguments = job_arguments(__doc__, of_a_kernel=False)


def work(bench: Bench, task: None, report_step: ReportStep) -> dict[str, object]:
    return measure_roofline(bench.device, bench.watch, report_step)


with Supervision(arguments.spec, ROOT, time_limit_s=arguments.time_limit_s, timed=True) as job:
    (outcome,) = job.run([None], work)
record = job.record(status=outcome.status, reason=outcome.reason, values=outcome.result)
write_record(record, arguments.output)
