"""The figures, of a real run on an H200 and of the same run with faults put in."""

from __future__ import annotations

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pandas as pd
import pytest

from workflow.figures import QUANTITIES, error_figure, row_zero_note, spread, styles_of, sweep_figure

ROOT = Path(__file__).resolve().parents[2]
H200 = ROOT / "tests" / "data" / "h200"
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "a | pipe, <script>alert(1)</script> & $x_1$ -- \x1b[31mred\x07\nnext line"


def h200() -> tuple[pd.DataFrame, pd.DataFrame]:
    return pd.read_csv(H200 / "benchmark.csv"), pd.read_csv(H200 / "correctness.csv")


def fail(rows: pd.DataFrame, chosen: pd.Series, status: str, reason: str) -> pd.DataFrame:
    """The benchmark with these rows failed, in latency and memory."""
    changed = rows.astype(dict.fromkeys(("latency_reason", "memory_reason", "marks"), object))
    for phase in ("latency", "memory"):
        changed.loc[chosen, [f"{phase}_status", f"{phase}_reason"]] = [status, reason]
    numbers = ["latency_ms", "latency_low_ms", "latency_high_ms", "teraflops_per_second"]
    memory = ["peak_memory_bytes", "law_bytes", "workspace_bytes"]
    changed.loc[chosen, numbers + memory] = float("nan")
    changed.loc[chosen, "marks"] = None
    return changed


def texts(svg: str) -> list[str]:
    """Every text of an SVG, which must be XML."""
    root = ElementTree.fromstring(svg)
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("sweep", ["article", "llm"])
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_a_sweeps_figure_names_its_axes_lengths_and_implementations(sweep, quantity):
    benchmark, grid = h200()
    found = texts(sweep_figure(benchmark, grid, sweep, quantity))
    unit = {"latency": "(ms)", "throughput": "(TFLOP/s)", "memory": "(GiB)"}[quantity]
    assert any(unit in text for text in found)
    assert "sequence length (tokens)" in found
    assert {str(n) for n in benchmark.loc[benchmark["sweep"] == sweep, "seq_len"]} <= set(found)
    for name in ("naive", "sdpa", "triton"):
        assert any(text.startswith(f"{name} ") for text in found)


def test_a_label_carries_the_last_number_of_the_table():
    benchmark, grid = h200()
    row = benchmark.query("sweep == 'article' and implementation == 'naive' and seq_len == 8192").iloc[0]
    assert f"naive {row['latency_ms']:.3g} ms" in texts(sweep_figure(benchmark, grid, "article", "latency"))


def test_the_figure_of_memory_draws_the_law_and_states_the_workspace():
    benchmark, grid = h200()
    found = texts(sweep_figure(benchmark, grid, "article", "memory"))
    assert "with 32 MiB of workspace" in found
    assert any("memory law" in text for text in found)
    without = sweep_figure(benchmark.assign(law_bytes=float("nan")), grid, "article", "memory")
    assert not any("memory law" in text for text in texts(without))


def test_the_same_data_gives_the_same_bytes_in_another_process():
    benchmark, grid = h200()
    program = (
        "import sys; import pandas as pd; from workflow.figures import error_figure, sweep_figure;"
        "b, g = map(pd.read_csv, sys.argv[1:]);"
        "sys.stdout.write(sweep_figure(b, g, 'llm', 'latency') + error_figure(g))"
    )
    command = [sys.executable, "-c", program, str(H200 / "benchmark.csv"), str(H200 / "correctness.csv")]
    other = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sweep_figure(benchmark, grid, "llm", "latency") + error_figure(grid) == other
    assert "<dc:date>" not in other


def test_every_empty_cell_is_drawn_with_its_status_and_reason():
    benchmark, grid = h200()
    is_naive, is_sdpa = (benchmark["implementation"] == name for name in ("naive", "sdpa"))
    changed = fail(benchmark, is_naive & (benchmark["seq_len"] >= 4096), "out_of_memory", "asked for 64 GiB")
    changed = fail(changed, is_sdpa, "unsupported", "needs compute capability 9.0")
    changed = fail(changed, benchmark["implementation"] == "triton", "wrong", HOSTILE)
    for quantity in QUANTITIES:
        svg = sweep_figure(changed, grid, "article", quantity)
        found = texts(svg)
        assert "out_of_memory: asked for 64 GiB" in found
        assert "unsupported: needs compute capability 9.0" in found
        assert any(text.startswith("wrong: a | pipe, <script>alert(1)</script> & $x_1$") for text in found)
        assert found.count("×") == 2 + 5 + 5
        assert "<script" not in svg
        assert "\x1b" not in svg


def test_a_sweep_without_any_number_is_drawn_too():
    benchmark, grid = h200()
    nothing = fail(benchmark, benchmark["seq_len"] > 0, "error", "RuntimeError: no kernel image")
    found = texts(sweep_figure(nothing, grid, "llm", "latency"))
    assert "no number to draw" in found
    assert found.count("×") == 9


def test_a_status_that_is_not_there_is_not_measured():
    benchmark, grid = h200()
    absent = benchmark.assign(memory_status=None, peak_memory_bytes=float("nan"))
    assert "not measured" in texts(sweep_figure(absent, grid, "llm", "memory"))


def test_a_peak_of_zero_bytes_is_shown_and_breaks_no_axis():
    benchmark, grid = h200()
    rows = benchmark.copy()
    rows.loc[(rows["implementation"] == "sdpa") & (rows["seq_len"] == 512), "peak_memory_bytes"] = 0
    assert "measured: 0 bytes" in texts(sweep_figure(rows, grid, "article", "memory"))


