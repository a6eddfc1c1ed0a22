"""What a record says is held against the machine's bounds before it may stand in a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from harness.record import ERROR, OK, WRONG, Record, write_record
from tests.workflow.test_plan import plan_of
from workflow.plan import CORRECTNESS, TIMING, Plan
from workflow.story import grid_faults
from workflow.tables import benchmark_rows, correctness_rows, held_against

ROOFLINE_VALUES: dict[str, Any] = {
    "read_bytes_per_second": 4e12,
    "matrix_teraflops_per_second": 800.0,
    "flush_proven": True,
}
ROOFLINE = Record(phase="roofline", spec={}, status=OK, values=ROOFLINE_VALUES)
TIMED = Record(
    phase=TIMING,
    spec={},
    status=OK,
    values={
        "latency_ms": 0.01,
        "working_set_bytes": 4_400_000,
        "flop_count": 880_000_000,
        "key_value_bytes_per_second": 2e11,
    },
    samples={"cold_ms": [[0.01]]},
    marks=["one_process"],
)


def faster(latency_ms: float) -> Record:
    return replace(TIMED, values={**TIMED.values, "latency_ms": latency_ms})


def test_a_possible_time_stands_as_it_is():
    found = held_against(TIMED, ROOFLINE)
    share = TIMED.values["key_value_bytes_per_second"] / ROOFLINE_VALUES["read_bytes_per_second"]
    assert found.values.pop("share_of_read_bandwidth") == share
    assert found == TIMED


def test_an_impossible_time_is_withheld_from_the_table():
    found = held_against(faster(0.0005), ROOFLINE)
    assert found.status == ERROR
    assert found.reason.startswith("withheld: 0.0005 ms is impossible: its 4400000 bytes take at least")
    assert found.values == {}
    assert found.samples == {}


def test_a_row_of_a_run_without_a_proven_flush_is_marked():
    unproven = replace(ROOFLINE, values={**ROOFLINE_VALUES, "flush_proven": False})
    assert held_against(TIMED, unproven).marks == ["one_process", "flush_unproven"]
    missing = Record(phase="roofline", spec={}, status=ERROR, reason="no GPU")
    assert held_against(TIMED, missing).marks == ["one_process", "flush_unproven"]


def test_what_has_no_time_is_left_as_it_is():
    failed = Record(phase=TIMING, spec={}, status=ERROR, reason="killed by SIGSEGV")
    assert held_against(failed, ROOFLINE) == failed


def written(plan: Plan, root, latencies: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of a plan whose timing records have these latencies, measured in this order."""
    write_record(
        Record(**{**ROOFLINE.__dict__, "spec": plan.roofline_job().spec}), root / plan.roofline_job().path
    )
    for order, (implementation, latency_ms) in enumerate(latencies.items()):
        job = plan.sweep_job(TIMING, "tiny", implementation, 64)
        record = replace(
            faster(latency_ms), spec=job.spec, started_at=f"2026-12-02T12:00:0{9 - order}.000000Z"
        )
        write_record(record, root / job.path)
    return [row for row in benchmark_rows(plan, root, []) if row["seq_len"] == 64]


def test_the_table_tells_positions_twins_and_impossible_times(tmp_path):
    rows = written(plan_of(), tmp_path, {"triton": 0.01, "narrow": 0.0001, "again": 0.011})
    found = {row["implementation"]: row for row in rows}
    assert {name: row["position"] for name, row in found.items()} == {"again": 1, "narrow": 2, "triton": 3}
    assert {name: row["twin_of"] for name, row in found.items()} == {
        "triton": None,
        "narrow": None,
        "again": "triton",
    }
    assert found["narrow"]["latency_status"] == ERROR
    assert found["narrow"]["latency_ms"] is None
    assert found["triton"]["latency_ms"] == 0.01


def graded(workload: str, status: str, marks: str = "") -> dict[str, Any]:
    return {"implementation": "triton", "workload": workload, "status": status, "marks": marks}


def test_a_row_carries_what_the_grid_of_its_own_workload_found(tmp_path):
    plan = plan_of()
    written(plan, tmp_path, {"triton": 0.01, "narrow": 0.01, "again": 0.011})

    def marks(*grid: dict[str, Any]) -> dict[str, list[str]]:
        rows = [row for row in benchmark_rows(plan, tmp_path, list(grid)) if row["seq_len"] == 64]
        return {row["implementation"]: row["marks"].split() for row in rows}

    good = graded("attention", OK)
    assert "grid_failed" not in marks(good)["triton"]
    assert "grid_failed" in marks(good, graded("attention", WRONG))["triton"]
    assert "grid_failed" in marks(good, graded("attention", WRONG))["again"]  # the same kernel twice
    assert "grid_failed" not in marks(good, graded("attention", WRONG))["narrow"]
    assert "grid_incomplete" in marks(good, graded("attention", ERROR))["triton"]
    assert "not_deterministic" in marks(good, graded("attention", OK, "not_deterministic"))["triton"]
    for other in (graded("decode", WRONG), graded("decode", OK, "not_deterministic")):
        assert marks(good, other) == marks(good)


def test_a_cell_that_is_right_but_not_deterministic_is_marked_and_no_fault(tmp_path):
    plan = plan_of()
    job = next(job for job in plan.jobs() if job.phase == CORRECTNESS and job.implementation == "triton")
    cells = [{**problem, "status": OK, "reason": None} for problem in job.spec["problems"]]
    cells[0] |= {"fault_kind": "not_deterministic", "reason": "other bits (not_deterministic)"}
    write_record(Record(phase=CORRECTNESS, spec=job.spec, status=OK, cells=cells), tmp_path / job.path)
    grid = correctness_rows(plan, tmp_path)
    rows = [row for row in grid if row["implementation"] == "triton" and row["status"] == OK]
    assert [row["marks"] for row in rows] == ["not_deterministic", *[""] * (len(cells) - 1)]
    assert rows[0]["reason"] == "other bits (not_deterministic)"
    (line,) = [line for line in grid_faults(pd.DataFrame(grid)) if "other bits" in line]
    assert line.startswith("triton is right, and gave other bits for the same inputs, in 1 cell ")
