"""Records as rows: the two CSV files, and how a row is shown to a person."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.bounds import impossible
from harness.problem import DECODE
from harness.record import (
    ERROR,
    NOT_DETERMINISTIC,
    OK,
    OUT_OF_MEMORY,
    TIMEOUT,
    UNSUPPORTED,
    WRONG,
    Record,
    RecordError,
    canonical_json,
    read_record,
)
from workflow.plan import CORRECTNESS, MEMORY, TIMING, TUNING, Job, Plan

TIMING_COLUMNS = (
    "latency_ms",
    "latency_p20_ms",
    "latency_p80_ms",
    "latency_low_ms",
    "latency_high_ms",
    "interval_coverage",
    "latency_cycles",
    "latency_cycles_low",
    "latency_cycles_high",
    "warm_latency_ms",
    "warm_latency_low_ms",
    "warm_latency_high_ms",
    "host_time_us",
    "graph_latency_ms",
    "graph_reason",
    "profiler_latency_ms",
    "profiler_reason",
    "kernel_names",
    "teraflops_per_second",
    "key_value_bytes_per_second",
    "share_of_read_bandwidth",
    "sample_count",
    "process_count",
    "outlier_count_mild",
    "outlier_count_severe",
    "timer",
    "warm_up_s",
    "working_set_bytes",
    "cache_bytes",
    "working_set_over_cache",
    "metered_sm_clock_mhz",
    "sm_clock_spread",
    "sm_clock_mhz_min",
    "sm_clock_mhz_max",
    "temperature_c_max",
    "power_w_max",
    "throttle_reasons",
    "other_processes",
    "locked_sm_clock_mhz",
    "clock_lock_reason",
)
MEMORY_COLUMNS = (
    "peak_memory_bytes",
    "input_bytes",
    "output_bytes",
    "extra_bytes",
    "workspace_bytes",
    "reserved_bytes",
    "law_bytes",
)
# `queries` is of the workload decode: how many of a sequence's tokens ask. `seq_len` is its context.
PROBLEM_COLUMNS = (
    *("workload", "batch", "heads", "kv_heads", "queries", "head_dim", "causal", "dtype"),
    *("lengths", "page_size"),
)
CELL_COLUMNS = (
    "workload",
    "batch",
    "heads",
    "kv_heads",
    "queries",
    "seq_len",
    "head_dim",
    "causal",
    "dtype",
    "lengths",
    "page_size",
    "status",
    "fault_kind",
    "reason",
    "max_abs_error",
    "error_batch",
    "error_head",
    "error_row",
    "error_column",
    "value_there",
    "unit_in_last_place",
    "error_in_units",
    "max_abs_error_fp64",
    "reference_error_fp64",
    "bound_fp64",
    "relative_error",
    "relative_bound",
    "allclose",
    "judged_calls",
)

CORRECTNESS_COLUMNS = ("environment", "implementation", *CELL_COLUMNS, "marks")
# Those that a reader may count on where there are no rows.
BENCHMARK_COLUMNS = (
    *("environment", "sweep", "seq_len", "implementation", "position", "twin_of", "marks"),
    *PROBLEM_COLUMNS,
    *(f"{what}_{name}" for what in ("latency", "memory") for name in ("status", "reason")),
    *TIMING_COLUMNS,
    *MEMORY_COLUMNS,
)


def load(job: Job, root: Path) -> Record:
    """A job's record, marked `stale` if its spec is not the job's; an unreadable one becomes an error."""
    try:
        record = read_record(root / job.path)
    except RecordError as fault:
        return Record(phase=job.phase, spec=job.spec, status=ERROR, reason=str(fault))
    if record.spec != job.spec:
        record.marks.append("stale")
    return record


def load_measurement(plan: Plan, job: Job, root: Path) -> Record:
    """A timing or memory job's record; `stale` also where today's tuned options are not those it took."""
    record = load(job, root)
    used = record.values.get("options")
    if used is not None and used != _options_today(plan, job, root) and "stale" not in record.marks:
        record.marks.append("stale")
    return record


def _options_today(plan: Plan, job: Job, root: Path) -> str | None:
    """The options that a job run now would take, as its record would state them; None if none are known."""
    options = dict(job.spec["implementation"]["options"])
    assert job.sweep is not None  # a timing or memory job
    assert job.seq_len is not None
    winner = plan.winner_file(job.sweep, job.implementation, job.seq_len)
    if winner is not None:
        won = _won(root / winner)
        if won is None:
            return None
        options.update(won)
    return canonical_json(options)


def _won(winner: Path) -> dict[str, Any] | None:
    """The options in a file that tuning wrote; None if it cannot be read."""
    try:
        return dict(json.loads(winner.read_text(encoding="utf-8"))["options"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def gpu_of(record: Record) -> str | None:
    """The UUID of the GPU that a record was measured on; None where there was none."""
    uuid: str | None = record.circumstances.get("gpu", {}).get("uuid")
    return uuid


def stale_records(plan: Plan, root: Path) -> list[str]:
    """The paths of the records on disk that are stale or cannot be read."""
    stale = []
    for job in plan.jobs():
        if (root / job.path).exists():
            record = load_measurement(plan, job, root) if job.phase in (TIMING, MEMORY) else load(job, root)
            unreadable = record.status == ERROR and not record.started_at  # what `load` makes of it
            if job.phase == TUNING and (winner := (root / job.path).with_suffix(".winner.json")).exists():
                unreadable = unreadable or _won(winner) is None
            if "stale" in record.marks or unreadable:
                stale.append(job.path)
    return stale


def failed_jobs(plan: Plan, root: Path) -> list[Job]:
    """The jobs whose record, or a cell of it, is an error or a timeout."""
    return [
        job
        for job in plan.jobs()
        if (record := load(job, root)).status in (ERROR, TIMEOUT)
        or any(cell["status"] in (ERROR, TIMEOUT) for cell in record.cells)
    ]


def correctness_rows(plan: Plan, root: Path) -> list[dict[str, Any]]:
    """A row per cell of the grid."""
    rows = []
    for job in plan.jobs():
        if job.phase != CORRECTNESS:
            continue
        record = load(job, root)
        cells = record.cells or [
            {"status": record.status, "reason": record.reason, **problem} for problem in job.spec["problems"]
        ]
        for cell in cells:
            row: dict[str, Any] = {"environment": plan.environment, "implementation": job.implementation}
            values = {**cell, **_axes(cell)}
            row.update({name: values.get(name) for name in CELL_COLUMNS})
            marks = [*record.marks]
            if not cell.get("is_attention", True):
                marks.append("not_attention")
            if cell["status"] == OK and cell.get("fault_kind") == NOT_DETERMINISTIC:
                marks.append(NOT_DETERMINISTIC)
            rows.append({**row, "marks": " ".join(marks)})
    return rows


def _axes(problem: dict[str, Any]) -> dict[str, Any]:
    """A problem's length, which a table runs over, and how many queries a decode problem has."""
    queries = problem["seq_len_q"] if problem["workload"] == DECODE else None
    return {"seq_len": problem["seq_len_k"], "queries": queries}


