"""Tuning picks the fastest of the candidates that could be timed, and gives each the same chance."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from harness.device import Call, CpuDevice, Series
from harness.supervisor import Outcome, Verdict
from harness.tuning import TuningSettings, candidate_cells, judge_candidates, time_candidates, winner
from tests.harness.attentions import kernel_of, make_problem, right

CANDIDATES: list[dict[str, Any]] = [{"tile": 16}, {"tile": 32}, {"tile": 64}]
SETTINGS = TuningSettings(rounds=3, samples=12)


def outcome(status: str, reason: str | None = None) -> Outcome:
    return Outcome(status, reason, {}, "")


def attention(q: Any, k: Any, v: Any, *, causal: bool, tile: int) -> Any:
    seen.append(tile)
    return right(q, k, v, causal=causal)


seen: list[int] = []


def test_each_candidate_gets_as_many_samples_in_rounds_of_changing_order() -> None:
    seen.clear()
    steps: list[str] = []
    device = CpuDevice()
    device.cache_bytes = 1 << 20
    samples = time_candidates(
        kernel_of(attention), CANDIDATES, make_problem(), device, SETTINGS, steps.append
    )
    assert [len(found) for found in samples] == [12, 12, 12]
    assert all(sample > 0 for found in samples for sample in found)
    assert set(Counter(seen).values()) == {24}  # each series has a warm-up as long as itself
    rounds = [[step.split(": ", 1)[1] for step in steps[turn : turn + 3]] for turn in (0, 3, 6)]
    assert {tuple(sorted(order)) for order in rounds} == {tuple(str(options) for options in CANDIDATES)}
    assert len({tuple(order) for order in rounds}) > 1


def test_samples_that_cannot_be_trusted_choose_no_winner() -> None:
    class DryQueue(CpuDevice):
        def series(self, call: Call, count: int, *, cold: bool) -> Series:
            return Series([1.0] * count, [], starved=True)

    with pytest.raises(Verdict, match="cannot be trusted"):
        time_candidates(kernel_of(attention), CANDIDATES, make_problem(), DryQueue(), SETTINGS, print)


def test_the_fastest_median_wins_and_the_others_keep_their_reasons() -> None:
    checks = [outcome("ok"), outcome("wrong", "off by one"), outcome("ok")]
    found = judge_candidates(CANDIDATES, checks, {0: [1.0, 2.0, 90.0], 2: [3.0, 3.0, 3.0]})
    assert winner(found) == {"tile": 16}
    assert [candidate.status for candidate in found] == ["ok", "wrong", "ok"]
    assert found[1].reason == "off by one"
    assert found[1].latency_ms is None
    json.dumps(candidate_cells(found), allow_nan=False)


def test_where_no_candidate_could_be_timed_the_defaults_stay() -> None:
    checks = [outcome("wrong", "a"), outcome("error", "b"), outcome("timeout", "c")]
    assert winner(judge_candidates(CANDIDATES, checks, {})) == {}


def test_candidates_go_on_top_of_the_implementations_options() -> None:
    kernel = kernel_of(
        attention, {"stages": 2, "tile": 8}, candidates=lambda problem, target, **options: CANDIDATES
    )
    target = CpuDevice().target()
    offered = kernel.candidates(make_problem(), target)
    assert offered == [{"stages": 2, "tile": tile} for tile in (16, 32, 64)]
    assert kernel.with_options(offered[0]).options == offered[0]
    assert kernel.options == {"stages": 2, "tile": 8}
    assert kernel_of(attention).candidates(make_problem(), target) == []
