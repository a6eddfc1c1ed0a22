"""The real workflow, run by a real Snakemake in a temporary folder, on the CPU."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys

import pytest

from tests.workflow.checkout import Checkout, small_config
from workflow.session import in_random_order


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A complete run of the three implementations that the project ships."""
    checkout = Checkout.make(tmp_path_factory.mktemp("finished"))
    config = small_config(naive="naive", sdpa="sdpa", triton="triton_flash")
    config["timing"]["processes"]["cpu"] = 2
    checkout.configure(config)
    result = checkout.snakemake()
    assert result.returncode == 0, result.stdout
    return checkout, result.stdout


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """A complete run of the workload decode, on pages, with a floor."""
    checkout = Checkout.make(tmp_path_factory.mktemp("decoded"))
    config = small_config(
        naive="naive", sdpa="sdpa", triton="triton_flash", split="triton_decode", floor="read_floor"
    )
    sweep = config["sweeps"].pop("tiny")
    del sweep["causal"]
    config["sweeps"]["newest"] = {
        **sweep,
        **{"workload": "decode", "batch": 2, "kv_heads": 1, "queries": 2, "lengths": "uneven"},
        **{"page_size": 16, "seq_lens": {"cpu": [70]}},
    }
    config["correctness"]["decode"] = {
        **{"seq_lens": {"cpu": [33]}, "head_dims": [16], "batches": [2], "kv_heads": {"cpu": 1}},
        **{"group_sizes": [2], "dtypes": ["fp16"]},
        "forms": [
            {"queries": 1, "lengths": "some_empty", "page_size": 0},
            {"queries": 3, "lengths": "uneven", "page_size": 16},
        ],
    }
    checkout.configure(config)
    result = checkout.snakemake()
    assert result.returncode == 0, result.stdout
    return checkout


class TestARunOfDecode:
    def test_goes_through_the_same_rules_and_leaves_out_who_does_not_answer_it(self, decoded):
        rows = decoded.csv("benchmark")
        assert list(rows["implementation"]) == ["naive", "sdpa", "split", "floor"]
        assert set(rows["latency_status"]) == set(rows["memory_status"]) == {"ok"}
        assert set(rows["workload"]) == {"decode"}
        assert set(decoded.records("timing")) == {
            f"newest/{name}/70" for name in ("naive", "sdpa", "split", "floor")
        }

    def test_its_grid_tells_each_problem(self, decoded):
        grid = decoded.csv("correctness")
        assert set(grid["status"]) == {"ok"}
        assert len(grid) == 4 * 2
        cells = set(zip(grid["queries"], grid["lengths"], grid["page_size"], strict=True))
        assert cells == {(1, "some_empty", 0), (3, "uneven", 16)}
        floors = grid[grid["marks"].fillna("").str.contains("not_attention")]
        assert set(floors["implementation"]) == {"floor"}
        assert "Of a floor" in decoded.table()
        page = (decoded.folder / "report/report.md").read_text()
        assert "Each was checked on 2 cells of the correctness grid" in page

    def test_its_figure_of_merit_is_the_bandwidth(self, decoded):
        rows = decoded.csv("benchmark")
        # Two sequences of 35 and 70 tokens, K and V, one head of 16 numbers of 2 bytes.
        rate = 2 * (35 + 70) * 16 * 2 / (rows["latency_ms"] * 1e-3)
        assert rows["key_value_bytes_per_second"].to_numpy() == pytest.approx(rate.to_numpy())
        for column in ("TB/s", "of read bandwidth", "warm (ms)", "graph (ms)"):
            assert column in decoded.table()
        assert "| TFLOP/s" not in decoded.table()
        figure = (decoded.folder / "report/figures/newest_throughput.svg").read_text()
        assert "bandwidth of reading, measured" in figure
        assert "context length (tokens)" in figure

    def test_a_floor_is_marked_and_never_the_fastest(self, decoded):
        marks = decoded.csv("benchmark").set_index("implementation")["marks"]
        assert "not_attention" in marks["floor"].split()
        page = (decoded.folder / "report/report.md").read_text()
        assert not re.search(r"floor[^.\n]* (is|are) the fastest", page)


