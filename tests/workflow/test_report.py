"""The report's page, its tables as HTML, and the HTML report that Snakemake itself makes."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.workflow.checkout import Checkout, small_config
from tests.workflow.test_figures import H200, HOSTILE, fail, h200
from workflow.pages import (
    SCRIPT,
    cells_page,
    correctness_page,
    environment_page,
    latency_page,
    memory_page,
)
from workflow.story import report_page

ENVIRONMENT = json.loads((H200 / "environment.json").read_text())


def page(benchmark: pd.DataFrame, grid: pd.DataFrame) -> str:
    return report_page(benchmark, grid, ENVIRONMENT, ["figures/error.svg", "figures/article_latency.svg"])


def section(text: str, heading: str) -> str:
    """What stands between a heading and the next one of its level or above."""
    level = heading.split(" ")[0]
    after = text.split(f"{heading}\n", 1)[1]
    return re.split(rf"(?m)^#{{1,{len(level)}}} ", after)[0]


class TestThePage:
    def test_tells_the_run_in_order_and_ends_with_the_marks(self):
        text = page(*h200())
        headings = [line for line in text.splitlines() if line.startswith("## ")]
        assert headings == [
            "## In short",
            "## Is it right?",
            "## Sweep article",
            "## Sweep llm",
            "## What could not be measured, and why",
            "## What to distrust",
        ]
        assert text.splitlines()[2].startswith("Measured on NVIDIA H200")
        assert "`launch_bound`: " in text.splitlines()[-1]

    def test_what_is_unsupported_here_is_not_called_wrong(self):
        benchmark, grid = h200()
        grid.loc[grid["implementation"] == "triton", "status"] = "unsupported"
        short = section(page(benchmark, grid), "## In short")
        assert "Unsupported in every cell, on this machine: triton." in short
        assert "Not right" not in short
        grid.loc[grid["implementation"] == "triton", "status"] = ["wrong"] + ["unsupported"] * (
            int((grid["implementation"] == "triton").sum()) - 1
        )
        assert "Not right, or not judged, in every cell: triton (0 of " in page(benchmark, grid)

    def test_says_who_is_the_fastest_at_each_length_by_what_factor(self):
        benchmark, grid = h200()
        story = section(page(benchmark, grid), "## Sweep article")
        for seq_len, cells in benchmark[benchmark["sweep"] == "article"].groupby("seq_len"):
            ordered = cells.sort_values("latency_ms")
            best, last = ordered.iloc[0], ordered.iloc[-1]
            line = next(line for line in story.splitlines() if line.startswith(f"- seq_len {seq_len}: "))
            assert f"{best['implementation']}, {best['latency_ms']:.4g} ms" in line
            assert f"({best['latency_low_ms']:.4g} – {best['latency_high_ms']:.4g})" in line
            ratio = float(re.findall(r"takes ([\d.]+) times as long\.", line)[0])
            assert ratio == pytest.approx(last["latency_ms"] / best["latency_ms"], rel=0.01)

    def test_says_that_a_kernel_loses(self):
        text = page(*h200())
        assert "naive loses at every length: 3.03 to 12.7 times the latency of the fastest." in text
        assert "triton loses at every length: 1.15 to 1.44 times the latency of the fastest." in text

    def test_overlapping_intervals_are_not_told_apart(self):
        benchmark, grid = h200()
        wide = benchmark.copy()
        triton = wide["implementation"] == "triton"
        wide.loc[triton, "latency_low_ms"] = wide.loc[triton, "latency_low_ms"] / 2
        line = next(line for line in page(wide, grid).splitlines() if line.startswith("- seq_len 512: "))
        assert re.match(r"- seq_len 512: sdpa, .*, and triton, .*, are not told apart: their intervals", line)
        assert "sdpa and triton are the fastest, not told apart, at seq_len 512" in page(wide, grid)

    def test_one_process_is_not_an_experiment(self):
        benchmark, grid = h200()
        assert "Each latency comes from one process." in page(benchmark, grid)
        assert "the median of 3 processes" in page(benchmark.assign(process_count=3), grid)

    def test_memory_its_law_and_its_workspace_come_from_the_table(self):
        benchmark, grid = h200()
        story = section(section(page(benchmark, grid), "## Sweep llm"), "### How much memory?")
        naive = benchmark.query("sweep == 'llm' and implementation == 'naive'").set_index("seq_len")
        line = next(line for line in story.splitlines() if line.startswith("- naive: "))
        for seq_len in (1024, 16384):
            assert f"{naive.loc[seq_len, 'peak_memory_bytes'] / 2**30:.4g} GiB" in line
        assert f"{naive['workspace_bytes'].iloc[0] / 2**20:.4g} MiB of it are a library's workspace" in line
        excess = (naive["peak_memory_bytes"] - naive["workspace_bytes"]) / naive["law_bytes"] - 1
        assert "does **not** follow the kernel's memory law" in line
        assert f"at seq_len {excess.idxmax()} it is {excess.max() * 100:.2g} % above it" in line
        assert "- triton: 0.03125 GiB" in story
        assert "The peak is the kernel's memory law to the byte." in story

    def test_a_peak_of_zero_bytes_is_no_divisor(self):
        benchmark, grid = h200()
        nothing = benchmark.copy()
        nothing.loc[nothing["implementation"] == "sdpa", "peak_memory_bytes"] = 0
        text = page(nothing, grid)
        assert "sdpa: 0 GiB at seq_len 512" in text
        assert "inf" not in text

    def test_row_zero_is_refuted_where_the_data_refutes_it(self):
        _, grid = h200()
        text = page(*h200())
        causal = grid[(grid["max_abs_error"] > 0) & grid["causal"]]
        low, high = int(causal["error_row"].min()), int(causal["error_row"].max())
        assert low > 0
        assert f"lies in rows {low} to {high}, in half of the {len(causal)} cells" in text
        assert "**never in row 0**" in text
        single = int((causal["error_in_units"] == 1).sum())
        assert f"In {single} of {len(causal)} causal cells the largest error is exactly one unit" in text
        assert "fp16, head_dim 64, causal: the largest error is 0.001953 (2^-9) at every length" in text

    def test_row_zero_is_confirmed_where_the_data_confirms_it(self):
        benchmark, grid = h200()
        text = page(benchmark, grid.assign(error_row=0))
        assert "never in row 0" not in text
        assert "lies in row 0 in all 96 cells: they fit the article's explanation" in text
        some = grid.copy()
        some.loc[grid["seq_len"] == 128, "error_row"] = 0
        assert "lies in row 0 in 16 of 96 cells, and in rows 1 to 79 in the others" in page(benchmark, some)

    def test_an_error_of_zero_lies_in_no_row(self):
        _, grid = h200()
        assert (grid.loc[grid["implementation"] == "naive", "max_abs_error"] == 0).all()
        assert "naive computes what the reference computes, to the last bit" in page(*h200())

    def test_every_empty_cell_says_why(self):
        benchmark, grid = h200()
        naive = benchmark["implementation"] == "naive"
        changed = fail(benchmark, naive & (benchmark["seq_len"] == 16384), "out_of_memory", HOSTILE)
        missing = section(page(changed, grid), "## What could not be measured, and why")
        (row,) = [line for line in missing.splitlines() if line.startswith("| llm")]
        assert "| 16384     | latency and memory | out\\_of\\_memory | a \\| pipe, &lt;script&gt;" in row
        assert row.replace("\\|", "").count("|") == 7
        assert "Every cell that was asked for has a number." in page(benchmark, grid)
        assert "2 of 48 latencies and memory peaks have no number" in page(changed, grid)

    def test_text_from_kernels_breaks_no_table_and_no_page(self):
        benchmark, grid = h200()
        broken = grid.astype({"reason": object})
        broken.loc[broken["implementation"] == "sdpa", ["status", "reason"]] = ["wrong", HOSTILE]
        text = page(fail(benchmark, benchmark["implementation"] == "sdpa", "error", HOSTILE), broken)
        assert "<script" not in text
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "sdpa is wrong in 96 cells" in text
        for line in text.splitlines():
            assert line.startswith("|") == line.endswith("|") or "|" not in line.replace("\\|", "")

    def test_interpreted_numbers_are_compared_with_nothing(self):
        benchmark, grid = h200()
        marked = benchmark.astype({"marks": object})
        marked.loc[marked["implementation"] == "triton", "marks"] = "interpreted"
        story = section(page(marked, grid), "## Sweep llm")
        lines = [line for line in story.splitlines() if line.startswith("- seq_len")]
        assert not any("triton" in line for line in lines)
        assert "Run by Triton's interpreter, and so compared with nothing: triton 0.04856 ms at 1024" in story
        assert "`interpreted`: " in section(page(marked, grid), "## What to distrust")

    def test_a_stale_number_says_so_where_it_is_compared(self):
        benchmark, grid = h200()
        marked = benchmark.astype({"marks": object})
        marked.loc[marked["implementation"] == "sdpa", "marks"] = "stale"
        assert "- seq_len 512: sdpa (stale), 0.01174 ms" in page(marked, grid)
        assert "Carried by sweep article: sdpa at every length" in page(marked, grid)

    def test_shows_the_figures_it_is_given_and_no_other(self):
        images = re.findall(r"!\[.*?\]\((.*?)\)", page(*h200()))
        assert images == ["figures/error.svg", "figures/article_latency.svg"]

    def test_a_run_without_sweeps_or_without_a_grid_has_a_page(self):
        benchmark, grid = h200()
        empty = pd.DataFrame()
        assert "## Is it right?" not in report_page(benchmark, empty, ENVIRONMENT)
        assert "## Sweep" not in report_page(empty, grid, ENVIRONMENT)
        assert "never in row 0" in report_page(empty, grid, ENVIRONMENT)


class Tables(HTMLParser):
    """The cells of a page's table, row by row, and every tag of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip("\n")


