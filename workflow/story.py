"""report/report.md: the run told from top to bottom, in sentences that the numbers decide.

Every number comes from the CSV files, and every judgement from a rule written here: who is the
fastest, when two are not told apart, what follows its law. Nothing is said about what was not measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from harness.record import MARKS, NOT_DETERMINISTIC, OK, UNSUPPORTED
from workflow.comparisons import COMPARISON_COLUMNS
from workflow.goals import GOAL_COLUMNS, goal_groups, goal_line, goal_section
from workflow.gpus import gpu_section
from workflow.render import (
    GIB,
    by_workload,
    environment_line,
    first_names,
    grid_tables,
    legend,
    prefill_cells,
    problem_line,
    rate_of,
    sweep_table,
)
from workflow.tables import markdown, table_text
from workflow.verdicts import verdict_lines, verdict_section

INTERPRETED = "interpreted"
# Rows with one of these marks have a number that is no contender's.
ASIDE = {INTERPRETED, "not_attention"}
# Marks that make a number doubtful as such; a comparison that uses it repeats them.
DOUBTS = ("stale", "grid_failed", "grid_incomplete")
SAME_MEMORY = 0.01  # relative difference up to which two peaks, or a peak and its law, agree
CONFIDENCE = 0.95  # an interval that covers less is said to


def report_page(
    benchmark: pd.DataFrame,
    grid: pd.DataFrame,
    environment: dict[str, Any],
    figures: Sequence[str] = (),
    comparison: pd.DataFrame | None = None,
    goals: pd.DataFrame | None = None,
) -> str:
    """The page; `figures` are paths relative to it, named `<sweep>_<quantity>.svg` and `error.svg`."""
    comparison = pd.DataFrame(columns=list(COMPARISON_COLUMNS)) if comparison is None else comparison
    goals = pd.DataFrame(columns=list(GOAL_COLUMNS)) if goals is None else goals
    parts = [
        "# Report",
        environment_line(environment, benchmark),
        asked(benchmark, grid),
        "## In short",
        bullets(in_short(benchmark, grid, comparison, goals)),
        *goal_section(goals, lambda name, text: image(name, text, figures)),
    ]
    if not grid.empty:
        parts += [
            "## Is it right?",
            grid_tables(grid),
            bullets(grid_faults(grid)),
            "### Where the largest error lies",
            image("error", "maximum error against sequence length", figures),
            *error_story(prefill_cells(grid)),
        ]
    for sweep, rows in _groups(benchmark, "sweep"):
        parts += [f"## Sweep {table_text(sweep)}", problem_line(rows), sweep_table(rows)]
        if measured(rows, "latency"):
            parts += [
                "### How fast?",
                image(f"{sweep}_latency", f"latency against sequence length, sweep {sweep}", figures),
                bullets(speed_story(first_names(rows))),
                process_note(rows),
                image(f"{sweep}_throughput", f"throughput against sequence length, sweep {sweep}", figures),
                bullets(throughput_story(first_names(rows))),
                *verdict_section(comparison, sweep),
            ]
        if measured(rows, "memory"):
            parts += [
                "### How much memory?",
                image(f"{sweep}_memory", f"peak memory against sequence length, sweep {sweep}", figures),
                bullets(memory_story(first_names(rows))),
            ]
    parts += gpu_section(benchmark, comparison)
    if not benchmark.empty:
        parts += ["## What could not be measured, and why", empty_cells(benchmark)]
    parts += [
        "## What to distrust",
        "" if benchmark.empty else legend(benchmark.assign(marks=None)),
        bullets(doubts(benchmark, grid)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def image(name: str, text: str, figures: Sequence[str]) -> str:
    path = next((path for path in figures if path.rsplit("/", 1)[-1] == f"{name}.svg"), None)
    return f"![{table_text(text)}]({path})" if path else ""


def _groups(table: pd.DataFrame, column: str) -> list[tuple[str, pd.DataFrame]]:
    """The table's rows by a column's values, in their order; none of a table without rows."""
    return [] if table.empty else list(table.groupby(column, sort=False))


def measured(rows: pd.DataFrame, phase: str) -> bool:
    """Whether the sweep asks for this phase at all; an empty status means that it does not."""
    return bool(rows[f"{phase}_status"].notna().any())


def asked(benchmark: pd.DataFrame, grid: pd.DataFrame) -> str:
    """What the run set out to measure."""
    names = dict.fromkeys(
        table_text(name)
        for table in (grid, first_names(benchmark))
        if not table.empty
        for name in table["implementation"]
    )
    sweeps = [
        f"{table_text(sweep)} (seq_len {listed(sorted(set(rows['seq_len'])))})"
        for sweep, rows in _groups(benchmark, "sweep")
    ]
    text = f"{counted(len(names), 'implementation')}: {listed(names)}."
    for workload, part in by_workload(grid):
        cells = [len(cells) for _, cells in _groups(part, "implementation")]
        if cells:
            who = "Each" if len(by_workload(grid)) == 1 else f"Each that answers {workload}"
            text += f" {who} was checked on {counted(max(cells), 'cell')} of the correctness grid."
    if sweeps:
        text += f" Measured in {'these sweeps' if len(sweeps) > 1 else 'one sweep'}: {listed(sweeps)}."
    return text


def in_short(
    benchmark: pd.DataFrame, grid: pd.DataFrame, comparison: pd.DataFrame, goals: pd.DataFrame
) -> list[str]:
    """The page's findings, a line each."""
    right: list[str] = []
    not_right: list[str] = []
    not_here: list[str] = []
    for name, cells in _groups(grid, "implementation"):
        if (cells["status"] == UNSUPPORTED).all():
            not_here.append(table_text(name))
            continue
        good = int((cells["status"] == OK).sum())
        line = f"{table_text(name)} ({good} of {len(cells)})"
        (right if good == len(cells) else not_right).append(line)
    lines = []
    if right:
        lines.append(f"Right in every cell of the grid: {listed(right)}.")
    if not_right:
        lines.append(f"Not right, or not judged, in every cell: {listed(not_right)}.")
    if not_here:
        lines.append(f"Unsupported in every cell, on this machine: {listed(not_here)}.")
    lines += [goal_line(name, cells) for name, cells in goal_groups(goals)]
    for sweep, rows in _groups(benchmark, "sweep"):
        if measured(rows, "latency"):
            lines.append(f"Sweep {table_text(sweep)}: {winners(first_names(rows))}")
            lines += verdict_lines(comparison, sweep)
    if benchmark.empty:
        return lines
    empty = sum(len(missing(benchmark, phase)) for phase in ("latency", "memory"))
    wanted = sum(int(benchmark[f"{phase}_status"].notna().sum()) for phase in ("latency", "memory"))
    lines.append(
        f"{empty} of {wanted} latencies and memory peaks have no number; each says why, below."
        if empty
        else f"All {wanted} latencies and memory peaks that were asked for were measured."
    )
    marked = sum(bool(marks_in(marks)) for marks in benchmark["marks"])
    lines.append(
        f"{marked} of {len(benchmark)} rows carry a mark that limits what they say: see the end."
        if marked
        else "No row carries a mark."
    )
    return lines


