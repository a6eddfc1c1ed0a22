"""report/collect.md and its tables as HTML: several environments beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.record import MARKS, OK
from workflow.collect import COLLECT_MARKS, NOT_ASKED_FOR, Collection, Environment, names_of
from workflow.pages import Number, table_page
from workflow.plan import TIMING
from workflow.render import GIB, RATES, legend, problem_line, rate_of, sweep_table
from workflow.tables import markdown, table_text

MEANINGS = MARKS | COLLECT_MARKS
STATUSES = ("latency_status", "memory_status")


def rows_table(rows: Sequence[dict[str, Any]], sweep: str) -> pd.DataFrame:
    """The rows of one sweep, without those that nobody asked for: `not_asked_part` tells of them."""
    return pd.DataFrame([row for row in rows if row["sweep"] == sweep and not _not_asked(row)])


def _not_asked(row: Mapping[str, Any]) -> bool:
    return {row[name] for name in STATUSES} <= {NOT_ASKED_FOR, ""}


def not_asked_part(rows: Sequence[Mapping[str, Any]], sweep: str, names: Mapping[str, str]) -> list[str]:
    """A sentence for each environment that was not asked about all lengths of a sweep."""
    found: dict[str, dict[int, None]] = {}
    for row in rows:
        if row["sweep"] == sweep and NOT_ASKED_FOR in {row[name] for name in STATUSES}:
            found.setdefault(row["environment"], {})[row["seq_len"]] = None
    return [
        f"{names[key]} has no numbers at {', '.join(str(n) for n in sorted(lengths))}: the configuration does"
        " not ask its device for them."
        for key, lengths in found.items()
    ]


def collected_page(collection: Collection, sweeps: Sequence[str], figures: Mapping[str, str]) -> str:
    """The page: what was measured on, whether it was the same, and a table and a figure for each sweep.

    `figures` has the link to each sweep's figure.
    """
    names = names_of(collection.environments)
    parts = [
        "# Several environments",
        "Put beside each other by `snakemake collect` from the records of each; nothing was measured for this"
        " page. No verdict is given between environments: they differ in more than one thing, and no A/A test"
        " says what a difference between two machines is worth.",
        markdown([_environment_row(one, names, collection) for one in collection.environments]),
        *(f"{table_text(copy)}." for copy in collection.copies),
        "## Kernels",
        kernels_part(collection, names),
        "## Stale, and why",
        stale_part(collection, names),
    ]
    for sweep in sweeps:
        rows = rows_table(collection.rows, sweep)
        parts.append(f"## Sweep {table_text(sweep)}")
        if rows.empty:
            parts.append("No environment has lengths of this sweep.")
        else:
            parts += [problem_line(rows), _sweep_part(rows, names)]
            parts += [table_text(line) for line in not_asked_part(collection.rows, sweep, names)]
        parts.append(f"![{table_text(sweep)}]({figures[sweep]})")
        parts.append(_apart_part([row for row in collection.apart if row["sweep"] == sweep], names))
    everything = pd.DataFrame(collection.rows)
    if len(everything):
        parts += ["## How to read the tables", legend(everything), _collect_legend(everything)]
    parts += _left_out_part(collection, names)
    return "\n\n".join(part for part in parts if part) + "\n"


def _environment_row(
    environment: Environment, names: Mapping[str, str], collection: Collection
) -> dict[str, str]:
    account = environment.account
    gpu = account.get("gpu")
    mine = pd.DataFrame([row for row in collection.rows if row["environment"] == environment.key])
    days = sorted(str(time)[:10] for time in _present(mine, "_measured_at"))
    commits = sorted({str(commit)[:12] for commit in _present(mine, "_commit")})
    dirty = any(flag is True for flag in _present(mine, "_dirty"))
    where = (
        f"{gpu.get('name')}, driver {gpu.get('driver')}, CUDA {gpu.get('cuda')}"
        if gpu
        else f"{account.get('cpu')}, {account.get('cpu_threads_torch')} threads"
    )
    cells = {
        "environment": names[environment.key],
        "measured on": where,
        "torch": account.get("torch", "unknown"),
        "triton": account.get("triton", "unknown"),
        "Python": account.get("python", "unknown"),
        "days": "" if not days else days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}",
        "commit": ", ".join(commits) + (" with uncommitted changes" if dirty else ""),
        "cards": str(len(set(_present(mine, "latency_gpu", "memory_gpu")))) if gpu else "",
        "key": environment.key,
    }
    return {name: table_text(text) for name, text in cells.items()}


def _present(rows: pd.DataFrame, *endings: str) -> list[Any]:
    found = [value for name in rows.columns if name.endswith(endings) for value in rows[name].dropna()]
    return [value for value in found if value != ""]  # a record that is not there has no time


def kernels_part(collection: Collection, names: Mapping[str, str]) -> str:
    """Whether all ran this checkout's kernels, and if not, which ran what."""
    if not collection.kernels:
        return "Nothing was measured."
    others = {line["implementation"] for line in collection.kernels if not line["today"]}
    if not others:
        return "Every number is of a kernel as this checkout has it."
    table = [
        {
            "impl": table_text(line["implementation"]),
            "kernel": table_text(line["kernel"]),
            "options": table_text("" if line["options"] == "{}" else line["options"]),
            "digest": table_text(line["digest"]),
            "this checkout's": "yes" if line["today"] else "no",
            "measured in": table_text(
                ", ".join(f"{names[key]} ({count} records)" for key, count in line["cells"].items())
            ),
            "commit": table_text(", ".join(line["commits"])),
        }
        for line in collection.kernels
        if line["implementation"] in others
    ]
    said = ", ".join(dict.fromkeys(row["impl"] for row in table))
    return f"Not every number is of a kernel as this checkout has it: {said}.\n\n{markdown(table)}"


