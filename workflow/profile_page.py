"""report/profile.md: what limits each implementation, from measured times, counters and machine code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.kernel_names import element_operation, short_kernel_name
from harness.problem import DECODE, Problem
from harness.record import FAULTS, MARKS, OK, Record
from workflow.limits import (
    COUNTED,
    HALF,
    LAUNCH,
    NO_TENSOR,
    PRODUCTS,
    RULES,
    SPILLING,
    STALLS,
    WHERE_FROM,
    Evidence,
    bytes_text,
    limits,
    longest_kernel,
    percent_text,
    throughput_text,
    waiting,
    words,
)
from workflow.pages import Number, table_page
from workflow.plan import Job, Plan
from workflow.profiling import counter_jobs
from workflow.render import RATES, environment_line
from workflow.static_profile import Row, article_section, static_sections
from workflow.story import bullets, listed
from workflow.tables import load, markdown, table_text

Counted = list[tuple[Job, Record]]
TIMED_FIRST = (
    "No latency was measured here yet, or none beside the machine's own rates: `snakemake` measures both, and"
    " then this page says what limits each implementation."
)
ALIKE = 1.5  # moving more bytes by less than this explains no difference
MORE_WAITING = 0.25  # warps for each that issues: a reason to wait that differs by less is not told
SHOWN_REASONS = 2  # to wait, of a kernel


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
        parts += ["## What limits it", *limits_tables(rows), rules_text(rows)]
        parts += ["## By implementation", *by_implementation(rows)]
        parts += ["## Who wins, and why", *wins(rows), *fewer_and_slower(rows, static)]
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
        spans = "; ".join(f"{word} at {listed(lengths)}" for word, lengths in _spans(mine).items())
        floor = ", a floor" if mine[0].is_floor else ""
        lines.append(f"{table_text(name)} (sweep {table_text(sweep)}{floor}): {spans}.")
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


def limits_tables(rows: Sequence[Evidence]) -> list[str]:
    """For each sweep a line for each timed row: its shares of what was measured, and what limits it."""
    parts = []
    for sweep in dict.fromkeys(row.sweep for row in rows):
        mine = [row for row in rows if row.sweep == sweep]
        parts += [f"Sweep {table_text(sweep)}:", markdown([_limits_row(row) for row in mine])]
    return parts


def _limits_row(row: Evidence) -> dict[str, str]:
    unit = RATES[row.workload].unit
    rate, share = (
        (f"K and V ({unit})", "of the read bandwidth")
        if row.workload == DECODE
        else (unit, "of the matrix rate")
    )
    least = "" if row.is_counted else "≥ "
    return {
        "seq_len": str(row.seq_len),
        "impl": table_text(row.implementation),
        "latency (ms)": f"{row.latency_ms:.4g}",
        rate: row.throughput,
        share: "" if row.throughput_share is None else percent_text(row.throughput_share),
        "bytes moved": f"{least}{bytes_text(row.bytes_moved)}, {row.bytes_from}",
        "of the bandwidth": f"{least}{percent_text(row.memory_share)}",
        "limited by": words(row),
        "marks": table_text(" ".join(row.marks)),
    }


def rules_text(rows: Sequence[Evidence]) -> str:
    """What the words and the columns mean, and where bytes are known from."""
    used = {limit.word for row in rows for limit in limits(row)}
    sources = dict.fromkeys(row.bytes_from for row in rows)
    lines = [f"{word}: {text}." for word, text in RULES.items() if word in used]
    lines += [f"bytes {source}: {WHERE_FROM[source]}." for source in sources]
    if set(sources) - {COUNTED}:
        lines.append(
            "≥: bytes that were not counted are a lower bound, but for output that stays in the cache."
        )
    if any(row.workload == DECODE for row in rows):
        lines.append("K and V: their bytes over the latency, against the bandwidth of reading alone.")
    carried = {mark for row in rows for mark in row.marks} - {"launch_bound"}  # a word of its own, above
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
            lines.append(f"{_place(last)}: {text}. {_counters_in_words(last)}")
        floor = any(row.is_floor for row in rows if row.implementation == name)
        title = f"**{table_text(name)}**{' (a floor, which computes less)' if floor else ''}"
        parts += [title, bullets(line.strip() for line in lines)]
    return parts


def _counters_in_words(row: Evidence) -> str:
    """What ncu saw of the same call, or of one at the nearest length, in a sentence; nothing without it."""
    counted = row if row.is_counted else row.counted_near
    if counted is None:
        return ""
    found = [
        f"DRAM moves {bytes_text(counted.bytes_moved)},"
        f" {counted.bytes_moved / counted.minimal_bytes:.3g} times inputs and output"
    ]
    for name, text in (
        ("tensor_pipe_percent", "the tensor pipe is busy {:.3g} % of the time"),
        ("l2_hit_rate_percent", "L2 has {:.0f} % of what is asked of it"),
        ("occupancy_percent", "{:.0f} % of the warps that fit are there"),
    ):
        if counted.counters.get(name) is not None:
            found.append(text.format(counted.counters[name]))
    where = "" if counted is row else f", at seq_len {counted.seq_len}"
    return f"By ncu{where}: {listed(found)}."


def wins(rows: Sequence[Evidence]) -> list[str]:
    """At each sweep's longest length with two numbers: who is fastest, and what the others pay for."""
    parts = []
    for sweep in dict.fromkeys(row.sweep for row in rows):
        mine = [row for row in rows if row.sweep == sweep]
        contenders = [row for row in mine if not row.is_floor]
        lengths = [row.seq_len for row in contenders]
        shared = [n for n in dict.fromkeys(lengths) if lengths.count(n) > 1]
        if not shared:
            continue
        best, *others = sorted(
            (row for row in contenders if row.seq_len == max(shared)), key=lambda row: row.latency_ms
        )
        floors = [row for row in mine if row.is_floor and row.seq_len == best.seq_len]
        held = [
            f" It takes {best.latency_ms / floor.latency_ms:.3g} times as long as the floor"
            f" {table_text(floor.implementation)}, which computes less and is no contender."
            for floor in floors
        ]
        parts += [
            f"{_place(best)}: **{table_text(best.implementation)}** wins with {throughput_text(best)}."
            + "".join(held),
            bullets(_why_slower(other, best, contenders) for other in others),
        ]
    return parts or ["No two implementations have a number at the same length."]