# --- is it right?


def grid_faults(grid: pd.DataFrame) -> list[str]:
    """A line for each implementation and status other than ok, with the first reason."""
    lines = []
    for (name, status), cells in grid[grid["status"] != OK].groupby(["implementation", "status"], sort=False):
        reasons = [reason for reason in cells["reason"].dropna() if str(reason)]
        first = f", the first: {table_text(reasons[0])}" if reasons else ""
        kinds = (
            sorted(set(", ".join(cells["fault_kind"].dropna()).split(", "))) if "fault_kind" in cells else []
        )
        found = f" ({listed(kinds)})" if any(kinds) else ""
        lines.append(
            f"{table_text(name)} is {table_text(status)}{found} in {counted(len(cells), 'cell')}"
            f" (seq_len {listed(sorted(set(cells['seq_len'])))}){first}"
        )
    marked = grid[grid["marks"].map(lambda marks: NOT_DETERMINISTIC in marks_in(marks))]
    for name, cells in marked.groupby("implementation", sort=False):
        lines.append(
            f"{table_text(name)} is right, and gave other bits for the same inputs, in"
            f" {counted(len(cells), 'cell')} (seq_len {listed(sorted(set(cells['seq_len'])))})"
        )
    return lines


def error_story(grid: pd.DataFrame) -> list[str]:
    """Which row the largest error lies in, and what its size is: the article's explanation, tested."""
    right = grid[(grid["status"] == OK) & grid["max_abs_error"].notna()]
    if right.empty:
        return ["No cell was right, so no error can be explained."]
    parts = []
    exact = [
        table_text(name)
        for name, cells in right.groupby("implementation", sort=False)
        if (cells["max_abs_error"] == 0).all()
    ]
    if exact:
        subject = "computes" if len(exact) == 1 else "compute"
        parts.append(
            f"{listed(exact)} {subject} what the reference computes, to the last bit: error 0 everywhere."
            " An error of 0 lies in no row; what follows counts the others."
        )
    wrong = right[right["max_abs_error"] > 0]
    causal = wrong[wrong["causal"].astype(bool)]
    plain = wrong[~wrong["causal"].astype(bool)]
    lines = [row_zero(causal), *causal_sizes(causal), units(causal)] if len(causal) else []
    parts.append(bullets(lines + plain_trend(plain)))
    if len(wrong):
        parts += [error_table(wrong), reference_share(wrong)]
    return parts


