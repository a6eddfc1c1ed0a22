"""How many measurements of how many are done, and about how long the others take: a line after each.

Snakemake itself says what it measures and how many steps are done. None of its logger plugins says how
long is left (`rich` shows the time gone by, in place of Snakemake's own lines), and a plugin would have to
be installed. This one handles the same events and is attached by the Snakefile; what it says goes through
Snakemake's logger, so to the terminal and to the log file alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.record import RecordError, history_folder, read_record

FORMER, THIS = "former runs", "this run so far"


@dataclass
class Measurement:
    """A measuring job of this run. Times are seconds, of one clock."""

    rule: str
    record: Path
    former_s: float | None  # what the measurement took when it was last made, without its start
    started: float | None = None
    ended: float | None = None

    @property
    def taken_s(self) -> float | None:
        return None if self.started is None or self.ended is None else self.ended - self.started


@dataclass(frozen=True)
class Estimate:
    """About how long the measurements still take, what that is read from, and how many it leaves out."""

    left_s: float
    sources: tuple[str, ...]
    left_out: int


@dataclass
class Tracker:
    """The measurements of a run, by Snakemake's number of the job, and what is known of how long they take.

    One that was made before takes as long as it last did, and longer by what jobs of this run took beside
    their measurement. Another takes the mean of this run's jobs of its rule: timings run in random order, so
    those done speak for those left. `clock` gives seconds.
    """

    measurements: dict[int, Measurement]
    clock: Callable[[], float] = time.monotonic
    _beside_s: list[float] = field(default_factory=list)

    def start(self, number: int) -> None:
        if number in self.measurements:
            self.measurements[number].started = self.clock()

    def end(self, number: int, measured: bool = True) -> None:
        """A job has ended; one that did not measure says nothing of how long others take."""
        job = self.measurements.get(number)
        if job is None:
            return
        job.ended = self.clock()
        if not measured:
            job.started = None
        elif job.taken_s is not None and (made_s := last_duration_s(job.record)) is not None:
            self._beside_s.append(max(0.0, job.taken_s - made_s))

    @property
    def done(self) -> int:
        return sum(job.ended is not None for job in self.measurements.values())

    def estimate(self) -> Estimate | None:
        """What is left; None where nothing is known of half of the measurements that are left, or of more."""
        now = self.clock()
        left_s, sources, left_out = 0.0, set(), 0
        waiting = [job for job in self.measurements.values() if job.ended is None]
        for job in waiting:
            alike = [
                other.taken_s
                for other in self.measurements.values()
                if other.rule == job.rule and other.taken_s is not None
            ]
            if job.former_s is not None:
                whole_s, source = job.former_s + (fmean(self._beside_s) if self._beside_s else 0.0), FORMER
            elif alike:
                whole_s, source = fmean(alike), THIS
            else:
                left_out += 1
                continue
            sources.add(source)
            left_s += max(0.0, whole_s - (now - job.started if job.started is not None else 0.0))
        if waiting and 2 * left_out >= len(waiting):
            return None  # what is known says little of the whole
        return Estimate(left_s / self._side_by_side(now), tuple(sorted(sources)), left_out)

    def _side_by_side(self, now: float) -> float:
        """How many measurements ran at a time so far; less than one where time passed between them."""
        spans = [
            (job.started, now if job.ended is None else job.ended)
            for job in self.measurements.values()
            if job.started is not None
        ]
        if not spans or (passed := now - min(start for start, _ in spans)) <= 0:
            return 1.0
        return sum(end - start for start, end in spans) / passed or 1.0


def last_duration_s(record: Path) -> float | None:
    """How long the newest measurement took that was written to this path; None where there is none."""
    for path in sorted(history_folder(record).glob("*.json"), reverse=True):  # named by their time
        try:
            return read_record(path).duration_s
        except (RecordError, OSError):
            continue
    return None


def sentence(done: int, total: int, estimate: Estimate | None, now: float) -> str:
    """The line; `now` is seconds since the epoch, and the hour in it is local."""
    text = f"Measured {done} of {total}"
    if done == total:
        return f"{text}."
    if estimate is None:
        return f"{text}; how long the others take is not known yet."
    about = f"about {spelt(estimate.left_s)} left"
    sources = f"estimated from {' and '.join(estimate.sources)}"
    if estimate.left_out:
        without = f"{estimate.left_out} of a kind not measured before not counted"
        return f"{text}; at least {about} ({sources}; {without})."
    hour = time.strftime("%H:%M", time.localtime(now + estimate.left_s))
    return f"{text}; {about}, until {hour} ({sources})."


def spelt(seconds: float) -> str:
    """A duration as a person says it, no more exact than an estimate can be."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class Progress(logging.Handler):
    """Says the line at a run's start and after each measurement, from Snakemake's own events."""

    def __init__(self, workflow: Any, say: Callable[[str], None]) -> None:
        super().__init__()
        self._workflow = workflow
        self._say = say
        self._tracker: Tracker | None = None
        self._said = -1

    def emit(self, record: logging.LogRecord) -> None:
        event = str(getattr(record, "event", ""))
        try:
            self._handle(event, record)
        except Exception:  # whatever it is: a run does not end for the sake of an estimate
            self.handleError(record)

    def _handle(self, event: str, record: Any) -> None:
        if event == "run_info" and self._tracker is None:
            self._tracker = Tracker(measurements(self._workflow.dag))
            self._report(self._tracker)
        elif self._tracker is None:
            return
        elif event == "job_info":
            self._tracker.start(record.jobid)
        elif event in ("job_finished", "job_error"):
            number = record.job_id if event == "job_finished" else record.jobid
            self._tracker.end(number, measured=event == "job_finished")
        elif event == "progress":
            self._report(self._tracker)

    def _report(self, tracker: Tracker) -> None:
        total = len(tracker.measurements)
        if total and tracker.done != self._said:
            self._said = tracker.done
            self._say(sentence(tracker.done, total, tracker.estimate(), time.time()))


def measurements(dag: Any) -> dict[int, Measurement]:
    """The jobs that this run is to do and that make a record, which those with a spec do."""
    found = {}
    for job in dag.needrun_jobs():
        if job.params.get("spec") is not None:
            record = next(
                Path(path)
                for path in map(str, job.output)
                if path.endswith(".json") and not path.endswith(".winner.json")
            )
            found[dag.jobid(job)] = Measurement(job.rule.name, record, last_duration_s(record))
    return found


def show_progress(workflow: Any) -> None:
    """Have a run say how far it is. `snakemake --quiet progress` silences it with Snakemake's own."""
    from snakemake.logging import logger
    from snakemake.settings.enums import Quietness

    extra = {"quietness": Quietness.PROGRESS}
    logger.addHandler(Progress(workflow, lambda text: logger.info(text, extra=extra)))
