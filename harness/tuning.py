"""Which of a kernel's option sets is the fastest at one problem? Found apart from any measurement.

All candidates are compiled side by side first, and each is judged against the reference. Those that are
right are then timed in one process with the pipeline's stopwatch, in rounds of random order, so that a
drifting clock favours none.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.device import Device, finite
from harness.plugin import Kernel
from harness.problem import Problem
from harness.record import ERROR, OK
from harness.statistics import summarize
from harness.supervisor import Outcome, ReportStep, Verdict
from harness.tensors import make_inputs

Options = dict[str, Any]


@dataclass(frozen=True)
class TuningSettings:
    """How candidates are timed: the config's `tuning` section."""

    rounds: int
    samples: int


@dataclass(frozen=True)
class Candidate:
    """One option set and how it fared; samples in milliseconds, cold cache."""

    options: Options
    status: str
    reason: str | None
    latency_ms: float | None = None
    latency_low_ms: float | None = None
    latency_high_ms: float | None = None
    samples_ms: list[float] | None = None


def time_candidates(
    kernel: Kernel,
    candidates: Sequence[Options],
    problem: Problem,
    device: Device,
    settings: TuningSettings,
    report_step: ReportStep,
) -> list[list[float]]:
    """Samples of each candidate (ms), taken in rounds; the order of each round is random but seeded."""
    inputs = make_inputs(problem, device.kind)
    order = random.Random(problem.seed)
    samples: list[list[float]] = [[] for _ in candidates]
    per_round = max(1, settings.samples // settings.rounds)
    for turn in range(settings.rounds):
        indices = list(range(len(candidates)))
        order.shuffle(indices)
        for index in indices:
            report_step(f"round {turn + 1}: {candidates[index]}")
            contender = kernel.with_options(candidates[index])

            def call(contender: Kernel = contender) -> Any:
                return contender.answer(inputs, problem)

            device.series(call, per_round, cold=True)  # the warm-up of this round
            series = device.series(call, per_round, cold=True)
            if series.starved or not finite(series.latencies_ms):
                raise Verdict(ERROR, f"candidate {candidates[index]}: its samples cannot be trusted")
            samples[index] += series.latencies_ms
    return samples


def judge_candidates(
    candidates: Sequence[Options], checks: Sequence[Outcome], samples: dict[int, list[float]]
) -> list[Candidate]:
    """Put together what is known of each candidate; `samples` has those that were timed, by index."""
    judged = []
    for index, (options, check) in enumerate(zip(candidates, checks, strict=True)):
        if index not in samples:
            judged.append(Candidate(options, check.status, check.reason))
            continue
        summary = summarize(samples[index])
        judged.append(
            Candidate(options, OK, None, summary.median, summary.low, summary.high, samples_ms=samples[index])
        )
    return judged


def winner(candidates: Sequence[Candidate]) -> Options:
    """The options of the candidate with the lowest median; none if no candidate could be timed."""
    timed = [candidate for candidate in candidates if candidate.latency_ms is not None]
    return min(timed, key=lambda candidate: candidate.latency_ms or 0.0).options if timed else {}


def candidate_cells(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The candidates as a record's cells."""
    return [asdict(candidate) for candidate in candidates]