def stale_part(collection: Collection, names: Mapping[str, str]) -> str:
    """For each environment what of its records' specs is not as this checkout has it."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in collection.rows:
        for prefix in ("latency", "memory"):
            if row.get(f"{prefix}_changed"):
                key = (row["environment"], row["implementation"], row[f"{prefix}_changed"])
                found.setdefault(key, []).append(f"{row['sweep']} {row['seq_len']} {prefix}")
    if not found:
        return "No record is stale: each is of the code and the configuration of this checkout."
    table = [
        {
            "environment": table_text(names[key]),
            "impl": table_text(implementation),
            "records": str(len(cells)),
            "not as today": table_text(changed),
        }
        for (key, implementation, changed), cells in sorted(found.items())
    ]
    return markdown(table)


def _sweep_part(rows: pd.DataFrame, names: Mapping[str, str]) -> str:
    """The benchmark's table, with a line for each environment."""
    # The table of one run says nothing of environments: a line's name has both here.
    lines = sweep_table(rows).splitlines()
    found = [names[key] for key in rows["environment"]]
    cells = ["environment", None, *(table_text(name) for name in found)]
    width = max(len(cell) for cell in cells if cell is not None)
    return "\n".join(
        f"| {'-' * width} {line}" if cell is None else f"| {cell:<{width}} {line}"
        for cell, line in zip(cells, lines, strict=True)
    )


def _apart_part(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """What was measured of another problem than the sweep's, by itself."""
    if not rows:
        return ""
    table = [
        {
            "environment": table_text(names[row["environment"]]),
            "impl": table_text(row["implementation"]),
            "seq_len": str(row["seq_len"]),
            "what": "latency" if row["phase"] == TIMING else "peak memory",
            "number": _number(row),
            "marks": table_text(row["marks"]),
            "why apart": table_text(row["apart"]),
        }
        for row in rows
    ]
    return f"Of another problem than this sweep's, and so in no cell of the table:\n\n{markdown(table)}"


def _number(row: Mapping[str, Any]) -> str:
    prefix = "latency" if row["phase"] == TIMING else "memory"
    if row[f"{prefix}_status"] != OK:
        return table_text(f"{row[f'{prefix}_status']}: {row[f'{prefix}_reason']}")
    if row["phase"] == TIMING:
        rate = RATES.get(str(row["workload"]))
        value = row.get(rate.column) if rate else None
        second = f", {value / rate.divisor:.3g} {rate.unit}" if rate and value is not None else ""
        return f"{row['latency_ms']:.4g} ms{second}"
    return f"{row['peak_memory_bytes'] / GIB:.4g} GiB"


def _collect_legend(rows: pd.DataFrame) -> str:
    used = {mark for marks in rows["marks"].dropna() for mark in marks.split()}
    return "\n".join(f"- `{mark}`: {text}" for mark, text in COLLECT_MARKS.items() if mark in used)


def _left_out_part(collection: Collection, names: Mapping[str, str]) -> Iterator[str]:
    lines = []
    for key, left_out in collection.left_out.items():
        if left_out:
            folders = dict.fromkeys(path.rpartition("/")[0] for path in left_out)
            told = ", ".join(folders)
            lines.append(f"- {table_text(f'{names[key]}, {len(left_out)} records: {told}')}")
    if lines:
        yield "## Measured there and not named in this configuration"
        yield "\n".join(lines)


def collected_table(collection: Collection, sweep: str, names: Mapping[str, str]) -> str:
    """One sweep's table as an HTML page, to sort and filter by environment."""
    rows = rows_table(collection.rows, sweep)
    title = f"Several environments, sweep {sweep}"
    if rows.empty:
        return table_page(title, ["No environment has lengths of this sweep."], [])
    rate = rate_of(rows)
    table = [
        {
            "seq_len": Number(row["seq_len"], ".0f"),
            "implementation": str(row["implementation"]),
            "environment": names[str(row["environment"])],
            "latency (ms)": Number(_float(row["latency_ms"])),
            "interval from": Number(_float(row["latency_low_ms"])),
            "to": Number(_float(row["latency_high_ms"])),
            rate.unit: Number(_float(row[rate.column]) / rate.divisor, ".3g"),
            "peak (GiB)": Number(_float(row["peak_memory_bytes"]) / GIB),
            "latency status": _text(row["latency_status"]) or "not asked for",
            "memory status": _text(row["memory_status"]) or "not asked for",
            "reason": _either(row, "reason"),
            "marks": _text(row["marks"]),
            "kernel digest": _text(row.get("latency_kernel_digest"))
            or _text(row.get("memory_kernel_digest")),
            "not as this checkout": _text(row.get("latency_changed")) or _text(row.get("memory_changed")),
        }
        for row in rows.to_dict("records")
    ]
    used = {mark for row in table for mark in str(row["marks"]).split()}
    notes = [problem_line(rows), *(f"{mark}: {text}." for mark, text in MEANINGS.items() if mark in used)]
    notes += not_asked_part(collection.rows, sweep, names)
    faults = [not all(row[name] in (OK, "") for name in STATUSES) for row in rows.to_dict("records")]
    return table_page(title, notes, table, faults)


def _float(value: Any) -> float:
    return float("nan") if pd.isna(value) else float(value)


def _text(value: Any) -> str:
    return "" if pd.isna(value) else str(value)


def _either(row: Mapping[Any, Any], what: str) -> str:
    """What latency and memory say of this, once where it is the same."""
    found = [_text(row.get(f"{prefix}_{what}")) for prefix in ("latency", "memory")]
    return "; ".join(dict.fromkeys(text for text in found if text))
