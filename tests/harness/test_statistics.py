"""The summary of samples agrees with numpy and scipy, and says no more than the samples do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from harness.statistics import median_interval_ranks, percentile, summarize

finite_samples = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60)


@given(finite_samples)
def test_median_and_percentiles_are_numpys(samples: list[float]) -> None:
    summary = summarize(samples)
    for found, fraction in ((summary.median, 50), (summary.p20, 20), (summary.p80, 80)):
        assert found == pytest.approx(np.percentile(samples, fraction), rel=1e-12)
    assert summary.count == len(samples)


@given(finite_samples, st.floats(0, 1))
def test_any_percentile_is_numpys(samples: list[float], fraction: float) -> None:
    found = percentile(sorted(samples), fraction)
    assert found == pytest.approx(np.percentile(samples, 100 * fraction), rel=1e-9)


@given(finite_samples, st.randoms())
def test_the_order_of_samples_does_not_matter(samples: list[float], random: object) -> None:
    shuffled = list(samples)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert summarize(shuffled) == summarize(samples)


@given(finite_samples)
def test_the_interval_encloses_the_median_and_is_made_of_samples(samples: list[float]) -> None:
    summary = summarize(samples)
    assert summary.low <= summary.median <= summary.high
    assert {summary.low, summary.high} <= set(samples)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("count", [6, 7, 10, 25, 50, 51, 100, 1000, 1100, 5000])
def test_the_ranks_are_the_innermost_that_reach_the_confidence(count: int, confidence: float) -> None:
    low, high, coverage = median_interval_ranks(count, confidence)
    assert low + high == count - 1
    assert coverage == pytest.approx(1 - 2 * binom.cdf(low, count, 0.5), abs=1e-9)
    reachable = 1 - 2 * 0.5**count >= confidence
    assert (coverage >= confidence) == reachable
    assert not reachable or 1 - 2 * binom.cdf(low + 1, count, 0.5) < confidence


@pytest.mark.parametrize("count", range(1, 6))
def test_too_few_samples_say_that_they_cover_less(count: int) -> None:
    low, high, coverage = median_interval_ranks(count, 0.95)
    assert (low, high) == (0, count - 1)
    assert coverage == pytest.approx(1 - 2 * 0.5**count)
    assert coverage < 0.95


@pytest.mark.parametrize("count", [6, 15, 50])
def test_the_interval_covers_the_true_median_as_often_as_it_says(count: int) -> None:
    random = np.random.default_rng(count)
    draws = random.exponential(size=(4000, count))  # skewed, as latencies are
    covered = 0
    for draw in draws:
        summary = summarize(draw.tolist())
        covered += summary.low <= math.log(2) <= summary.high
    assert covered / len(draws) == pytest.approx(summary.coverage, abs=0.015)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sample_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        summarize([1.0, value, 2.0])
