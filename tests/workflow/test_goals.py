"""What goals ask, what was reached, and what the page and the figure say of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.record import ERROR, OK, UNSUPPORTED
from tests.workflow.test_figures import HOSTILE, texts
from workflow.config import load_config
from workflow.goals import (
    GOAL_COLUMNS,
    geometric_mean,
    goal_line,
    goal_rows,
    goal_section,
    problem_bytes_of,
)
from workflow.goals_figure import goal_figure
from workflow.pages import goals_page
from workflow.plan import Plan

ROOT = Path(__file__).resolve().parents[2]

GOAL = {
    "implementation": "ours",
    "against": ["one", "other"],
    "speedup_each": 1.0,
    "speedup_geometric_mean": 1.1,
    "sweeps": ["article"],
    "shortest_seq_len": None,
    "longest_seq_len": None,
    "smallest_problem_bytes": None,
}


def cell(seq_len: int, sweep: str = "article", **latencies: Any) -> list[dict[str, Any]]:
    """Rows of the benchmark table: a latency each, or a status and marks."""
    rows = []
    for name, value in latencies.items():
        number = isinstance(value, float)
        marks = value if not number and value not in (ERROR, UNSUPPORTED) else ""
        rows.append(
            {
                **{"environment": "h200", "sweep": sweep, "seq_len": seq_len, "implementation": name},
                "latency_status": OK if number or marks else value,
                "latency_ms": value if number else 1.0 if marks else None,
                "marks": marks,
            }
        )
    return rows


def sizes(rows: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    return {(row["sweep"], row["seq_len"]): 100 * row["seq_len"] for row in rows}


def reached(rows: list[dict[str, Any]], **changes: Any) -> pd.DataFrame:
    found = goal_rows({"fast": {**GOAL, **changes}}, rows, [], sizes(rows))
    return pd.DataFrame(found, columns=list(GOAL_COLUMNS))


def page(goals: pd.DataFrame) -> str:
    return "\n\n".join(goal_section(goals, lambda name, text: f"![{text}]({name}.svg)"))


def test_the_fastest_of_the_others_counts_in_each_cell_anew():
    rows = [*cell(512, ours=2.0, one=3.0, other=2.5), *cell(1024, ours=4.0, one=3.0, other=9.0)]
    goals = reached(rows)
    assert list(goals["fastest"]) == ["other", "one"]
    assert list(goals["speedup"]) == [1.25, 0.75]
    assert list(goals["verdict"]) == ["reached", "missed"]
    assert geometric_mean(goals) == pytest.approx(math.sqrt(1.25 * 0.75))
    assert goal_line("fast", goals) == (
        "Goal fast: reached in 1 of 2 cells; missed in 1; geometric mean 0.968, missed: 1.1 is the goal."
    )
    assert "- article, seq_len 1024: 0.750 of one, 1 wanted" in page(goals)
    assert "| article | 1024      | 0.750 (missed) |" in page(goals)


def test_as_fast_as_wanted_is_reached_and_a_hair_slower_is_missed():
    goals = reached([*cell(1, ours=1.0, one=1.0), *cell(2, ours=1.0, one=0.9999)])
    assert list(goals["verdict"]) == ["reached", "missed"]


def test_a_goal_without_a_figure_for_each_cell_has_no_verdict():
    goals = reached(cell(512, ours=1.0, one=1.2), speedup_each=None, speedup_geometric_mean=1.2)
    assert list(goals["verdict"]) == [None]
    assert goal_line("fast", goals) == "Goal fast: geometric mean 1.200, reached: 1.2 is the goal."


def test_a_cell_counts_where_its_sweep_and_length_are_asked_for():
    rows = [row for n in (1, 2, 3, 4) for row in cell(n, ours=1.0, one=1.0)] + cell(
        2, "llm", ours=1.0, one=1.0
    )
    goals = reached(rows, shortest_seq_len=2, longest_seq_len=3)
    assert list(zip(goals["sweep"], goals["seq_len"], strict=True)) == [("article", 2), ("article", 3)]
    assert list(reached(rows, smallest_problem_bytes=300)["seq_len"]) == [3, 4]


def test_a_problem_is_as_large_as_its_inputs_and_output():
    sweep = {"batch": 2, "heads": 4, "head_dim": 64, "causal": False, "dtype": "fp16"}
    config = {
        "implementations": {"naive": {"kernel": "naive"}},
        "sweeps": {"article": {**sweep, "seq_lens": {"cuda": [512, 1024]}}},
    }
    plan = Plan(load_config(config, ROOT / "kernels"), "cuda", "h200", ROOT)
    tensor = 2 * 4 * 512 * 64 * 2
    assert problem_bytes_of(plan) == {("article", 512): 4 * tensor, ("article", 1024): 8 * tensor}


@pytest.mark.parametrize("mark", ["stale", "interpreted", "grid_failed", "grid_incomplete"])
@pytest.mark.parametrize("side", ["ours", "one"])
def test_a_number_in_doubt_is_shown_and_does_not_count(mark, side):
    goals = reached([*cell(512, **{"ours": 2.0, "one": 1.0, side: mark}), *cell(1024, ours=1.0, one=1.5)])
    assert list(goals["verdict"].fillna("")) == ["", "reached"]
    assert list(goals["reason"]) == [f"{side} is {mark}", ""]
    assert geometric_mean(goals) == 1.5
    assert "(does not count)" in page(goals)
    assert goal_line("fast", goals).startswith(
        "Goal fast: reached in 1 of 2 cells; no number that counts in 1; geometric mean 1.500"
    )
    assert any(text.startswith("Hollow: ") for text in texts(goal_figure(goals, "fast")))


def test_two_gpus_are_not_held_against_each_other():
    rows = cell(512, ours=1.0, one=2.0)
    rows[0]["latency_gpu"], rows[1]["latency_gpu"] = "GPU-1", "GPU-2"
    assert list(reached(rows)["reason"]) == ["they were measured on two GPUs"]


def test_one_that_failed_is_named_and_one_that_cannot_run_here_is_not():
    goals = reached(
        [*cell(1, ours=1.0, one=2.0, other=ERROR), *cell(2, ours=1.0, one=2.0, other=UNSUPPORTED)]
    )
    assert list(goals["verdict"]) == ["reached", "reached"]
    assert list(goals["reason"]) == ["not counting what failed: other has no latency (error)", ""]
    assert "other has no latency (error): article at 1" in page(goals)


@pytest.mark.parametrize("latencies", [{"ours": ERROR, "one": 1.0}, {"ours": 1.0, "one": ERROR}])
def test_a_cell_without_a_number_says_why(latencies):
    goals = reached(cell(512, **latencies))
    (failed,) = [name for name, value in latencies.items() if value == ERROR]
    assert list(goals["reason"]) == [f"{failed} has no latency (error)"]
    assert goal_line("fast", goals) == "Goal fast: no number that counts in 1."
    assert "no number to draw" in texts(goal_figure(goals, "fast"))
    assert "no number" in page(goals)


def test_without_a_goal_there_is_no_section():
    assert goal_section(pd.DataFrame(columns=list(GOAL_COLUMNS)), lambda name, text: "") == []


def test_the_spread_of_the_cells_own_twins_stands_beside_what_was_missed():
    spreads = [{"sweep": "article", "seq_len": 512, "aa_spread": spread} for spread in (0.01, None, 0.034)]
    rows = cell(512, ours=2.0, one=1.0)
    rows = goal_rows({"fast": GOAL}, rows, spreads, sizes(rows))
    assert rows[0]["aa_spread"] == 0.034
    assert "0.500 of one, 1 wanted; A/A spread here: 3.4%" in page(pd.DataFrame(rows))


def test_the_figure_has_a_line_a_sweep_with_its_mean_and_the_goal():
    rows = [
        *cell(512, ours=1.0, one=1.5),
        *cell(1024, ours=1.0, one=1.5),
        *cell(512, "llm", ours=1.0, one=0.5),
    ]
    goals = reached(rows, sweeps=["article", "llm"], speedup_each=1.2)
    found = texts(goal_figure(goals, "fast"))
    assert {"article, mean 1.500", "llm, mean 0.500", "the goal", "as fast", "512", "1024"} <= set(found)
    assert (
        "ours against the fastest of one, other: at least 1.2 in each cell and 1.1 in the geometric mean."
        in (found)
    )
    with pytest.raises(ValueError, match="slow"):
        goal_figure(goals, "slow")


def test_the_page_of_every_cell_has_a_row_a_cell_and_no_markup_from_a_kernel():
    rows = cell(512, ours=1.0, one=1.5)
    goals = reached(rows).assign(reason=HOSTILE)
    html = goals_page(goals)
    assert html.count("<tr") == 2
    assert "<script>alert" not in html
    assert '<td class="number">1.500</td>' in html
