"""Find a kernel's fastest options at one seq_len: --spec JSON --output RECORD --winner FILE."""

import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.forkserver import run_in_fork_server

run_in_fork_server(__file__)

from harness.command import job_arguments
from harness.correctness import Tolerance, check_problem
from harness.job import Bench, Supervision
from harness.plugin import Kernel
from harness.problem import Problem
from harness.record import OK, canonical_json, write_atomically, write_record
from harness.supervisor import ReportStep
from harness.target import Target
from harness.tuning import (
    Options,
    TuningSettings,
    candidate_cells,
    judge_candidates,
    time_candidates,
    winner,
)

arguments = job_arguments(__doc__)
spec = arguments.spec
problem = Problem.from_dict(spec["problem"])
tolerance = Tolerance(**spec["tolerance"])
settings = TuningSettings(**spec["tuning"])


def offer(bench: Bench, task: Problem, report_step: ReportStep) -> dict[str, object]:
    target = bench.device.target()
    return {"candidates": bench.kernel.candidates(task, target), "target": asdict(target)}


def compile_one(kernel: Kernel, options: Options, report_step: ReportStep) -> dict[str, object]:
    kernel.with_options(options).compile_for(problem, Target(**offered.result["target"]))
    return {}


def check(bench: Bench, options: Options, report_step: ReportStep) -> dict[str, object]:
    kernel = bench.kernel.with_options(options)
    return check_problem(kernel, problem, bench.device, tolerance, renewed=False)


def time(bench: Bench, contenders: list[Options], report_step: ReportStep) -> dict[str, object]:
    return {
        "samples": time_candidates(bench.kernel, contenders, problem, bench.device, settings, report_step)
    }


with Supervision(
    spec, ROOT, time_limit_s=arguments.time_limit_s, timed=True, kept_gpu=arguments.kept_gpu
) as job:
    (offered,) = job.run([problem], offer)
    candidates: list[Options] = offered.result.get("candidates", [])
    job.run_without_device(candidates, compile_one)  # what fails here fails again in its check, and says so
    checks = job.run(candidates, check)
    right = [index for index, outcome in enumerate(checks) if outcome.status == OK]
    (timed,) = job.run([[candidates[index] for index in right]], time) if right else (offered,)

samples = dict(zip(right, timed.result.get("samples", []), strict=False))
judged = judge_candidates(candidates, checks, samples)
failure = next((outcome for outcome in (offered, timed) if outcome.status != OK), None)
record = job.record(
    status=failure.status if failure else OK,
    reason=failure.reason if failure else None,
    values={"winner": canonical_json(winner(judged))},
    cells=candidate_cells(judged),
)
write_record(record, arguments.output)
if arguments.winner is not None:
    write_atomically(arguments.winner, canonical_json({"options": winner(judged)}) + "\n")
