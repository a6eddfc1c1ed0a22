"""What runs again after which change: only what the change can have changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.record import ERROR, OK, TIMEOUT, Record, canonical_json
from tests.workflow.checkout import Checkout, small_config
from workflow.config import load_config
from workflow.plan import CORRECTNESS, MEMORY, ROOFLINE, TIMING, TUNING, Plan
from workflow.tables import benchmark_rows, correctness_rows, failed_jobs, stale_records

IMPLEMENTATIONS = {"naive": "naive", "sdpa": "sdpa", "triton": "triton_flash", "helped": "helped"}


def checks(*implementations: str, lengths: tuple[int, ...] = (32,)) -> set[str]:
    return {f"check attention of {name} at seq_len {n}" for name in implementations for n in lengths}


def timings(*implementations: str, lengths: tuple[int, ...] = (32, 33), sweep: str = "tiny") -> set[str]:
    return {f"time {name} at seq_len {n} (sweep {sweep})" for name in implementations for n in lengths}


def memories(*implementations: str, lengths: tuple[int, ...] = (32, 33), sweep: str = "tiny") -> set[str]:
    return {
        f"measure memory of {name} at seq_len {n} (sweep {sweep})"
        for name in implementations
        for n in lengths
    }


def everything(*implementations: str) -> set[str]:
    return checks(*implementations) | timings(*implementations) | memories(*implementations)


TABLES = {"tables"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A complete run: what follows changes something, looks what would run, and changes it back."""
    checkout = Checkout.make(tmp_path_factory.mktemp("finished"), "helped", "helping")
    config = small_config(**IMPLEMENTATIONS)
    config["correctness"]["seq_lens"]["cpu"] = [32]
    config["sweeps"]["tiny"]["seq_lens"]["cpu"] = [32, 33]
    checkout.configure(config)
    result = checkout.snakemake()
    assert result.returncode == 0, result.stdout
    return checkout


@contextmanager
def edited(checkout: Checkout, file: str, old: str, new: str) -> Iterator[None]:
    path = checkout.folder / file
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new, 1))
    try:
        yield
    finally:
        path.write_text(before)


@contextmanager
def appended(checkout: Checkout, file: str, text: str = "\nEDITED = True\n") -> Iterator[None]:
    path = checkout.folder / file
    before = path.read_text()
    path.write_text(before + text)
    try:
        yield
    finally:
        path.write_text(before)


@contextmanager
def configured(checkout: Checkout, *changes: tuple[object, ...]) -> Iterator[None]:
    """Set values of the configuration, each given as (key, ..., value)."""
    path = checkout.folder / "config" / "config.yaml"
    before = path.read_text()
    config = yaml.safe_load(before)
    for *keys, last, value in changes:
        place = config
        for key in keys:
            place = place[key]
        place[last] = value
    checkout.configure(config)
    try:
        yield
    finally:
        path.write_text(before)


class TestNothingRuns:
    def test_when_nothing_changed(self, finished: Checkout) -> None:
        assert finished.planned() == {}

    def test_when_every_file_has_a_new_modification_time(self, finished: Checkout) -> None:
        """As after `touch` and `git checkout`."""
        for part in ("Snakefile", "config", "harness", "kernels", "profiles", "workflow"):
            path = finished.folder / part
            for file in [path, *path.rglob("*")]:
                os.utime(file)
        assert finished.planned() == {}

    def test_when_comments_docstrings_and_white_space_changed(self, finished: Checkout) -> None:
        comment = "\n\n\n# Nothing new.\n\n"
        with (
            appended(finished, "kernels/triton_flash.py", comment),
            appended(finished, "kernels/inputs.py", comment),
            appended(finished, "harness/stopwatch.py", comment),
            appended(finished, "workflow/scripts/measure_timing.py", comment),
            appended(finished, "workflow/tables.py", comment),
            edited(finished, "kernels/naive.py", '"""Attention as', '"""Something else, as'),
            edited(finished, "kernels/naive.py", "torch.Tensor, *, causal", "torch.Tensor, *,    causal"),
        ):
            assert finished.planned() == {}

    def test_when_a_key_changed_that_no_measurement_depends_on(self, finished: Checkout) -> None:
        with configured(finished, ("time_limit_s", 90)):
            assert finished.measurements_planned() - TABLES == set()


