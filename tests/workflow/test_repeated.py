"""Two runs of one study beside each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from workflow.repeated import repeated_cells, repeated_page

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs/results/h200/default"


@pytest.fixture
def run() -> tuple[pd.DataFrame, pd.DataFrame, dict]:
    benchmark, comparison = (pd.read_csv(PUBLISHED / f"{name}.csv") for name in ("benchmark", "comparison"))
    return benchmark, comparison, json.loads((PUBLISHED / "environment.json").read_text())


def again(benchmark: pd.DataFrame, factors: dict[int, float]) -> pd.DataFrame:
    """The run once more, some rows by a factor slower."""
    later = benchmark.copy()
    for row, factor in factors.items():
        later.loc[row, ["latency_ms", "latency_cycles"]] *= factor
    return later


def test_the_ratio_is_after_over_before_and_the_largest_difference_comes_first(run) -> None:
    benchmark, comparison, _ = run
    cells = repeated_cells(benchmark, again(benchmark, {3: 0.5, 7: 1.2}), (comparison, comparison))
    assert len(cells) == benchmark["latency_ms"].notna().sum()
    assert cells["ratio"][:3].round(9).tolist() == [0.5, 1.2, 1.0]
    assert cells.loc[0, "implementation"] == benchmark.loc[3, "implementation"]
    row = benchmark.loc[3]
    said = comparison[(comparison["sweep"] == row["sweep"]) & (comparison["seq_len"] == row["seq_len"])]
    assert cells.loc[0, "resolvable_difference"] == said["resolvable_difference"].max() > 0


def test_the_page_tells_the_median_and_names_what_differs_most_and_beyond_resolution(run) -> None:
    benchmark, comparison, environment = run
    later = again(benchmark, dict.fromkeys(range(len(benchmark)), 1.001) | {3: 0.5})
    page = repeated_page(benchmark, later, (comparison, comparison), (environment, environment))
    assert "is 1.00100 in milliseconds and 1.00100 in clock cycles" in page
    row = benchmark.loc[3]
    name = row["implementation"].replace("_", r"\_")
    named = f"{name} at {row['seq_len']} (sweep {row['sweep']}) -50.00%"
    assert f"The largest differences: {named};" in page
    assert f"1 of {len(benchmark)} differ by more" in page
    assert f"resolve there: {named}." in page
    assert page.count("NVIDIA H200") == 2


def test_a_row_without_a_latency_in_one_run_is_in_no_cell(run) -> None:
    benchmark, comparison, _ = run
    later = benchmark.copy()
    later.loc[0, "latency_status"] = "error"
    later.loc[1, "latency_ms"] = float("nan")
    cells = repeated_cells(benchmark, later, (comparison, comparison))
    assert len(cells) == len(benchmark) - 2


def test_runs_of_two_environments_and_runs_with_nothing_in_common_are_refused(run) -> None:
    benchmark, comparison, environment = run
    both = (environment, environment)
    with pytest.raises(ValueError, match="expected two runs of one environment"):
        repeated_page(benchmark, benchmark.assign(environment="other"), (comparison, comparison), both)
    with pytest.raises(ValueError, match="no cell has a latency in both runs"):
        repeated_page(benchmark, benchmark.assign(seq_len=1), (comparison, comparison), both)


def test_the_script_writes_the_page_or_one_line(tmp_path) -> None:
    command = [sys.executable, ROOT / "workflow/scripts/compare_runs.py", "--before", PUBLISHED]
    output = ["--output", tmp_path / "page.md"]
    subprocess.run([*command, "--after", PUBLISHED, *output], check=True)
    assert "is 1.00000 in milliseconds" in (tmp_path / "page.md").read_text()
    refused = subprocess.run(
        [*command, "--after", tmp_path, *output], check=False, capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert refused.stderr.startswith("compare_runs: ")
    assert refused.stderr.count("\n") == 1