class TestTheTablesAsHtml:
    def test_hold_the_numbers_of_the_csv(self):
        benchmark, grid = h200()
        llm = benchmark[benchmark["sweep"] == "llm"]
        header, *rows = Tables(latency_page(llm)).rows
        assert [float(row[header.index("latency (ms)")]) for row in rows] == pytest.approx(
            list(llm["latency_ms"]), rel=1e-3
        )
        header, *rows = Tables(memory_page(llm)).rows
        assert [float(row[header.index("peak (GiB)")]) for row in rows] == pytest.approx(
            list(llm["peak_memory_bytes"] / 2**30), rel=1e-3
        )
        header, *rows = Tables(cells_page(grid)).rows
        assert len(rows) == len(grid)
        places = [row[header.index("in row")] for row in rows]
        assert places[:96] == [""] * 96  # naive: an error of 0 lies nowhere
        assert [int(place) for place in places[96:]] == list(grid["error_row"])[96:]
        assert Tables(correctness_page(grid)).rows[1][:4] == ["attention", "naive", "96", "96"]

    def test_hold_the_environment(self):
        rows = dict(Tables(environment_page(ENVIRONMENT)).rows[1:])
        assert rows["gpu.name"] == "NVIDIA H200"
        assert rows["tf32.matmul"] == "no"

    def test_text_from_kernels_stays_text(self):
        benchmark, grid = h200()
        changed = fail(benchmark, benchmark["implementation"] == "sdpa", "error", HOSTILE)
        broken = grid.astype({"reason": object}).assign(reason=HOSTILE, status="wrong")
        for text in (latency_page(changed), memory_page(changed), cells_page(broken)):
            parsed = Tables(text)
            assert [tag for tag, _ in parsed.tags].count("script") == text.count(SCRIPT) == 1
            assert any("<script>alert(1)</script>" in cell for row in parsed.rows for cell in row)
            assert "\x1b" not in text