def row_zero(causal: pd.DataFrame) -> str:
    """Does the largest causal error lie in row 0, as the article has it?"""
    rows = causal["error_row"].astype(int)
    first, total = int((rows == 0).sum()), len(rows)
    if first == 0:
        return (
            f"With the causal mask the largest error lies in {in_rows(rows)}, in half of the"
            f" {counted(total, 'cell')} in row {int(rows.quantile(0.5, interpolation='lower'))} or before,"
            " and **never in row 0**. Row 0 sees one key, so its output is a copy of one row of V. The"
            " article explains the constant causal error by row 0; these cells refute that."
        )
    if first == total:
        return (
            f"With the causal mask the largest error lies in row 0 in all {counted(total, 'cell')}: they"
            " fit the article's explanation by row 0."
        )
    others = rows[rows != 0]
    return (
        f"With the causal mask the largest error lies in row 0 in {first} of {counted(total, 'cell')}, and in"
        f" {in_rows(others)} in the others: the article's explanation by row 0 does not cover those."
    )


def causal_sizes(causal: pd.DataFrame) -> list[str]:
    """For each dtype and head_dim whether the largest causal error is the same at every length."""
    lines = []
    for (dtype, head_dim), cells in causal.groupby(["dtype", "head_dim"], sort=False):
        largest = cells.groupby("seq_len")["max_abs_error"].max()
        where = f"{table_text(dtype)}, head_dim {head_dim}, causal"
        worst = cells.loc[cells["max_abs_error"].idxmax()]
        there = (
            f"row {int(worst['error_row'])}, where the reference is {worst['value_there']:.4g} and one unit"
            f" in the last place is {power(worst['unit_in_last_place'])}"
        )
        if len(largest) > 1 and largest.nunique() == 1:
            lines.append(
                f"{where}: the largest error is {power(largest.iloc[0])} at every length,"
                f" for example in {there}."
            )
        elif len(largest) > 1:
            lines.append(
                f"{where}: the largest error is not constant, from {power(largest.min())} to"
                f" {power(largest.max())}; the largest lies in {there}."
            )
        else:
            lines.append(f"{where}: the largest error is {power(largest.iloc[0])}, in {there}.")
    return lines


