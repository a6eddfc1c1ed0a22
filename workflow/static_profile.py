"""report/static_profile.md: the static profile as a table, and the article's question answered from it.

Every number comes from the records, but for the article's own and those of data sheets, which are named
as such.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.architectures import ARCHITECTURES
from harness.record import FAULTS, OK, UNSUPPORTED
from harness.sass import MIX, TENSOR_CORE_GROUPS
from harness.static_profile import DOES_NOT_FIT, NO_TENSOR_CORES, SPILLS, VERDICTS
from workflow.pages import Number, table_page
from workflow.plan import Plan
from workflow.profiling import static_jobs
from workflow.story import bullets, listed
from workflow.tables import load, markdown, table_text

Row = dict[str, Any]
FIGURES = (
    *("function", "threads", "registers", "stack_bytes", "shared_memory_bytes"),
    *("block_shared_memory_limit_bytes", "tensor_memory_columns", "blocks_per_multiprocessor"),
    *("warps_per_multiprocessor", "occupancy", "occupancy_limiter"),
    *("ceiling_teraflops_per_second", "ceiling_of", "seconds"),
)
COLUMNS = (
    *(
        "environment",
        "sweep",
        "kernel",
        "target",
        "options",
        "head_dim",
        "causal",
        "dtype",
        "status",
        "reason",
    ),
    *FIGURES,
    *("instructions", *MIX),
    *(f"loop_{name}" for name in ("instructions", *MIX)),
    *("verdicts", "warnings", "triton", "ptxas", "ptxas-blackwell", "nvdisasm", "marks"),
)
# Of the columns below those of the page's tables: the whole mix is in the CSV and in the report's table.
ON_THE_PAGE = (
    *("target", "options", "registers", "LDL / STL (in loops)", "shared memory (KiB)", "warps"),
    *("tensor cores", "FFMA", "verdicts"),
)
# The article's table for its Tesla T4 (fp16, 16 heads, head_dim 64, not causal), TFLOP/s by seq_len, and
# the T4's bandwidth by its data sheet. Quoted, not measured here.
ARTICLE_TARGET = "sm_75"
ARTICLE_PEAK = ARCHITECTURES[7, 5].peak
ARTICLE_RATES = {
    "naive": {512: 1.74, 2048: 2.01, 8192: 2.09},
    "sdpa": {512: 9.61, 2048: 12.40, 8192: 12.91},
    "triton": {512: 1.13, 2048: 1.37, 8192: 1.34},
}
ARTICLE_LATENCIES_MS = {"naive": 131.724, "triton": 205.150}  # at seq_len 8192
ARTICLE_BYTES = 4 * 16 * 8192 * 64 * 2  # Q, K, V and O at that length
ARTICLE_SCORES = 16 * 8192**2
ARTICLE_SCORE_BYTES = 10  # of naive attention, by the article's memory column: scores, scaled, fp32, cast
ARTICLE_FLOP = 4 * ARTICLE_SCORES * 64
T4_BYTES_PER_SECOND = 320e9


def static_rows(plan: Plan, root: Path) -> list[Row]:
    """A row for every compiled function, and for every option set or job that gave none."""
    rows: list[Row] = []
    for job in static_jobs(plan):
        record = load(job, root)
        blank = {"problem": job.spec["problem"], "status": record.status, "reason": record.reason}
        for cell in record.cells or [{**blank, "options": job.spec["implementation"]["options"]}]:
            row: Row = dict.fromkeys(COLUMNS)
            row |= {"environment": plan.environment, "sweep": job.sweep, "kernel": job.implementation}
            row |= {"target": job.spec["target"], "options": options_text(cell["options"])}
            row |= {name: cell["problem"][name] for name in ("head_dim", "causal", "dtype")}
            row |= {name: cell.get(name) for name in ("status", "reason", *FIGURES)}
            row |= cell.get("mix", {})
            row |= {f"loop_{name}": count for name, count in cell.get("loop_mix", {}).items()}
            row |= {"verdicts": "; ".join(cell.get("verdicts", [])), "marks": " ".join(record.marks)}
            row["warnings"] = " | ".join(cell.get("warnings", []))
            row |= {
                name: record.values.get(name) for name in ("triton", "ptxas", "ptxas-blackwell", "nvdisasm")
            }
            rows.append(row)
    return rows


def options_text(options: dict[str, Any]) -> str:
    """Options for people, by name, those that are None left out: equal options give equal text."""
    given = sorted((name, value) for name, value in options.items() if value is not None)
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in given
    )


def fault_lines(rows: Sequence[Row]) -> list[str]:
    """A line for every row that is an error or a timeout."""
    return [
        f"{row['status']}: {row['kernel']} for {row['target']} (sweep {row['sweep']}; {row['options']}):"
        f" {row['reason']}"
        for row in rows
        if row["status"] in FAULTS
    ]


def static_page(rows: Sequence[Row]) -> str:
    """The page report/static_profile.md."""
    return "\n\n".join(part for part in ("# Static profile", *static_sections(rows)) if part) + "\n"


def static_sections(rows: Sequence[Row]) -> list[str]:
    """The parts of the page below its title, for this page and for the profile's."""
    if not rows:
        return ["No kernel of any sweep says what to compile (`compile_units`): there is nothing to profile."]
    parts = [compiled_line(rows), "## In short", bullets(in_short(rows))]
    if article := article_section(rows):
        parts += ["## Why does a kernel that moves fewer bytes lose?", *article]
    for sweep in dict.fromkeys(row["sweep"] for row in rows):
        mine = [row for row in rows if row["sweep"] == sweep]
        first = mine[0]
        mask = "causal" if first["causal"] else "not causal"
        parts += [
            f"## Compiled: sweep {table_text(sweep)}",
            f"head_dim {first['head_dim']}, {mask}, {first['dtype']}.",
            *_kernel_tables(mine),
            bullets(_refused(mine)),
        ]
    return [*parts, legend()]


