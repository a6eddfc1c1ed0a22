"""A difference is said where there is one, and not where there is none; tried on series of an H200."""

from __future__ import annotations

import gzip
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from harness.comparison import (
    FASTER,
    SAME,
    SLOWER,
    UNCLEAR,
    Comparison,
    Measured,
    Twins,
    before_edit,
    compare,
    edit_effect,
    resolvable_difference,
)
from harness.record import ERROR, Record, history_folder, write_record

SERIES = Path(__file__).resolve().parents[1] / "data" / "h200" / "aa_series.json.gz"
PROCESSES = 5  # what config `timing.processes` is on a GPU


@cache
def recorded() -> dict[str, Measured]:
    """Ten cells timed in 56 fresh processes each, clocks not locked."""
    cells = json.loads(gzip.decompress(SERIES.read_bytes()))["cells"]
    return {name: Measured(cell["cold_ms"], cell["sm_clock_mhz"]) for name, cell in cells.items()}


def slowed(side: Measured, factor: float) -> Measured:
    return Measured([[ms * factor for ms in process] for process in side.latencies_ms], side.sm_clocks_mhz)


def draw(cell: Measured, random: np.random.Generator) -> tuple[Measured, Measured, Twins]:
    """A contender, a baseline and A/A twins: four times other processes of one and the same thing."""
    order = random.permutation(len(cell.latencies_ms))
    groups = [order[index * PROCESSES : (index + 1) * PROCESSES] for index in range(4)]
    first, second, third, fourth = (
        Measured([cell.latencies_ms[i] for i in group], [cell.sm_clocks_mhz[i] for i in group])
        for group in groups
    )
    return first, second, (third, fourth)


def test_two_measurements_of_the_same_thing_are_not_called_different() -> None:
    random = np.random.default_rng(4)
    verdicts = [
        compare(contender, baseline, aa).verdict
        for cell in recorded().values()
        for contender, baseline, aa in (draw(cell, random) for _ in range(20))
    ]
    assert len(verdicts) == 200
    assert sum(verdict in (FASTER, SLOWER) for verdict in verdicts) <= 2
    assert verdicts.count(SAME) >= 180


def test_a_slowdown_of_two_percent_is_found_wherever_less_is_resolved() -> None:
    random = np.random.default_rng(5)
    resolving = []
    for name, cell in recorded().items():
        found: list[str] = []
        for _ in range(600):
            contender, baseline, aa = draw(cell, random)
            comparison = compare(slowed(contender, 1.02), baseline, aa)
            if _resolved(comparison) < 0.02:
                found.append(comparison.verdict)
            if len(found) == 100:
                resolving.append(name)
                assert found.count(SLOWER) >= 95, name
                break
    assert len(resolving) >= 5  # those of 2048 and longer; at 512 processes spread by more than 1 %


def _resolved(comparison: Comparison) -> float:
    assert comparison.resolvable_difference is not None
    return comparison.resolvable_difference


def test_a_slowdown_of_the_resolvable_size_is_found_in_95_of_100() -> None:
    random = np.random.default_rng(6)
    verdicts = []
    for cell in recorded().values():
        for _ in range(30):
            contender, baseline, aa = draw(cell, random)
            resolved = _resolved(compare(contender, baseline, aa))
            verdicts.append(compare(slowed(contender, 1 + resolved), baseline, aa).verdict)
    assert verdicts.count(SLOWER) >= 0.95 * len(verdicts)
    assert FASTER not in verdicts


def test_a_difference_that_is_resolved_is_never_called_the_same() -> None:
    random = np.random.default_rng(7)
    for cell in recorded().values():
        for _ in range(10):
            contender, baseline, aa = draw(cell, random)
            twice = 1 + 2 * _resolved(compare(contender, baseline, aa))
            assert compare(slowed(contender, twice), baseline, aa).verdict != SAME


