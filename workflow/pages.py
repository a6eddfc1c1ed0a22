"""Tables as HTML pages of their own, for Snakemake's report, which shows CSV and Markdown only as downloads.

Text from kernels is escaped. Each page holds one script, which sorts and filters its table; none loads
anything.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from harness.comparison import CONFIDENCE
from harness.problem import ATTENTION, DECODE
from harness.record import MARKS, OK
from workflow.comparisons import GPU
from workflow.goals import goal_groups, goal_sentence
from workflow.render import GIB, by_workload, problem_line, rate_of, workload_of
from workflow.tables import one_line

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; margin: 1.2em; }
h1 { font-size: 1.2em; margin: 0 0 .3em; }
p { margin: .3em 0 .8em; color: #555; max-width: 60em; }
table { border-collapse: collapse; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
thead { position: sticky; top: 0; background: #fff; box-shadow: 0 2px #888; }
th { vertical-align: bottom; border: 0; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.prose { min-width: 40em; }
tr.fault td { background: #f6f0e4; }
th button { all: unset; cursor: pointer; font-weight: bold; }
th button:hover, th button:focus-visible { text-decoration: underline; }
th button::after { content: " \\2195"; color: #888; font-weight: normal; }
th[aria-sort=ascending] button::after { content: " \\2191"; color: #222; }
th[aria-sort=descending] button::after { content: " \\2193"; color: #222; }
th select { display: block; font: inherit; font-weight: normal; max-width: 9em; margin: .2em 0; }
input { font: inherit; width: 22em; }
"""
# A header's button sorts by its column: up, down, and as it was. Cells without a number come last. Where a
# column has few values a list beside its header keeps the rows with one of them; the box above the table
# keeps the rows that hold every word in it.
SCRIPT = """
"use strict";
const table = document.querySelector("table");
const rows = [...table.tBodies[0].rows];
const heads = [...table.tHead.rows[0].cells];
const MOST_VALUES = 12;
const text = (row, column) => row.cells[column].textContent;

function sort(column, direction) {
  const numeric = rows.some(row => row.cells[column].classList.contains("number"));
  const compare = (a, b) => numeric ? Number(text(a, column)) - Number(text(b, column))
    : text(a, column).localeCompare(text(b, column), "en", {numeric: true});
  const filled = rows.filter(row => text(row, column) !== "");
  if (direction) filled.sort((a, b) => direction * compare(a, b));
  const empty = rows.filter(row => text(row, column) === "");
  table.tBodies[0].append(...direction ? [...filled, ...empty] : rows);
  const word = {"1": "ascending", "-1": "descending", "0": "none"}[direction];
  heads.forEach((head, index) => head.setAttribute("aria-sort", index === column ? word : "none"));
}

const box = document.createElement("input");
const count = document.createElement("p");
const lists = heads.map((head, column) => {
  const button = document.createElement("button");
  button.textContent = head.textContent;
  head.replaceChildren(button);
  head.setAttribute("aria-sort", "none");
  const next = {none: 1, ascending: -1, descending: 0};
  button.onclick = () => sort(column, next[head.getAttribute("aria-sort")]);
  const values = [...new Set(rows.map(row => text(row, column)))];
  if (values.length < 2 || values.length > MOST_VALUES || values.length === rows.length) return null;
  const list = document.createElement("select");
  list.setAttribute("aria-label", "rows by " + button.textContent);
  list.append(new Option("all"), ...values.map((value, index) => new Option(value || "(empty)", index)));
  list.keeps = row => list.value === "all" || text(row, column) === values[list.value];
  list.onchange = filter;
  head.append(list);
  return list;
}).filter(list => list);

function filter() {
  const words = box.value.toLowerCase().split(" ").filter(word => word);
  rows.forEach(row => {
    const whole = [...row.cells].map(cell => cell.textContent.toLowerCase()).join("\\n");
    row.hidden = !(lists.every(list => list.keeps(row)) && words.every(word => whole.includes(word)));
  });
  count.textContent = rows.filter(row => !row.hidden).length + " of " + rows.length + " rows";
}

if (rows.length) {
  box.type = "search";
  box.placeholder = "rows with these words";
  box.setAttribute("aria-label", box.placeholder);
  box.oninput = filter;
  table.before(box, count);
  filter();
}
"""
PROSE = 60  # characters from which a text gets room for a line of its own


def table_page(
    title: str, notes: Sequence[str], rows: Sequence[dict[str, Any]], faults: Sequence[bool] = ()
) -> str:
    """An HTML page with one table to sort and filter; a row whose entry in `faults` is true is shaded.

    Numbers are aligned to the right. Everything is escaped here and nowhere else.
    """
    headers = list(rows[0]) if rows else []
    head = "".join(f"<th>{escaped(header)}</th>" for header in headers)
    body = []
    for index, row in enumerate(rows):
        shade = ' class="fault"' if faults and faults[index] else ""
        body.append(f"<tr{shade}>{''.join(_cell(value) for value in row.values())}</tr>")
    lines = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escaped(title)}</h1>",
        *(f"<p>{escaped(note)}</p>" for note in notes if note),
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>",
        *body,
        f"</tbody>\n</table>\n<script>{SCRIPT}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(lines)


