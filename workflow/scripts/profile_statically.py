"""Compile a kernel for a GPU that need not be there, and read its code: --spec JSON --output RECORD."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.forkserver import run_in_fork_server

run_in_fork_server(__file__)

os.environ.pop("TRITON_INTERPRET", None)  # what is interpreted is not compiled

import harness.triton_ready  # noqa: F401, for every process that compiles, which is forked from this one
from harness.architectures import target_of
from harness.command import job_arguments
from harness.job import Supervision
from harness.plugin import Kernel
from harness.problem import Problem
from harness.record import OK, write_record
from harness.static_profile import Options, option_sets, profile_kernel, tools
from harness.supervisor import ReportStep

arguments = job_arguments(__doc__)
spec = arguments.spec
problem = Problem.from_dict(spec["problem"])
target = target_of(spec["target"])


def offer(kernel: Kernel, task: Problem, report_step: ReportStep) -> dict[str, object]:
    report_step("candidates")
    sets = option_sets(kernel, task, target, spec["candidates"], spec["options"])
    return {"option_sets": sets, "tools": tools()}


def compile_one(kernel: Kernel, options: Options, report_step: ReportStep) -> dict[str, object]:
    report_step(f"compile {options}")
    return {"cells": profile_kernel(kernel.with_options(options), problem, target)}


with Supervision(spec, ROOT, time_limit_s=arguments.time_limit_s, timed=False) as job:
    (offered,) = job.run_without_device([problem], offer)
    wanted: list[Options] = offered.result.get("option_sets", [])
    outcomes = job.run_without_device(wanted, compile_one)

cells: list[dict[str, object]] = []
for options, outcome in zip(wanted, outcomes, strict=True):
    failed = {"status": outcome.status, "reason": outcome.reason}
    about = {"options": options, "problem": spec["problem"], "target": spec["target"]}
    cells += outcome.result["cells"] if outcome.status == OK else [{**about, **failed}]
record = job.record(
    status=offered.status, reason=offered.reason, values=offered.result.get("tools", {}), cells=cells
)
write_record(record, arguments.output)