def _kernel_tables(rows: Sequence[Row]) -> list[str]:
    """A table for each kernel of a sweep, of the columns that verdicts rest on."""
    parts = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        compiled = [_shown(row) for row in rows if row["kernel"] == kernel and row["status"] == OK]
        if compiled:
            parts.append(f"{table_text(kernel)}:")
            parts.append(markdown([{name: row[name] for name in ON_THE_PAGE} for row in compiled]))
    return parts


def compiled_line(rows: Sequence[Row]) -> str:
    """What compiled and read, and that nothing was run."""
    found = {
        name: sorted({row[name] for row in rows if row[name]})
        for name in ("triton", "ptxas", "ptxas-blackwell")
    }
    text = "; ".join(f"{name} {', '.join(versions)}" for name, versions in found.items() if versions)
    said = f"Compiled with {table_text(text)}. " if text else ""
    return (
        f"{said}Nothing was run: these are properties of machine code, for GPUs that need not be there, and"
        " ceilings are published figures of the GPU named. docs/profiling.md says how each is found."
    )


def in_short(rows: Sequence[Row]) -> list[str]:
    """A line for each target: which verdicts how many of its compiled functions carry."""
    lines = []
    for target in dict.fromkeys(row["target"] for row in rows):
        mine = [row for row in rows if row["target"] == target and row["status"] == OK]
        if not mine:
            lines.append(f"`{target}`: nothing compiled.")
            continue
        counts = {verdict: sum(verdict in verdicts_of(row) for row in mine) for verdict in VERDICTS}
        carried = [f"`{verdict}` in {count} of {len(mine)}" for verdict, count in counts.items() if count]
        without = sum(not _has_products(row) for row in mine)
        if counts[NO_TENSOR_CORES] and without:
            carried[0] += f" ({without} more {'has' if without == 1 else 'have'} no products)"
        used = [group for group in TENSOR_CORE_GROUPS if any(row[group] for row in mine)]
        cores = f"tensor cores through {listed(used)}" if used else "products run on the fp32 pipes"
        lines.append(f"`{target}`: {cores}; {'; '.join(carried) or 'no verdict against any'}.")
    return lines


def _has_products(row: Row) -> bool:
    """Whether there is something for tensor cores to do; a floor, which computes next to nothing, has not."""
    return NO_TENSOR_CORES in verdicts_of(row) or any(row[group] for group in TENSOR_CORE_GROUPS)


def verdicts_of(row: Row) -> list[str]:
    return [verdict for verdict in str(row["verdicts"]).split("; ") if verdict]


