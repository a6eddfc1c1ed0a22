"""The static profile: run for real on the CPU, and its page on rows in which the cause is known."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from harness.record import OK
from harness.sass import MIX
from tests.workflow.checkout import Checkout, small_config
from workflow.static_profile import (
    COLUMNS,
    article_section,
    fault_lines,
    in_short,
    options_text,
    static_page,
    static_table_page,
)

ROOT = Path(__file__).resolve().parents[2]


def config():
    sections = small_config(
        naive="naive", triton="triton_flash", triton_again="triton_flash", odd="uncompilable"
    )
    sections["static_profile"] = {
        "targets": ["sm_80", "sm_90"],
        "candidates": 1,
        "options": {"triton_flash": [{"tile_q": 32, "tile_k": 16, "num_warps": 4, "num_stages": 1}]},
    }
    return sections


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    checkout = Checkout.make(tmp_path_factory.mktemp("profiled"), "uncompilable")
    checkout.configure(config())
    return checkout, checkout.snakemake("static_profile")


class TestARealProfile:
    def test_there_is_a_row_for_every_option_set_of_every_kernel_and_target(self, profiled):
        checkout, _ = profiled
        records = checkout.records("static_profile")
        kernels = ("triton_flash", "uncompilable")
        assert set(records) == {f"tiny/{k}/{t}" for k in kernels for t in ("sm_80", "sm_90")}
        for target, group in (("sm_80", "mma"), ("sm_90", "mma")):
            cells = records[f"tiny/triton_flash/{target}"]["cells"]
            assert [cell["status"] for cell in cells] == [OK, OK]
            assert [cell["options"]["tile_q"] for cell in cells][1] == 32
            # 16 dimensions are too few for Hopper's wgmma of 32 query rows.
            assert cells[1]["mix"][group] > 0
            assert all(cell["registers"] > 16 and cell["occupancy"] > 0 for cell in cells)

    def test_a_target_that_fails_is_a_row_with_its_message_and_ends_the_run_non_zero(self, profiled):
        checkout, result = profiled
        assert result.returncode != 0
        cell = checkout.records("static_profile")["tiny/uncompilable/sm_90"]["cells"][0]
        assert (cell["status"], cell["reason"]) == ("error", "ValueError: no such | instruction")
        refused = checkout.records("static_profile")["tiny/uncompilable/sm_80"]["cells"][0]
        assert (refused["status"], refused["reason"]) == ("unsupported", "not below 9.0")
        assert "error: uncompilable for sm_90" in result.stdout
        page = (checkout.folder / "report" / "static_profile.md").read_text()
        assert "uncompilable for sm_90: error: ValueError: no such \\| instruction" in page

    def test_it_says_what_it_found_as_progress_on_a_page_and_as_csv(self, profiled):
        checkout, result = profiled
        assert "compile triton_flash for sm_90 (sweep tiny)" in result.stdout
        assert "steps" in result.stdout
        assert "- `sm_80`: tensor cores through mma" in result.stdout
        page = (checkout.folder / "report" / "static_profile.md").read_text()
        assert "## Compiled: sweep tiny" in page
        with (checkout.folder / "results" / "static_profile.csv").open() as stream:
            rows = list(csv.DictReader(stream))
        assert [row["status"] for row in rows] == ["ok"] * 4 + ["unsupported", "error"]
        assert set(COLUMNS) <= set(rows[0])

    def test_it_is_no_part_of_the_run_and_what_is_compiled_is_not_compiled_again(self, profiled):
        checkout, _ = profiled
        assert "profile_statically" not in checkout.planned()
        assert "profile_statically" not in checkout.planned("static_profile")

    def test_an_edit_of_the_kernel_compiles_it_again_and_a_lost_note_of_snakemakes_hides_none(self, profiled):
        checkout, _ = profiled
        kernel = checkout.folder / "kernels" / "triton_flash.py"
        text = kernel.read_text()
        kernel.write_text(text + "\nEDITED = True\n")
        try:
            assert checkout.planned("static_profile")["profile_statically"] == 2
            (checkout.folder / ".snakemake" / "metadata").rename(checkout.folder / "lost")
            assert checkout.planned("static_profile")["profile_statically"] == 2
        finally:
            kernel.write_text(text)

    def test_a_record_that_was_deleted_is_compiled_again_though_its_page_is_there(self, profiled):
        checkout, _ = profiled
        [record] = (checkout.folder / "results").glob("*/static_profile/tiny/triton_flash/sm_80.json")
        record.rename(checkout.folder / "kept.json")
        try:
            planned = checkout.planned("static_profile")
        finally:
            (checkout.folder / "kept.json").rename(record)
        assert planned["profile_statically"] == 1
        assert planned["render_static_profile"] == 1


def row(target="sm_75", **values):
    counts = dict.fromkeys(("instructions", *MIX), 0) | {"instructions": 1000, "fp32_multiply_add": 600}
    found = dict.fromkeys(COLUMNS) | counts | {f"loop_{name}": count for name, count in counts.items()}
    found |= {
        "sweep": "article", "kernel": "flash", "target": target, "options": "tile 64", "head_dim": 64,
        "causal": False, "dtype": "fp16", "status": OK, "registers": 200, "stack_bytes": 0,
        "shared_memory_bytes": 1024, "block_shared_memory_limit_bytes": 65536, "warps_per_multiprocessor": 8,
        "occupancy": 0.25, "occupancy_limiter": "registers", "ceiling_teraflops_per_second": 8.1,
        "ceiling_of": "T4", "verdicts": "no tensor cores", "warnings": "", "triton": "3.7.1",
    }  # fmt: skip
    return found | values


SPILLING = {
    "options": "tile 128", "registers": 255, "stack_bytes": 5256, "local_load": 300, "local_store": 200,
    "loop_local_load": 150, "loop_local_store": 50, "verdicts": "no tensor cores; spills",
}  # fmt: skip


def test_the_articles_question_is_answered_with_the_figures_and_no_more_is_claimed_than_was_seen():
    elsewhere = row("sm_80", **{**SPILLING, "stack_bytes": 0, "mma": 128, "verdicts": ""})
    text = "\n".join(article_section([row(), row(**SPILLING), elsewhere]))
    assert "none of the 2 option sets has a tensor-core instruction" in text
    assert "needs 5,256 bytes of stack besides" in text
    assert "20 % of the loop's instructions, where 60 % are FFMA" in text
    assert "**What does not spill there:** (tile 64)." in text
    assert "`sm_80` 128 tensor-core instructions" in text
    assert "8.1 TFLOP/s on a T4, not the 65" in text
    assert "consistent with the published numbers" in text
    assert "was not measured" in " ".join(text.split())


def test_a_compiler_that_finds_the_tensor_cores_is_not_blamed():
    text = "\n".join(article_section([row(mma=64, verdicts="")]))
    assert "this compiler is not the reason" in text
    assert "No tensor cores" not in text


def test_without_the_articles_architecture_the_question_has_no_section():
    assert article_section([row("sm_90")]) == []
    assert article_section([row(status="error", reason="out of luck")]) == []
    assert "moves fewer bytes" not in static_page([row("sm_90", mma=1)])


def test_the_lines_in_short_count_verdicts_by_target():
    lines = in_short([row(), row(**SPILLING), row("sm_90", wgmma=8, verdicts="")])
    assert lines == [
        "`sm_75`: products run on the fp32 pipes; `no tensor cores` in 2 of 2; `spills` in 1 of 2.",
        "`sm_90`: tensor cores through wgmma; no verdict against any.",
    ]


def test_a_floor_is_not_counted_among_what_has_no_tensor_cores():
    """It has no products: nothing that tensor cores would do."""
    floor = row(kernel="read", fp32_multiply_add=0, verdicts="")
    (line,) = in_short([row(), floor])
    assert line.endswith("`no tensor cores` in 1 of 2 (1 more has no products).")
    page = static_page([row(), floor])
    floors = [line for line in page.split("read:")[1].splitlines() if line.startswith("| sm_75")]
    assert ["no products" in line for line in floors] == [True]


def test_the_page_shows_the_columns_that_verdicts_rest_on_and_the_csv_and_the_report_the_whole_mix():
    page, table = static_page([row(mma=64)]), static_table_page([row(mma=64)])
    (header,) = [line for line in page.splitlines() if "| target" in line]
    assert header.count("|") == 10
    for name in ("MUFU", "barriers"):
        assert name not in header
        assert name in table
    assert {"special_function", "barrier", "stack_bytes"} <= set(COLUMNS)


def test_what_failed_stands_on_the_page_and_in_the_table_escaped():
    rows = [row(), row("sm_90", status="error", reason="bad <b> | pipe", verdicts="")]
    assert fault_lines(rows) == ["error: flash for sm_90 (sweep article; tile 64): bad <b> | pipe"]
    assert "error: bad &lt;b&gt; \\| pipe" in static_page(rows)
    table = static_table_page(rows)
    assert "error: bad &lt;b&gt; | pipe" in table
    assert table.count('class="fault"') == 1


def test_a_sweep_whose_kernels_say_nothing_to_compile_says_so():
    assert "No kernel of any sweep says what to compile" in static_page([])


def test_equal_options_have_equal_text_in_whatever_order_they_come():
    assert options_text({"b": 1, "a": "x", "none": None}) == options_text({"a": "x", "b": 1}) == "a x, b 1"