class TestAnEditOfAKernel:
    def test_reruns_the_jobs_of_the_implementations_that_use_it_and_the_tables(
        self, finished: Checkout
    ) -> None:
        with appended(finished, "kernels/triton_flash.py"):
            assert finished.measurements_planned() == everything("triton") | TABLES

    def test_of_a_module_that_three_import_reruns_these_three(self, finished: Checkout) -> None:
        with appended(finished, "kernels/inputs.py"):
            assert finished.measurements_planned() == everything("naive", "sdpa", "triton") | TABLES

    def test_of_a_module_that_one_imports_reruns_this_one(self, finished: Checkout) -> None:
        with appended(finished, "kernels/helping.py"):
            assert finished.measurements_planned() == everything("helped") | TABLES

    def test_of_a_kernel_that_no_implementation_names_reruns_nothing(self, finished: Checkout) -> None:
        (finished.folder / "kernels" / "unnamed.py").write_text("def attention(q, k, v, *, causal): ...\n")
        try:
            assert finished.planned() == {}
        finally:
            (finished.folder / "kernels" / "unnamed.py").unlink()


class TestAnAdditionToTheConfiguration:
    def test_a_new_seq_len_of_a_sweep(self, finished: Checkout) -> None:
        with configured(finished, ("sweeps", "tiny", "seq_lens", "cpu", [32, 33, 40])):
            new = timings(*IMPLEMENTATIONS, lengths=(40,)) | memories(*IMPLEMENTATIONS, lengths=(40,))
            assert finished.measurements_planned() == new | TABLES

    def test_a_new_seq_len_of_the_grid(self, finished: Checkout) -> None:
        with configured(finished, ("correctness", "seq_lens", "cpu", [32, 40])):
            assert finished.measurements_planned() == checks(*IMPLEMENTATIONS, lengths=(40,)) | TABLES

    def test_a_seq_len_taken_out_measures_nothing_and_leaves_the_table(self, finished: Checkout) -> None:
        with configured(finished, ("sweeps", "tiny", "seq_lens", "cpu", [32])):
            assert finished.measurements_planned() == TABLES

    def test_a_new_sweep(self, finished: Checkout) -> None:
        config = yaml.safe_load((finished.folder / "config" / "config.yaml").read_text())
        masked = {**config["sweeps"]["tiny"], "causal": True}
        with configured(finished, ("sweeps", "masked", masked)):
            new = timings(*IMPLEMENTATIONS, sweep="masked") | memories(*IMPLEMENTATIONS, sweep="masked")
            assert finished.measurements_planned() == new | TABLES

    def test_a_new_implementation_of_a_kernel_that_is_measured_already(self, finished: Checkout) -> None:
        with configured(finished, ("implementations", "again", {"kernel": "naive"})):
            # The second name of an A/A test is checked under the first.
            assert finished.measurements_planned() == timings("again") | memories("again") | TABLES


class TestAnEditOfTheHarness:
    @pytest.mark.parametrize(
        ("file", "expected"),
        [
            ("harness/memory.py", memories(*IMPLEMENTATIONS)),
            ("harness/stopwatch.py", timings(*IMPLEMENTATIONS)),
            ("harness/tuning.py", set()),  # on a CPU nothing is tuned
            ("harness/job.py", everything(*IMPLEMENTATIONS)),
            ("workflow/scripts/check_correctness.py", checks(*IMPLEMENTATIONS)),
        ],
    )
    def test_reruns_what_that_code_measures(self, finished: Checkout, file: str, expected: set[str]) -> None:
        with appended(finished, file):
            assert finished.measurements_planned() - TABLES == expected

    def test_a_setting_of_the_stopwatch_reruns_timings_alone(self, finished: Checkout) -> None:
        with configured(finished, ("timing", "samples", 7)):
            assert finished.measurements_planned() == timings(*IMPLEMENTATIONS) | TABLES

    def test_an_edit_of_the_tables_code_makes_tables_alone(self, finished: Checkout) -> None:
        with appended(finished, "workflow/tables.py"):
            assert finished.measurements_planned() == TABLES


STAND_IN_NVML = """
NAME, DRIVER = {name!r}, {driver!r}
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return "GPU-1"
def nvmlDeviceGetName(handle): return NAME
def nvmlDeviceGetMigMode(handle): return 0, 0
def nvmlSystemGetDriverVersion(): return DRIVER
"""


