"""Markdown for people: the benchmark page and the list of faults. Every number comes from the CSVs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.problem import ATTENTION, DECODE
from harness.record import FAULTS, MARKS, OK
from workflow.tables import markdown, one_line, table_text

GIB = 1024**3


def first_names(benchmark: pd.DataFrame) -> pd.DataFrame:
    """The rows without those of an A/A test's second name, which is no contender of its own."""
    return benchmark[benchmark["twin_of"].isna()] if "twin_of" in benchmark else benchmark


@dataclass(frozen=True)
class Rate:
    """The figure of merit of a workload: a column of the table, what it is divided by, and its unit."""

    column: str
    divisor: float
    unit: str


# Prefill is bound by arithmetic; decode reads the cache once, and is bound by that.
RATES = {
    ATTENTION: Rate("teraflops_per_second", 1.0, "TFLOP/s"),
    DECODE: Rate("key_value_bytes_per_second", 1e12, "TB/s"),
}


def workload_of(rows: pd.DataFrame) -> str:
    """The workload of one sweep's rows; tables from before there were two are of attention."""
    return str(rows["workload"].iloc[0]) if "workload" in rows and len(rows) else ATTENTION


def rate_of(rows: pd.DataFrame) -> Rate:
    """The figure of merit of one sweep's rows."""
    return RATES[workload_of(rows)]