def benchmark_rows(plan: Plan, root: Path, grid: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per (sweep, seq_len, implementation), latency and memory side by side."""
    rows = []
    roofline = load(plan.roofline_job(), root)
    for sweep, seq_len, implementation in plan.cells():
        row: dict[str, Any] = {
            "environment": plan.environment,
            "sweep": sweep,
            "seq_len": seq_len,
            "implementation": implementation,
            "twin_of": twin if (twin := plan.twin_of(implementation)) != implementation else None,
        }
        workload = plan.config["sweeps"][sweep]["workload"]
        marks = _grid_marks(plan.twin_of(implementation), workload, grid)
        for phase, prefix, columns in (
            (TIMING, "latency", TIMING_COLUMNS),
            (MEMORY, "memory", MEMORY_COLUMNS),
        ):
            if not plan.measures(sweep, phase):
                row.update({f"{prefix}_status": "", f"{prefix}_reason": ""}, **dict.fromkeys(columns))
                continue
            job = plan.sweep_job(phase, sweep, implementation, seq_len)
            record = load_measurement(plan, job, root)
            if phase == TIMING:
                record = held_against(record, roofline)
            problem = {**job.spec["problem"], **_axes(job.spec["problem"])}
            row.update({name: problem[name] for name in PROBLEM_COLUMNS})
            row.update({f"{prefix}_status": record.status, f"{prefix}_reason": record.reason or ""})
            row.update({name: record.values.get(name) for name in columns})
            row[f"{prefix}_measured_at"] = record.started_at
            row[f"{prefix}_gpu"] = gpu_of(record)
            row[f"{prefix}_commit"] = record.circumstances.get("source", {}).get("commit")
            row[f"{prefix}_dirty"] = record.circumstances.get("source", {}).get("dirty")
            marks += [mark for mark in record.marks if mark not in marks]
        rows.append({**row, "marks": " ".join(marks)})
    _add_positions(rows)
    return rows


def held_against(record: Record, roofline: Record) -> Record:
    """A timing record as it may be shown: an error where its time cannot have been on this machine.

    Without a roofline nothing was held against anything, and the number says so.
    """
    if record.status != OK:
        return record
    if roofline.status != OK:
        return replace(record, marks=[*record.marks, "flush_unproven"])
    values = record.values
    reason = impossible(
        values["latency_ms"], values["working_set_bytes"], values["flop_count"], roofline.values
    )
    if reason is not None:
        return replace(record, status=ERROR, reason=reason, values={}, samples={}, marks=[])
    proven = [] if roofline.values["flush_proven"] else ["flush_unproven"]
    if "key_value_bytes_per_second" in values:  # records from before there was decode lack it
        share = values["key_value_bytes_per_second"] / roofline.values["read_bytes_per_second"]
        values = {**values, "share_of_read_bandwidth": share}
    return replace(
        record,
        values=values,
        marks=[*record.marks, *proven],
    )


def _add_positions(rows: list[dict[str, Any]]) -> None:
    """Number the timings in the order they were measured in, beginning with 1."""
    order = sorted({row["latency_measured_at"] for row in rows if row.get("latency_measured_at")})
    for row in rows:
        measured_at = row.get("latency_measured_at")
        row["position"] = order.index(measured_at) + 1 if measured_at else None


def _grid_marks(implementation: str, workload: str, grid: list[dict[str, Any]]) -> list[str]:
    """What the grid of the row's own workload says of its implementation."""
    rows = [row for row in grid if (row["implementation"], row["workload"]) == (implementation, workload)]
    statuses = {row["status"] for row in rows}
    marks = ["grid_failed"] if WRONG in statuses else []
    if statuses - {OK, WRONG, UNSUPPORTED, OUT_OF_MEMORY}:
        marks.append("grid_incomplete")
    if any(NOT_DETERMINISTIC in row["marks"].split() for row in rows):
        marks.append(NOT_DETERMINISTIC)
    return marks


def one_line(text: Any) -> str:
    """Text without line ends and control characters, white space made single."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def markdown(rows: list[dict[str, str]]) -> str:
    """A Markdown table with a column for each key of the rows."""
    from tabulate import tabulate  # the Snakefile imports this module, and renders nothing

    return str(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))


def table_text(text: Any) -> str:
    """Text that can stand in a cell of a Markdown table, whatever a kernel wrote into it.

    White space and control characters become single spaces, and what Markdown or HTML would take for
    their own is escaped.
    """
    plain = one_line(text)
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        plain = plain.replace(character, entity)
    return re.sub(r"([\\`*_{}\[\]|~#$])", r"\\\1", plain)