class TestACompleteRun:
    def test_every_cell_of_the_grid_is_right(self, finished):
        checkout, _ = finished
        grid = checkout.csv("correctness")
        assert len(grid) == 3 * 4
        assert set(grid["status"]) == {"ok"}

    def test_every_row_has_a_latency_a_memory_peak_and_no_fault(self, finished):
        checkout, _ = finished
        rows = checkout.csv("benchmark")
        assert list(rows["implementation"]) == ["naive", "sdpa", "triton"]
        assert set(rows["latency_status"]) == {"ok"}
        assert set(rows["memory_status"]) == {"ok"}
        assert (rows["latency_low_ms"] <= rows["latency_ms"]).all()
        assert (rows["latency_ms"] <= rows["latency_high_ms"]).all()
        assert (rows["peak_memory_bytes"] > 0).all()

    def test_the_table_has_the_articles_columns_and_is_shown_at_the_end(self, finished):
        checkout, output = finished
        header = "| seq_len   | impl   | latency (ms)   |"
        assert header in checkout.table()
        assert header in output
        for column in ("TFLOP/s", "peak mem (GiB)", "interval (ms)", "status", "marks"):
            assert column in checkout.table()

    def test_numbers_of_the_interpreter_are_marked_wherever_they_appear(self, finished):
        checkout, _ = finished
        marks = checkout.csv("benchmark").set_index("implementation")["marks"].fillna("")
        assert "interpreted" in marks["triton"]
        assert "interpreted" not in marks["naive"]
        triton_row = next(line for line in checkout.table().splitlines() if "| 32        | triton" in line)
        assert "interpreted" in triton_row

    def test_throughput_is_flops_over_the_median(self, finished):
        checkout, _ = finished
        row = checkout.csv("benchmark").iloc[0]
        flop_count = 4 * 1 * 2 * 32 * 32 * 16
        assert row["teraflops_per_second"] == pytest.approx(flop_count / row["latency_ms"] / 1e9)

    def test_a_record_keeps_its_spec_its_circumstances_and_every_raw_sample(self, finished):
        checkout, _ = finished
        record = checkout.records("timing")["tiny/naive/32"]
        assert record["spec"]["problem"]["seq_len_q"] == 32
        assert len(record["samples"]["cold_ms"]) == record["spec"]["processes"]
        assert len(record["samples"]["cold_ms"][0]) == record["spec"]["timing"]["samples"]
        assert record["circumstances"]["torch"] == record["circumstances"]["packages"]["torch"]
        assert record["values"]["timer"] == "perf_counter"

    def test_a_number_of_the_interpreter_is_had_from_one_process(self, finished):
        checkout, _ = finished
        records = checkout.records("timing")
        assert len(records["tiny/naive/32"]["samples"]["cold_ms"]) == 2
        triton = records["tiny/triton/32"]
        assert triton["status"] == "ok"
        assert len(triton["samples"]["cold_ms"]) == 1
        assert {"interpreted", "one_process"} <= set(triton["marks"])

    def test_every_record_has_a_copy_in_the_history(self, finished):
        checkout, _ = finished
        for phase in ("correctness", "timing", "memory"):
            copies = list((checkout.folder / "results" / "history").glob(f"*/{phase}/**/*.json"))
            assert len(copies) == len(checkout.records(phase)) > 0

    def test_checks_come_before_timings(self, finished):
        _, output = finished
        started = [line for line in output.splitlines() if line.startswith("Job ")]
        last_check = max(i for i, line in enumerate(started) if ": check " in line)
        first_timing = min(i for i, line in enumerate(started) if ": time " in line)
        assert last_check < first_timing

    def test_timings_run_in_random_order_and_their_positions_are_recorded(self, finished):
        checkout, output = finished
        lines = [line for line in output.splitlines() if line.startswith("Job ") and ": time " in line]
        ran = [re.search(r"time (\w+) at seq_len (\d+)", line).groups() for line in lines]
        rows = checkout.csv("benchmark").sort_values("position")
        assert list(zip(rows["implementation"], rows["seq_len"].astype(str), strict=True)) == ran
        draws = {in_random_order(2)(None) for _ in range(20)}
        assert len(draws) == 20
        assert all(2 <= draw < 3 for draw in draws)

    def test_the_environment_is_captured(self, finished):
        checkout, _ = finished
        (path,) = (checkout.folder / "results").glob("*/environment.json")
        environment = json.loads(path.read_text())
        assert environment["key"] == path.parent.name
        for name in ("os", "cpu", "cpu_threads_torch", "python", "torch", "triton", "tf32", "source"):
            assert environment[name] not in (None, "")

    def test_run_again_does_nothing(self, finished):
        checkout, _ = finished
        assert "Nothing to be done" in checkout.snakemake().stdout

    def test_one_measurement_can_be_repeated_by_hand(self, finished, tmp_path):
        checkout, _ = finished
        (record,) = (checkout.folder / "results").glob("*/timing/tiny/naive/32.json")
        output = tmp_path / "results" / "again.json"
        script = "workflow/scripts/measure_timing.py"
        command = [sys.executable, script, "--spec", str(record), "--output", str(output)]
        subprocess.run(command, cwd=checkout.folder, env=checkout.environment(), check=True)
        assert json.loads(output.read_text())["spec"] == json.loads(record.read_text())["spec"]
        assert json.loads(output.read_text())["status"] == "ok"


