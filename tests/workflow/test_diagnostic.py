"""The SDPA diagnostic: run for real on the CPU, and its rules on records in which the cause is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from harness.comparison import UNCLEAR
from harness.record import ERROR, OK, UNSUPPORTED, Record
from tests.workflow.checkout import Checkout, small_config
from workflow.config import load_config
from workflow.diagnostic import (
    NOT_SUPPORTED,
    SUPPORTED,
    backend_choice,
    clocks,
    cold_start,
    diagnostic_figure,
    diagnostic_page,
    fault_lines,
    refusals,
)
from workflow.plan import DIAGNOSTIC_BACKENDS, DIAGNOSTIC_PRIMINGS, Plan

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "gpu": None,
    "cpu": "a CPU",
    "cpu_threads_torch": 2,
    "torch": "2",
    "triton": "3",
    "python": "3",
}
NAMES = {
    "cudnn": "cudnn_flash_fprop",
    "flash": "flash_fwd_kernel",
    "efficient": "fmha_cutlassF",
    "math": "gemm",
}
LEVELS = {"default": 0.044, "cudnn": 0.044, "flash": 0.066, "efficient": 0.13, "math": 0.8}


def config():
    sections = small_config(sdpa="sdpa")
    sections["sdpa_diagnostic"] = {
        "heads": 2,
        "head_dim": 16,
        "seq_len": {"cpu": 33},
        "processes": {"cpu": 2},
        "samples": 3,
        "priming_s": 0.01,
        "warm_up_s": 0.01,
    }
    return sections


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory):
    checkout = Checkout.make(tmp_path_factory.mktemp("diagnosed"))
    checkout.configure(config())
    result = checkout.snakemake("sdpa_diagnostic")
    assert result.returncode == 0, result.stdout
    return checkout, result.stdout


class TestARealDiagnostic:
    def test_there_is_a_record_for_every_backend_and_priming(self, diagnosed):
        checkout, _ = diagnosed
        records = checkout.records("sdpa_diagnostic")
        assert set(records) == {f"{b}/{p}" for b in DIAGNOSTIC_BACKENDS for p in DIAGNOSTIC_PRIMINGS}
        for name, record in records.items():
            refused = name.startswith(("cudnn", "efficient"))
            assert record["status"] == (UNSUPPORTED if refused else OK)
            if not refused:
                assert [len(process) for process in record["samples"]["early_ms"]] == [3, 3]
                assert [len(process) for process in record["samples"]["late_ms"]] == [3, 3]
                assert all(process[0] > 0 for process in record["samples"]["first_call_ms"])

    def test_the_page_says_what_ran_what_did_not_and_which_explanation_holds(self, diagnosed):
        checkout, output = diagnosed
        page = (checkout.folder / "report" / "sdpa_diagnostic.md").read_text()
        assert "PyTorch has no cudnn backend for the CPU" in page
        assert "## Clocks: UNCLEAR" in page
        assert "No SM clock was read." in page
        for title in ("Cold start", "Backend choice"):
            assert f"## {title}: " in page
            assert f"**{title}: " in output
        ElementTree.parse(checkout.folder / "report" / "figures" / "sdpa_diagnostic.svg")

    def test_it_is_no_part_of_the_run_and_is_not_measured_again(self, diagnosed):
        checkout, _ = diagnosed
        assert "diagnose_sdpa" not in checkout.planned()
        assert "diagnose_sdpa" not in checkout.planned("sdpa_diagnostic")

    def test_an_edit_of_the_kernel_measures_it_again(self, diagnosed):
        checkout, _ = diagnosed
        naive = checkout.folder / "kernels" / "naive.py"
        text = naive.read_text()
        naive.write_text(text + "\nEDITED = True\n")
        try:
            assert checkout.planned("sdpa_diagnostic")["diagnose_sdpa"] == len(DIAGNOSTIC_BACKENDS)
        finally:
            naive.write_text(text)

    def test_a_record_that_was_deleted_is_measured_again_though_its_page_is_there(self, diagnosed):
        checkout, _ = diagnosed
        record = next((checkout.folder / "results").glob("*/sdpa_diagnostic/*/*.json"))
        record.rename(checkout.folder / "kept.json")
        try:
            planned = checkout.planned("sdpa_diagnostic")
        finally:
            (checkout.folder / "kept.json").rename(record)
        assert planned["diagnose_sdpa"] == 1


def synthetic(early=lambda backend, priming: 1.0, clock=lambda process: 1900.0, spread=0.002):
    """Records of a GPU: fixed cycles for each backend, times those of a clock that may move."""
    random = np.random.default_rng(1)
    plan = Plan(load_config(config(), ROOT / "kernels"), "cuda", "h200", ROOT)
    cells = {}
    for job in plan.diagnostic_jobs():
        backend, priming = job.implementation, job.sweep
        samples = {"first_call_ms": [[40.0]] * 5}
        for when in ("early", "late"):
            factor = early(backend, priming) if when == "early" else 1.0
            mhz = [clock(random) for _ in range(5)]
            level = [LEVELS[backend] * factor * random.normal(1, spread) for _ in mhz]
            samples[f"{when}_ms"] = [
                [ms * 1900 / f * random.normal(1, spread) for _ in range(9)]
                for ms, f in zip(level, mhz, strict=True)
            ]
            samples[f"{when}_sm_clock_mhz"] = [[f] * 9 for f in mhz]
        values = {"kernel_names": NAMES.get(backend, NAMES["cudnn"])}
        cells[backend, priming] = Record(
            phase="sdpa_diagnostic", spec=job.spec, status=OK, values=values, samples=samples
        )
    return cells


def test_where_nothing_differs_no_explanation_is_supported():
    cells = synthetic()
    assert cold_start(cells).verdict == NOT_SUPPORTED
    assert backend_choice(cells).verdict == NOT_SUPPORTED
    assert "those of cudnn" in backend_choice(cells).summary
    assert "math takes 18" in backend_choice(cells).summary
    assert "slower by the 99 % intervals of 15 comparisons" in cold_start(cells).summary
    assert clocks(cells).verdict == NOT_SUPPORTED
    assert "nothing to explain" in clocks(cells).summary


def test_a_slow_start_is_found_and_not_taken_for_the_clock():
    cells = synthetic(early=lambda backend, priming: 1.8 if priming.startswith("isolated") else 1.0)
    assert cold_start(cells).verdict == SUPPORTED
    assert "default against first samples after_naive: 1.8" in cold_start(cells).summary
    assert clocks(cells).verdict == NOT_SUPPORTED
    assert "spreads in cycles too" in clocks(cells).summary


def test_a_clock_that_moves_is_found_and_not_taken_for_a_slow_start():
    cells = synthetic(clock=lambda random: float(random.uniform(900, 1900)))
    assert clocks(cells).verdict == SUPPORTED
    assert cold_start(cells).verdict != SUPPORTED


def test_one_process_leaves_the_question_of_a_slow_start_open():
    cells = {
        key: replace(record, samples={name: series[:1] for name, series in record.samples.items()})
        for key, record in synthetic().items()
    }
    assert cold_start(cells).verdict == UNCLEAR


def test_a_default_that_runs_other_kernels_is_found():
    cells = synthetic()
    key = ("default", "after_matmul")
    other = {"kernel_names": f"{NAMES['cudnn']} | {NAMES['efficient']}"}
    cells[key] = replace(cells[key], values=other)
    found = backend_choice(cells)
    assert found.verdict == SUPPORTED
    assert "2 different sets" in found.summary


def test_what_did_not_run_has_its_reason_on_the_page_and_an_error_is_a_fault():
    cells = synthetic()
    for priming in DIAGNOSTIC_PRIMINGS:
        cells["flash", priming] = replace(
            cells["flash", priming], status=UNSUPPORTED, reason="needs <sm80> | more", values={}, samples={}
        )
    assert fault_lines(cells) == []
    cells["math", "isolated"] = replace(
        cells["math", "isolated"], status=ERROR, reason="killed", values={}, samples={}
    )
    assert fault_lines(cells) == ["math, isolated: error: killed"]
    assert refusals(cells) == [
        "flash: unsupported: needs &lt;sm80&gt; \\| more",
        "math (isolated): error: killed",
    ]
    page = diagnostic_page(cells, ENVIRONMENT, "figures/sdpa_diagnostic.svg")
    assert "needs &lt;sm80&gt;" in page
    assert "(figures/sdpa_diagnostic.svg)" in page
    svg = diagnostic_figure(cells)
    ElementTree.fromstring(svg)
    assert "math, after naive" in svg
    assert "flash, isolated" not in svg


def test_without_any_number_the_page_and_the_figure_are_there():
    cells = {
        key: replace(record, status=ERROR, reason="no GPU", values={}, samples={})
        for key, record in synthetic().items()
    }
    assert "No backend gave a number." in diagnostic_page(cells, ENVIRONMENT, "x.svg")
    assert "no number to draw" in diagnostic_figure(cells)
    assert len(fault_lines(cells)) == len(cells)


def test_the_same_records_give_the_same_figure():
    assert diagnostic_figure(synthetic()) == diagnostic_figure(synthetic())