def escaped(text: Any) -> str:
    """Text as HTML shows it: one line, without control characters, nothing in it taken for markup."""
    return html.escape(one_line(text))


def _cell(value: Any) -> str:
    """A cell; a `str` is text, anything else a number."""
    kind = ' class="number"'
    if isinstance(value, str):
        kind = ' class="prose"' if len(value) > PROSE else ""
    return f"<td{kind}>{escaped(value)}</td>"


class Number(float):
    """A number with the format it is shown in; nothing where there is none."""

    form: str

    def __new__(cls, value: Any, form: str = ".4g") -> Number:
        number = super().__new__(cls, value)
        number.form = form
        return number

    def __str__(self) -> str:
        return "" if pd.isna(self) else format(float(self), self.form)


def correctness_page(grid: pd.DataFrame) -> str:
    """How many cells of the grid each implementation gets right, and its largest errors."""
    rows, faults = [], []
    for workload, name, cells in [
        (workload, name, cells)
        for workload, part in by_workload(grid)
        for name, cells in ([] if part.empty else part.groupby("implementation", sort=False))
    ]:
        right = int((cells["status"] == OK).sum())
        others = cells.loc[cells["status"] != OK, "status"].value_counts()
        row: dict[str, Any] = {
            "workload": workload,
            "implementation": str(name),
            "cells": Number(len(cells), ".0f"),
            "right": Number(right, ".0f"),
            "not right": ", ".join(f"{count} {status}" for status, count in others.items()),
        }
        for dtype in grid["dtype"].unique():
            errors = cells.loc[cells["dtype"] == dtype, "max_abs_error"]
            row[f"largest error, {dtype}"] = Number(errors.max())
        row["marks"] = " ".join(sorted(set(" ".join(cells["marks"].dropna()).split())))
        rows.append(row)
        faults.append(right < len(cells))
    note = "Largest absolute difference from attention computed by PyTorch in the same dtype."
    if not grid.empty and grid["marks"].astype(str).str.contains("not_attention").any():
        note += " Of a floor (not_attention): from what it means to compute instead."
    return table_page("Correctness: each implementation", [note], rows, faults)


def cells_page(grid: pd.DataFrame) -> str:
    """Every cell of the grid, with its reason in full and the place of its largest error."""
    place = ["error_row", "value_there", "unit_in_last_place"]
    located = grid.copy()
    located[place] = located[place].astype(float)
    located.loc[~(located["max_abs_error"] > 0), place] = math.nan  # an error of 0 lies nowhere
    rows = [
        {
            "implementation": str(row["implementation"]),
            "dtype": str(row["dtype"]),
            "workload": str(row.get("workload", ATTENTION)),
            "mask": "causal" if row["causal"] else "none",
            "queries": Number(row.get("queries", math.nan), ".0f"),
            "lengths": _text(row.get("lengths")),
            "page_size": Number(row.get("page_size", math.nan), ".0f"),
            "head_dim": Number(row["head_dim"], ".0f"),
            "batch": Number(row["batch"], ".0f"),
            "seq_len": Number(row["seq_len"], ".0f"),
            "status": str(row["status"]),
            "kind of fault": _text(row.get("fault_kind")),
            "largest error": Number(row["max_abs_error"]),
            "in row": Number(row["error_row"], ".0f"),
            "reference there": Number(row["value_there"]),
            "unit in the last place": Number(row["unit_in_last_place"]),
            "error in units": Number(row["error_in_units"], ".3g"),
            "error against fp64": Number(row["max_abs_error_fp64"], ".3g"),
            "the reference's": Number(row["reference_error_fp64"], ".3g"),
            "reason": _text(row["reason"]),
            "marks": _text(row["marks"]),
        }
        for row in located.to_dict("records")
    ]
    return table_page("Correctness: every cell", [], rows, [row["status"] != OK for row in rows])


def latency_page(rows: pd.DataFrame) -> str:
    """One sweep's latencies, each with its interval, its status, its marks, and its GPU where they differ."""
    rate, decode = rate_of(rows), workload_of(rows) == DECODE
    several = "latency_gpu" in rows and rows["latency_gpu"].nunique() > 1
    table = [
        {
            "seq_len": Number(row["seq_len"], ".0f"),
            "implementation": str(row["implementation"]),
            "status": _text(row["latency_status"]) or "not asked for",
            "latency (ms)": Number(row["latency_ms"]),
            "interval from": Number(row["latency_low_ms"]),
            "to": Number(row["latency_high_ms"]),
            "warm cache (ms)": Number(row["warm_latency_ms"]),
            "host time a call (µs)": Number(row["host_time_us"], ".3g"),
            rate.unit: Number(row[rate.column] / rate.divisor, ".3g"),
            **({"replayed by a graph (ms)": Number(row["graph_latency_ms"])} if decode else {}),
            **({"share of read bandwidth": Number(row["share_of_read_bandwidth"], ".3g")} if decode else {}),
            "samples": Number(row["sample_count"], ".0f"),
            **({"GPU": _text(row["latency_gpu"])} if several else {}),
            **_why(row, "latency"),
        }
        for row in rows.to_dict("records")
    ]
    return _sweep_page("Latency", rows, table)


