"""report/profile.md: what limits each implementation, from measured times, counters and machine code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.problem import Problem
from harness.record import FAULTS, MARKS, OK, Record
from workflow.limits import (
    COUNTED,
    RULES,
    WHERE_FROM,
    Evidence,
    bytes_text,
    limits,
    percent_text,
    rate_text,
    words,
)
from workflow.pages import Number, table_page
from workflow.plan import Job, Plan
from workflow.profiling import counter_jobs
from workflow.render import environment_line
from workflow.static_profile import Row, static_sections
from workflow.story import bullets, listed
from workflow.tables import load, markdown, table_text

Counted = list[tuple[Job, Record]]
TIMED_FIRST = (
    "No latency was measured here yet, or none beside the machine's own rates: `snakemake` measures both, and"
    " then this page says what limits each implementation."
)
ALIKE = 1.5  # moving more bytes by less than this explains no difference


def counted(plan: Plan, root: Path) -> Counted:
    """The record of every job of the dynamic profile."""
    return [(job, load(job, root)) for job in counter_jobs(plan)]


def fault_lines(counters: Counted) -> list[str]:
    """A line for every profile that is an error or a timeout."""
    return [
        f"{record.status}: {job.implementation} at seq_len {job.seq_len} (sweep {job.sweep}): {record.reason}"
        for job, record in counters
        if record.status in FAULTS
    ]


def profile_page(
    rows: Sequence[Evidence],
    counters: Counted,
    static: Sequence[Row],
    environment: dict[str, Any],
    device: str,
    figures: dict[str, str],
) -> str:
    """The page; `figures` has the path of each sweep's roofline, relative to it."""
    parts = ["# Profile"]
    if rows:
        measured = [
            {"_measured_at": row.measured_at or None, "_commit": row.commit, "_dirty": row.dirty}
            for row in rows
        ]
        parts.append(environment_line(environment, pd.DataFrame(measured)))
    parts += ["## In short", bullets(in_short(rows, counters, device))]
    if rows:
        parts += ["## What limits it", limits_table(rows), rules_text(rows)]
        parts += ["## By implementation", *by_implementation(rows)]
        parts += ["## Who wins, and why", bullets(wins(rows))]
        for sweep, path in figures.items():
            parts += [f"![roofline, sweep {table_text(sweep)}]({path})"]
    parts += ["## Counters of one call", *counter_sections(counters, device)]
    parts += ["# Static profile", *static_sections(static)]
    return "\n\n".join(part for part in parts if part) + "\n"


def in_short(rows: Sequence[Evidence], counters: Counted, device: str) -> list[str]:
    """A line for each sweep and implementation, and one for what there are no numbers of."""
    lines = []
    for sweep, name in dict.fromkeys((row.sweep, row.implementation) for row in rows):
        mine = _of(rows, sweep, name)
        spans = listed(f"{word} at {listed(lengths)}" for word, lengths in _spans(mine).items())
        lines.append(f"{table_text(name)} (sweep {table_text(sweep)}): {spans}.")
    return [*(lines or [TIMED_FIRST]), *_no_counters(counters, device)]


def _of(rows: Sequence[Evidence], sweep: str, name: str) -> list[Evidence]:
    mine = [row for row in rows if (row.sweep, row.implementation) == (sweep, name)]
    return sorted(mine, key=lambda row: row.seq_len)


def _spans(rows: Sequence[Evidence]) -> dict[str, list[int]]:
    """The lengths at which each combination of words holds, in the order of the lengths."""
    spans: dict[str, list[int]] = {}
    for row in rows:
        spans.setdefault(words(row), []).append(row.seq_len)
    return spans


def _no_counters(counters: Counted, device: str) -> list[str]:
    if device != "cuda":
        return ["No counters: there is no GPU here. The static part, below, needs none."]
    if not counters:
        return ["No counters: no sweep has one of the lengths in `profile.seq_lens`."]
    reasons = dict.fromkeys(str(record.reason) for _, record in counters if record.status != OK)
    if all(record.status != OK for _, record in counters):
        return [f"No counters: {table_text('; '.join(reasons))}. The static part, below, needs none."]
    return []


def limits_table(rows: Sequence[Evidence]) -> str:
    """A line for each timed row: its shares of what the machine was measured to do, and what limits it."""
    return markdown(
        [
            {
                "sweep": table_text(row.sweep),
                "seq_len": str(row.seq_len),
                "impl": table_text(row.implementation),
                "latency (ms)": f"{row.latency_ms:.4g}",
                "TFLOP/s": rate_text(row.rate),
                "of the matrix rate": percent_text(row.matrix_share),
                "bytes, at least": f"{bytes_text(row.bytes_moved)}, {row.bytes_from}",
                "of the bandwidth": percent_text(row.memory_share),
                "FLOP / byte": f"{row.intensity:.3g}",
                "limited by": words(row),
                "marks": table_text(" ".join(row.marks)),
            }
            for row in rows
        ]
    )


