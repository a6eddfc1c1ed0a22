"""Is one implementation faster than another? An answer over processes, and what it takes to give one.

A process is one experiment: its samples share a clock and a memory's place, so what is compared are the
logarithms of the processes' median latencies, and their difference is the logarithm of the ratio of two
latencies. Its interval is Welch's, who lets the two sides vary differently: the medians of one kernel
spread ten times as much as those of another, which is why their variances are not pooled either.
(B. L. Welch, Biometrika 34, 1947, pages 28-35.) The same is done in cycles of the SM clock, which a moving
clock does not change.

The A/A twins of a cell are one kernel measured under two names. The **A/A spread** is how far apart this
run puts two measurements of the same thing: the half-width of the interval of the twins' ratio, or their
difference where that is larger; no smaller difference is one. The **resolvable difference** is what an
effect must exceed, and what chance may take from it besides: a true difference of that size is found with a
probability of at least 95 %.

FASTER and SLOWER are said where the interval excludes 1 and the ratio is beyond the A/A spread, in
milliseconds and in cycles and in the same direction. SAME is said where the interval includes 1 and the
whole of it lies within 5 % of 1, in both units again: an equivalence test by two one-sided tests, of
(1 - confidence) / 2 each. (D. J. Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987,
pages 657-680.) Its margin is fixed: one that grew with the noise would call anything the same that is
measured badly enough. Anything else is UNCLEAR.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from scipy.special import stdtrit

from harness.record import OK, Record, RecordError, history_folder, read_record

FASTER = "FASTER"
SLOWER = "SLOWER"
SAME = "SAME"
UNCLEAR = "UNCLEAR"

CONFIDENCE = 0.99
POWER = 0.95
SAME_MARGIN = 0.05
MS = "milliseconds"
CYCLES = "cycles"
LARGEST_LOGARITHM = 700.0


@dataclass(frozen=True)
class Measured:
    """The samples of one implementation at one cell: a list for each process.

    `latencies_ms` holds milliseconds, `sm_clocks_mhz` the SM clock beside each of them, or nothing where
    there is none to read.
    """

    latencies_ms: Sequence[Sequence[float]]
    sm_clocks_mhz: Sequence[Sequence[float]] = ()

    @classmethod
    def of(cls, record: Record) -> Measured:
        """The cold samples of a timing record; none if it has no number."""
        return cls(record.samples.get("cold_ms", []), record.samples.get("sm_clock_mhz", []))

    @property
    def has_clocks(self) -> bool:
        return any(len(clocks) > 0 for clocks in self.sm_clocks_mhz)


Twins = tuple[Measured, Measured]


@dataclass(frozen=True)
class Ratio:
    """The latency of the one over that of the other; below 1 the one is faster.

    `low` and `high` are None where there are too few processes for an interval.
    """

    ratio: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Comparison:
    """What two measurements say of each other, and why no more.

    `aa_spread` and `resolvable_difference` are fractions, 0.01 for 1 %, of the unit in which they are
    larger; None where they are not known. `reason` says why a verdict is UNCLEAR, and is None otherwise.
    """

    verdict: str
    reason: str | None
    in_ms: Ratio | None
    in_cycles: Ratio | None
    aa_spread: float | None
    resolvable_difference: float | None


class _NotComparable(Exception):
    """Samples that cannot be compared; says why."""


@dataclass(frozen=True)
class _Difference:
    """A difference of mean logarithms, its standard error and degrees of freedom."""

    effect: float
    error: float
    freedom: float
    confidence: float

    @property
    def half_width(self) -> float:
        return self._chance((1 + self.confidence) / 2)

    @property
    def miss(self) -> float:
        """What chance takes from an effect with a probability of 1 - POWER."""
        return self._chance(POWER)

    def _chance(self, probability: float) -> float:
        return float(stdtrit(self.freedom, probability)) * self.error

    def ratio(self) -> Ratio:
        low, high = self.effect - self.half_width, self.effect + self.half_width
        return Ratio(_exp(self.effect), _exp(low), _exp(high))


@dataclass(frozen=True)
class _Finding:
    """What one unit says: the difference, the A/A spread, the resolvable difference, as logarithms."""

    difference: _Difference
    spread: float
    resolvable: float

    @property
    def direction(self) -> int:
        """-1 for a difference downwards, 1 upwards, 0 for none that was found."""
        if abs(self.difference.effect) <= self.spread or not self.excludes_1:
            return 0
        return -1 if self.difference.effect < 0 else 1

    @property
    def excludes_1(self) -> bool:
        return abs(self.difference.effect) > self.difference.half_width

    @property
    def same(self) -> bool:
        reach = abs(self.difference.effect) + self.difference.half_width
        return not self.excludes_1 and reach < math.log1p(SAME_MARGIN)


def compare(
    contender: Measured, baseline: Measured, aa: Twins | None = None, confidence: float = CONFIDENCE
) -> Comparison:
    """The ratio of the contender's latency to the baseline's, with its interval and a verdict.

    `aa` are the A/A twins of the cell; without them the verdict is UNCLEAR. Where there are no clocks to
    read (on a CPU) the verdict is that of the milliseconds alone.
    """
    try:
        ours, theirs = _log_medians(contender), _log_medians(baseline)
    except _NotComparable as fault:
        return _unclear(str(fault), {})
    units = [unit for unit in ours if unit in theirs]
    ratios = {unit: Ratio(_exp(fmean(ours[unit]) - fmean(theirs[unit]))) for unit in units}
    try:
        if ours.keys() != theirs.keys():
            raise _NotComparable("the SM clock was read beside the samples of one side alone")
        differences = {unit: _difference(ours[unit], theirs[unit], confidence) for unit in units}
        ratios = {unit: difference.ratio() for unit, difference in differences.items()}
        twins = _twins(aa, units, confidence)
    except _NotComparable as fault:
        return _unclear(str(fault), ratios)
    findings = [_finding(differences[unit], twins[unit]) for unit in units]
    verdict, reason = _verdict(findings)
    return Comparison(
        verdict,
        reason,
        ratios[MS],
        ratios.get(CYCLES),
        max(_exp(finding.spread) - 1 for finding in findings),
        max(_exp(finding.resolvable) - 1 for finding in findings),
    )


def resolvable_difference(aa: Twins, confidence: float = CONFIDENCE) -> float | None:
    """The smallest difference that a run resolves at a cell, as a fraction, by its A/A twins alone.

    It holds for implementations that spread no more than the twins; a comparison tells its own. None
    where the twins cannot say it.
    """
    return compare(*aa, aa=aa, confidence=confidence).resolvable_difference


def _log_medians(side: Measured) -> dict[str, list[float]]:
    """The logarithm of each process's median, in milliseconds and, where there are clocks, in cycles."""
    if not side.latencies_ms or not all(side.latencies_ms):
        raise _NotComparable("there are no samples")
    if not all(_positive(process) for process in side.latencies_ms):
        raise _NotComparable("a sample is not a positive finite time")
    medians = {MS: [math.log(median(process)) for process in side.latencies_ms]}
    if not side.has_clocks:
        return medians
    if [len(clocks) for clocks in side.sm_clocks_mhz] != [len(process) for process in side.latencies_ms]:
        raise _NotComparable("some samples have no SM clock beside them")
    if not all(_positive(clocks) for clocks in side.sm_clocks_mhz):
        raise _NotComparable("an SM clock is not a positive finite number")
    medians[CYCLES] = [
        math.log(median(ms * mhz * 1e3 for ms, mhz in zip(process, clocks, strict=True)))
        for process, clocks in zip(side.latencies_ms, side.sm_clocks_mhz, strict=True)
    ]
    return medians