def _place(row: Evidence) -> str:
    return f"Sweep {table_text(row.sweep)}, seq_len {row.seq_len}"


def _why_slower(slow: Evidence, fast: Evidence, rows: Sequence[Evidence]) -> str:
    """What is known of why one takes longer: counters of both here, else elsewhere, else bounds and rates."""
    if _times(slow, fast) == "1":
        return f"**{table_text(slow.implementation)}** takes as long, to three figures."
    text = f"**{table_text(slow.implementation)}** takes {_times(slow, fast)} times as long"
    launch = [limit.sentence for limit in limits(slow) if limit.word == LAUNCH]
    if slow.is_counted and fast.is_counted:
        return f"{text}: {'; '.join([*launch, *differences(slow, fast)])}."
    if slow.bytes_moved > ALIKE * slow.minimal_bytes:
        bound = (
            f"it moves at least {slow.bytes_moved / slow.minimal_bytes:.3g} times the bytes that the problem"
            f" needs, which alone take {_at_bandwidth(slow)} at the measured bandwidth"
        )
        return f"{text}: {'; '.join([*launch, bound])}."
    known = [f"it reaches {throughput_text(slow)}", *launch]
    known += [limit.sentence for limit in limits(slow) if limit.word in (NO_TENSOR, SPILLING)]
    for there, other in _counted_pairs(slow, fast, rows)[:1]:
        return (
            f"{text}: {'; '.join(known)}. What it moves was not counted here. At seq_len {there.seq_len},"
            f" where ncu counted both and it takes {_times(there, other)} times as long:"
            f" {'; '.join(differences(there, other))}."
        )
    return f"{text}: {'; '.join(known)}; what keeps it from more only counters of both would show."


def _times(slow: Evidence, fast: Evidence) -> str:
    return f"{slow.latency_ms / fast.latency_ms:.3g}"


def _at_bandwidth(row: Evidence) -> str:
    return f"{row.bytes_moved / row.bandwidth * 1e3:.3g} of its {row.latency_ms:.3g} ms"


