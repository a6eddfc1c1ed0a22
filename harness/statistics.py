"""Order statistics of latency samples; no assumption about their distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Median, 20th and 80th percentile, and a confidence interval of the median.

    `coverage` is the probability with which the interval covers the true median; it is at least the
    level asked for, or less where there are too few samples for any interval to reach it.
    """

    count: int
    median: float
    p20: float
    p80: float
    low: float
    high: float
    coverage: float


def summarize(samples: Sequence[float], confidence: float = 0.95) -> Summary:
    """Summarize samples; raises ValueError if there are none or one is not a finite number."""
    if not samples:
        raise ValueError("no samples")
    if not all(math.isfinite(sample) for sample in samples):
        raise ValueError("a sample is not a finite number")
    ordered = sorted(samples)
    low, high, coverage = median_interval_ranks(len(ordered), confidence)
    return Summary(
        count=len(ordered),
        median=percentile(ordered, 0.5),
        p20=percentile(ordered, 0.2),
        p80=percentile(ordered, 0.8),
        low=ordered[low],
        high=ordered[high],
        coverage=coverage,
    )


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """The percentile of sorted samples, linear between neighbours (numpy's default)."""
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def median_interval_ranks(count: int, confidence: float) -> tuple[int, int, float]:
    """Ranks (from 0) of the two samples that enclose the median, and the coverage they reach.

    The number of samples below the true median is binomial(count, 1/2), so the interval from rank r
    to rank count - 1 - r covers it with probability 1 - 2 P(X <= r). (David and Nagaraja, Order
    Statistics, section 7.1.) The innermost pair that reaches the confidence is taken, or the extremes.
    """
    # Integers, since floats overflow above a thousand samples; `ways` is comb(count, rank).
    tail, ways = 0, 1
    best = (0, count - 1, 1 - 2 * 0.5**count if count > 1 else 0.0)
    for rank in range((count - 1) // 2 + 1):
        tail += ways
        ways = ways * (count - rank) // (rank + 1)
        coverage = 1 - 2 * tail / 2**count
        if coverage < confidence:
            break
        best = (rank, count - 1 - rank, coverage)
    return best


@dataclass(frozen=True)
class Outliers:
    """How many samples lie beyond Tukey's fences: 1.5 (mild) or 3 (severe) interquartile ranges out.

    They are counted and stay in every statistic. (J. W. Tukey, Exploratory Data Analysis, section 2D.)
    """

    mild: int
    severe: int


def count_outliers(samples: Sequence[float]) -> Outliers:
    """Classify samples by Tukey's fences; the counts do not overlap."""
    ordered = sorted(samples)
    lower, upper = percentile(ordered, 0.25), percentile(ordered, 0.75)

    def beyond(ranges: float) -> int:
        fence = ranges * (upper - lower)
        return sum(sample < lower - fence or sample > upper + fence for sample in ordered)

    severe = beyond(3.0)
    return Outliers(mild=beyond(1.5) - severe, severe=severe)


@dataclass(frozen=True)
class Trend:
    """Whether samples rise or fall in the order they were taken.

    `z` is Kendall's statistic in standard deviations under no trend, and `change` the median of the last
    third over that of the first, less one.
    """

    z: float
    change: float


def trend(samples: Sequence[float]) -> Trend:
    """Mann and Kendall's trend test, ties counted; `z` is 0 where all samples are equal.

    (M. G. Kendall, Rank Correlation Methods, chapter 4, for the variance with ties.)
    """
    count = len(samples)
    score = sum(
        (later > earlier) - (later < earlier)
        for index, earlier in enumerate(samples)
        for later in samples[index + 1 :]
    )
    ties = [sum(sample == value for sample in samples) for value in set(samples)]
    variance = (
        count * (count - 1) * (2 * count + 5) - sum(tie * (tie - 1) * (2 * tie + 5) for tie in ties)
    ) / 18
    third = max(1, count // 3)
    first, last = percentile(sorted(samples[:third]), 0.5), percentile(sorted(samples[-third:]), 0.5)
    return Trend(score / math.sqrt(variance) if variance > 0 else 0.0, last / first - 1)