def units(causal: pd.DataFrame) -> str:
    """How many causal cells are explained by one unit in the last place."""
    single = causal[causal["error_in_units"] == 1]
    if single.empty:
        return "In no causal cell is the largest error one unit in the last place of the value there."
    sizes = single["value_there"].abs()
    text = (
        f"In {len(single)} of {counted(len(causal), 'causal cell')} the largest error is exactly one unit in"
        f" the last place of the reference's value there. They lie in"
        f" {in_rows(single['error_row'].astype(int))}, where that value's magnitude is {sizes.min():.3g} to"
        f" {sizes.max():.3g}. A row that averages few keys has large outputs, and so a large unit."
    )
    rest = causal[causal["error_in_units"] != 1]
    if len(rest):
        smaller = " of a smaller value" if rest["value_there"].abs().max() < sizes.min() else ""
        units_low, units_high = rest["error_in_units"].min(), rest["error_in_units"].max()
        text += f" In the other {len(rest)} it is {units_low:.3g} to {units_high:.3g} units{smaller}."
    return text


def plain_trend(plain: pd.DataFrame) -> list[str]:
    """Without a mask: does the error shrink as the length grows?"""
    lines = []
    for dtype, cells in plain.groupby("dtype", sort=False):
        largest = cells.groupby("seq_len")["max_abs_error"].max()
        first, last = largest.iloc[0], largest.iloc[-1]
        where = f"{table_text(dtype)}, not causal"
        if len(largest) < 2:
            lines.append(f"{where}: the largest error is {first:.3g}.")
            continue
        if first == last:
            change = f"is {first:.3g} both at seq_len {largest.index[0]} and"
        else:
            verb = "shrinks" if last < first else "grows"
            change = f"{verb} from {first:.3g} at seq_len {largest.index[0]} to {last:.3g}"
        lines.append(f"{where}: the largest error {change} at {largest.index[-1]}.")
    return lines


def error_table(wrong: pd.DataFrame) -> str:
    """The largest error of each mask, dtype and head_dim: where it lies, and its unit."""
    rows = []
    keys = ["causal", "dtype", "head_dim"]
    for (causal, dtype, head_dim), cells in wrong.groupby(keys):
        worst = cells.loc[cells["max_abs_error"].idxmax()]
        rows.append(
            {
                "mask": "causal" if causal else "none",
                "dtype": table_text(dtype),
                "head_dim": str(head_dim),
                "largest error": f"{worst['max_abs_error']:.4g}",
                "impl": table_text(worst["implementation"]),
                "seq_len": str(worst["seq_len"]),
                "row": str(int(worst["error_row"])),
                "reference there": f"{worst['value_there']:.4g}",
                "unit in the last place": power(worst["unit_in_last_place"]),
                "error in units": f"{worst['error_in_units']:.3g}",
            }
        )
    return markdown(rows)


def reference_share(wrong: pd.DataFrame) -> str:
    """The reference rounds too: how much of the difference is its own."""
    closer = wrong["max_abs_error_fp64"] < wrong["reference_error_fp64"]
    return (
        "The difference is from a reference that rounds too. Against the same attention in fp64, the"
        f" implementation is the closer one in {int(closer.sum())} of {counted(len(wrong), 'cell')}"
        f" (its error up to {wrong['max_abs_error_fp64'].max():.3g}, the reference's up to"
        f" {wrong['reference_error_fp64'].max():.3g})."
    )


# --- how fast?


def comparable(rows: pd.DataFrame, phase: str = "latency") -> pd.DataFrame:
    """Rows with a native number: interpreted ones, and floors, are compared with nothing."""
    aside = rows["marks"].apply(lambda marks: bool(ASIDE & set(marks_in(marks)))).astype(bool)
    return rows[(rows[f"{phase}_status"] == OK) & ~aside]