def article_section(rows: Sequence[Row]) -> list[str]:
    """The answer, by the rows of the article's architecture; nothing where those are not asked for.

    The first sweep that is compiled for it stands for the article's problem.
    """
    there = [row for row in rows if row["target"] == ARTICLE_TARGET and row["status"] == OK]
    there = [row for row in there if row["sweep"] == there[0]["sweep"]]
    if not there:
        return []
    without = [row for row in there if NO_TENSOR_CORES in verdicts_of(row)]
    ceiling = there[0]["ceiling_teraflops_per_second"]
    parts = [
        "The article's Triton kernel on a Tesla T4 keeps the scores out of memory, and still loses to naive"
        f" attention at every length: {_rates('triton')} TFLOP/s against {_rates('naive')}, and"
        f" {_rates('sdpa')} of SDPA."
    ]
    if len(without) < len(there):
        parts.append(
            f"Compiled here for its architecture, {len(there) - len(without)} of {len(there)} option sets"
            " have tensor-core instructions: this compiler is not the reason that the article's kernel lost."
        )
        return [*parts, _tile_table(there)]
    parts += [
        f"**No tensor cores.** Compiled here for its architecture (`{ARTICLE_TARGET}`), none of the"
        f" {len(there)} option sets has a tensor-core instruction: the two products become"
        f" {_span(there, 'fp32_multiply_add')} scalar FFMA instructions. Their ceiling is the published rate"
        f" of the fp32 pipes, {ceiling:g} TFLOP/s on a {there[0]['ceiling_of']}, not the"
        f" {ARTICLE_PEAK.tensor_teraflops_per_second:g} of its tensor cores. Every figure of the article's"
        f" Triton kernel is below {ceiling:g}; SDPA's {max(ARTICLE_RATES['sdpa'].values()):g} is above it,"
        " which takes tensor cores.",
        f"**The bytes that it saves do not decide.** At seq_len 8192 it moves at least Q, K, V and O,"
        f" {ARTICLE_BYTES / 2**20:.0f} MiB: {ARTICLE_BYTES / T4_BYTES_PER_SECOND * 1e3:.2f} ms at the T4's"
        f" published 320 GB/s, of {ARTICLE_LATENCIES_MS['triton']:.0f} ms. Its operations take"
        f" {ARTICLE_FLOP / (ceiling * 1e12) * 1e3:.0f} ms at {ceiling:g} TFLOP/s. Naive attention writes and"
        f" reads {ARTICLE_SCORE_BYTES} bytes a score besides, which at that bandwidth is at least"
        f" {2 * ARTICLE_SCORE_BYTES * ARTICLE_SCORES / T4_BYTES_PER_SECOND * 1e3:.0f} of its"
        f" {ARTICLE_LATENCIES_MS['naive']:.0f} ms, and can afford it: its products are PyTorch's, which have"
        " a tensor-core path there.",
        *_spill_sentences(there),
        *_other_targets(rows, there),
        _tile_table(there),
        "All of this is consistent with the published numbers, and no more than that: the T4 itself was not"
        " measured, and which source, which tile and which version of Triton the article had is not known"
        " (those before 3.3 still had a path to the tensor cores there). Compiled here is this project's"
        " kernel.",
    ]
    return parts


def _rates(name: str) -> str:
    values = ARTICLE_RATES[name].values()
    return f"{min(values):g} to {max(values):g}"


def _span(rows: Sequence[Row], column: str) -> str:
    values = [row[column] for row in rows]
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


def _spill_sentences(there: Sequence[Row]) -> list[str]:
    spilling = [row for row in there if SPILLS in verdicts_of(row)]
    kept = [row for row in there if SPILLS not in verdicts_of(row)]
    sentences = []
    if spilling:
        worst = max(spilling, key=lambda row: row["stack_bytes"])
        spills = worst["loop_local_load"] + worst["loop_local_store"]
        sentences.append(
            f"**Registers are spilled to memory.** With {worst['options']} a thread has {worst['registers']}"
            f" registers, needs {worst['stack_bytes']:,} bytes of stack besides, and the code has"
            f" {worst['local_load']:,} loads and {worst['local_store']:,} stores of local memory:"
            f" {_percent(spills, worst['loop_instructions'])} of the loop's instructions, where"
            f" {_percent(worst['loop_fp32_multiply_add'], worst['loop_instructions'])} are FFMA."
        )
    if kept:
        named = listed(f"({row['options']})" for row in kept)
        sentences.append(
            f"**What does not spill there:** {named}. These are compiled with"
            f" {_span(kept, 'registers')} registers and no access of local memory; FFMA are"
            f" {_percent_span(kept)} of the loop's instructions. Their predicted ceiling is the fp32 pipes'"
            " rate, and none's is the tensor cores'."
        )
    return sentences


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _percent_span(rows: Sequence[Row]) -> str:
    shares = [100 * row["loop_fp32_multiply_add"] / max(1, row["loop_instructions"]) for row in rows]
    low, high = f"{min(shares):.0f}", f"{max(shares):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _other_targets(rows: Sequence[Row], there: Sequence[Row]) -> list[str]:
    """The option set that spills the most there, where it was compiled for other targets too."""
    worst = max(there, key=lambda row: row["stack_bytes"])
    alike = [
        row
        for row in rows
        if all(row[name] == worst[name] for name in ("sweep", "kernel", "options"))
        and row["target"] != worst["target"]
        and row["status"] == OK
    ]
    found = []
    for row in alike:
        cores = sum(row[group] for group in TENSOR_CORE_GROUPS)
        spills = row["local_load"] + row["local_store"]
        found.append(
            f"`{row['target']}` {cores} tensor-core instructions, {row['fp32_multiply_add']} FFMA,"
            f" {spills or 'no'} spill instructions"
        )
    if not found:
        return []
    return [
        f"**The same source and tile elsewhere** ({worst['options']}): {'; '.join(found)}. One instruction"
        " of a later tensor core does many times the work of an earlier one's."
    ]