def rules_text(rows: Sequence[Evidence]) -> str:
    """What the words mean, and where bytes are known from."""
    used = {limit.word for row in rows for limit in limits(row)}
    sources = dict.fromkeys(row.bytes_from for row in rows)
    lines = [f"{word}: {text}." for word, text in RULES.items() if word in used]
    lines += [f"bytes {source}: {WHERE_FROM[source]}." for source in sources]
    carried = {mark for row in rows for mark in row.marks}
    lines += [f"`{mark}`: {text}." for mark, text in MARKS.items() if mark in carried]
    return bullets(lines)


def by_implementation(rows: Sequence[Evidence]) -> list[str]:
    """For each implementation and sweep what limits it at its longest length, with the figures."""
    parts = []
    for name in dict.fromkeys(row.implementation for row in rows):
        lines = []
        for sweep in dict.fromkeys(row.sweep for row in rows if row.implementation == name):
            last = _of(rows, sweep, name)[-1]
            text = "; ".join(f"**{limit.word}**: {limit.sentence}" for limit in limits(last))
            lines.append(
                f"Sweep {table_text(sweep)}, seq_len {last.seq_len}: {text}. {_counters_in_words(last)}"
            )
        parts += [f"**{table_text(name)}**", bullets(line.strip() for line in lines)]
    return parts


def _counters_in_words(row: Evidence) -> str:
    """What ncu saw of the same call, in a sentence; nothing where it saw none."""
    values = row.counters
    if not values or row.bytes_from != COUNTED:
        return ""
    found = [f"DRAM moves {row.bytes_moved / row.minimal_bytes:.3g} times the bytes that the problem needs"]
    for name, text in (
        ("tensor_pipe_percent", "the tensor pipe is busy {:.0f} % of the time"),
        ("l2_hit_rate_percent", "L2 has {:.0f} % of what is asked of it"),
        ("occupancy_percent", "{:.0f} % of the warps that fit are there"),
    ):
        if values.get(name) is not None:
            found.append(text.format(values[name]))
    return f"By ncu {listed(found)}."


def wins(rows: Sequence[Evidence]) -> list[str]:
    """At each sweep's longest length with two numbers: who is fastest, and what the others pay for."""
    lines = []
    for sweep in dict.fromkeys(row.sweep for row in rows):
        lengths = [row.seq_len for row in rows if row.sweep == sweep]
        shared = [n for n in dict.fromkeys(lengths) if lengths.count(n) > 1]
        if not shared:
            continue
        there = [row for row in rows if row.sweep == sweep and row.seq_len == max(shared)]
        best, *others = sorted(there, key=lambda row: row.latency_ms)
        reasons = [f"{table_text(other.implementation)} {_why_slower(other, best)}" for other in others]
        lines.append(
            f"{_place(best)}: **{table_text(best.implementation)}** wins with {rate_text(best.rate)} TFLOP/s,"
            f" {percent_text(best.matrix_share)} of the matrix rate; {'; '.join(reasons)}."
        )
    return [*lines, *fewer_and_slower(rows)] or ["No two implementations have a number at the same length."]


def _place(row: Evidence) -> str:
    return f"Sweep {table_text(row.sweep)}, seq_len {row.seq_len}"


def _why_slower(slow: Evidence, fast: Evidence) -> str:
    text = f"takes {slow.latency_ms / fast.latency_ms:.3g} times as long"
    more = slow.bytes_moved / fast.bytes_moved
    if more > ALIKE:
        bound = slow.bytes_moved / slow.bandwidth * 1e3
        return (
            f"{text}: it moves at least {more:.3g} times the bytes, which alone take {bound:.3g} ms at the"
            " measured bandwidth"
        )
    slow_busy, fast_busy = (row.counters.get("tensor_pipe_percent") for row in (slow, fast))
    if slow_busy is not None and fast_busy is not None:
        return (
            f"{text}, moving as much: its tensor pipe is busy {slow_busy:.0f} % of the time, and"
            f" {fast_busy:.0f} % in the other"
        )
    return (
        f"{text}, moving as much: it reaches {percent_text(slow.matrix_share)} of the matrix rate, and what"
        " keeps it from more only counters would show"
    )