def marks_in(cell: Any) -> list[str]:
    return [] if pd.isna(cell) else str(cell).split()


def named(row: dict[Any, Any]) -> str:
    """An implementation's name, with those of its marks that put the number itself in doubt."""
    doubts = [mark for mark in DOUBTS if mark in marks_in(row["marks"])]
    return table_text(row["implementation"] + (f" ({', '.join(doubts)})" if doubts else ""))


def ranking(rows: pd.DataFrame) -> tuple[list[dict[Any, Any]], list[dict[Any, Any]]]:
    """The fastest of one length with all that are not told apart from it, and the others, in order."""
    ordered = comparable(rows).sort_values("latency_ms", kind="stable").to_dict("records")
    if not ordered:
        return [], []
    limit = ordered[0]["latency_high_ms"]
    return (
        [row for row in ordered if row["latency_low_ms"] <= limit],
        [row for row in ordered if row["latency_low_ms"] > limit],
    )


def winners(rows: pd.DataFrame) -> str:
    """One line on a sweep: who is the fastest where, and who loses everywhere."""
    won: dict[str, list[int]] = {}
    lost: dict[str, list[float]] = {}
    lengths = 0
    for seq_len, cells in rows.groupby("seq_len"):
        best, others = ranking(cells)
        if len(best) + len(others) < 2:
            continue
        lengths += 1
        won.setdefault(" and ".join(table_text(row["implementation"]) for row in best), []).append(seq_len)
        for row in others:
            ratios = lost.setdefault(table_text(row["implementation"]), [])
            ratios.append(row["latency_ms"] / best[0]["latency_ms"])
    if not won:
        return "at no length are there two native latencies to compare."
    parts = []
    for names, seq_lens in won.items():
        verb = "are the fastest, not told apart," if " and " in names else "is the fastest"
        where = "at every length" if len(seq_lens) == lengths else f"at seq_len {listed(seq_lens)}"
        parts.append(f"{names} {verb} {where}")
    text = "; ".join(parts) + "."
    for name, ratios in lost.items():
        if len(ratios) == lengths:
            text += f" {name} loses at every length, taking {times(ratios)} times as long as the fastest."
    return text


def speed_story(rows: pd.DataFrame) -> list[str]:
    """A line for each length, then one for each implementation that loses, then the interpreted ones."""
    lines = []
    losses: dict[str, dict[int, float]] = {}
    for seq_len, cells in rows.groupby("seq_len"):
        best, others = ranking(cells)
        if not best:
            lines.append(f"seq_len {seq_len}: no native latency.")
            continue
        if not others and len(best) == 1:
            lines.append(f"seq_len {seq_len}: {timed(best[0])}; there is nothing to compare it with.")
            continue
        if len(best) == 1:
            text = f"seq_len {seq_len}: {timed(best[0])} is the fastest"
        else:
            text = (
                f"seq_len {seq_len}: {listed(map(timed, best))} are not told apart: their intervals overlap"
                " that of the fastest"
            )
        for row in others:
            ratio = row["latency_ms"] / best[0]["latency_ms"]
            losses.setdefault(table_text(row["implementation"]), {})[int(seq_len)] = ratio
            text += f"; {timed(row)} takes {factor(ratio)} times as long"
        lines.append(text + ".")
    compared = comparable(rows).groupby("implementation", sort=False)["seq_len"].count()
    for name, ratios in losses.items():
        if len(ratios) < 2:
            continue
        everywhere = len(ratios) == compared.get(name)
        where = f"at seq_len {listed(ratios)}"
        if everywhere:
            all_lengths = len(ratios) == rows["seq_len"].nunique()
            where = "at every length" + ("" if all_lengths else " at which it can be compared")
        steps = list(itertools.pairwise(ratios.values()))
        trend = (
            ", by more the longer the sequence"
            if everywhere and all(later > earlier for earlier, later in steps)
            else ", by less the longer the sequence"
            if everywhere and all(later < earlier for earlier, later in steps)
            else ""
        )
        lines.append(
            f"{name} loses {where}{trend}: {times(list(ratios.values()))} times the latency of the fastest."
        )
    return lines + interpreted_line(rows)


