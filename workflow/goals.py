"""results/goals.csv: what the configuration's goals ask of an implementation, and what it reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.problem import Problem
from harness.record import OK
from workflow.plan import TIMING, Plan
from workflow.tables import markdown, table_text

REACHED = "reached"
MISSED = "missed"
# Marks of a row that make its number none to hold against a goal.
NO_EVIDENCE = ("interpreted", "stale", "grid_failed", "grid_incomplete")
GOAL_COLUMNS = (
    "environment",
    "goal",
    "implementation",
    "against",
    "sweep",
    "seq_len",
    "fastest",
    "latency_ms",
    "fastest_latency_ms",
    "speedup",
    "in_doubt",
    "wanted",
    "wanted_geometric_mean",
    "aa_spread",
    "verdict",
    "reason",
)


def goal_rows(
    goals: dict[str, dict[str, Any]],
    benchmark: Sequence[dict[str, Any]],
    comparison: Sequence[dict[str, Any]],
    problem_bytes: Mapping[tuple[str, int], int],
) -> list[dict[str, Any]]:
    """A row for each goal and cell, from the rows of the two other tables and the bytes of each problem.

    `speedup` is the latency of the fastest of those that the goal names over that of its implementation.
    """
    cells: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in benchmark:
        cells.setdefault((row["sweep"], row["seq_len"]), {})[row["implementation"]] = row
    spreads: dict[tuple[str, int], float] = {}
    for row in comparison:
        if (spread := row["aa_spread"]) is not None:
            place = (row["sweep"], row["seq_len"])
            spreads[place] = max(spread, spreads.get(place, 0.0))
    return [
        {
            "environment": cell[goal["implementation"]]["environment"],
            "goal": name,
            "implementation": goal["implementation"],
            "against": " ".join(goal["against"]),
            "sweep": sweep,
            "seq_len": seq_len,
            "wanted": goal["speedup_each"],
            "wanted_geometric_mean": goal["speedup_geometric_mean"],
            "aa_spread": spreads.get((sweep, seq_len)),
            **_reached(goal, cell),
        }
        for name, goal in goals.items()
        for (sweep, seq_len), cell in cells.items()
        if goal["implementation"] in cell and _asks(goal, sweep, seq_len, problem_bytes)
    ]


def problem_bytes_of(plan: Plan) -> dict[tuple[str, int], int]:
    """The bytes that a problem's inputs and output have, for each sweep and length."""
    return {
        (sweep, seq_len): Problem.from_dict(
            plan.sweep_job(TIMING, sweep, implementation, seq_len).spec["problem"]
        ).minimal_bytes
        for sweep, seq_len, implementation in plan.cells()
    }


def _asks(
    goal: dict[str, Any], sweep: str, seq_len: int, problem_bytes: Mapping[tuple[str, int], int]
) -> bool:
    shortest, longest = goal["shortest_seq_len"] or 0, goal["longest_seq_len"] or math.inf
    large = problem_bytes[sweep, seq_len] >= (goal["smallest_problem_bytes"] or 0)
    return sweep in goal["sweeps"] and shortest <= seq_len <= longest and large


def _reached(goal: dict[str, Any], cell: dict[str, dict[str, Any]]) -> dict[str, Any]:
    mine = cell[goal["implementation"]]
    row: dict[str, Any] = dict.fromkeys(("fastest", "latency_ms", "fastest_latency_ms", "speedup", "verdict"))
    row["in_doubt"] = False
    rivals = [cell[name] for name in goal["against"] if name in cell]
    timed = [rival for rival in rivals if rival["latency_status"] == OK]
    if mine["latency_status"] != OK or not timed:
        without = [mine] if mine["latency_status"] != OK else rivals
        return {**row, "reason": _without_number(without)}
    fastest = min(timed, key=lambda rival: float(rival["latency_ms"]))
    speedup = fastest["latency_ms"] / mine["latency_ms"]
    row |= {
        "fastest": fastest["implementation"],
        "latency_ms": mine["latency_ms"],
        "fastest_latency_ms": fastest["latency_ms"],
        "speedup": speedup,
    }
    doubts = [
        f"{side['implementation']} is {mark}"
        for side in (mine, fastest)
        for mark in NO_EVIDENCE
        if mark in side["marks"].split()
    ]
    if mine.get("latency_gpu") != fastest.get("latency_gpu"):
        doubts.append("they were measured on two GPUs")
    if doubts:
        return {**row, "in_doubt": True, "reason": "; ".join(doubts)}
    # One that cannot run here is no rival here; one that failed might have been the fastest.
    failed = [rival for rival in rivals if rival["latency_status"] not in (OK, "unsupported")]
    row["reason"] = f"not counting what failed: {_without_number(failed)}" if failed else ""
    if goal["speedup_each"] is None:
        return row
    return {**row, "verdict": REACHED if speedup >= goal["speedup_each"] else MISSED}


def _without_number(rows: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"{row['implementation']} has no latency ({row['latency_status']})" for row in rows)


def counts(row: Any) -> bool:
    """Whether a row's speedup is held against the goal: not where a mark makes one of its sides doubtful."""
    return not pd.isna(row["speedup"]) and not row["in_doubt"]