def _counted_pairs(
    slow: Evidence, fast: Evidence, rows: Sequence[Evidence]
) -> list[tuple[Evidence, Evidence]]:
    """The two at other lengths at which both were counted and the same one is slower, the longest first."""
    counted = {(row.implementation, row.seq_len): row for row in rows if row.is_counted}
    pairs = [
        (row, counted[fast.implementation, row.seq_len])
        for row in counted.values()
        if row.implementation == slow.implementation and (fast.implementation, row.seq_len) in counted
    ]
    slower = [(row, other) for row, other in pairs if row.latency_ms > other.latency_ms]
    return sorted(slower, key=lambda pair: -pair[0].seq_len)


def differences(slow: Evidence, fast: Evidence) -> list[str]:
    """What the counters of two say of why the first takes longer, in the order of the rules.

    More bytes in DRAM, and nothing more where these take more than half of the time. Else how busy the
    pipe is that both live on, spilled registers, more bytes in L2, what its warps wait for more than the
    other's, and whether there are fewer of them.
    """
    name = table_text(fast.implementation)
    found = []
    kernels = [row.counters.get("kernel_count") for row in (slow, fast)]
    if None not in kernels and kernels[0] != kernels[1]:
        found.append(f"it launches {kernels[0]} kernels, {name} {kernels[1]}")
    more = slow.bytes_moved / fast.bytes_moved
    if more > ALIKE:
        found.append(
            f"it moves {more:.3g} times the bytes of {name}, which alone take {_at_bandwidth(slow)} at the"
            " measured bandwidth"
        )
        if slow.memory_share > HALF:
            return found
    if max(slow.memory_share, fast.memory_share) > HALF:
        found.append(
            f"it moves {more:.3g} times the bytes of {name}, at {percent_text(slow.memory_share)} of the"
            f" measured bandwidth, and {name} at {percent_text(fast.memory_share)}"
        )
    elif (pipes := _both(slow, fast, "tensor_pipe_percent")) and max(pipes) >= PRODUCTS:
        found.append(
            f"its tensor pipe is busy {pipes[0]:.3g} % of the time, and that of {name} {pipes[1]:.3g} %"
        )
    found += _spilled_more(slow, fast, name)
    if (moved := _both(slow, fast, "l2_bytes")) and moved[0] > ALIKE * moved[1]:
        found.append(f"L2 moves {moved[0] / moved[1]:.3g} times the bytes")
    return [*found, *_waits_more(slow, fast, name)]


def _both(slow: Evidence, fast: Evidence, quantity: str) -> tuple[float, float] | None:
    one, other = (row.counters.get(quantity) for row in (slow, fast))
    return None if one is None or other is None else (one, other)


def _spilled_more(slow: Evidence, fast: Evidence, name: str) -> list[str]:
    """Local memory that one goes through and the other not, with the registers of each."""
    spilling = [limit for limit in limits(slow) if limit.word == SPILLING]
    if not spilling or any(limit.word == SPILLING for limit in limits(fast)):
        return []
    registers = _both(slow, fast, "registers")
    held = f" (it has {registers[0]:.0f} registers a thread, {name} {registers[1]:.0f})" if registers else ""
    return [f"it spills registers{held}: {spilling[0].sentence}"]


def _waits_more(slow: Evidence, fast: Evidence, name: str) -> list[str]:
    """What the warps of one's longest kernel wait for more than the other's, and how many warps there are."""
    kernels = [longest_kernel(row) for row in (slow, fast)]
    if kernels[0] is None or kernels[1] is None:
        return []
    mine, theirs = (waiting(kernel) for kernel in kernels if kernel is not None)
    excess = {reason: warps - theirs.get(reason, 0.0) for reason, warps in mine.items()}
    told = [
        f"{mine[reason]:.2g} wait for {STALLS.get(reason, reason)} ({theirs.get(reason, 0.0):.2g} in {name})"
        for reason in sorted(excess, key=lambda reason: -excess[reason])[:SHOWN_REASONS]
        if excess[reason] >= MORE_WAITING
    ]
    found = [f"for each warp that issues, {listed(told)}"] if told else []
    if warps := _both(slow, fast, "occupancy_percent"):
        short = "it has fewer warps" if warps[0] < warps[1] / ALIKE else "it is not short of warps"
        found.append(f"{short}: {warps[0]:.0f} % of those that fit are there, {warps[1]:.0f} % in {name}")
    return found