def interpreted_line(rows: pd.DataFrame) -> list[str]:
    native = comparable(rows).index
    foreign = rows[(rows["latency_status"] == OK) & ~rows.index.isin(native)]
    if foreign.empty:
        return []
    texts = [
        f"{table_text(name)} "
        + listed(f"{row['latency_ms']:.4g} ms at {row['seq_len']}" for row in mine.to_dict("records"))
        for name, mine in foreign.groupby("implementation", sort=False)
    ]
    return [f"Run by Triton's interpreter, and so compared with nothing: {'; '.join(texts)}."]


def timed(row: dict[Any, Any]) -> str:
    return (
        f"{named(row)}, {row['latency_ms']:.4g} ms ({row['latency_low_ms']:.4g} –"
        f" {row['latency_high_ms']:.4g}),"
    )


def process_note(rows: pd.DataFrame) -> str:
    """What an interval does not say."""
    counts = rows["process_count"].dropna()
    if counts.empty:
        return ""
    if counts.max() == 1:
        return (
            "Each latency comes from one process. Its interval says how well that process knows its own"
            " median, not how far the next process would be from it: a small difference is not yet a finding."
        )
    return (
        f"Each latency is the median of {spanned(counts.astype(int))} processes, and its interval spans what"
        " they found: it says how far the next process may be."
    )


def throughput_story(rows: pd.DataFrame) -> list[str]:
    """Each implementation's rate at its shortest and longest length, and its highest."""
    lines = []
    rate = rate_of(rows)
    for name, mine in rows[rows["latency_status"] == OK].groupby("implementation", sort=False):
        rates = mine.sort_values("seq_len").set_index("seq_len")[rate.column] / rate.divisor
        aside = sorted({mark for marks in mine["marks"] for mark in marks_in(marks)} & ASIDE)
        what = "" if len(comparable(mine)) else f" ({table_text(', '.join(aside))})"
        text = f"{table_text(name)}{what}: {rates.iloc[0]:.3g} {rate.unit} at seq_len {rates.index[0]}"
        if len(rates) > 1:
            text += f", {rates.iloc[-1]:.3g} at {rates.index[-1]}"
            if rates.idxmax() not in (rates.index[0], rates.index[-1]):
                text += f"; the highest, {rates.max():.3g}, at {rates.idxmax()}"
        lines.append(text + ".")
    return lines


# --- how much memory?


def memory_story(rows: pd.DataFrame) -> list[str]:
    """Each implementation's peaks, its workspace and its law; then who takes how much more than whom."""
    lines = []
    for name, mine in rows[rows["memory_status"] == OK].groupby("implementation", sort=False):
        cells = mine.sort_values("seq_len")
        interpreted = "" if len(comparable(cells, "memory")) else " (interpreted)"
        first, last = cells.iloc[0], cells.iloc[-1]
        text = f"{table_text(name)}{interpreted}: {gibibytes(first)} GiB at seq_len {first['seq_len']}"
        if len(cells) > 1:
            own = without_workspace(cells)
            bare = "" if (own == cells["peak_memory_bytes"]).all() else " without workspace"
            text += f", {gibibytes(last)} GiB at {last['seq_len']}"
            if own.iloc[0] > 0:
                text += (
                    f": {factor(last['seq_len'] / first['seq_len'])} times the length,"
                    f" {factor(own.iloc[-1] / own.iloc[0])} times the memory{bare}"
                )
        lines.append(f"{text}. {workspace(cells)}{law(cells)}".rstrip())
    return lines + memory_comparison(comparable(rows, "memory"))