def memory_page(rows: pd.DataFrame) -> str:
    """One sweep's memory peaks beside the kernel's own law and the workspace."""
    table = [
        {
            "seq_len": Number(row["seq_len"], ".0f"),
            "implementation": str(row["implementation"]),
            "status": _text(row["memory_status"]) or "not asked for",
            "peak (GiB)": Number(row["peak_memory_bytes"] / GIB),
            "law (GiB)": Number(row["law_bytes"] / GIB),
            "workspace (MiB)": Number(row["workspace_bytes"] / 2**20),
            "Q, K, V (GiB)": Number(row["input_bytes"] / GIB),
            "output (GiB)": Number(row["output_bytes"] / GIB),
            "the rest (GiB)": Number(row["extra_bytes"] / GIB),
            **_why(row, "memory"),
        }
        for row in rows.to_dict("records")
    ]
    return _sweep_page("Peak memory", rows, table)


def comparison_page(rows: pd.DataFrame) -> str:
    """One sweep's comparisons: ratios with their intervals, verdicts, and what each cell resolves."""
    table = [
        {
            "seq_len": Number(row["seq_len"], ".0f"),
            "kind": str(row["kind"]),
            "implementation": str(row["implementation"]),
            "against": str(row["against"]) + (f" on {row['against_gpu']}" if row["kind"] == GPU else ""),
            "ratio": Number(row["ratio"]),
            "interval from": Number(row["ratio_low"]),
            "to": Number(row["ratio_high"]),
            "in cycles": Number(row["cycles_ratio"]),
            "from": Number(row["cycles_ratio_low"]),
            "up to": Number(row["cycles_ratio_high"]),
            "verdict": _text(row["verdict"]),
            "A/A spread (%)": Number(row["aa_spread"] * 100, ".2g"),
            "resolves (%)": Number(row["resolvable_difference"] * 100, ".2g"),
            "reason": _text(row["reason"]),
        }
        for row in rows.astype({"aa_spread": float, "resolvable_difference": float}).to_dict("records")
    ]
    title = "Comparisons" + (f", sweep {rows['sweep'].iloc[0]}" if len(rows) else "")
    note = f"Intervals are over processes and hold the ratio with {CONFIDENCE:.0%} confidence."
    return table_page(title, [note], table)


def goals_page(goals: pd.DataFrame) -> str:
    """Every cell of every goal: the speedup, what was wanted, and whether it was reached."""
    table = [
        {
            "goal": str(row["goal"]),
            "sweep": str(row["sweep"]),
            "seq_len": Number(row["seq_len"], ".0f"),
            "implementation": str(row["implementation"]),
            "fastest of the others": _text(row["fastest"]),
            "speedup": Number(row["speedup"], ".3f"),
            "wanted": Number(row["wanted"]),
            "verdict": _text(row["verdict"]),
            "A/A spread (%)": Number(row["aa_spread"] * 100, ".2g"),
            "reason": _text(row["reason"]),
        }
        for row in goals.astype({"wanted": float, "aa_spread": float}).to_dict("records")
    ]
    notes = [f"{name}: {goal_sentence(cells, str)}" for name, cells in goal_groups(goals)]
    return table_page("Goals", notes, table)


def _sweep_page(quantity: str, rows: pd.DataFrame, table: list[dict[str, Any]]) -> str:
    notes = [problem_line(rows)]
    used = {mark for row in table for mark in row["marks"].split()}
    notes += [f"{mark}: {meaning}." for mark, meaning in MARKS.items() if mark in used]
    title = f"{quantity}, sweep {rows['sweep'].iloc[0]}"
    return table_page(title, notes, table, [row["status"] != OK for row in table])


def _why(row: dict[Any, Any], phase: str) -> dict[str, str]:
    return {"reason": _text(row[f"{phase}_reason"]), "marks": _text(row["marks"])}


def _text(value: Any) -> str:
    return "" if pd.isna(value) else str(value)


def environment_page(environment: dict[str, Any]) -> str:
    """What the run was measured on: every entry of environment.json."""
    rows = [{"what": name, "value": _spelt(value)} for name, value in _flat(environment)]
    return table_page("Environment", [], rows)


def _flat(values: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        pairs += _flat(value, f"{above}{name}.") if isinstance(value, dict) else [(f"{above}{name}", value)]
    return pairs


def _spelt(value: Any) -> str:
    if value is None:
        return "unknown"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