def _positive(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)


def _difference(ours: list[float], theirs: list[float], confidence: float) -> _Difference:
    """Welch's difference of means, with his degrees of freedom."""
    if min(len(ours), len(theirs)) < 2:
        raise _NotComparable("one process tells nothing of what another would give: take at least two")
    # Exact for equal values, whose variance must be 0 and not a rounding error.
    shares = [(variance(side) / len(side), len(side) - 1) for side in (ours, theirs)]
    total = sum(share for share, _ in shares)
    if total == 0:
        raise _NotComparable("the processes' medians are all equal, so nothing says what chance does")
    freedom = total**2 / sum(share**2 / degrees for share, degrees in shares)
    return _Difference(fmean(ours) - fmean(theirs), math.sqrt(total), freedom, confidence)


def _twins(aa: Twins | None, units: list[str], confidence: float) -> dict[str, _Difference]:
    if aa is None:
        raise _NotComparable("this cell has no A/A twins, so what it resolves is not known")
    try:
        one, other = (_log_medians(twin) for twin in aa)
        if not all(unit in one and unit in other for unit in units):
            raise _NotComparable("their samples have no SM clock beside them")
        return {unit: _difference(one[unit], other[unit], confidence) for unit in units}
    except _NotComparable as fault:
        raise _NotComparable(f"the A/A twins of this cell cannot be compared: {fault}") from fault


