"""Diagnose one backend of SDPA under one priming: --spec JSON --output RECORD."""

import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.forkserver import run_in_fork_server

run_in_fork_server(__file__)

from harness.command import job_arguments
from harness.correctness import Tolerance
from harness.diagnostic import (
    Diagnosis,
    DiagnosticSettings,
    diagnose,
    diagnosis_marks,
    diagnosis_samples,
    diagnosis_values,
)
from harness.job import Bench, Supervision
from harness.plugin import load_kernel
from harness.problem import Problem
from harness.record import OK, write_record
from harness.supervisor import Outcome, ReportStep

arguments = job_arguments(__doc__)
spec = arguments.spec
problem = Problem.from_dict(spec["problem"])
tolerance = Tolerance(**spec["tolerance"])
settings = DiagnosticSettings(**spec["diagnostic"])


def work(bench: Bench, process: int, report_step: ReportStep) -> dict[str, object]:
    primer = load_kernel(spec["primer"], {}) if spec["primer"] else None
    found = diagnose(
        bench.kernel,
        primer,
        spec["priming"],
        problem,
        bench.device,
        tolerance,
        settings,
        bench.watch,
        report_step,
    )
    return asdict(found)


def finish(outcomes: list[Outcome]) -> dict[str, object]:
    failed = next((outcome for outcome in outcomes if outcome.status != OK), None)
    if failed is not None:
        return {"status": failed.status, "reason": failed.reason}
    processes = [Diagnosis(**outcome.result) for outcome in outcomes]
    values = diagnosis_values(processes)
    return {
        "status": OK,
        "values": values,
        "marks": diagnosis_marks(values),
        "samples": diagnosis_samples(processes),
    }


with Supervision(
    spec, ROOT, time_limit_s=arguments.time_limit_s, timed=True, kept_gpu=arguments.kept_gpu
) as job:
    outcomes = job.run(range(spec["processes"]), work, fresh_child_each=True)
write_record(job.record(**finish(outcomes)), arguments.output)