def _tile_table(there: Sequence[Row]) -> str:
    return markdown(
        [
            {
                "options": row["options"],
                "registers": str(row["registers"]),
                "stack (bytes)": f"{row['stack_bytes']:,}",
                "local loads / stores": f"{row['local_load']:,} / {row['local_store']:,}",
                "FFMA in the loop": _percent(row["loop_fp32_multiply_add"], row["loop_instructions"]),
                "fits": "no" if DOES_NOT_FIT in verdicts_of(row) else "yes",
                "predicted ceiling": f"{row['ceiling_teraflops_per_second']:g} TFLOP/s ({row['ceiling_of']})",
                "so": "spills" if SPILLS in verdicts_of(row) else "does not spill",
            }
            for row in there
        ]
    )


def _shown(row: Row) -> dict[str, str]:
    """A row of the page's tables; a count of the whole text, and in brackets of its loops."""
    cores = [f"{row[group]} {group}" for group in TENSOR_CORE_GROUPS if row[group]]
    shared = f"{row['shared_memory_bytes'] / 1024:.3g} of {row['block_shared_memory_limit_bytes'] / 1024:.0f}"
    share = f"{100 * row['occupancy']:.0f}"
    local = f"{row['local_load']} / {row['local_store']}"
    if row["local_load"] or row["local_store"]:
        local += f" ({row['loop_local_load']} / {row['loop_local_store']})"
    return {
        "kernel": table_text(row["kernel"]),
        "target": row["target"],
        "options": table_text(row["options"]),
        "registers": str(row["registers"]),
        "stack (bytes)": str(row["stack_bytes"]),
        "LDL / STL (in loops)": local,
        "shared memory (KiB)": shared,
        "warps": f"{row['warps_per_multiprocessor']} ({share} %), by {row['occupancy_limiter']}",
        "tensor cores": ", ".join(cores) or ("none" if _has_products(row) else "no products"),
        "FFMA": str(row["fp32_multiply_add"]),
        "MUFU": str(row["special_function"]),
        "global": f"{row['global_load']} / {row['global_store']}",
        "shared": f"{row['shared_load']} / {row['shared_store']}",
        "async copy": str(row["async_copy"]),
        "TMA": f"{row['tma_load']} / {row['tma_store']}",
        "barriers": str(row["barrier"]),
        "verdicts": ", ".join(verdicts_of(row)),
    }


def _refused(rows: Sequence[Row]) -> list[str]:
    """A line for each kernel, status and reason for which there is nothing compiled, with the targets."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != OK:
            key = (row["kernel"], row["status"], str(row["reason"]))
            found.setdefault(key, []).append(row["target"])
    return [
        f"{table_text(kernel)} for {listed(dict.fromkeys(targets))}: {status}: {table_text(reason)}"
        for (kernel, status, reason), targets in found.items()
    ]


def legend() -> str:
    """What the columns and the verdicts mean."""
    lines = [f"- `{verdict}`: {text}." for verdict, text in VERDICTS.items()]
    return (
        "Counts are of instructions in the program text, loads before stores; LDL and STL are loads and"
        " stores of local memory, which is where spilled registers go. Warps: how many one multiprocessor"
        " holds at once by the published limits, and which limit that is. Shared memory is a block's, of the"
        " most that one may have. Stack bytes and the rest of the mix (MUFU, global and shared memory, async"
        " copies, TMA, barriers) are in `results/static_profile.csv`, which `snakemake static_profile`"
        " writes.\n\n" + "\n".join(lines)
    )


def static_table_page(rows: Sequence[Row]) -> str:
    """The static profile as an HTML table, for Snakemake's report."""
    shown = []
    for row in rows:
        found = _shown(row) if row["status"] == OK else {}
        cells: dict[str, Any] = {"sweep": row["sweep"]}
        cells |= {name: str(row[name]) for name in ("kernel", "target", "options")}
        for name in ("registers", "stack (bytes)", "FFMA", "MUFU", "async copy", "barriers"):
            cells[name] = Number(found[name], ".0f") if found else Number("nan")
        for name in (
            "LDL / STL (in loops)",
            "shared memory (KiB)",
            "warps",
            "tensor cores",
            "global",
            "shared",
            "TMA",
        ):
            cells[name] = found.get(name, "")
        cells["verdicts, or why there is none"] = (
            ", ".join(verdicts_of(row)) if found else f"{row['status']}: {row['reason']}"
        )
        shown.append(cells)
    faults = [row["status"] not in (OK, UNSUPPORTED) for row in rows]
    return table_page("Static profile", [compiled_line(rows)], shown, faults)
