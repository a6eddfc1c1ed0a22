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
from harness.problem import DECODE, Problem
from harness.record import OK, canonical_json, write_record
from harness.second_opinion import Question, second_opinion, timers_disagree
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


def ask(bench: Bench, question: Question, report_step: ReportStep) -> dict[str, object]:
    return second_opinion(bench.kernel, problem, bench.device, question, report_step)


def finish(outcomes: list[Outcome], job: Supervision) -> dict[str, object]:
    failed = next((outcome for outcome in outcomes if outcome.status != OK), None)
    if failed is not None:
        return {"status": failed.status, "reason": failed.reason}
    processes = [TimedProcess(**outcome.result) for outcome in outcomes]
    values = {"options": canonical_json(arguments.options), **timing_values(processes, problem)}
    marks = timing_marks(processes, values)
    # In decode the launch is part of the question at every length.
    graph = "launch_bound" in marks or problem.workload == DECODE
    question = Question(graph=graph, profiler=spec["second_timer"])
    if spec["device"] == "cuda" and question.any:
        (opinion,) = job.run([question], ask)
        # A second opinion that fails takes nothing from the samples: it says why it has no number.
        values |= opinion.result if opinion.status == OK else question.unanswered(str(opinion.reason))
        if "profiler_latency_ms" in values and timers_disagree(
            values["warm_latency_ms"], values["profiler_latency_ms"]
        ):
            marks.append("timers_disagree")
    samples = {
        "cold_ms": [process.cold_ms for process in processes],
        "warm_ms": [process.warm_ms for process in processes],
        "host_us": [process.host_us for process in processes],
        "sm_clock_mhz": [process.sm_clock_mhz for process in processes],
    }
    return {"status": OK, "values": values, "marks": marks, "samples": samples}


with Supervision(
    spec,
    ROOT,
    time_limit_s=arguments.time_limit_s,
    timed=True,
    options=arguments.options,
    kept_gpu=arguments.kept_gpu,
) as job:
    outcomes = job.run([0], work)
    # A number that means nothing, or that there is not, is not had more often.
    if outcomes[0].status == OK and not outcomes[0].result["interpreted"]:
        outcomes += job.run(range(1, spec["processes"]), work, fresh_child_each=True)
    found = finish(outcomes, job)
write_record(job.record(**found), arguments.output)
