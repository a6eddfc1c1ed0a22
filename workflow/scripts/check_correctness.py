"""Judge one implementation on the grid's cells of one seq_len: --spec JSON --output RECORD."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.forkserver import run_in_fork_server

run_in_fork_server(__file__)

from harness.command import job_arguments
from harness.correctness import Tolerance, check_problem, grid_cells, grid_status
from harness.job import Bench, Supervision
from harness.problem import Problem
from harness.record import write_record
from harness.supervisor import Outcome, ReportStep

arguments = job_arguments(__doc__)
spec = arguments.spec
problems = [Problem.from_dict(problem) for problem in spec["problems"]]
tolerances = {dtype: Tolerance(**tolerance) for dtype, tolerance in spec["tolerances"].items()}


def work(bench: Bench, problem: Problem, report_step: ReportStep) -> dict[str, object]:
    report_step(str(problem))
    found = check_problem(bench.kernel, problem, bench.device, tolerances[problem.dtype])
    return {**found, "is_attention": bench.kernel.is_attention}


def finish(outcomes: list[Outcome]) -> dict[str, object]:
    status, reason = grid_status(outcomes)
    return {"status": status, "reason": reason, "cells": grid_cells(problems, outcomes)}


with Supervision(spec, ROOT, time_limit_s=arguments.time_limit_s, timed=False) as job:
    outcomes = job.run(problems, work)
write_record(job.record(**finish(outcomes)), arguments.output)