def _finding(difference: _Difference, twins: _Difference) -> _Finding:
    spread = max(abs(twins.effect), twins.half_width)
    # The interval must exclude 1 and the effect exceed the spread: the stricter one is the threshold. The
    # side that varies more, these two or the twins, says how far chance may take an effect below it.
    threshold = max(spread, difference.half_width)
    return _Finding(difference, spread, threshold + max(twins.miss, difference.miss))


def _verdict(findings: list[_Finding]) -> tuple[str, str | None]:
    directions = {finding.direction for finding in findings}
    if directions == {-1}:
        return FASTER, None
    if directions == {1}:
        return SLOWER, None
    if directions == {-1, 1}:
        return UNCLEAR, "one is faster in milliseconds and the other in cycles: the clock moved"
    if all(finding.same for finding in findings):
        return SAME, None
    if directions != {0}:
        return UNCLEAR, "there is a difference in milliseconds or in cycles, but not in both"
    if all(finding.excludes_1 for finding in findings):
        return UNCLEAR, "a difference, but no larger than between two measurements of one kernel here"
    return UNCLEAR, "too large to be the same, too small to be told from chance"


def _unclear(reason: str, ratios: dict[str, Ratio]) -> Comparison:
    return Comparison(UNCLEAR, reason, ratios.get(MS), ratios.get(CYCLES), None, None)


def _exp(logarithm: float) -> float:
    """A finite ratio: an interval of two processes may be wider than a float can say."""
    return math.exp(max(-LARGEST_LOGARITHM, min(LARGEST_LOGARITHM, logarithm)))


def edit_effect(
    before: Record, after: Record, aa: Twins | None = None, confidence: float = CONFIDENCE
) -> Comparison:
    """What an edit of a kernel did to a cell: SLOWER where the later record is the slower one.

    `aa` are the cell's A/A twins of one of the two runs. They say what a run does not tell apart within
    itself; what changes from one run to another is not in them. Raises ValueError where the specs differ in
    more than the kernel's source, since it would not be the edit's effect.
    """
    if not _differ_by_edit(before.spec, after.spec):
        raise ValueError("the two records do not differ by an edit of the kernel alone")
    return compare(Measured.of(after), Measured.of(before), aa, confidence)


def before_edit(current: Record, path: Path) -> Record | None:
    """The newest measurement of another source of the kernel, made before the current record of `path`.

    It is looked for in the history of `path`, among records with a number whose specs are equal otherwise;
    None if there is none.
    """
    for copied in sorted(history_folder(path).glob("*.json"), reverse=True):  # named by their time
        try:
            record = read_record(copied)
        except RecordError:  # of another schema version, or damaged: nothing to compare with
            continue
        if (
            record.status == OK
            and record.started_at < current.started_at
            and _differ_by_edit(record.spec, current.spec)
        ):
            return record
    return None


def measured_again(current: Record, path: Path) -> list[Record]:
    """All measurements with a number of what the record of `path` measured, by the same spec and options.

    They come from the history of `path`, the oldest first; the current one is among them.
    """
    found = []
    for copied in sorted(history_folder(path).glob("*.json")):  # named by their time
        try:
            record = read_record(copied)
        except RecordError:  # of another schema version, or damaged: nothing to compare with
            continue
        same = record.spec == current.spec and record.values.get("options") == current.values.get("options")
        if record.status == OK and same:
            found.append(record)
    return found


def _differ_by_edit(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two specs have different digests of the kernel's source, and all else alike."""
    (digest, rest), (other_digest, other_rest) = _apart(one), _apart(other)
    return digest is not None and other_digest is not None and digest != other_digest and rest == other_rest


def _apart(spec: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The digest of the kernel's source, and the spec without it."""
    source = spec.get("source", {})
    others = {name: value for name, value in source.items() if name != "kernel"}
    return source.get("kernel"), {**spec, "source": others}
