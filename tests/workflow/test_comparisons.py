"""Records become ratios, verdicts and sentences; on series recorded on an H200, clocks not locked."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.record import ERROR, OK, Record, read_record, write_record
from workflow.comparisons import COMPARISON_COLUMNS, comparison_rows
from workflow.config import load_config
from workflow.gpus import gpu_section
from workflow.pages import comparison_page
from workflow.plan import TIMING, Plan
from workflow.tables import benchmark_rows
from workflow.verdicts import verdict_lines, verdict_section

ROOT = Path(__file__).resolve().parents[2]
SERIES = json.loads(gzip.decompress((ROOT / "tests/data/h200/aa_series.json.gz").read_bytes()))["cells"]


def plan_of(**changes: Any) -> Plan:
    config = {
        "implementations": {
            "sdpa": {"kernel": "sdpa"},
            "triton": {"kernel": "triton_flash"},
            "again": {"kernel": "triton_flash"},
        },
        "baseline": "sdpa",
        "sweeps": {
            "article": {
                "batch": 1,
                "heads": 16,
                "head_dim": 64,
                "causal": False,
                "dtype": "fp16",
                "seq_lens": {"cuda": [512, 2048]},
            }
        },
        **changes,
    }
    return Plan(load_config(config, ROOT / "kernels"), "cuda", "h200", ROOT)


def recorded(plan: Plan, name: str, seq_len: int, first: int, factor: float = 1.0) -> tuple[Record, str]:
    """Five of the recorded processes as a record of the plan, each sample `factor` times as long."""
    job = plan.sweep_job(TIMING, "article", name, seq_len)
    series = SERIES[f"article {seq_len} {'sdpa' if name == 'sdpa' else 'triton'}"]
    samples = {
        "cold_ms": [[factor * ms for ms in process] for process in series["cold_ms"][first : first + 5]],
        "sm_clock_mhz": series["sm_clock_mhz"][first : first + 5],
    }
    values = {
        "latency_ms": factor,
        "working_set_bytes": 1,
        "flop_count": 1,
        "key_value_bytes_per_second": 1.0,
        "options": "{}",
    }
    record = Record(
        TIMING, job.spec, OK, values=values, samples=samples, started_at="2026-12-02T12:00:00.000000Z"
    )
    return record, job.path


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Plan, Path]:
    plan = plan_of()
    job = plan.roofline_job()
    values = {"read_bytes_per_second": 1e12, "matrix_teraflops_per_second": 1.0, "flush_proven": True}
    write_record(Record(job.phase, job.spec, OK, values=values), tmp_path / job.path)
    for seq_len in (512, 2048):
        winner = plan.winner_file("article", "triton", seq_len)
        assert winner is not None
        (tmp_path / winner).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / winner).write_text('{"options": {}}')
        for name, first in (("sdpa", 0), ("triton", 5), ("again", 10)):
            record, path = recorded(plan, name, seq_len, first)
            write_record(record, tmp_path / path)
    return plan, tmp_path


def rows_of(plan: Plan, root: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    rows = comparison_rows(plan, root)
    assert all(tuple(row) == COMPARISON_COLUMNS or set(row) == set(COMPARISON_COLUMNS) for row in rows)
    return {(row["kind"], row["implementation"], row["seq_len"]): row for row in rows}


def frame(plan: Plan, root: Path) -> pd.DataFrame:
    return pd.DataFrame(comparison_rows(plan, root), columns=list(COMPARISON_COLUMNS))


def test_each_cell_has_its_baseline_and_its_twin(measured: tuple[Plan, Path]) -> None:
    rows = rows_of(*measured)
    assert set(rows) == {
        (kind, name, seq_len)
        for kind, name in (("baseline", "triton"), ("twin", "again"))
        for seq_len in (512, 2048)
    }
    for seq_len in (512, 2048):
        twin = rows["twin", "again", seq_len]
        assert twin["against"] == "triton"
        assert twin["verdict"] not in ("FASTER", "SLOWER")
        assert 0 < twin["aa_spread"] < twin["resolvable_difference"] < 0.05
    assert rows["baseline", "triton", 2048]["verdict"] == "SLOWER"
    assert rows["baseline", "triton", 2048]["ratio_low"] > 1


def on_gpu(root: Path, path: str, uuid: str) -> None:
    record = read_record(root / path)
    write_record(replace(record, circumstances={"gpu": {"uuid": uuid}}), root / path)


def test_rows_of_two_gpus_are_not_compared_and_the_reason_names_them(measured: tuple[Plan, Path]) -> None:
    plan, root = measured
    for name, uuid in (("sdpa", "GPU-aaaa"), ("triton", "GPU-bbbb"), ("again", "GPU-bbbb")):
        on_gpu(root, recorded(plan, name, 2048, 0)[1], uuid)
    rows = rows_of(plan, root)
    row = rows["baseline", "triton", 2048]
    assert row["verdict"] is None
    assert row["ratio"] is None
    assert row["reason"] == "measured on two GPUs, GPU-bbbb and GPU-aaaa, which may differ by themselves"
    assert rows["twin", "again", 2048]["verdict"] is not None  # both of one GPU
    assert rows["baseline", "triton", 512]["verdict"] is not None  # of which nothing is known


def test_the_same_thing_on_two_gpus_tells_whether_they_agree(measured: tuple[Plan, Path]) -> None:
    """One that was measured again on another card, and an A/A test whose two sides are on two cards."""
    plan, root = measured
    for seq_len in (512, 2048):
        for name in ("sdpa", "triton", "again"):
            # At 512 the A/A test lies on two cards.
            uuid = "GPU-bbbb" if (name, seq_len) == ("again", 512) else "GPU-aaaa"
            on_gpu(root, recorded(plan, name, seq_len, 0)[1], uuid)
    slower, path = recorded(plan, "sdpa", 2048, 15, factor=1.2)
    elsewhere = replace(
        slower, circumstances={"gpu": {"uuid": "GPU-bbbb"}}, started_at="2026-12-01T12:00:00.000000Z"
    )
    now = (root / path).read_bytes()
    write_record(elsewhere, root / path)
    (root / path).write_bytes(now)  # what was measured on the other card is in the history

    rows = rows_of(plan, root)
    assert {key for key in rows if key[0] == "gpu"} == {("gpu", "sdpa", 2048), ("gpu", "triton", 512)}
    row = rows["gpu", "sdpa", 2048]
    assert (row["gpu"], row["against_gpu"]) == ("GPU-aaaa", "GPU-bbbb")
    assert row["ratio"] == pytest.approx(1 / 1.2, rel=0.02)
    assert row["verdict"] == "FASTER"
    # Two cards are no A/A test, so this one has its ratio and no verdict that would rest on one.
    assert rows["gpu", "triton", 512]["ratio"] == pytest.approx(1, rel=0.05)
    assert rows["gpu", "triton", 512]["verdict"] == "UNCLEAR"
    assert "no A/A twins" in rows["gpu", "triton", 512]["reason"]
    assert rows["baseline", "triton", 512]["verdict"] == "UNCLEAR"
    assert rows["baseline", "triton", 2048]["verdict"] == "SLOWER"

    benchmark = pd.DataFrame(benchmark_rows(plan, root, []))
    text = "\n\n".join(gpu_section(benchmark, frame(plan, root)))
    assert text.startswith("## Do the GPUs agree?")
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| GPU")}
    assert set(lines) >= {"GPU-aaaa", "GPU-bbbb"}
    assert "2 comparisons: the 99 % interval excludes 1 in 1 of them" in text
    assert "beyond what one GPU gives when it measures twice (A/A) in 1." in text
    assert re.search(
        r"The ratio furthest from 1 is 0\.8\d\d, of sdpa at seq_len 2048 \(sweep article\)\.", text
    )
    assert "sdpa on GPU-bbbb" in comparison_page(frame(plan, root))


def test_one_gpu_needs_no_section_and_two_that_share_nothing_cannot_tell(measured: tuple[Plan, Path]) -> None:
    plan, root = measured
    for name in ("sdpa", "triton", "again"):
        on_gpu(root, recorded(plan, name, 2048, 0)[1], "GPU-aaaa")
    assert gpu_section(pd.DataFrame(benchmark_rows(plan, root, [])), frame(plan, root)) == []
    on_gpu(root, recorded(plan, "sdpa", 512, 0)[1], "GPU-bbbb")
    text = "\n\n".join(gpu_section(pd.DataFrame(benchmark_rows(plan, root, [])), frame(plan, root)))
    assert "Nothing was measured on more than one of them" in text


def test_an_edit_is_not_told_across_two_gpus(measured: tuple[Plan, Path]) -> None:
    plan, root = measured
    record, path = recorded(plan, "triton", 2048, 15, factor=1.1)
    source = {**record.spec["source"], "kernel": "0123456789abcdef"}
    former = replace(
        record,
        spec={**record.spec, "source": source},
        circumstances={"gpu": {"uuid": "GPU-aaaa"}},
        started_at="2026-12-01T12:00:00.000000Z",
    )
    now = read_record(root / path)
    write_record(former, root / path)
    write_record(replace(now, circumstances={"gpu": {"uuid": "GPU-bbbb"}}), root / path)
    assert rows_of(plan, root)["edit", "triton", 2048]["reason"].startswith("measured on two GPUs")


def test_an_edit_is_told_against_what_the_kernel_was(measured: tuple[Plan, Path]) -> None:
    plan, root = measured
    record, path = recorded(plan, "triton", 2048, 15, factor=1.1)
    source = {**record.spec["source"], "kernel": "0123456789abcdef"}
    former = replace(record, spec={**record.spec, "source": source}, started_at="2026-12-01T12:00:00.000000Z")
    current = (root / path).read_text()
    write_record(former, root / path)
    (root / path).write_text(current)
    rows = rows_of(plan, root)
    edit = rows["edit", "triton", 2048]
    assert edit["verdict"] == "FASTER"
    assert edit["ratio"] == pytest.approx(1 / 1.1, rel=0.02)
    assert edit["before_measured_at"] == "2026-12-01T12:00:00.000000Z"
    section = "\n".join(verdict_section(frame(plan, root), "article"))
    assert "What the last edit of a kernel did" in section
    assert "2026-12-01T12:00" in section


def test_what_has_no_latency_is_compared_with_nothing_and_says_why(measured: tuple[Plan, Path]) -> None:
    plan, root = measured
    job = plan.sweep_job(TIMING, "article", "sdpa", 512)
    write_record(Record(TIMING, job.spec, ERROR, reason="killed"), root / job.path)
    row = rows_of(plan, root)["baseline", "triton", 512]
    assert row["verdict"] is None
    assert row["ratio"] is None
    assert row["reason"] == "sdpa has no latency (error)"


def test_a_stale_row_is_compared_with_nothing(measured: tuple[Plan, Path]) -> None:
    plan, root = measured
    record, path = recorded(plan, "triton", 512, 5)
    write_record(replace(record, spec={**record.spec, "processes": 7}), root / path)
    rows = rows_of(plan, root)
    assert rows["baseline", "triton", 512]["reason"] == "triton is stale"
    assert rows["twin", "again", 512]["reason"] == "triton is stale"


def test_without_twins_or_a_baseline_less_is_said(measured: tuple[Plan, Path]) -> None:
    _, root = measured
    alone = plan_of(implementations={"sdpa": {"kernel": "sdpa"}, "triton": {"kernel": "triton_flash"}})
    row = rows_of(alone, root)["baseline", "triton", 512]
    assert row["verdict"] == "UNCLEAR"
    assert "no A/A twins" in row["reason"]
    assert row["ratio"] is not None
    assert {kind for kind, _, _ in rows_of(plan_of(baseline=None), root)} == {"twin"}


def test_the_page_tells_verdicts_and_what_the_run_resolves(measured: tuple[Plan, Path]) -> None:
    table = frame(*measured)
    section = "\n".join(verdict_section(table, "article"))
    assert section.startswith("### How sure are the differences?")
    assert "triton and again are the same kernel, measured twice" in section
    ratio = table.query("kind == 'baseline' and seq_len == 2048")["ratio"].iloc[0]
    assert re_row(section, 2048).startswith(f"| 2048      | triton | sdpa      | {ratio:.3f} ")
    (line,) = verdict_lines(table, "article")
    assert line.startswith("triton against sdpa: ")
    assert "SLOWER at" in line
    page = comparison_page(table)
    assert page.count("<tr") == len(table) + 1
    assert "<h1>Comparisons, sweep article</h1>" in page


def re_row(text: str, seq_len: int) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {seq_len} "))


def test_a_sweep_that_compares_nothing_has_no_section() -> None:
    empty = pd.DataFrame(columns=list(COMPARISON_COLUMNS))
    assert verdict_section(empty, "article") == []
    assert verdict_lines(empty, "article") == []
