"""Time one implementation at one seq_len: --spec JSON --output RECORD."""

import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.forkserver import run_in_fork_server

run_in_fork_server(__file__)

from harness.command import job_arguments
from harness.correctness import Tolerance
from harness.job import Bench, Supervision
from harness.problem import Problem
from harness.record import OK, canonical_json, write_record
from harness.stopwatch import TimedProcess, TimingSettings, time_attention, timing_marks, timing_values
from harness.supervisor import Outcome, ReportStep

arguments = job_arguments(__doc__)
spec = arguments.spec
problem = Problem.from_dict(spec["problem"])
tolerance = Tolerance(**spec["tolerance"])
settings = TimingSettings(**spec["timing"])


def work(bench: Bench, process: int, report_step: ReportStep) -> dict[str, object]:
    return asdict(
        time_attention(bench.kernel, problem, bench.device, tolerance, settings, bench.watch, report_step)
    )


def finish(outcomes: list[Outcome]) -> dict[str, object]:
    failed = next((outcome for outcome in outcomes if outcome.status != OK), None)
    if failed is not None:
        return {"status": failed.status, "reason": failed.reason}
    processes = [TimedProcess(**outcome.result) for outcome in outcomes]
    values = {"options": canonical_json(arguments.options), **timing_values(processes, problem)}
    samples = {
        "cold_ms": [process.cold_ms for process in processes],
        "warm_ms": [process.warm_ms for process in processes],
        "host_us": [process.host_us for process in processes],
    }
    return {"status": OK, "values": values, "marks": timing_marks(processes, values), "samples": samples}


with Supervision(
    spec, ROOT, time_limit_s=arguments.time_limit_s, timed=True, options=arguments.options
) as job:
    outcomes = job.run(range(spec["processes"]), work, fresh_child_each=True)
write_record(job.record(**finish(outcomes)), arguments.output)