def geometric_mean(cells: pd.DataFrame) -> float:
    """The geometric mean of the speedups that count; nan if there is none."""
    counted = _counted(cells)
    return math.exp(sum(math.log(value) for value in counted) / len(counted)) if counted else math.nan


def _counted(cells: pd.DataFrame) -> list[float]:
    return [float(row["speedup"]) for row in cells.to_dict("records") if counts(row)]


def goal_groups(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each goal's name and rows, in their order."""
    for name, cells in [] if table.empty else table.groupby("goal", sort=False):
        yield str(name), cells


def goal_sentence(cells: pd.DataFrame, text: Callable[[Any], str] = table_text) -> str:
    """What one goal asks, in words; `text` writes a name."""
    first = cells.iloc[0]
    rivals = [text(name) for name in str(first["against"]).split()]
    whom = rivals[0] if len(rivals) == 1 else f"the fastest of {', '.join(rivals)}"
    asked = []
    if not pd.isna(first["wanted"]):
        asked.append(f"at least {first['wanted']:.4g} in each cell")
    if not pd.isna(first["wanted_geometric_mean"]):
        asked.append(f"{first['wanted_geometric_mean']:.4g} in the geometric mean")
    what = f": {' and '.join(asked)}" if asked else ", without a figure to reach"
    return f"{text(first['implementation'])} against {whom}{what}."


def goal_line(name: str, cells: pd.DataFrame) -> str:
    """What was reached of one goal, in one line."""
    parts = []
    judged = cells[cells["verdict"].notna()]
    if len(judged):
        reached = int((judged["verdict"] == REACHED).sum())
        parts.append(f"reached in {reached} of {len(cells)} cells")
        if missed := int((judged["verdict"] == MISSED).sum()):
            parts.append(f"missed in {missed}")
    counted = len(_counted(cells))
    if counted < len(cells):
        parts.append(f"no number that counts in {len(cells) - counted}")
    if counted:
        mean, wanted = geometric_mean(cells), cells["wanted_geometric_mean"].iloc[0]
        text = f"geometric mean {mean:.3f}"
        if not pd.isna(wanted):
            text += f", {'reached' if mean >= wanted else 'missed'}: {wanted:.4g} is the goal"
        parts.append(text)
    return f"Goal {table_text(name)}: {'; '.join(parts)}."


def goal_section(table: pd.DataFrame, image_of: Callable[[str, str], str]) -> list[str]:
    """The parts of the page's section; none where the configuration has no goal."""
    groups = list(goal_groups(table))
    if not groups:
        return []
    parts = [
        "## Goals",
        "A number is the latency of the fastest that the goal names over that of the goal's implementation:"
        " above 1 the implementation is faster. The A/A spread of a cell is how far apart one kernel may be"
        " that is measured twice there, over processes and with 99 % confidence; it excuses nothing.",
        "\n".join(f"- {table_text(name)}: {goal_sentence(cells)}" for name, cells in groups),
        _table(groups),
    ]
    for name, cells in groups:
        parts += [image_of(f"{name}_goal", f"speedup against length, goal {name}")]
        below = cells[cells["verdict"] == MISSED]
        if len(below):
            parts.append(f"Below the goal {table_text(name)}:\n\n{_below(below)}")
        if reasons := _reasons(cells):
            parts.append(f"What else there is to know of {table_text(name)}:\n\n{reasons}")
    return parts


def _table(groups: Sequence[tuple[str, pd.DataFrame]]) -> str:
    """One row a cell, one column a goal."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for name, rows in groups:
        for row in rows.to_dict("records"):
            cells.setdefault((row["sweep"], row["seq_len"]), {})[name] = _figure(row)
    return markdown(
        [
            {
                "sweep": table_text(sweep),
                "seq_len": str(seq_len),
                **{table_text(name): found.get(name, "") for name, _ in groups},
            }
            for (sweep, seq_len), found in cells.items()
        ]
    )


def _figure(row: dict[Any, Any]) -> str:
    """A cell: the number, and in a word what is wrong with it."""
    if pd.isna(row["speedup"]):
        return "no number"
    number = f"{row['speedup']:.3f}"
    if not counts(row):
        return f"{number} (does not count)"
    return number if row["verdict"] == REACHED or pd.isna(row["verdict"]) else f"{number} (missed)"


def _reasons(cells: pd.DataFrame) -> str:
    """Why cells have no number, or one that does not count, or one that not all were timed for."""
    found: dict[str, list[str]] = {}
    for row in cells.to_dict("records"):
        if isinstance(row["reason"], str) and row["reason"]:
            found.setdefault(row["reason"], []).append(f"{table_text(row['sweep'])} at {row['seq_len']}")
    return "\n".join(f"- {table_text(reason)}: {', '.join(where)}" for reason, where in found.items())


def _below(rows: pd.DataFrame) -> str:
    return "\n".join(
        f"- {table_text(row['sweep'])}, seq_len {row['seq_len']}: {row['speedup']:.3f} of"
        f" {table_text(row['fastest'])}, {row['wanted']:.4g} wanted{_twice(row['aa_spread'])}"
        for row in rows.to_dict("records")
    )


def _twice(spread: float) -> str:
    return "" if pd.isna(spread) else f"; A/A spread here: {spread:.1%}"