def fewer_and_slower(rows: Sequence[Evidence], static: Sequence[Row] = ()) -> list[str]:
    """The article's question on this machine: who moves far fewer bytes than another, and is slower?"""
    contenders = [row for row in rows if not row.is_floor]
    pairs = [
        (row, other)
        for row in contenders
        for other in contenders
        if (row.sweep, row.seq_len) == (other.sweep, other.seq_len)
        and row.bytes_moved * ALIKE < other.bytes_moved
    ]
    slower = [
        f"{_place(row)}: {_fewer(row, other)}: {'; '.join(limit.sentence for limit in limits(row))}."
        for row, other in pairs
        if row.latency_ms > other.latency_ms
    ]
    if pairs and not slower:
        why = " Why, the static profile below says." if article_section(static) else ""
        return [
            "Nothing here is slower than another that is known to move far more bytes. The article's kernel"
            f" was, on its GPU.{why}"
        ]
    return slower


def _fewer(row: Evidence, other: Evidence) -> str:
    """That one moves fewer bytes and is slower; a bound on its own bytes does not say that they are fewer."""
    name, slower = table_text(other.implementation), f"**{table_text(row.implementation)}**"
    if row.is_counted:
        return f"{slower} moves fewer bytes than {name} and is slower"
    return (
        f"{slower} is slower than {name}, which moves at least"
        f" {other.bytes_moved / other.minimal_bytes:.3g} times the bytes that the problem needs (how many"
        " move in the slower one was not counted)"
    )


def counter_sections(counters: Counted, device: str) -> list[str]:
    """What ncu counted: for each problem a table of the calls, and one of each call of several kernels."""
    if not any(record.status == OK for _, record in counters):
        return [bullets(_no_counters(counters, device))]
    parts = [
        "Nsight Compute replays each kernel with cold caches and the clocks left alone. Shares of time are"
        " its own, and its durations stand nowhere else. All that it gave lies in the records"
        " (`results/<environment>/profile/`)."
    ]
    for sweep, seq_len in dict.fromkeys((job.sweep, job.seq_len) for job, _ in counters):
        mine = [
            (job, record)
            for job, record in counters
            if (job.sweep, job.seq_len) == (sweep, seq_len) and record.status == OK
        ]
        if mine:
            parts += [f"### Sweep {table_text(sweep)}, seq_len {seq_len}", _calls_table(mine)]
            parts += _kernels(mine)
    refused = [
        f"{table_text(job.implementation)} at seq_len {job.seq_len} (sweep {table_text(job.sweep)}):"
        f" {record.status}: {table_text(record.reason)}"
        for job, record in counters
        if record.status != OK
    ]
    return [*parts, bullets(refused), _counters_legend(counters)]


def _calls_table(counters: Counted) -> str:
    """A row for each quantity and a column for each implementation."""
    columns = {}
    for job, record in counters:
        stale = " (stale)" if "stale" in record.marks else ""
        columns[f"{table_text(job.implementation)}{stale}"] = _call(record, _needed(job))
    names = dict.fromkeys(name for call in columns.values() for name in call)
    return markdown(
        [
            {"of one call": name} | {title: call.get(name, "") for title, call in columns.items()}
            for name in names
        ]
    )


def _call(record: Record, needed: int) -> dict[str, str]:
    values = record.values
    read, written = values.get("dram_read_bytes"), values.get("dram_write_bytes")
    cached = values.get("l2_bytes")
    longest = max(record.cells, key=lambda cell: cell["share"] or 0.0)
    shown = {
        "kernels": str(values["kernel_count"]),
        "DRAM read / written": _two_sizes(read, written),
        "times the least": "" if read is None or written is None else f"{(read + written) / needed:.3g}",
        "L2 bytes": "" if cached is None else bytes_text(cached),
        "L2, times the least": "" if cached is None else f"{cached / needed:.3g}",
        "local memory loaded / stored": _two_sizes(
            values.get("local_load_bytes"), values.get("local_store_bytes")
        ),
    }
    for title, name in (
        ("L2 hits", "l2_hit_rate_percent"),
        ("tensor pipe busy", "tensor_pipe_percent"),
        ("FP32 pipe busy", "fp32_pipe_percent"),
        ("issuing", "issue_percent"),
        ("occupancy", "occupancy_percent"),
    ):
        shown[title] = _percent(values.get(name))
    shown["registers a thread"] = _whole(values.get("registers"))
    shown["waits, longest kernel"] = _stalls(longest, 3)
    return shown