def by_workload(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """A table's rows apart by workload, in the order of the table."""
    if table.empty or "workload" not in table:
        return [(ATTENTION, table)]
    return [(str(workload), rows) for workload, rows in table.groupby("workload", sort=False)]


def prefill_cells(grid: pd.DataFrame) -> pd.DataFrame:
    """The cells of the grid of attention, which the article's questions about errors are put to."""
    return next((cells for workload, cells in by_workload(grid) if workload == ATTENTION), grid.iloc[:0])


def benchmark_page(benchmark: pd.DataFrame, grid: pd.DataFrame, environment: dict[str, Any]) -> str:
    """The page report/benchmark.md: what was measured on, is it right, how fast, how much memory."""
    parts = ["# Benchmark", environment_line(environment, benchmark)]
    if not grid.empty:
        parts += ["## Correctness", grid_tables(grid)]
    if not benchmark.empty:
        for sweep, rows in benchmark.groupby("sweep", sort=False):
            parts += [f"## Sweep {table_text(sweep)}", problem_line(rows), sweep_table(rows)]
        parts.append(legend(benchmark))
    return "\n\n".join(part for part in parts if part) + "\n"


def environment_line(environment: dict[str, Any], benchmark: pd.DataFrame) -> str:
    gpu = environment.get("gpu")
    where = (
        f"{gpu['name']} (driver {gpu['driver']}, CUDA {gpu['cuda']})"
        if gpu
        else f"{environment['cpu']}, {environment['cpu_threads_torch']} threads"
    )
    times = sorted(str(time)[:10] for time in _present(benchmark, "_measured_at"))
    dates = "" if not times else times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
    commits = sorted({str(commit)[:12] for commit in _present(benchmark, "_commit")})
    dirty = any(str(flag) == "True" for flag in _present(benchmark, "_dirty"))
    source = f"commit {', '.join(commits) or 'unknown'}{' with uncommitted changes' if dirty else ''}"
    software = f"torch {environment['torch']}, triton {environment['triton']}, Python {environment['python']}"
    return "Measured on " + table_text(f"{where}; {software}; {dates}; {source}") + "."


def _present(table: pd.DataFrame, suffix: str) -> list[Any]:
    columns = [name for name in table.columns if name.endswith(suffix)]
    return [value for name in columns for value in table[name].dropna()]


def grid_tables(grid: pd.DataFrame) -> str:
    """A table for each workload that was checked."""
    parts = by_workload(grid)
    if len(parts) == 1:
        return grid_table(grid)
    return "\n\n".join(f"Workload {workload}:\n\n{grid_table(cells)}" for workload, cells in parts)


def grid_table(grid: pd.DataFrame) -> str:
    """For each implementation how many cells of the grid have which status, and the largest error."""
    rows = []
    for implementation, cells in grid.groupby("implementation", sort=False):
        right = int((cells["status"] == OK).sum())
        others = cells.loc[cells["status"] != OK, "status"].value_counts()
        rows.append(
            {
                "impl": table_text(implementation),
                "right": f"{right} of {len(cells)}",
                "not right": table_text(", ".join(f"{count} {status}" for status, count in others.items())),
                **{
                    f"max error, {dtype}": _figure(cells.loc[cells["dtype"] == dtype, "max_abs_error"].max())
                    for dtype in cells["dtype"].unique()
                },
                "marks": table_text(" ".join(sorted(set(" ".join(cells["marks"].dropna()).split())))),
            }
        )
    note = "Largest absolute difference from attention computed by PyTorch in the same dtype."
    if grid["marks"].astype(str).str.contains("not_attention").any():
        note += " Of a floor (not_attention): from what it means to compute instead."
    return f"{markdown(rows)}\n\n{note}"


def problem_line(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    heads = f"{first['heads']} heads"
    if first["kv_heads"] != first["heads"]:
        heads += f" over {first['kv_heads']} heads of K and V"
    mask = "causal" if first["causal"] else "not causal"
    batches = rows["batch"].unique()
    batch = f"{batches.min()}"
    if len(batches) > 1:
        batch += f" to {batches.max()} (fewer the longer)"
    if workload_of(rows) == DECODE:
        tokens = "1 query token" if first["queries"] == 1 else f"{first['queries']:.0f} query tokens"
        pages = f" in pages of {first['page_size']:.0f} tokens" if first["page_size"] else ""
        lengths = str(first["lengths"]).replace("_", " ")
        return (
            f"Decode: {tokens} a sequence, context seq_len{pages}, batch {batch}, lengths {lengths}, {heads},"
            f" head_dim {first['head_dim']}, {first['dtype']}."
        )
    return f"Batch {batch}, {heads}, head_dim {first['head_dim']}, {mask}, {first['dtype']}."


def sweep_table(rows: pd.DataFrame) -> str:
    """The article's columns, and with each number its interval, its status and its marks."""
    workload = workload_of(rows)
    return markdown([_sweep_row(row, workload) for row in rows.to_dict("records")])


def _sweep_row(row: dict[Any, Any], workload: str) -> dict[str, str]:
    timed = row["latency_status"] == OK
    interval = f"{_figure(row['latency_low_ms'])} – {_figure(row['latency_high_ms'])}" if timed else ""
    memory = _gibibytes(row["peak_memory_bytes"]) if row["memory_status"] == OK else ""
    rate = RATES[workload]
    cells = {
        "seq_len": str(row["seq_len"]),
        "impl": table_text(row["implementation"]),
        "latency (ms)": _figure(row["latency_ms"]) if timed else "",
        "interval (ms)": interval,
    }
    if workload == DECODE:
        # At batch 1 the launch and the cache decide: the other ways to take the time stand beside it.
        cells["warm (ms)"] = _figure(row["warm_latency_ms"]) if timed else ""
        cells["graph (ms)"] = _figure(row["graph_latency_ms"]) if timed else ""
    cells[rate.unit] = f"{row[rate.column] / rate.divisor:.3g}" if timed else ""
    if workload == DECODE:
        share = row["share_of_read_bandwidth"]
        cells["of read bandwidth"] = f"{share:.0%}" if timed and not pd.isna(share) else ""
    return cells | {
        "peak mem (GiB)": memory,
        "status": table_text(_status(row)),
        "marks": table_text("" if pd.isna(row["marks"]) else row["marks"]),
    }


def _status(row: dict[Any, Any]) -> str:
    """One status if latency and memory agree, or were measured alone; otherwise both, with reasons."""
    found = {}
    for name in ("latency", "memory"):
        status, reason = row[f"{name}_status"], row[f"{name}_reason"]
        if not pd.isna(status) and status:
            found[name] = status if status == OK or pd.isna(reason) else f"{status}: {reason}"
    if not found:
        return "not asked for"
    if len(set(found.values())) == 1:
        return str(next(iter(found.values())))
    return "; ".join(f"{name} {text}" for name, text in found.items())


def legend(benchmark: pd.DataFrame) -> str:
    """What the columns and the marks that occur mean."""
    used = {mark for marks in benchmark["marks"].dropna() for mark in marks.split()}
    coverage = benchmark["interval_coverage"].min()
    lines = [
        "Latency is the median of the processes' medians with a cold cache. Its interval is over processes,"
        " or over samples where there is one process alone"
        + ("." if pd.isna(coverage) else f"; it covers the median with at least {coverage:.1%}."),
        "TFLOP/s counts 4 x batch x heads x unmasked pairs x head_dim operations. Peak memory is of one call"
        " in a process of its own: inputs, output, and all that is allocated at the peak, a library's"
        " workspace too.",
    ]
    if any(workload == DECODE for workload, _ in by_workload(benchmark)):
        lines[1] += (
            " Decode: TB/s are the bytes of K and V over the latency, set against the bandwidth of reading"
            " that this run measured; graph is a call replayed by a CUDA graph, with a warm cache."
        )
    lines += [f"- `{mark}`: {text}" for mark, text in MARKS.items() if mark in used]
    return "\n".join(lines[:2]) + ("\n\n" + "\n".join(lines[2:]) if len(lines) > 2 else "")


def fault_lines(benchmark: pd.DataFrame, grid: pd.DataFrame) -> list[str]:
    """One line for each cell that is wrong, an error or a timeout."""
    lines = []
    for row in grid[grid["status"].isin(FAULTS)].to_dict("records"):
        mask = "causal" if row["causal"] else "not causal"
        if row.get("workload") == DECODE:
            mask = (
                f"decode, {row['queries']:.0f} queries, {row['kv_heads']} kv_heads, lengths {row['lengths']},"
                f" page_size {row['page_size']}"
            )
        where = (
            f"correctness {row['implementation']} seq_len {row['seq_len']} head_dim {row['head_dim']}"
            f" batch {row['batch']} {mask} {row['dtype']}"
        )
        lines.append(f"{row['status']}: {where}: {one_line(row['reason'])}")
    for name in ("latency", "memory"):
        for row in benchmark[benchmark[f"{name}_status"].isin(FAULTS)].to_dict("records"):
            where = f"{name} {row['implementation']} seq_len {row['seq_len']} (sweep {row['sweep']})"
            lines.append(f"{row[f'{name}_status']}: {where}: {one_line(row[f'{name}_reason'])}")
    return lines


def _gibibytes(count: float) -> str:
    size = count / GIB
    return f"{size:.4f}" if size >= 0.001 else f"{size:.2g}"


def _figure(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.4g}"
