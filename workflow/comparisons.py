"""results/comparison.csv: each implementation against the baseline, its twin, and itself before an edit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.comparison import (
    Comparison,
    Measured,
    Ratio,
    Twins,
    before_edit,
    compare,
    edit_effect,
    measured_again,
)
from harness.record import OK, Record
from workflow.plan import TIMING, Plan
from workflow.tables import gpu_of, held_against, load, load_measurement

BASELINE = "baseline"
TWIN = "twin"
EDIT = "edit"
GPU = "gpu"
COMPARISON_COLUMNS = (
    "environment",
    "sweep",
    "seq_len",
    "kind",
    "implementation",
    "against",
    "verdict",
    "reason",
    "ratio",
    "ratio_low",
    "ratio_high",
    "cycles_ratio",
    "cycles_ratio_low",
    "cycles_ratio_high",
    "aa_spread",
    "resolvable_difference",
    "before_measured_at",
    "before_commit",
    "gpu",
    "against_gpu",
)


def comparison_rows(plan: Plan, root: Path) -> list[dict[str, Any]]:
    """A row for each comparison of the run, by sweep and length.

    `kind` says against what: the configuration's `baseline`, the first name of an A/A test (`twin`), the
    last measurement of another source of the same kernel (`edit`), or the same on another GPU (`gpu`). Ratios
    are latencies over latencies.
    """
    roofline = load(plan.roofline_job(), root)
    rows = []
    for sweep in plan.config["sweeps"]:
        if not plan.measures(sweep, TIMING):
            continue
        for seq_len in plan.seq_lens(sweep):
            cell = {}
            for name in plan.implementations(sweep):
                job = plan.sweep_job(TIMING, sweep, name, seq_len)
                cell[name] = (held_against(load_measurement(plan, job, root), roofline), root / job.path)
            where = {"environment": plan.environment, "sweep": sweep, "seq_len": seq_len}
            rows += [{**row, **where} for row in _of_a_cell(plan, cell)]
    return rows


def _of_a_cell(plan: Plan, cell: dict[str, tuple[Record, Path]]) -> Iterator[dict[str, Any]]:
    baseline = plan.config["baseline"]
    twins = _twins(plan, cell)
    for name, (record, path) in cell.items():
        first = plan.twin_of(name)
        if first != name:
            if first in cell:
                yield _row(TWIN, name, first, _compared(record, cell[first][0], twins))
            continue
        if baseline in cell and name != baseline:
            yield _row(BASELINE, name, baseline, _compared(record, cell[baseline][0], twins))
        if _unusable(record) is None and (before := before_edit(record, path)) is not None:
            row = _row(EDIT, name, name, _of_two_gpus(before, record) or edit_effect(before, record, twins))
            source = before.circumstances.get("source", {})
            yield {**row, "before_measured_at": before.started_at, "before_commit": source.get("commit")}
        for uuid, other in _on_other_gpus(plan, cell, name).items():
            row = _row(GPU, name, name, compare(Measured.of(record), Measured.of(other), twins))
            yield {**row, "gpu": gpu_of(record), "against_gpu": uuid}


def _on_other_gpus(plan: Plan, cell: dict[str, tuple[Record, Path]], name: str) -> dict[str, Record]:
    """The newest measurement of the same thing on each GPU but the row's own, by the GPU's UUID.

    It is a former one of the same spec, or that of an A/A test's other name.
    """
    record, path = cell[name]
    if gpu_of(record) is None or _unusable(record) is not None:
        return {}
    others = [other for twin, (other, _) in cell.items() if plan.twin_of(twin) == name != twin]
    usable = [other for other in others if _unusable(other) is None]
    found = [*measured_again(record, path), *usable]
    by_gpu = {gpu_of(one): one for one in sorted(found, key=lambda one: one.started_at)}
    return {uuid: one for uuid, one in by_gpu.items() if uuid not in (None, gpu_of(record))}


def _twins(plan: Plan, cell: dict[str, tuple[Record, Path]]) -> Twins | None:
    """The samples of the cell's first A/A test whose two sides have a number, and are of one GPU."""
    for name, (record, _) in cell.items():
        first = plan.twin_of(name)
        if first != name and first in cell:
            sides = (cell[first][0], record)
            if all(_unusable(side) is None for side in sides) and _of_two_gpus(*sides) is None:
                return Measured.of(sides[0]), Measured.of(sides[1])
    return None


def _unusable(record: Record) -> str | None:
    """Why a record's samples are compared with nothing; None if they may be."""
    if record.status != OK:
        return f"has no latency ({record.status})"
    return next((f"is {mark}" for mark in ("interpreted", "stale") if mark in record.marks), None)


def _of_two_gpus(record: Record, other: Record) -> str | None:
    """Why two rows that come from two GPUs are not compared; None if they come from one, or none is known."""
    one, two = gpu_of(record), gpu_of(other)
    if one is None or two is None or one == two:
        return None
    return f"measured on two GPUs, {one} and {two}, which may differ by themselves"


def _compared(record: Record, other: Record, twins: Twins | None) -> Comparison | str:
    """The comparison of two rows, or why there is none."""
    for side in (record, other):
        if (why := _unusable(side)) is not None:
            return f"{side.spec['implementation']['name']} {why}"
    return _of_two_gpus(record, other) or compare(Measured.of(record), Measured.of(other), twins)


def _row(kind: str, name: str, against: str, found: Comparison | str) -> dict[str, Any]:
    row = dict.fromkeys(COMPARISON_COLUMNS) | {"kind": kind, "implementation": name, "against": against}
    if isinstance(found, str):
        return {**row, "verdict": None, "reason": found}
    return {
        **row,
        "verdict": found.verdict,
        "reason": found.reason,
        **_ratio("ratio", found.in_ms),
        **_ratio("cycles_ratio", found.in_cycles),
        "aa_spread": found.aa_spread,
        "resolvable_difference": found.resolvable_difference,
    }


def _ratio(name: str, found: Ratio | None) -> dict[str, float | None]:
    if found is None:
        return {}
    return {name: found.ratio, f"{name}_low": found.low, f"{name}_high": found.high}
