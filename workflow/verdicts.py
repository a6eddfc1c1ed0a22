"""How sure the comparisons are: what the report says from results/comparison.csv."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.comparison import SAME_MARGIN
from workflow.comparisons import BASELINE, EDIT, TWIN
from workflow.tables import markdown, table_text

RULE = (
    "A ratio is a latency over the baseline's, with its 99 % interval over processes (Welch's, on"
    " logarithms); below 1 is faster. FASTER and SLOWER are said only where the interval excludes 1 and the"
    " difference exceeds what measuring the same kernel twice gives (A/A), in milliseconds and in cycles"
    f" alike; SAME where the interval includes 1 and all of it lies within {SAME_MARGIN:.0%} of 1; UNCLEAR"
    " otherwise. The last column is the smallest difference that is found with 95 % certainty here."
)


def verdict_section(comparison: pd.DataFrame, sweep: str) -> list[str]:
    """The parts of a sweep's section on comparisons; none where nothing was compared."""
    rows = comparison[comparison["sweep"] == sweep]
    against, twins, edits = (rows[rows["kind"] == kind] for kind in (BASELINE, TWIN, EDIT))
    if rows.empty:
        return []
    parts = ["### How sure are the differences?"]
    if len(against):
        parts += [RULE, _table(against), _counts(against)]
    if len(twins):
        parts.append(twin_line(twins))
    parts.append(edit_section(edits))
    return [part for part in parts if part]


def verdict_lines(comparison: pd.DataFrame, sweep: str) -> list[str]:
    """One line for each implementation that is compared with the baseline: where which verdict holds."""
    rows = comparison[(comparison["sweep"] == sweep) & (comparison["kind"] == BASELINE)]
    lines = []
    for (name, baseline), mine in rows.groupby(["implementation", "against"], sort=False):
        found = [
            f"{verdict} at {', '.join(str(seq_len) for seq_len in cells['seq_len'])}"
            for verdict, cells in mine.groupby("verdict", sort=False)
        ]
        if found:
            lines.append(f"{table_text(name)} against {table_text(baseline)}: {'; '.join(found)}.")
    return lines


def _table(rows: pd.DataFrame) -> str:
    return markdown([comparison_row(row) for row in rows.to_dict("records")])


def comparison_row(row: dict[Any, Any]) -> dict[str, str]:
    """A comparison as the page shows it; where there is no verdict, why."""
    verdict = row["reason"] if pd.isna(row["verdict"]) else row["verdict"]
    return {
        "seq_len": str(row["seq_len"]),
        "impl": table_text(row["implementation"]),
        "against": table_text(row["against"]),
        "ratio": _ratio(row["ratio"]),
        "99 % interval": _interval(row, "ratio"),
        "in cycles": _ratio(row["cycles_ratio"]),
        "interval in cycles": _interval(row, "cycles_ratio"),
        "verdict": table_text(verdict),
        "resolves": _percent(row["resolvable_difference"]),
    }


def _counts(rows: pd.DataFrame) -> str:
    unclear = rows[rows["verdict"] == "UNCLEAR"]
    return "\n".join(
        f"- seq_len {row['seq_len']}, {table_text(row['implementation'])}: UNCLEAR,"
        f" {table_text(row['reason'])}."
        for row in unclear.to_dict("records")
    )


def twin_line(twins: pd.DataFrame) -> str:
    """What the A/A test says: how far apart two measurements of one kernel are, and what is resolved."""
    measured = twins[twins["ratio"].notna()]
    first = twins.iloc[0]
    names = f"{table_text(first['against'])} and {table_text(first['implementation'])}"
    if measured.empty:
        return f"The A/A test, {names}, has no ratio: {table_text(first['reason'])}."
    lines = [
        f"- seq_len {row['seq_len']}: {_ratio(row['ratio'])} ({_interval(row, 'ratio')}), in cycles"
        f" {_ratio(row['cycles_ratio'])}; spread {_percent(row['aa_spread'])}; this run resolves differences"
        f" of {_percent(row['resolvable_difference'])}"
        + (f" — and calls them {row['verdict']}" if row["verdict"] in ("FASTER", "SLOWER") else "")
        for row in measured.to_dict("records")
    ]
    return f"{names} are the same kernel, measured twice under two names (A/A):\n\n" + "\n".join(lines)


def edit_section(edits: pd.DataFrame) -> str:
    """What the last edit of each kernel did to each cell; nothing where none was measured before."""
    if edits.empty:
        return ""
    rows = [
        {
            **{name: text for name, text in comparison_row(row).items() if name != "against"},
            "before": f"{str(row['before_measured_at'])[:16]} {_commit(row['before_commit'])}".strip(),
        }
        for row in edits.to_dict("records")
    ]
    return (
        "What the last edit of a kernel did: its latency over that of the newest measurement of its former"
        f" source, from `results/history/`.\n\n{markdown(rows)}"
    )


def _commit(commit: Any) -> str:
    return "" if pd.isna(commit) else str(commit)[:12]


def _ratio(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.3f}"


def _interval(row: dict[Any, Any], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "" if pd.isna(low) or pd.isna(high) else f"{low:.3f} – {high:.3f}"


def _percent(share: float) -> str:
    return "" if pd.isna(share) else f"{share * 100:.2g} %"