def _kernels(counters: Counted) -> list[str]:
    """The kernels of each call by name: a line where there is one, else a table."""
    parts, alone = [], []
    for job, record in counters:
        name = table_text(job.implementation)
        if len(record.cells) == 1:
            alone.append(f"{name} is one kernel, {table_text(short_kernel_name(record.cells[0]['name']))}.")
        else:
            parts += [
                f"The {len(record.cells)} kernels of {name}, in the order of their launches:",
                markdown([_kernel(cell) for cell in record.cells]),
            ]
    return [bullets(alone), *parts]


def _kernel(cell: dict[str, Any]) -> dict[str, str]:
    operation = element_operation(cell["name"])
    applied = f" ({operation})" if operation else ""
    return {
        "kernel": table_text(short_kernel_name(cell["name"]) + applied),
        "of the time": "" if cell["share"] is None else percent_text(cell["share"]),
        "DRAM read / written": _two_sizes(cell.get("dram_read_bytes"), cell.get("dram_write_bytes")),
        "L2 hits": _percent(cell.get("l2_hit_rate_percent")),
        "tensor pipe busy": _percent(cell.get("tensor_pipe_percent")),
        "occupancy": _percent(cell.get("occupancy_percent")),
        "registers": _whole(cell.get("registers")),
        "waits": _stalls(cell, 2),
    }


def _stalls(cell: dict[str, Any], count: int) -> str:
    return ", ".join(
        f"{table_text(name)} {warps:.2g}" if warps < 100 else f"{table_text(name)} {warps:.0f}"
        for name, warps in list(waiting(cell).items())[:count]
    )


def _counters_legend(counters: Counted) -> str:
    """What the rows of the tables mean, and the reasons to wait that occur."""
    done = [record for _, record in counters if record.status == OK]
    lines = [
        "Of a call of several kernels bytes are sums, percentages are means weighted by the kernels' times,"
        " and registers are the most.",
        "times the least: DRAM's bytes against inputs read once and output written once. Below 1, a part of"
        " the output still lay in L2 when the kernel ended. L2, times the least: what went through L2 against"
        " the same; each tile of queries reads K and V anew.",
        "local memory: where spilled registers go. issuing: the share of cycles in which a scheduler issues"
        " an instruction. occupancy: warps that are there, of those that fit on a multiprocessor.",
        "waits: warps that wait, for each one that issues, by the reason; a warp that could issue and was"
        " not chosen is left out.",
    ]
    used = {name for record in done for cell in record.cells for name in list(waiting(cell))[:3]}
    lines += [f"{table_text(name)}: waits for {text}." for name, text in STALLS.items() if name in used]
    return bullets(lines)


def _needed(job: Job) -> int:
    return Problem.from_dict(job.spec["problem"]).minimal_bytes


def _two_sizes(one: float | None, other: float | None) -> str:
    if one is None or other is None:
        return ""
    return f"{bytes_text(one)} / {bytes_text(other)}" if one or other else "none"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} %"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _rates(row: Evidence) -> dict[str, Number]:
    """The figures of merit of both workloads, of which a row has its own."""
    none, own = Number("nan"), row.workload == DECODE
    share = row.share_of_read_bandwidth
    return {
        "TFLOP/s": none if own else Number(row.rate / 1e12, ".3g"),
        "of the matrix rate": none if own else Number(row.matrix_share, ".1%"),
        "TB/s of K and V": Number(row.throughput, ".3g") if own else none,
        "of the read bandwidth": none if not own or share is None else Number(share, ".1%"),
    }


def limits_page(rows: Sequence[Evidence]) -> str:
    """What limits each implementation, as an HTML table for Snakemake's report."""
    shown = [
        {
            "sweep": row.sweep,
            "seq_len": Number(row.seq_len, ".0f"),
            "implementation": row.implementation,
            "latency (ms)": Number(row.latency_ms),
            **_rates(row),
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
