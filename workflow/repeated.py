"""Is a number the same on another day? Two runs of one study beside each other, cell by cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.record import OK
from workflow.render import environment_line
from workflow.story import bullets, counted, percent
from workflow.tables import markdown, table_text

CELL = ["sweep", "seq_len", "implementation"]
NAMED = 5  # so many of the largest differences are named


def repeated_cells(
    before: pd.DataFrame, after: pd.DataFrame, comparisons: tuple[pd.DataFrame, pd.DataFrame]
) -> pd.DataFrame:
    """The cells that have a latency in both runs, the largest difference first.

    `ratio` and `cycles_ratio` are after over before. `resolvable_difference` is the larger of what the two
    runs say that they can tell apart in the cell, by their own A/A rows; NaN where neither says.
    """
    columns = [*CELL, "latency_ms", "latency_cycles", "marks"]
    one, other = (
        rows.loc[(rows["latency_status"] == OK) & rows["latency_ms"].notna(), columns]
        for rows in (before, after)
    )
    cells = one.merge(other, on=CELL, suffixes=("_before", "_after"))
    cells = cells.assign(
        ratio=cells["latency_ms_after"] / cells["latency_ms_before"],
        cycles_ratio=cells["latency_cycles_after"] / cells["latency_cycles_before"],
    )
    resolved = pd.concat(comparisons).groupby(["sweep", "seq_len"])["resolvable_difference"].max()
    cells = cells.join(resolved, on=["sweep", "seq_len"])
    order = np.log(cells["ratio"]).abs().sort_values(ascending=False).index
    return cells.loc[order].reset_index(drop=True)


def repeated_page(
    before: pd.DataFrame,
    after: pd.DataFrame,
    comparisons: tuple[pd.DataFrame, pd.DataFrame],
    environments: tuple[dict[str, Any], dict[str, Any]],
) -> str:
    """The page as Markdown, from the benchmark tables, comparisons and environments of the two runs.

    Raises ValueError where the runs are of different environments or have no cell in common.
    """
    keys = {str(key) for rows in (before, after) for key in rows["environment"].unique()}
    if len(keys) != 1:
        raise ValueError(f"environment = {', '.join(sorted(keys))}: expected two runs of one environment")
    cells = repeated_cells(before, after, comparisons)
    if cells.empty:
        raise ValueError("no cell has a latency in both runs: nothing to put beside each other")
    off = (cells["ratio"] - 1).abs()
    beyond = cells[off > cells["resolvable_difference"]]
    summary = [
        f"{counted(len(cells), 'cell')} have a latency in both runs. The median of their ratios, after over"
        f" before, is {cells['ratio'].median():.5f} in milliseconds and"
        f" {cells['cycles_ratio'].median():.5f} in clock cycles.",
        f"Half of the cells differ by no more than {percent(off.median())}, nine of ten by no more than"
        f" {percent(off.quantile(0.9))}.",
        "The largest differences: " + "; ".join(_named(row) for _, row in cells.head(NAMED).iterrows()) + ".",
        f"{len(beyond)} of {len(cells)} differ by more than what the runs themselves say that they resolve"
        " there"
        + (": " + "; ".join(_named(row) for _, row in beyond.iterrows()) if len(beyond) else "")
        + ".",
    ]
    lines = [
        "# The same run twice",
        "Two runs of one study, each in processes of its own: what does a number say beyond its day?",
        bullets(
            f"{name}: {environment_line(environment, rows)}"
            for name, rows, environment in zip(
                ("before", "after"), (before, after), environments, strict=True
            )
        ),
        bullets(summary),
        markdown([_row(row) for _, row in cells.iterrows()]),
        "`resolvable` is the larger of the smallest differences that the two runs say they can tell apart in"
        " the cell, from the same kernel measured twice in each.",
    ]
    return "\n\n".join(lines) + "\n"


def _named(row: pd.Series) -> str:
    return (
        f"{table_text(row['implementation'])} at {row['seq_len']} (sweep {table_text(row['sweep'])})"
        f" {row['ratio'] - 1:+.2%}"
    )


def _row(row: pd.Series) -> dict[str, str]:
    resolvable = row["resolvable_difference"]
    return {
        "sweep": table_text(row["sweep"]),
        "seq_len": str(row["seq_len"]),
        "impl": table_text(row["implementation"]),
        "before (ms)": f"{row['latency_ms_before']:.4g}",
        "after (ms)": f"{row['latency_ms_after']:.4g}",
        "difference": f"{row['ratio'] - 1:+.2%}",
        "in cycles": f"{row['cycles_ratio'] - 1:+.2%}",
        "resolvable": "" if pd.isna(resolvable) else f"{resolvable:.2%}",
        "marks before": table_text(" ".join(str(row["marks_before"]).replace("nan", "").split())),
        "marks after": table_text(" ".join(str(row["marks_after"]).replace("nan", "").split())),
    }