def nvml(folder: Path, name: str, driver: str) -> dict[str, str]:
    """Variables with which a machine has this GPU, as far as a dry run can tell."""
    folder.mkdir(exist_ok=True)
    (folder / "pynvml.py").write_text(STAND_IN_NVML.format(name=name, driver=driver))
    return {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": "0"}


WRITE_BY_HAND = """
parse = job_arguments
def job_arguments(description):
    arguments = parse(description)
    from harness.record import Record, write_atomically
    values = {"latency_ms": 1.0, "peak_memory_bytes": 1}
    record = Record(arguments.spec["phase"], arguments.spec, "ok", values=values)
    write_atomically(arguments.output, json.dumps(vars(record)))
    if arguments.winner:
        write_atomically(arguments.winner, '{"options":{}}')
    raise SystemExit
"""
WRITE_NOTHING = """
import pathlib, sys
pathlib.Path(sys.argv[sys.argv.index("--output") + 1]).write_text("{}")
"""
MEASUREMENTS = ("correctness", "tuning", "timing", "memory")


@pytest.fixture(scope="module")
def on_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A run on a GPU that is not there: the real rules, with scripts that measure nothing."""
    folder = tmp_path_factory.mktemp("gpu")
    checkout = Checkout.make(folder / "checkout")
    config = small_config(naive="naive", triton="triton_flash")
    config["device"] = "cuda"
    config["correctness"]["seq_lens"]["cuda"] = [128]
    config["sweeps"]["tiny"]["seq_lens"]["cuda"] = [128]
    checkout.configure(config)
    variables = nvml(folder / "one", "NVIDIA H200", "580.65.06")
    key = subprocess.run(
        [sys.executable, "-c", "from harness.environment import environment_key as k; print(k('cuda'))"],
        cwd=checkout.folder,
        env=checkout.environment(**variables),
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout.strip()
    assert key.startswith("nvidia-h200_driver580.65_torch")
    # Snakemake is to have made all this itself: measuring scripts that write nothing but their record.
    with (checkout.folder / "harness" / "command.py").open("a") as command:
        command.write(WRITE_BY_HAND)
    (checkout.folder / "workflow" / "scripts" / "capture_environment.py").write_text(WRITE_NOTHING)
    result = checkout.snakemake(*MEASUREMENTS, **variables)
    assert result.returncode == 0, result.stdout
    assert len(list((checkout.folder / "results").glob("*/*/**/*.json"))) == 2 + 2 + 2 + 2
    return checkout


def write_by_hand(plan: Plan, root: Path, *, status: str = OK) -> None:
    """Records, winners and the account of the environment, as if a run had written them."""
    for job in plan.jobs():
        path = root / job.path
        path.parent.mkdir(parents=True, exist_ok=True)
        tuned = plan.device == "cuda" and job.phase in (TIMING, MEMORY) and plan.tunes(job.implementation)
        options = {"TILE_Q": 64} if tuned else {}
        values: dict[str, Any] = {"options": canonical_json(options)} if job.phase in (TIMING, MEMORY) else {}
        if job.phase == TIMING:
            values |= {
                "latency_ms": 1.0,
                "working_set_bytes": 1,
                "flop_count": 1,
                "key_value_bytes_per_second": 1.0,
            }
        if job.phase == MEMORY:
            values |= {"peak_memory_bytes": 1}
        if job.phase == ROOFLINE:
            values = {"read_bytes_per_second": 1e12, "matrix_teraflops_per_second": 1.0, "flush_proven": True}
        record = Record(job.phase, job.spec, status, values=values, started_at="2026-01-01T00:00:00.0Z")
        path.write_text(json.dumps(asdict(record)))
        if job.phase == TUNING:
            path.with_suffix(".winner.json").write_text('{"options":{"TILE_Q":64}}')
    (root / plan.environment_file).write_text("{}")


class TestAnotherEnvironment:
    def test_the_same_gpu_and_driver_run_nothing(self, on_a_gpu: Checkout, tmp_path: Path) -> None:
        same = nvml(tmp_path / "same", "NVIDIA H200", "580.65.99")  # the driver counts to its minor number
        assert on_a_gpu.measurements_planned(*MEASUREMENTS, **same) == set()

    @pytest.mark.parametrize(("name", "driver"), [("NVIDIA L4", "580.65.06"), ("NVIDIA H200", "590.10")])
    def test_another_gpu_or_driver_measures_everything_in_its_own_folder(
        self, on_a_gpu: Checkout, tmp_path: Path, name: str, driver: str
    ) -> None:
        other = nvml(tmp_path / "other", name, driver)
        before = sorted((on_a_gpu.folder / "results").rglob("*"))
        planned = on_a_gpu.measurements_planned(*MEASUREMENTS, **other)
        assert len(planned) == 2 + 1 + 2 + 2  # checks, the one kernel that is tuned, timings, memories
        assert sorted((on_a_gpu.folder / "results").rglob("*")) == before

    def test_an_edit_of_tuning_tunes_again_and_what_takes_its_winner_follows(
        self, on_a_gpu: Checkout, tmp_path: Path
    ) -> None:
        same = nvml(tmp_path / "same", "NVIDIA H200", "580.65.06")
        with appended(on_a_gpu, "harness/tuning.py"):
            assert on_a_gpu.measurements_planned("tuning", **same) == {
                "tune triton_flash at seq_len 128 (sweep tiny)"
            }
            planned = on_a_gpu.measurements_planned(*MEASUREMENTS, **same)
        assert planned == {
            "tune triton_flash at seq_len 128 (sweep tiny)",
            "time triton at seq_len 128 (sweep tiny)",
            "measure memory of triton at seq_len 128 (sweep tiny)",
        }

    @pytest.mark.parametrize("package", ["torch", "triton"])
    def test_another_version_of_a_package_measures_everything(
        self, finished: Checkout, tmp_path: Path, package: str
    ) -> None:
        assert finished.measurements_planned(**other_version(tmp_path, package)) == (
            everything(*IMPLEMENTATIONS) | TABLES
        )


def other_version(folder: Path, package: str) -> dict[str, str]:
    """Variables with which a package's version is 9.9.9: its metadata, early on the import path."""
    metadata = folder / "packages" / f"{package}-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9.9\n")
    return {"PYTHONPATH": str(folder / "packages")}


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout in which nothing has run yet."""
    checkout = Checkout.make(tmp_path_factory.mktemp("day"), "right")
    config = small_config(right="right")
    config["correctness"]["seq_lens"]["cpu"] = [32, 33]
    config["sweeps"]["tiny"]["seq_lens"]["cpu"] = [32, 33]
    checkout.configure(config)
    return checkout


class TestOneSeqLen:
    """In the order of a day: one length, then all, then that length again, then another environment."""

    def test_brings_its_length_up_to_date_prints_its_rows_and_measures_no_other(self, day: Checkout) -> None:
        result = day.snakemake("seq_len_32")
        assert result.returncode == 0, result.stdout
        assert set(day.history()) == {
            "correctness/attention/right/32",
            "timing/tiny/right/32",
            "memory/tiny/right/32",
            "roofline",
        }
        rows = [line for line in result.stdout.splitlines() if re.match(r"\| \d+ ", line)]
        assert [row.split("|")[1:3] for row in rows] == [[" 32        ", " right  "]]
        latency = day.records("timing")["tiny/right/32"]["values"]["latency_ms"]
        assert f"| {latency:.4g}" in rows[0]

    def test_forced_it_is_measured_again_and_the_former_records_stay_in_the_history(
        self, day: Checkout
    ) -> None:
        assert day.snakemake("seq_len_32", "results/benchmark.csv").returncode == 0
        before = day.history()
        assert {job: len(copies) for job, copies in before.items()} == dict.fromkeys(before, 1)
        assert len(before) == 7

        result = day.snakemake("-F", "seq_len_32")
        assert result.returncode == 0, result.stdout
        after = day.history()
        assert {job: len(copies) for job, copies in after.items()} == {
            job: 2 if job.endswith("/32") or job == "roofline" else 1 for job in before
        }
        for job, copies in after.items():
            assert copies[0] == before[job][0]
            if job == "roofline":
                continue
            phase, name = job.split("/", 1)
            assert copies[-1] == day.records(phase)[name]
        assert day.measurements_planned("results/benchmark.csv") == TABLES

    def test_another_environment_gets_a_folder_of_its_own_beside_the_old_one(
        self, day: Checkout, tmp_path: Path
    ) -> None:
        (old,) = (path.parent for path in (day.folder / "results").glob("*/environment.json"))
        before = {path: path.read_bytes() for path in old.rglob("*.json")}
        result = day.snakemake("seq_len_32", **other_version(tmp_path, "triton"))
        assert result.returncode == 0, result.stdout
        folders = {path.parent.name for path in (day.folder / "results").glob("*/environment.json")}
        assert folders == {old.name, re.sub(r"_triton[^_]+", "_triton9.9.9", old.name)}
        assert {path: path.read_bytes() for path in old.rglob("*.json")} == before
        assert day.measurements_planned("seq_len_32", "results/benchmark.csv") - TABLES == set()


class TestALostSnakemakeFolder:
    """Without its notes Snakemake calls everything up to date whose files are there."""

    @pytest.fixture
    def lost(self, finished: Checkout, tmp_path: Path) -> Checkout:
        shutil.copytree(finished.folder, tmp_path / "lost")
        shutil.rmtree(tmp_path / "lost" / ".snakemake")
        return Checkout(tmp_path / "lost")

    def test_what_is_current_is_not_measured_again(self, lost: Checkout) -> None:
        assert lost.planned() == {}

    def test_a_row_from_other_code_is_marked_and_the_next_run_measures_it_again(self, lost: Checkout) -> None:
        before = lost.history()
        with appended(lost, "kernels/naive.py"):
            assert lost.measurements_planned() == everything("naive") | TABLES
            assert lost.measurements_planned("seq_len_33") == (
                timings("naive", lengths=(33,)) | memories("naive", lengths=(33,))
            )

            gather_and_render(lost)
            marks = lost.csv("benchmark").set_index("implementation")["marks"].fillna("")
            assert all("stale" in mark for mark in marks["naive"])
            assert not any("stale" in mark for mark in marks[["sdpa", "triton", "helped"]])
            grid = lost.csv("correctness").set_index("implementation")["marks"].fillna("")
            assert set(grid["naive"]) == {"stale"}
            assert set(grid["sdpa"]) == {""}
            rows = [line for line in lost.table().splitlines() if re.match(r"\| 3[23] ", line)]
            assert ["stale" in row for row in rows] == ["naive" in row for row in rows]

            # One length first: the notes that this leaves are not those of the other lengths.
            assert lost.snakemake("seq_len_33").returncode == 0
            assert lost.measurements_planned() == checks("naive") | timings("naive", lengths=(32,)) | (
                memories("naive", lengths=(32,)) | TABLES
            )
            result = lost.snakemake("report/benchmark.md")
            assert result.returncode == 0, result.stdout
            assert not lost.csv("benchmark")["marks"].fillna("").str.contains("stale").any()
        measured = {job for job, copies in lost.history().items() if len(copies) > len(before[job])}
        assert measured == {
            "correctness/attention/naive/32",
            *(f"{phase}/tiny/naive/{n}" for phase in ("timing", "memory") for n in (32, 33)),
        }


def gather_and_render(checkout: Checkout) -> None:
    """Run the scripts behind the tables on what is there, whatever Snakemake thinks of it."""
    (environment,) = (checkout.folder / "results").glob("*/environment.json")
    config = yaml.safe_load((checkout.folder / "config" / "config.yaml").read_text())
    checked = canonical_json(load_config(config, checkout.folder / "kernels"))
    files = ["--benchmark", "results/benchmark.csv", "--correctness", "results/correctness.csv"]
    others = ["--comparison", "results/comparison.csv", "--goals", "results/goals.csv"]
    plan = ["--config", checked, "--device", "cpu", "--environment", environment.parent.name]
    place = ["--environment", str(environment), "--output", "report/benchmark.md"]
    for script, arguments in (
        ("aggregate", [*plan, *files, *others]),
        ("render_benchmark", [*files, *place]),
    ):
        subprocess.run(
            [sys.executable, f"workflow/scripts/{script}.py", *arguments], cwd=checkout.folder, check=True
        )


class TestStaleByHand:
    """On a plan for a GPU, with records written by hand."""

    @pytest.fixture
    def plan(self, tmp_path: Path) -> Plan:
        root = Path(__file__).resolve().parents[2]
        config = small_config(naive="naive", triton="triton_flash")
        config["device"] = "cuda"
        plan = Plan(load_config(config, root / "kernels"), "cuda", "gpu", root)
        write_by_hand(plan, tmp_path)
        return plan

    @staticmethod
    def stale_rows(plan: Plan, root: Path) -> set[tuple[str, int]]:
        rows = benchmark_rows(plan, root, correctness_rows(plan, root))
        return {(row["implementation"], row["seq_len"]) for row in rows if "stale" in row["marks"]}

    def test_nothing_is_stale_as_it_was_written(self, plan: Plan, tmp_path: Path) -> None:
        assert self.stale_rows(plan, tmp_path) == set()
        assert stale_records(plan, tmp_path) == []

    @pytest.mark.parametrize("winner", ['{"options":{"TILE_Q":128}}', '{"options":{}}', "{", "[]", None])
    def test_a_row_is_stale_where_its_options_are_not_todays_winner(
        self, plan: Plan, tmp_path: Path, winner: str | None
    ) -> None:
        path = tmp_path / str(plan.winner_file("tiny", "triton", 128))
        if winner is None:
            path.unlink()
        else:
            path.write_text(winner)
        assert self.stale_rows(plan, tmp_path) == {("triton", 128)}
        unreadable = winner in ("{", "[]")  # it is to be tuned again; so it is where there is no file at all
        assert stale_records(plan, tmp_path) == [
            *(["results/gpu/tuning/tiny/triton_flash/128.json"] if unreadable else []),
            *(f"results/gpu/{phase}/tiny/triton/128.json" for phase in (TIMING, MEMORY)),
        ]

    def test_a_record_that_cannot_be_read_is_to_be_measured_again(self, plan: Plan, tmp_path: Path) -> None:
        job = next(job for job in plan.jobs() if job.phase == CORRECTNESS)
        (tmp_path / job.path).write_text("half of a rec")
        assert stale_records(plan, tmp_path) == [job.path]
        assert failed_jobs(plan, tmp_path) == [job]

    @pytest.mark.parametrize("status", [ERROR, TIMEOUT])
    def test_failed_jobs_are_those_whose_record_or_cell_says_error_or_timeout(
        self, plan: Plan, tmp_path: Path, status: str
    ) -> None:
        assert failed_jobs(plan, tmp_path) == []
        grid, timing = (
            next(job for job in plan.jobs() if job.phase == phase) for phase in (CORRECTNESS, TIMING)
        )
        for job, change in (
            (grid, {"cells": [{"status": OK}, {"status": status}]}),
            (timing, {"status": status}),
        ):
            content = json.loads((tmp_path / job.path).read_text())
            (tmp_path / job.path).write_text(json.dumps({**content, **change}))
        assert failed_jobs(plan, tmp_path) == [grid, timing]


def test_retry_failed_measures_again_what_failed_and_only_that(tmp_path: Path) -> None:
    checkout = Checkout.make(tmp_path / "checkout", "right", "flaky")
    checkout.configure(small_config(right="right", flaky="flaky"))
    works_now = tmp_path / "works now"
    variables = {"WORKS_NOW": str(works_now)}
    assert checkout.snakemake("report/benchmark.md", **variables).returncode == 0
    assert set(checkout.csv("benchmark").query("implementation == 'flaky'")["latency_status"]) == {"error"}
    before = checkout.history()

    works_now.touch()
    time.sleep(0.01)
    assert checkout.measurements_planned("report/benchmark.md", **variables) == set()
    result = checkout.snakemake("retry_failed", **variables)
    assert result.returncode == 0, result.stdout
    assert "measuring 3 jobs again" in result.stdout
    after = checkout.history()
    assert {job for job in after if len(after[job]) > len(before[job])} == {
        "correctness/attention/flaky/33",
        "timing/tiny/flaky/32",
        "memory/tiny/flaky/32",
    }
    assert set(checkout.csv("benchmark")["latency_status"]) == {"ok"}
    assert "| error" not in checkout.table()

    again = checkout.snakemake("retry_failed", **variables)
    assert again.returncode == 0
    assert "no record says error or timeout" in again.stdout
    assert checkout.history() == after
    assert checkout.planned() == {}