def fewer_and_slower(rows: Sequence[Evidence]) -> list[str]:
    """The article's question on this machine: who moves far fewer bytes than another, and is slower?"""
    pairs = [
        (row, other)
        for row in rows
        for other in rows
        if (row.sweep, row.seq_len) == (other.sweep, other.seq_len)
        and row.bytes_moved * ALIKE < other.bytes_moved
    ]
    slower = [
        f"{_place(row)}: **{table_text(row.implementation)}** moves fewer bytes than"
        f" {table_text(other.implementation)} and is slower:"
        f" {'; '.join(limit.sentence for limit in limits(row))}."
        for row, other in pairs
        if row.latency_ms > other.latency_ms
    ]
    if pairs and not slower:
        return [
            "Nothing that moves far fewer bytes than another is slower here. The article's kernel was, on its"
            " GPU: why, the static profile below says."
        ]
    return slower


def counter_sections(counters: Counted, device: str) -> list[str]:
    """What ncu counted: for each call its sums, and each of its kernels by name."""
    parts = [
        "Nsight Compute replays each kernel with cold caches and the clocks left alone. Shares of time are"
        " its own, and its durations stand nowhere else.",
        bullets(_no_counters(counters, device)),
    ]
    if not any(record.status == OK for _, record in counters):
        return parts[1:]
    calls, kernels, refused = [], [], []
    for job, record in counters:
        about = {
            "sweep": table_text(job.sweep),
            "seq_len": str(job.seq_len),
            "impl": table_text(job.implementation),
        }
        if record.status != OK:
            refused.append(
                f"{about['impl']} at seq_len {job.seq_len} (sweep {about['sweep']}): {record.status}:"
                f" {table_text(record.reason)}"
            )
            continue
        values, needed = record.values, _needed(job)
        calls.append(about | {"kernels": str(values["kernel_count"])} | _counts(values, needed))
        kernels += [about | _kernel(cell) for cell in record.cells]
    return [*parts, markdown(calls), "Every kernel of a call, by name:", markdown(kernels), bullets(refused)]


def _needed(job: Job) -> int:
    return Problem.from_dict(job.spec["problem"]).minimal_bytes


def _counts(values: dict[str, Any], needed: int) -> dict[str, str]:
    read, written = values.get("dram_read_bytes"), values.get("dram_write_bytes")
    dram = "" if read is None or written is None else f"{bytes_text(read)} / {bytes_text(written)}"
    times = "" if read is None or written is None else f"{(read + written) / needed:.3g}"
    return {
        "DRAM read / written": dram,
        "times the least": times,
        "L2": "" if values.get("l2_bytes") is None else bytes_text(values["l2_bytes"]),
        **_pipes(values),
    }


def _pipes(values: dict[str, Any]) -> dict[str, str]:
    """The columns that a call and a kernel have alike; empty where ncu has no number."""
    local = [values.get(f"local_{what}_bytes") for what in ("load", "store")]
    return {
        **{
            title: "" if values.get(name) is None else f"{values[name]:.3g}"
            for title, name in (
                ("L2 hits (%)", "l2_hit_rate_percent"),
                ("tensor pipe (%)", "tensor_pipe_percent"),
                ("FP32 pipe (%)", "fp32_pipe_percent"),
                ("issuing (%)", "issue_percent"),
                ("occupancy (%)", "occupancy_percent"),
                ("registers", "registers"),
            )
        },
        "local loads / stores": ""
        if None in local
        else " / ".join(bytes_text(count) for count in local if count is not None),
    }


def _kernel(cell: dict[str, Any]) -> dict[str, str]:
    stalls = list(cell["stalls"].items())[:3]
    return {
        "kernel": table_text(cell["short_name"]),
        "of the time": "" if cell["share"] is None else percent_text(cell["share"]),
        **_pipes(cell),
        "waits (warps for each that issues)": ", ".join(
            f"{table_text(name)} {warps:.2g}" for name, warps in stalls
        ),
    }


def limits_page(rows: Sequence[Evidence]) -> str:
    """What limits each implementation, as an HTML table for Snakemake's report."""
    shown = [
        {
            "sweep": row.sweep,
            "seq_len": Number(row.seq_len, ".0f"),
            "implementation": row.implementation,
            "latency (ms)": Number(row.latency_ms),
            "TFLOP/s": Number(row.rate / 1e12, ".3g"),
            "of the matrix rate": Number(row.matrix_share, ".1%"),
            "bytes, at least": Number(row.bytes_moved, ",.0f"),
            "known from": WHERE_FROM[row.bytes_from],
            "of the bandwidth": Number(row.memory_share, ".1%"),
            "limited by": words(row),
            "because": "; ".join(limit.sentence for limit in limits(row)),
        }
        for row in rows
    ]
    notes = [f"{word}: {text}." for word, text in RULES.items()] if rows else [TIMED_FIRST]
    return table_page("What limits it", notes, shown)