KERNELS = ("right", "wrong", "out_of_memory", "unsupported", "raising")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A run of which four implementations of five have no number; it ends non-zero."""
    made = Checkout.make(tmp_path_factory.mktemp("report"), *KERNELS)
    config = small_config(**{name: name for name in KERNELS})
    (made.folder / "config" / "own.yaml").write_text(json.dumps(config))  # JSON is YAML
    result = made.snakemake("all", "--configfile", "config/own.yaml")
    assert result.returncode != 0, result.stdout
    return made


@pytest.fixture(scope="module")
def report(checkout):
    result = checkout.snakemake("report", "--configfile", "config/own.yaml")
    assert result.returncode == 0, result.stdout
    return checkout.folder / "report" / "report.html"


def embedded(report: Path, name: str) -> dict[str, Any]:
    """An object that Snakemake wrote into its report's script."""
    start = f"var {name} = {{"
    line = next(line.strip() for line in report.read_text().splitlines() if line.strip().startswith(start))
    value: dict[str, Any] = json.JSONDecoder().raw_decode(line, len(start) - 1)[0]
    return value


class TestTheRealReport:
    def test_the_run_draws_and_writes_everything_though_it_ends_with_faults(self, checkout):
        folder = checkout.folder / "report"
        figure = (folder / "figures" / "tiny_latency.svg").read_text()
        for status in ("wrong: before timing", "out_of_memory: ", "unsupported: no head_dim 16", "error: "):
            assert status in figure
        page = (folder / "report.md").read_text()
        for image in re.findall(r"!\[.*?\]\((.*?)\)", page):
            assert (folder / image).is_file()
        assert "| tiny    | unsupported     | 32" in page
        assert "<script" not in page

    def test_holds_every_figure_and_table_itself(self, checkout, report):
        results = embedded(report, "results")
        assert set(results) == {
            *(f"report/figures/tiny_{quantity}.svg" for quantity in ("latency", "throughput", "memory")),
            *(f"report/tables/tiny_{name}.html" for name in ("latency", "comparison", "memory")),
            "report/tables/environment.html",
            *(f"report/tables/{name}.html" for name in ("correctness", "correctness_cells")),
            "report/figures/error.svg",
        }
        for path, result in results.items():
            kind, _, data = str(result["data_uri"]).partition(",")
            assert kind.startswith(("data:image/svg+xml", "data:text/html"))
            assert base64.b64decode(data) == (checkout.folder / path).read_bytes()

    def test_sorts_them_into_categories_with_captions_and_labels(self, report):
        text = report.read_text()
        categories = {"Correctness", "Latency", "Memory", "Environment"}
        assert set(embedded(report, "categories")) == categories
        for result in embedded(report, "results").values():
            assert len(str(result["caption"])) > 100
            assert "system-message" not in str(result["caption"])  # docutils puts its complaints there
            assert str(result["labels"]["what"]).endswith((", figure", ", table"))
        assert "Attention kernels: are they right" in text
        assert "system-message" not in text.split("workflow_desc", 1)[1][:20000]

    def test_loads_nothing_from_elsewhere(self, report):
        for tag, attributes in Tables(report.read_text()).tags:
            for name in ("src", "href", "data", "poster", "srcset"):
                address = attributes.get(name) or ""
                assert not (tag != "a" and address.startswith(("http:", "https:", "//"))), (tag, address)

    def test_is_not_made_again_without_need(self, checkout, report):
        again = checkout.snakemake("report", "-n", "--configfile", "config/own.yaml")
        assert "Nothing to be done" in again.stdout

    def test_snakemakes_own_option_makes_the_same_report(self, checkout, report):
        result = checkout.snakemake("--configfile", "config/own.yaml", "--report", "any.html")
        assert result.returncode == 0, result.stdout
        assert set(embedded(checkout.folder / "any.html", "results")) == set(embedded(report, "results"))

    def test_draws_nothing_again_for_a_comment_or_a_touch(self, checkout, report):
        for path in ("workflow/figures.py", "workflow/scripts/plot_figures.py", "workflow/story.py"):
            with (checkout.folder / path).open("a") as stream:
                stream.write("\n# a comment\n")
        targets = ("report/report.md", "report/figures/error.svg", "report/tables/correctness.html")
        again = checkout.snakemake(*targets, "-n", "--configfile", "config/own.yaml")
        assert "Nothing to be done" in again.stdout
