"""The summary of samples agrees with numpy and scipy, and says no more than the samples do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, kendalltau, norm

from harness.statistics import count_outliers, median_interval_ranks, percentile, summarize, trend

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


def test_outliers_are_those_beyond_tukeys_fences() -> None:
    even = [
        float(value) for value in range(1, 12)
    ]  # quartiles 3.5 and 8.5: fences at -4 and 16, -11.5 and 23.5
    assert count_outliers(even).mild == count_outliers(even).severe == 0
    found = count_outliers([*even[:-1], 17.0])
    assert (found.mild, found.severe) == (1, 0)
    found = count_outliers([*even[:-1], 1000.0])
    assert (found.mild, found.severe) == (0, 1)


@given(st.lists(st.integers(1, 8), min_size=6, max_size=40).filter(lambda values: len(set(values)) > 1))
def test_the_trend_is_scipys(values: list[int]) -> None:
    samples = [float(value) for value in values]
    expected = kendalltau(range(len(samples)), samples, method="asymptotic")
    found = trend(samples)
    assert found.z * expected.statistic >= 0
    assert 2 * norm.sf(abs(found.z)) == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)


def test_a_rise_is_a_trend_and_its_change_is_told() -> None:
    rising = trend([1.0 + 0.01 * index for index in range(30)])
    assert rising.z > 5
    assert rising.change == pytest.approx(0.2 / 1.045)
    assert trend(list(reversed([1.0 + 0.01 * index for index in range(30)]))).z < -5


def test_equal_samples_have_no_trend() -> None:
    assert trend([2.0] * 10).z == trend([2.0] * 10).change == 0.0


def test_samples_without_a_trend_are_seldom_said_to_have_one() -> None:
    random = np.random.default_rng(7)
    found = sum(abs(trend(draw.tolist()).z) > 3.3 for draw in random.normal(1.0, 0.01, size=(2000, 30)))
    assert found <= 8  # one in a thousand by chance