def without_workspace(cells: pd.DataFrame) -> pd.Series:
    return cells["peak_memory_bytes"] - cells["workspace_bytes"].fillna(0).astype(int)


def workspace(cells: pd.DataFrame) -> str:
    counts = cells["workspace_bytes"].fillna(0)
    if not (counts > 0).any():
        return ""
    sizes = sorted({f"{count / 2**20:.4g}" for count in counts}, key=float)
    span = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"{span} MiB of it are a library's workspace. "


def law(cells: pd.DataFrame) -> str:
    """Does the peak without workspace follow the kernel's own arithmetic?"""
    with_law = cells[cells["law_bytes"].notna()]
    if with_law.empty:
        return "The kernel states no memory law."
    subject = "Without it the peak" if (cells["workspace_bytes"] > 0).any() else "The peak"
    off = without_workspace(with_law) / with_law["law_bytes"] - 1
    worst = off.abs().idxmax()
    if off[worst] == 0:
        return f"{subject} is the kernel's memory law to the byte."
    if abs(off[worst]) <= SAME_MEMORY:
        return f"{subject} follows the kernel's memory law to within {percent(off[worst])}."
    size = f"{factor(1 + off[worst])} times it" if off[worst] >= 1 else percent(off[worst])
    side = "" if off[worst] >= 1 else " above it" if off[worst] > 0 else " below it"
    where = with_law.loc[worst, "seq_len"]
    return f"{subject} does **not** follow the kernel's memory law: at seq_len {where} it is {size}{side}."


def memory_comparison(rows: pd.DataFrame) -> list[str]:
    """At the longest length with two numbers: who takes the same, and who takes how many times more."""
    counts = rows.groupby("seq_len")["implementation"].count()
    lengths = counts[counts > 1].index
    if lengths.empty:
        return []
    cells = rows[rows["seq_len"] == lengths[-1]].sort_values("peak_memory_bytes", kind="stable")
    least = cells.iloc[0]
    if least["peak_memory_bytes"] <= 0:
        return []
    ratios = cells["peak_memory_bytes"] / least["peak_memory_bytes"]
    same = cells[ratios <= 1 + SAME_MEMORY]
    names = [named(row) for row in same.to_dict("records")]
    text = f"At seq_len {lengths[-1]} " + (
        f"{listed(names)} take the same, to within {percent(ratios[same.index].max() - 1)}"
        if len(same) > 1
        else f"{names[0]} takes the least"
    )
    for row in cells[ratios > 1 + SAME_MEMORY].to_dict("records"):
        text += (
            f"; {named(row)} takes {factor(row['peak_memory_bytes'] / least['peak_memory_bytes'])} times that"
        )
    return [text + "."]


# --- what is missing, and what to distrust


def missing(benchmark: pd.DataFrame, phase: str) -> pd.DataFrame:
    """Rows of which this phase was asked for and has no number."""
    status = benchmark[f"{phase}_status"]
    return benchmark[status.notna() & (status != OK)]


def empty_cells(benchmark: pd.DataFrame) -> str:
    """Every cell without a number, with its status and its reason."""
    found: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for row in benchmark.to_dict("records"):
        for phase in ("latency", "memory"):
            status, reason = row[f"{phase}_status"], row[f"{phase}_reason"]
            if pd.isna(status) or status == OK:
                continue
            why = "" if pd.isna(reason) else table_text(reason)
            key = (table_text(row["sweep"]), table_text(row["implementation"]), table_text(status), why)
            seq_lens, phases = found.setdefault((*key, phase), ([], [phase]))
            seq_lens.append(str(row["seq_len"]))
    # Latency and memory that fail alike, at the same lengths, are one line.
    merged: dict[tuple[Any, ...], list[str]] = {}
    for alike, (seq_lens, phases) in found.items():
        merged.setdefault((*alike[:-1], tuple(seq_lens)), []).extend(phases)
    rows = [
        {
            "sweep": sweep,
            "impl": name,
            "seq_len": ", ".join(seq_lens),
            "quantity": listed(phases),
            "status": status,
            "reason": why,
        }
        for (sweep, name, status, why, seq_lens), phases in merged.items()
    ]
    not_asked = [
        f"Sweep {table_text(sweep)} did not ask for {phase}."
        for sweep, cells in _groups(benchmark, "sweep")
        for phase in ("latency", "memory")
        if not measured(cells, phase)
    ]
    text = markdown(rows) if rows else "Every cell that was asked for has a number."
    return "\n\n".join([text, *not_asked])