@pytest.mark.parametrize("processes", [2, 3, 5])
@pytest.mark.parametrize("noise", [0.005, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("slowdown", [1.05, 1.1, 1.3, 2.0])
def test_what_is_slower_by_the_margin_is_not_called_the_same_however_noisy(
    slowdown: float, noise: float, processes: int
) -> None:
    random = np.random.default_rng(9)

    def measure(level: float) -> Measured:
        return Measured([[level * math.exp(noise * random.standard_normal())] for _ in range(processes)])

    verdicts = [
        compare(measure(slowdown), measure(1.0), (measure(1.0), measure(1.0))).verdict for _ in range(400)
    ]
    assert verdicts.count(SAME) <= 0.01 * len(verdicts)  # (1 - confidence) / 2 is expected at the margin


def test_noise_is_not_called_the_same() -> None:
    noisy = Measured([[1.0], [1.3]])
    found = compare(Measured([[2.0], [2.2]]), noisy, (Measured([[1.0], [1.9]]), Measured([[1.1], [2.0]])))
    assert found.verdict == UNCLEAR
    assert found.reason == "too large to be the same, too small to be told from chance"


def test_the_interval_is_welchs() -> None:
    contender, baseline, _ = draw(recorded()["article 2048 sdpa"], np.random.default_rng(8))
    found = compare(contender, slowed(baseline, 1.5)).in_ms
    logs = [
        [math.log(np.median(process)) for process in side.latencies_ms]
        for side in (contender, slowed(baseline, 1.5))
    ]
    expected = ttest_ind(*logs, equal_var=False).confidence_interval(0.99)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert found.ratio == pytest.approx(math.exp(np.mean(logs[0]) - np.mean(logs[1])))


@st.composite
def sides(draw: st.DrawFn, scale: float = 1.0) -> Measured:
    """Some processes whose times spread by up to 10 %, and clocks by 5 %."""
    process_count, samples = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    some = st.lists(st.integers(1000, 1100), min_size=samples, max_size=samples)
    times = draw(st.lists(some, min_size=process_count, max_size=process_count))
    clocks = draw(st.lists(some, min_size=process_count, max_size=process_count))
    return Measured([[scale * value / 1000 for value in process] for process in times], clocks)


INVERSE = {FASTER: SLOWER, SLOWER: FASTER, SAME: SAME, UNCLEAR: UNCLEAR}


@given(sides(), sides(), sides(), sides(), st.sampled_from([1.0, 1.1, 1.5, 3.0]))
def test_swapping_the_sides_inverts_ratio_and_verdict(
    one: Measured, other: Measured, twin: Measured, again: Measured, factor: float
) -> None:
    one = slowed(one, factor)
    there, back = compare(one, other, (twin, again)), compare(other, one, (again, twin))
    assert back.verdict == INVERSE[there.verdict]
    assert back.resolvable_difference == there.resolvable_difference
    assert back.reason == there.reason
    for forth, reverse in ((there.in_ms, back.in_ms), (there.in_cycles, back.in_cycles)):
        assert forth is not None
        assert reverse is not None
        assert forth.ratio * reverse.ratio == pytest.approx(1)
        if forth.low is not None and reverse.high is not None:
            assert forth.low * reverse.high == pytest.approx(1)


@given(sides(), sides(), sides(), sides(), st.floats(1e-3, 1e3))
def test_a_constant_factor_on_both_sides_changes_nothing(
    one: Measured, other: Measured, twin: Measured, again: Measured, factor: float
) -> None:
    plain = compare(one, other, (twin, again))
    scaled = compare(slowed(one, factor), slowed(other, factor), (twin, again))
    assert scaled.verdict == plain.verdict
    assert scaled.reason == plain.reason
    assert scaled.in_ms is not None
    assert plain.in_ms is not None
    assert scaled.in_ms.ratio == pytest.approx(plain.in_ms.ratio)


def varied(level: float, spread: float = 0.001, clock: float = 1900.0, processes: int = 5) -> Measured:
    """Processes whose medians lie evenly around a level, all at one clock."""
    medians = [level * (1 + spread * (index - (processes - 1) / 2)) for index in range(processes)]
    return Measured([[ms] * 3 for ms in medians], [[clock] * 3] * processes)


TWINS = (varied(1.0), varied(1.0))


def test_the_direction_is_the_contenders() -> None:
    assert compare(varied(0.9), varied(1.0), TWINS).verdict == FASTER
    assert compare(varied(1.1), varied(1.0), TWINS).verdict == SLOWER
    found = compare(varied(1.0), varied(1.0), TWINS)
    assert (found.verdict, found.reason) == (SAME, None)


def test_without_twins_there_is_a_ratio_and_no_verdict() -> None:
    found = compare(varied(1.1), varied(1.0))
    assert found.verdict == UNCLEAR
    assert found.reason == "this cell has no A/A twins, so what it resolves is not known"
    assert found.in_ms is not None
    assert found.in_ms.ratio == pytest.approx(1.1)
    assert found.in_ms.low is not None
    assert found.resolvable_difference is None


def test_an_effect_within_the_spread_of_the_twins_is_none() -> None:
    unlike = (varied(1.05), varied(1.0))  # two names of one thing, 5 % apart
    found = compare(varied(1.04), varied(1.0), unlike)
    assert found.in_ms is not None
    assert found.in_ms.low is not None
    assert found.in_ms.low > 1.03  # the interval alone would have said so
    assert found.aa_spread is not None
    assert found.aa_spread > 0.05
    assert found.verdict == UNCLEAR
    assert found.reason == "a difference, but no larger than between two measurements of one kernel here"
    assert compare(varied(1.2), varied(1.0), unlike).verdict == SLOWER


def test_a_difference_that_the_clock_made_is_none() -> None:
    slow_clock, fast_clock = varied(1.1, clock=1800.0), varied(1.0, clock=1980.0)
    found = compare(slow_clock, fast_clock, TWINS)  # the same number of cycles
    assert found.verdict == UNCLEAR
    assert found.reason == "there is a difference in milliseconds or in cycles, but not in both"
    opposite = compare(varied(1.1, clock=1500.0), varied(1.0, clock=1980.0), TWINS)
    assert opposite.reason == "one is faster in milliseconds and the other in cycles: the clock moved"
    assert opposite.verdict == UNCLEAR


def test_without_clocks_the_milliseconds_decide() -> None:
    def clockless(level: float) -> Measured:
        return Measured(varied(level).latencies_ms, [[]] * 5)  # as a record of a CPU has it

    found = compare(clockless(1.1), clockless(1.0), (clockless(1.0), clockless(1.0)))
    assert found.verdict == SLOWER
    assert found.in_cycles is None
    assert "one side alone" in str(compare(varied(1.1), clockless(1.0), TWINS).reason)
    assert "no SM clock" in str(compare(varied(1.1), varied(1.0), (clockless(1.0), clockless(1.0))).reason)


def test_one_process_gives_a_ratio_without_an_interval() -> None:
    found = compare(varied(1.1, processes=1), varied(1.0), TWINS)
    assert found.verdict == UNCLEAR
    assert str(found.reason).startswith("one process")
    assert found.in_ms is not None
    assert found.in_ms.ratio == pytest.approx(1.1, rel=1e-5)
    assert found.in_ms.low is found.in_ms.high is None
    assert "A/A twins" in str(compare(varied(1.1), varied(1.0), (varied(1.0, processes=1), TWINS[1])).reason)


def test_processes_that_all_agree_are_no_certainty() -> None:
    still = varied(1.0, spread=0.0)
    found = compare(slowed(still, 1.1), still, TWINS)
    assert found.verdict == UNCLEAR
    assert "all equal" in str(found.reason)
    assert compare(slowed(still, 1.1), varied(1.0), TWINS).verdict == SLOWER  # one side that varies is enough


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_or_a_clock_that_cannot_be_is_not_compared(bad: float) -> None:
    times = Measured([[1.0, bad], [1.0, 1.1]], [[1900.0, 1900.0]] * 2)
    clocks = Measured([[1.0, 1.0], [1.0, 1.1]], [[1900.0, bad], [1900.0, 1900.0]])
    for side, reason in ((times, "time"), (clocks, "SM clock")):
        for found in (compare(side, varied(1.0), TWINS), compare(varied(1.0), side, TWINS)):
            assert found.verdict == UNCLEAR
            assert reason in str(found.reason)
            assert found.in_ms is None


@pytest.mark.parametrize("nothing", [Measured([]), Measured([[], []]), Measured([[1.0], []])])
def test_no_samples_are_not_compared(nothing: Measured) -> None:
    assert compare(nothing, varied(1.0), TWINS).reason == "there are no samples"
    assert resolvable_difference((nothing, varied(1.0))) is None


def test_two_processes_far_apart_give_a_wide_interval_that_is_finite() -> None:
    far = Measured([[1e-9], [1e9]])
    found = compare(far, Measured([[1.0], [2.0]]), (far, far))
    assert found.verdict != SLOWER
    assert found.in_ms is not None
    assert found.in_ms.high is not None
    assert math.isfinite(found.in_ms.high)


def test_more_processes_resolve_less() -> None:
    cell = recorded()["article 2048 triton"]

    def twins(processes: int) -> Twins:
        first, second = (slice(start * processes, (start + 1) * processes) for start in range(2))
        one, other = (Measured(cell.latencies_ms[i], cell.sm_clocks_mhz[i]) for i in (first, second))
        return one, other

    few, some, many = (resolvable_difference(twins(processes)) for processes in (3, 8, 25))
    assert few is not None
    assert some is not None
    assert many is not None
    assert few > some > many


SPEC: dict[str, Any] = {
    "phase": "timing",
    "environment": "h200",
    "implementation": {"name": "triton", "kernel": "triton_flash", "options": {}},
    "source": {"kernel": "aaaa", "harness": "1111"},
    "problem": {"seq_len_q": 2048},
    "timing": {"samples": 3},
}


def record(level: float, kernel: str, started_at: str, **changes: Any) -> Record:
    side = varied(level)
    spec = {**SPEC, "source": {"kernel": kernel, "harness": "1111"}, **changes.pop("spec", {})}
    fields: dict[str, Any] = {
        "phase": "timing",
        "spec": spec,
        "status": "ok",
        "values": {"latency_ms": level},
        "samples": {"cold_ms": side.latencies_ms, "sm_clock_mhz": side.sm_clocks_mhz},
        "started_at": started_at,
    }
    return Record(**{**fields, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "h200" / "timing" / "article" / "triton" / "2048.json"


def at(minute: int) -> str:
    return f"2026-12-01T10:{minute:02d}:00.000000Z"


def test_an_edit_is_held_against_the_newest_measurement_before_it(path: Path) -> None:
    oldest, before = record(1.3, "aaaa", at(1)), record(1.0, "bbbb", at(2))
    first, current = record(1.1, "cccc", at(3)), record(1.1, "cccc", at(4))  # measured twice
    later = record(5.0, "dddd", at(5))
    for one in (current, oldest, later, before, first):
        write_record(one, path)
    assert before_edit(current, path) == before
    assert before_edit(before, path) == oldest
    assert before_edit(oldest, path) is None
    assert edit_effect(before, current, TWINS).verdict == SLOWER
    assert edit_effect(oldest, before, TWINS).verdict == FASTER


@pytest.mark.parametrize(
    "change",
    [
        {"problem": {"seq_len_q": 512}},
        {"timing": {"samples": 30}},
        {"environment": "a100"},
        {"source": {"kernel": "bbbb", "harness": "2222"}},
        {"implementation": {"name": "triton", "kernel": "triton_flash", "options": {"tile": 64}}},
        {"lock_sm_clock_mhz": 1500},
        {"source": {"kernel": "cccc", "harness": "1111"}},  # no edit at all
    ],
)
def test_a_record_that_differs_in_more_than_the_kernel_is_no_before(
    path: Path, change: dict[str, Any]
) -> None:
    other, current = record(1.0, "bbbb", at(1), spec=change), record(1.1, "cccc", at(2))
    for one in (other, current):
        write_record(one, path)
    assert before_edit(current, path) is None
    with pytest.raises(ValueError, match="edit of the kernel alone"):
        edit_effect(other, current, TWINS)


def test_history_that_cannot_be_read_or_has_no_number_is_passed_over(path: Path) -> None:
    before = record(1.0, "aaaa", at(1))
    failed = record(1.0, "bbbb", at(2), status=ERROR, reason="killed", samples={})
    current = record(1.1, "cccc", at(4))
    for one in (before, failed, current):
        write_record(one, path)
    (history_folder(path) / "20261201T100300.000000Z-00000000.json").write_text("{", encoding="utf-8")
    assert before_edit(current, path) == before
    assert before_edit(current, path.with_name("512.json")) is None