FAULTY = ("wrong", "raising", "out_of_memory", "hanging", "exiting", "unsupported")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A run in which every implementation but one goes wrong in its own way."""
    checkout = Checkout.make(tmp_path_factory.mktemp("faulty"), "right", *FAULTY)
    config = small_config(**{name: name for name in ("right", *FAULTY)})
    config["time_limit_s"] = 6
    config["sweeps"]["tiny"]["causal"] = True  # the cell in which `exiting` exits
    checkout.configure(config)
    result = checkout.snakemake()
    return checkout, result


class TestARunWithFaults:
    def test_ends_non_zero_after_the_tables_are_written(self, faulty):
        checkout, result = faulty
        assert result.returncode != 0
        assert len(checkout.csv("benchmark")) == 7
        assert "right" in checkout.table()

    @pytest.mark.parametrize(
        ("implementation", "latency_status", "reason"),
        [
            ("right", "ok", None),
            ("wrong", "wrong", "before timing: "),
            ("raising", "error", "RuntimeError: a | pipe"),
            ("out_of_memory", "out_of_memory", "RuntimeError: "),
            ("hanging", "timeout", "did not finish within 6 s (in step: first call)"),
            ("exiting", "error", "the process exited with code 3 (in step: first call)"),
            ("unsupported", "unsupported", "no head_dim 16 on cpu"),
        ],
    )
    def test_each_fault_is_a_row_with_its_status_and_reason(
        self, faulty, implementation, latency_status, reason
    ):
        checkout, _ = faulty
        row = checkout.csv("benchmark").set_index("implementation").loc[implementation]
        assert row["latency_status"] == latency_status
        if reason is not None:
            assert reason in row["latency_reason"]
            assert row[["latency_ms", "teraflops_per_second"]].isna().all()

    def test_a_cell_that_ends_its_process_takes_no_other_cell_with_it(self, faulty):
        checkout, _ = faulty
        cells = checkout.csv("correctness").query("implementation == 'exiting'")
        failed = cells[cells["status"] != "ok"]
        assert len(cells) == 4
        assert failed[["causal", "dtype", "status"]].values.tolist() == [[True, "fp16", "error"]]

    def test_the_verdict_lists_each_wrong_error_and_timeout_cell_and_nothing_else(self, faulty):
        _, result = faulty
        lines = result.stdout.split("cells are wrong, errors or timeouts:\n")[1].splitlines()
        listed = [line.strip() for line in itertools.takewhile(lambda line: line.startswith("  "), lines)]
        named = {line.split()[2] for line in listed}
        assert named == {"wrong", "raising", "hanging", "exiting"}
        assert any(line.startswith("timeout: latency hanging seq_len 32 (sweep tiny): ") for line in listed)

    def test_a_reason_breaks_neither_the_table_nor_the_terminal(self, faulty):
        checkout, result = faulty
        table = checkout.table()
        rows = [line for line in table.splitlines() if line.startswith("| 32 ")]
        assert len(rows) == 7
        for row in rows:
            assert row.replace("\\|", "").count("|") == 9
        assert "<script>" not in table
        assert "\x1b[31m" not in table
        listed = result.stdout.split("cells are wrong, errors or timeouts:")[1]
        assert "\x1b[31m" not in listed

    def test_an_implementation_that_fails_the_grid_is_marked(self, faulty):
        checkout, _ = faulty
        marks = checkout.csv("benchmark").set_index("implementation")["marks"].fillna("")
        assert "grid_failed" in marks["wrong"]
        assert "grid_incomplete" in marks["exiting"]
        assert marks["right"] == "" or "grid" not in marks["right"]


def test_measurements_of_two_runs_never_overlap_whatever_they_allow_themselves(tmp_path):
    calls = tmp_path / "calls"
    shared = {"ATTENTION_BENCH_LOCKS": str(tmp_path / "locks")}
    checkouts = [Checkout.make(tmp_path / name, "right") for name in ("one", "two")]
    for checkout in checkouts:
        checkout.configure(small_config(a="right", b="right"))
        assert checkout.snakemake("correctness", **shared).returncode == 0
    runs = [
        subprocess.Popen(
            checkout.command("all", "--cores", "4", "--resources", "gpu=4", "whole_cpu=4"),
            cwd=checkout.folder,
            env=checkout.environment(CALL_LOG=str(calls), **shared),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for checkout in checkouts
    ]
    assert [run.wait(timeout=300) for run in runs] == [0, 0]

    # Each measuring process wrote when its kernel's calls began and ended.
    spans: dict[str, tuple[float, float]] = {}
    for line in calls.read_text().splitlines():
        process, began, ended = line.split()
        first, last = spans.get(process, (float(began), float(ended)))
        spans[process] = (min(first, float(began)), max(last, float(ended)))
    ordered = sorted(spans.values())
    assert len(ordered) == 2 * 2 * 2  # checkouts, implementations, timing and memory
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(ordered))


def test_cuda_on_a_machine_without_a_gpu_is_one_line_and_measures_nothing(tmp_path):
    checkout = Checkout.make(tmp_path / "checkout")
    config = small_config(naive="naive")
    config["device"] = "cuda"
    checkout.configure(config)
    result = checkout.snakemake(CUDA_VISIBLE_DEVICES="")
    assert result.returncode != 0
    assert result.stdout.count("device = cuda: NVML finds no NVIDIA GPU on this machine") == 1
    assert "Traceback" not in result.stdout
    assert not checkout.records("timing")


def test_a_bad_configuration_is_a_line_a_fault_and_runs_nothing(tmp_path):
    checkout = Checkout.make(tmp_path / "checkout")
    config = small_config(naive="naive")
    config["sweeps"]["tiny"]["head_dim"] = -1
    config["device"] = "gpu"
    checkout.configure(config)
    result = checkout.snakemake()
    assert result.returncode != 0
    lines = [line for line in result.stdout.splitlines() if line.startswith("config: ")]
    assert len(lines) == 2
    assert "Traceback" not in result.stdout
    assert not (checkout.folder / "results").exists()


def test_another_config_file_is_a_study_of_its_own(tmp_path):
    checkout = Checkout.make(tmp_path / "checkout")
    planned = checkout.planned("--configfile", "config/small.yaml", "--config", "device=cpu")
    assert planned["measure_timing"] == 3 * 2  # nothing of the default run's sweeps
    assert planned["check_correctness"] == 3 * 2