def doubts(benchmark: pd.DataFrame, grid: pd.DataFrame) -> list[str]:
    """Each mark that occurs, its meaning, and the numbers that carry it."""
    lines = []
    coverage = math.nan if benchmark.empty else benchmark["interval_coverage"].min()
    if not pd.isna(coverage) and coverage < CONFIDENCE:
        lines.append(
            f"Some intervals cover the true median with a probability of only {coverage:.1%}:"
            " there were too few samples for more."
        )
    if any(
        str(flag) == "True" for name in ("latency_dirty", "memory_dirty") for flag in benchmark.get(name, ())
    ):
        lines.append("The source had uncommitted changes, so the commit named above does not tell all of it.")
    for mark, meaning in MARKS.items():
        carriers = [
            f"sweep {table_text(sweep)}: " + listed(carried(cells, mark), ", ")
            for sweep, cells in _groups(benchmark, "sweep")
            if carried(cells, mark)
        ]
        if not grid.empty and (found := carried(grid, mark)):
            carriers.append("correctness grid: " + listed(found, ", "))
        if carriers:
            lines.append(f"`{mark}`: {meaning}. Carried by {'; '.join(carriers)}.")
    return lines or ["No number carries a mark."]


def carried(rows: pd.DataFrame, mark: str) -> list[str]:
    """Which implementations carry a mark, and at which lengths."""
    has = rows["marks"].apply(lambda marks: mark in marks_in(marks)).astype(bool)
    return [
        f"{table_text(name)} at "
        + (
            "every length"
            if has[rows["implementation"] == name].all()
            else listed(sorted(set(mine["seq_len"])))
        )
        for name, mine in rows[has].groupby("implementation", sort=False)
    ]


# --- words and figures


def listed(items: Iterable[Any], joint: str = " and ") -> str:
    """`a`, `a and b`, `a, b and c`."""
    texts = [str(item) for item in items]
    return joint.join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def spanned(values: pd.Series) -> str:
    """`4`, or `1 to 79`."""
    return f"{values.min()}" if values.min() == values.max() else f"{values.min()} to {values.max()}"


def in_rows(rows: pd.Series) -> str:
    return f"row {rows.min()}" if rows.min() == rows.max() else f"rows {spanned(rows)}"


def factor(ratio: float) -> str:
    if abs(ratio - round(ratio)) < 1e-9:
        return f"{round(ratio):,}"
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.3g}" if ratio < 1000 else f"{ratio:,.0f}"


def times(ratios: Sequence[float]) -> str:
    low, high = factor(min(ratios)), factor(max(ratios))
    return low if low == high else f"{low} to {high}"


def power(value: float) -> str:
    """A number, and the power of two that it is, if it is one."""
    mantissa, exponent = float(value).hex().split("p")
    text = f"{value:.4g}"
    return f"{text} (2^{int(exponent)})" if float.fromhex(mantissa + "p0") == 1.0 else text


def percent(share: float) -> str:
    return f"{abs(share) * 100:.2g} %"


def gibibytes(row: Any) -> str:
    return f"{row['peak_memory_bytes'] / GIB:.4g}"