def test_interpreted_and_stale_numbers_are_told_apart():
    benchmark, grid = h200()
    plain = texts(sweep_figure(benchmark, grid, "llm", "latency"))
    assert not any("interpreted" in text for text in plain)
    marked = benchmark.astype({"marks": object})
    marked.loc[marked["implementation"] == "triton", "marks"] = "interpreted stale"
    svg = sweep_figure(marked, grid, "llm", "latency")
    assert "interpreted (hollow)" in texts(svg)
    assert "stale" in texts(svg)
    assert any("not comparable with native numbers" in text for text in texts(svg))


def test_marks_of_time_are_not_drawn_on_memory():
    benchmark, grid = h200()
    assert "throttled" in texts(sweep_figure(benchmark, grid, "llm", "latency"))
    assert "throttled" not in texts(sweep_figure(benchmark, grid, "llm", "memory"))
    alone = benchmark.assign(marks="one_process")
    assert "one_process" in texts(sweep_figure(alone, grid, "llm", "latency"))
    assert "one_process" not in texts(sweep_figure(alone, grid, "llm", "memory"))


def test_one_length_and_lengths_that_lie_close_are_drawn():
    benchmark, grid = h200()
    one = benchmark[benchmark["seq_len"] == 512]
    assert "512" in texts(sweep_figure(one, grid, "article", "throughput"))
    close = benchmark.replace({"seq_len": {2048: 1000}})
    found = texts(sweep_figure(close, grid, "article", "latency"))
    assert {"1000", "1024"} <= set(found)


def test_the_figure_of_errors_has_a_panel_for_each_mask_and_dtype():
    _, grid = h200()
    found = texts(error_figure(grid))
    for head_dim in (64, 128):
        for mask in ("causal", "not causal"):
            for dtype in ("fp16", "bf16"):
                assert f"{dtype}, {mask}, head_dim {head_dim}" in found
    assert found.count("1 unit in the") == 8
    assert found.count("sdpa") == found.count("triton") == found.count("naive") == 8


def test_the_figure_of_errors_names_the_rows_and_corrects_the_article():
    _, grid = h200()
    found = texts(error_figure(grid))
    wrong = grid[grid["max_abs_error"] > 0]
    worst = wrong.loc[wrong.groupby(["causal", "head_dim", "dtype", "seq_len"])["max_abs_error"].idxmax()]
    named = sorted(text for text in found if text.startswith("row ") and ":" not in text)
    assert named == sorted(f"row {int(row)}" for row in worst["error_row"])
    causal = wrong[wrong["causal"]]
    zero, lowest, highest = (causal["error_row"] == 0).sum(), *causal["error_row"].agg(["min", "max"])
    note = row_zero_note(grid)
    assert note in found
    assert f"{zero} of {len(causal)} largest errors lie in row 0" in note
    assert note.endswith(f"rows {int(lowest)} to {int(highest)}.")


def test_the_figure_of_errors_draws_cells_without_a_right_output():
    _, grid = h200()
    changed = grid.astype({"reason": object})
    changed.loc[changed["implementation"] == "sdpa", ["status", "reason"]] = ["wrong", HOSTILE]
    changed.loc[changed["implementation"] == "triton", ["status", "reason"]] = ["unsupported", "no sm_75"]
    found = texts(error_figure(changed))
    assert found.count("unsupported: no sm_75") == 8
    assert sum(text.startswith("wrong: a | pipe") for text in found) == 8
    assert found.count("no error above 0 to draw") == 8


def test_an_implementation_looks_the_same_in_every_figure():
    benchmark, grid = h200()
    styles = styles_of(grid, benchmark[benchmark["implementation"] == "triton"])
    assert list(styles) == ["naive", "sdpa", "triton"]
    assert len({(style.colour, style.shape) for style in styles.values()}) == 3


def test_labels_never_overlap_and_stay_in_order():
    wanted, heights = [1.0, 1.02, 1.01, 3.0, -5.0], [0.2, 0.2, 0.4, 0.2, 0.2]
    centres = spread(wanted, heights, floor=0.0)
    order = sorted(range(5), key=lambda i: wanted[i])
    for below, above in itertools.pairwise(order):
        assert centres[above] - centres[below] >= (heights[above] + heights[below]) / 2 - 1e-9
    assert centres[3] == pytest.approx(3.0)
    assert centres[4] == pytest.approx(0.1)


def test_a_very_long_reason_is_cut_to_the_width_of_the_figure():
    benchmark, grid = h200()
    long = fail(benchmark, benchmark["implementation"] == "sdpa", "error", "iii llm " * 5000)
    found = [
        text for text in texts(sweep_figure(long, grid, "llm", "latency")) if text.startswith("error: iii")
    ]
    assert len(found) == 1
    assert found[0].endswith("…")
    assert 60 < len(found[0]) < 150


def test_an_unknown_quantity_or_sweep_is_an_error():
    benchmark, grid = h200()
    with pytest.raises(ValueError, match="quantity = 'energy'"):
        sweep_figure(benchmark, grid, "llm", "energy")
    with pytest.raises(ValueError, match="sweep = 'none'"):
        sweep_figure(benchmark, grid, "none", "latency")


def test_an_interval_that_ends_at_the_median_is_drawn_though_rounding_moved_it_past():
    benchmark, grid = h200()
    for seq_len in sorted(set(benchmark["seq_len"])):
        # Every value of a process count of two or five can be an end of its own interval.
        rows = benchmark["seq_len"] == seq_len
        benchmark.loc[rows, "latency_low_ms"] = benchmark.loc[rows, "latency_ms"] * (1 + 1e-15)
        benchmark.loc[rows, "latency_high_ms"] = benchmark.loc[rows, "latency_ms"] * (1 - 1e-15)
    for quantity in ("latency", "throughput"):
        assert sweep_figure(benchmark, grid, "article", quantity).startswith("<?xml")
