"""Several environments in one report: a recorded run on an H200, and others made from it by hand."""

from __future__ import annotations

import copy
import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.record import OK, Record, write_atomically, write_record
from tests.workflow.checkout import ROOT, Checkout
from tests.workflow.test_figures import H200, texts
from workflow.collect import (
    CollectFault,
    Collection,
    Environment,
    collect,
    find_environments,
    names_of,
    seen,
)
from workflow.collect_figure import collected_figure
from workflow.collect_pages import collected_page, collected_table, rows_table
from workflow.config import load_config
from workflow.plan import CORRECTNESS, MEMORY, TIMING, Job, Plan
from workflow.tables import MEMORY_COLUMNS, TIMING_COLUMNS

BENCHMARK = pd.read_csv(H200 / "benchmark.csv")
ACCOUNT: dict[str, Any] = json.loads((H200 / "environment.json").read_text())
H200_KEY: str = ACCOUNT["key"]
A100_KEY = H200_KEY.replace("h200", "a100")
CPU_KEY = "cpu-some-processor-8-threads_torch2.11.0_triton3.6.0_python3.12"
KERNELS = {"naive": "naive", "sdpa": "sdpa", "triton": "triton_flash"}
ROOFLINE = {"read_bytes_per_second": 4e12, "matrix_teraflops_per_second": 900.0, "flush_proven": True}
TENSORS = {
    "article": {"batch": 1, "heads": 16, "head_dim": 64, "causal": False, "dtype": "fp16"},
    "llm": {"batch": 2, "heads": 16, "head_dim": 128, "causal": True, "dtype": "bf16"},
}
CONFIG: dict[str, Any] = {
    "implementations": {name: {"kernel": kernel} for name, kernel in KERNELS.items()},
    "correctness": {
        "seq_lens": {"cuda": [128], "cpu": [64]},
        "head_dims": [64],
        "batches": [1],
        "causal": [False],
    },
    "sweeps": {
        name: {
            **tensors,
            "measure": ["timing", "memory"],
            "seq_lens": {
                "cuda": sorted(int(n) for n in BENCHMARK.loc[BENCHMARK["sweep"] == name, "seq_len"].unique()),
                "cpu": [64, 512],
            },
        }
        for name, tensors in TENSORS.items()
    },
}
Change = Callable[[Record], Record | None]


def checked(**changes: Any) -> dict[str, Any]:
    """The configuration with these keys at its top, as the Snakefile would have it."""
    return load_config({**copy.deepcopy(CONFIG), **changes}, ROOT / "kernels")


def as_it_was(record: Record) -> Record:
    return record


def measured(
    results: Path,
    key: str = H200_KEY,
    *,
    slower: float = 1.0,
    change: Change = as_it_was,
    config: dict[str, Any] | None = None,
    checkout: Path = ROOT,
) -> Path:
    """A folder `results/<key>` with the recorded numbers, as a run in that checkout would have written it.

    Latencies are the recorded ones times `slower`; `change` alters each timing and memory record, or
    leaves it out by giving None.
    """
    device = "cpu" if key.startswith("cpu") else "cuda"
    account = {**ACCOUNT, "key": key, "device": device}
    if device == "cpu":
        del account["gpu"]
    write_atomically(results / key / "environment.json", json.dumps(account))
    plan = Plan(config or checked(), device, key, checkout)

    def write(job: Job, **fields: Any) -> None:
        started = "2026-12-01T00:00:00.000000Z"
        record = Record(job.phase, job.spec, circumstances=account, started_at=started, **fields)
        altered = change(record) if job.phase in (TIMING, MEMORY) else record
        if altered is not None:
            write_record(altered, results.parent / job.path)

    for job in plan.jobs():
        if job.phase == CORRECTNESS:
            cells = [{**problem, "status": OK, "max_abs_error": 0.0} for problem in job.spec["problems"]]
            write(job, status=OK, cells=cells)
        elif job.phase in (TIMING, MEMORY):
            row = recorded(job)
            if row is not None:
                columns = TIMING_COLUMNS if job.phase == TIMING else MEMORY_COLUMNS
                values = {name: row[name] for name in columns if name in row and not pd.isna(row[name])}
                if job.phase == TIMING:
                    values |= {
                        name: row[name] * slower
                        for name in row
                        if str(name).startswith("latency_") and str(name).endswith("_ms")
                    }
                    values["teraflops_per_second"] /= slower
                    values["flop_count"] = int(row["teraflops_per_second"] * row["latency_ms"] * 1e9)
                marks = [] if pd.isna(row["marks"]) or job.phase == MEMORY else str(row["marks"]).split()
                write(job, status=OK, values=values, marks=marks)
    write(plan.roofline_job(), status=OK, values=ROOFLINE)
    return results / key


def recorded(job: Job) -> dict[Any, Any] | None:
    """The recorded row of a job's cell."""
    at = (BENCHMARK["sweep"] == job.sweep) & (BENCHMARK["seq_len"] == job.seq_len)
    rows = BENCHMARK[at & (BENCHMARK["implementation"] == job.implementation)].to_dict("records")
    return rows[0] if rows else None


def of(implementation: str, seq_lens: set[int], change: Change) -> Change:
    """The change for the records of one implementation at these lengths, and none for the others."""

    def altered(record: Record) -> Record | None:
        spec = record.spec
        chosen = spec["implementation"]["name"] == implementation and spec["problem"]["seq_len_k"] in seq_lens
        return change(record) if chosen else record

    return altered


def with_spec(*path: str, value: Any) -> Change:
    """A change of one entry of the spec."""

    def altered(record: Record) -> Record:
        spec = copy.deepcopy(record.spec)
        part = spec
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = value
        return replace(record, spec=spec)

    return altered


def one_after_the_other(*changes: Change) -> Change:
    def altered(record: Record) -> Record | None:
        left: Record | None = record
        for change in changes:
            left = change(left) if left is not None else None
        return left

    return altered


def only(phase: str, change: Change) -> Change:
    return lambda record: change(record) if record.phase == phase else record


OLD = with_spec("source", "kernel", value="00000000deadbeef")
HOSTILE = "a | pipe <script>alert(1)</script>"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """An H200, a made-up A100 of half its speed, and a CPU, with something to say of many cells."""
    results = tmp_path_factory.mktemp("machines") / "results"
    of_h200 = one_after_the_other(
        of("triton", {1024}, OLD),
        of("naive", {512}, OLD),
        of("sdpa", {8192}, only(TIMING, impossible)),
        of("triton", {512}, only(TIMING, tuned)),
    )
    of_a100 = one_after_the_other(
        of("triton", {1024}, OLD),  # the same as on the H200
        of("naive", {512}, with_spec("source", "kernel", value="11111111deadbeef")),
        of("triton", {4096}, OLD),
        of("sdpa", {512}, with_spec("implementation", "options", value={"backend": "math"})),
        of("sdpa", {1024}, only(TIMING, with_spec("source", "harness", value="00000000deadbeef"))),
        of("naive", {1024}, only(TIMING, with_spec("timing", "samples", value=7))),
        of("sdpa", {2048}, with_spec("problem", "batch", value=3)),
        of("naive", {2048}, only(TIMING, lambda record: None)),
        of("triton", {2048}, only(MEMORY, older)),
        of("naive", {8192, 16384}, one_after_the_other(failed, OLD)),
    )
    measured(results, change=of_h200)
    measured(results, A100_KEY, slower=2.1, change=of_a100)
    measured(results, CPU_KEY, slower=2000)
    longer = results / A100_KEY / "timing" / "article" / "naive" / "99999.json"
    shutil.copy(longer.with_name("512.json"), longer)
    (results / A100_KEY / "timing" / "llm" / "sdpa" / "4096.json").write_text("{")
    return collect(checked(collect=[str(results)]), ROOT)


@pytest.fixture(scope="module")
def figures(found):
    """The texts of each sweep's figure."""
    return {
        sweep: texts(collected_figure(rows_table(found.rows, sweep), sweep, names(found)))
        for sweep in ("article", "llm")
    }


def impossible(record: Record) -> Record:
    return replace(record, values={**record.values, "latency_ms": 1e-6})


def tuned(record: Record) -> Record:
    """A record with launch options that no tuning in its folder has."""
    return replace(record, values={**record.values, "options": '{"tile_q":128}'})


def failed(record: Record) -> Record:
    return replace(record, status="error", reason=HOSTILE, values={}, marks=[])


def older(record: Record) -> Record:
    """A record from before problems had a workload."""
    spec = copy.deepcopy(record.spec)
    for name in ("workload", "lengths", "page_size"):
        del spec["problem"][name]
    return replace(record, spec=spec)


def cell(found: Collection, key: str, sweep: str, seq_len: int, implementation: str) -> dict[str, Any]:
    where = {"environment": key, "sweep": sweep, "seq_len": seq_len, "implementation": implementation}
    (row,) = [row for row in found.rows if {name: row[name] for name in where} == where]
    return row


def marks(found: Collection, key: str, sweep: str, seq_len: int, implementation: str) -> set[str]:
    """The marks of a cell that only a collection gives, and `stale`."""
    own = cell(found, key, sweep, seq_len, implementation)["marks"].split()
    return set(own) & {"stale", "other_kernel", "other_measurement"}


def page(found: Collection) -> str:
    return collected_page(found, ["article", "llm"], {"article": "a.svg", "llm": "l.svg"})


def part(text: str, heading: str) -> str:
    return text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_a_machine_without_a_gpu_puts_the_environments_beside_each_other_and_measures_nothing(tmp_path):
    checkout = Checkout.make(tmp_path / "checkout")
    config = {
        **CONFIG,
        "sweeps": {"llm": CONFIG["sweeps"]["llm"]},
        "collect": ["results", "from_elsewhere"],
    }
    checkout.configure(config)
    here = {"config": load_config(config, ROOT / "kernels"), "checkout": checkout.folder}
    results = checkout.folder / "results"
    measured(results, **here)
    elsewhere = measured(tmp_path / "other" / "results", A100_KEY, slower=2.1, **here)
    (checkout.folder / "from_elsewhere").symlink_to(elsewhere)
    before = sorted(path for path in results.rglob("*.json"))
    done = checkout.snakemake("collect")
    assert done.returncode == 0, done.stdout
    assert "2 environments beside each other: a100, h200" in done.stdout
    assert "1 of 1 steps" in done.stdout
    assert sorted(path for path in results.rglob("*.json")) == before
    table = checkout.csv("collect")
    for key, slower in ((H200_KEY, 1.0), (A100_KEY, 2.1)):
        mine = table[table["environment"] == key].set_index(["sweep", "seq_len", "implementation"])
        for row in BENCHMARK[BENCHMARK["sweep"] == "llm"].to_dict("records"):
            at = (row["sweep"], row["seq_len"], row["implementation"])
            assert mine.loc[at, "latency_ms"] == pytest.approx(row["latency_ms"] * slower)
            assert mine.loc[at, "peak_memory_bytes"] == row["peak_memory_bytes"]
    written = checkout.folder / "report" / "collect.md"
    assert "![llm](collect/llm.svg)" in written.read_text()
    ElementTree.parse(checkout.folder / "report" / "collect" / "llm.svg")
    shown = checkout.snakemake("collect", "--report", "report/collect.html")
    assert shown.returncode == 0, shown.stdout
    assert "Several environments" in (checkout.folder / "report" / "collect.html").read_text()
    # A record that changed is seen, and what cannot be told apart is refused in one line.
    measured(results, A100_KEY, slower=3.0, **here)
    refused = checkout.snakemake("collect")
    assert refused.returncode != 0
    (line,) = [line for line in refused.stdout.splitlines() if line.startswith("collect: ")]
    assert "two machines' numbers are not made one environment" in line


def test_a_cell_of_another_kernel_is_marked_and_it_is_said_which(found, figures):
    assert marks(found, A100_KEY, "article", 4096, "triton") == {"stale", "other_kernel"}
    assert marks(found, H200_KEY, "article", 4096, "triton") == set()
    assert cell(found, A100_KEY, "article", 4096, "triton")["latency_kernel_digest"] == "00000000deadbeef"
    said = part(page(found), "Kernels")
    (line,) = [line for line in said.splitlines() if "| triton" in line and "00000000deadbeef" in line]
    assert "| no " in line
    assert "a100 (8 records), h200 (4 records)" in line
    assert "other_kernel" in figures["article"]
    assert "`other_kernel`: " in page(found)


def test_a_kernel_that_all_ran_alike_is_stale_and_no_other_kernel(found):
    for key in (A100_KEY, H200_KEY):
        assert marks(found, key, "article", 1024, "triton") == {"stale"}


def test_where_nobody_ran_this_checkouts_kernel_and_they_differ_each_is_marked(found):
    for key in (A100_KEY, H200_KEY):
        assert marks(found, key, "article", 512, "naive") == {"stale", "other_kernel"}


def test_other_options_under_one_name_are_another_kernel(found):
    assert "other_kernel" in marks(found, A100_KEY, "article", 512, "sdpa")
    assert "math" in part(page(found), "Kernels")


@pytest.mark.parametrize(
    ("implementation", "what"), [("sdpa", "source.harness"), ("naive", "timing.samples")]
)
def test_what_was_measured_otherwise_is_marked_and_told(found, implementation, what):
    assert marks(found, A100_KEY, "llm", 1024, implementation) == {"stale", "other_measurement"}
    assert marks(found, H200_KEY, "llm", 1024, implementation) == set()
    lines = part(page(found), "Stale, and why").splitlines()
    assert any("a100" in line and implementation in line and what in line for line in lines)


def test_launch_options_that_are_not_those_of_the_tuning_there_are_stale(found):
    assert marks(found, H200_KEY, "article", 512, "triton") == {"stale"}
    lines = part(page(found), "Stale, and why").splitlines()
    assert any("h200" in line and "triton" in line and "launch options (not those" in line for line in lines)


def test_a_record_that_cannot_be_read_is_an_error_and_says_nothing_of_a_kernel(found):
    row = cell(found, A100_KEY, "llm", 4096, "sdpa")
    assert row["latency_status"] == "error"
    assert "not a readable record" in row["latency_reason"]
    (today,) = [line for line in found.kernels if line["implementation"] == "sdpa" and line["today"]]
    whole = [line for line in found.rows if line["implementation"] == "sdpa"]
    there = [
        line for line in whole if line["environment"] == A100_KEY and line["seq_len"] not in (64, 512, 2048)
    ]
    assert today["cells"][A100_KEY] == 2 * len(there) - 1


def test_another_problem_stands_apart_and_in_no_cell(found):
    row = cell(found, A100_KEY, "article", 2048, "sdpa")
    assert (row["latency_status"], row["memory_status"]) == ("other_problem", "other_problem")
    assert row["latency_ms"] is None
    assert row["peak_memory_bytes"] is None
    assert row["latency_reason"] == "measured with batch 3 in place of 1"
    (apart,) = [row for row in found.apart if row["phase"] == TIMING and row["sweep"] == "article"]
    recorded_ms = BENCHMARK.query("sweep == 'article' and implementation == 'sdpa' and seq_len == 2048")
    assert apart["latency_ms"] == pytest.approx(2.1 * recorded_ms["latency_ms"].iloc[0])
    assert apart["batch"] == 3
    story = part(page(found), "Sweep article")
    assert "Of another problem than this sweep's" in story
    assert f"{apart['latency_ms']:.4g} ms" in story.split("Of another problem")[1]
    assert f"{apart['latency_ms']:.4g}" not in story.split("Of another problem")[0]


def test_a_record_from_before_a_field_of_the_problem_is_of_the_same_problem(found):
    row = cell(found, A100_KEY, "article", 2048, "triton")
    assert row["memory_status"] == OK
    assert row["peak_memory_bytes"] > 0


def test_every_empty_cell_says_why(found):
    assert cell(found, A100_KEY, "article", 2048, "naive")["latency_status"] == "not_measured"
    assert cell(found, A100_KEY, "article", 2048, "naive")["memory_status"] == OK
    assert cell(found, CPU_KEY, "article", 1024, "sdpa")["latency_status"] == "not_asked_for"
    assert cell(found, CPU_KEY, "article", 64, "sdpa")["latency_status"] == "not_measured"
    for row in found.rows:
        for prefix, number in (("latency", "latency_ms"), ("memory", "peak_memory_bytes")):
            if row[number] is None or pd.isna(row[number]):
                assert row[f"{prefix}_status"] not in (OK, "")
                assert row[f"{prefix}_reason"]
    story = part(page(found), "Sweep article")
    assert "cpu has no numbers at 1024, 2048, 4096, 8192: the configuration does not ask" in story
    assert "latency not\\_measured: no record" in story
    assert "not\\_asked\\_for" not in story
    hostile = [line for line in story.splitlines() if "error" in line and "pipe" in line]
    assert len(hostile) == 1
    assert "<script" not in page(found)


def test_an_impossible_time_is_withheld_here_too(found):
    row = cell(found, H200_KEY, "article", 8192, "sdpa")
    assert row["latency_status"] == "error"
    assert row["latency_reason"].startswith("withheld: 1e-06 ms is impossible")
    assert row["latency_ms"] is None


def test_a_records_own_marks_stay_and_where_no_record_is_shown_there_are_none(found):
    assert "throttled" in cell(found, A100_KEY, "llm", 16384, "sdpa")["marks"].split()
    assert "launch_bound" in cell(found, CPU_KEY, "article", 512, "sdpa")["marks"].split()
    assert "stale" in cell(found, A100_KEY, "article", 8192, "naive")["marks"].split()
    assert cell(found, A100_KEY, "article", 2048, "sdpa")["marks"] == ""


def test_what_the_configuration_does_not_name_is_listed(found):
    assert found.left_out == {CPU_KEY: [], A100_KEY: ["timing/article/naive/99999"], H200_KEY: []}
    said = part(page(found), "Measured there and not named in this configuration")
    assert "a100, 1 records: timing/article/naive" in said


def test_the_figure_has_a_line_for_each_environment_and_names_its_axes(found, figures):
    for drawn in figures.values():
        for axis in ("latency (ms)", "throughput (TFLOP/s)", "peak memory (GiB)", "sequence length (tokens)"):
            assert axis in drawn
        for name in ("h200", "a100"):
            for unit in ("ms", "TFLOP/s", "GiB"):
                assert sum(text.startswith(f"{name} ") and f" {unit}" in text for text in drawn) >= 2
    assert "other_problem: measured with batch 3 in place of 1" in figures["article"]
    assert not any(text.startswith("not_asked_for") for text in figures["article"])
    row = cell(found, H200_KEY, "llm", 16384, "triton")
    assert f"h200 {row['latency_ms']:.3g} ms" in figures["llm"]


def test_the_html_table_has_a_line_for_each_environment(found):
    table = collected_table(found, "article", names(found))
    for name in ("cpu", "a100", "h200"):
        assert f"<td>{name}</td>" in table
    assert "<td>00000000deadbeef</td>" in table
    assert "<script>alert" not in table


def names(found: Collection) -> dict[str, str]:
    return names_of(found.environments)


def test_decode_is_shown_in_terabytes_a_second(tmp_path):
    decode = {"workload": "decode", "batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64, "dtype": "bf16"}
    config = checked(
        sweeps={"tokens": {**decode, "seq_lens": {"cuda": [64], "cpu": [64]}}},
        implementations={"naive": {"kernel": "naive"}},
        collect=[str(tmp_path / "results")],
    )
    timed = {
        "latency_ms": 0.5,
        "latency_low_ms": 0.4,
        "latency_high_ms": 0.6,
        "working_set_bytes": 131072,
        "flop_count": 1000,
        "teraflops_per_second": 1.0,
        "key_value_bytes_per_second": 2.5e12,
    }
    for key in (H200_KEY, A100_KEY):
        measured(tmp_path / "results", key, config=config)
        plan = Plan(config, "cuda", key, ROOT)
        job = plan.sweep_job(TIMING, "tokens", "naive", 64)
        write_record(Record(TIMING, job.spec, OK, values=timed, started_at="2026"), tmp_path / job.path)
    found = collect(config, ROOT)
    text = collected_page(found, ["tokens"], {"tokens": "t.svg"})
    assert "| 2.5 " in text
    assert "TB/s" in text
    drawn = texts(collected_figure(rows_table(found.rows, "tokens"), "tokens", names(found)))
    assert "throughput (TB/s)" in drawn
    assert "h200 2.5 TB/s" in drawn


def empty(folder: Path, key: str, **account: Any) -> Path:
    """An environment's folder with one record."""
    device = {"key": key, "device": "cuda", **account}
    write_atomically(folder / "environment.json", json.dumps(device))
    record = Record(TIMING, {"environment": key}, OK, values={"latency_ms": 1.0}, circumstances=device)
    write_record(record, folder / TIMING / "s" / "i" / "8.json")
    return folder


def test_two_folders_of_one_environment_that_differ_are_refused(tmp_path):
    one = empty(tmp_path / "results" / "k", "k")
    two = empty(tmp_path / "other" / "results" / "k", "k")
    third = empty(tmp_path / "results" / "l", "l")
    folders = [str(one), str(two), str(third)]
    environments, copies = find_environments(folders)
    assert [environment.folder for environment in environments] == [one, third]
    assert copies == [f"{two} holds what {one} holds, and is counted once"]
    assert find_environments([str(one), str(one.parent), str(third)])[1] == []  # one folder, named twice
    file = two / TIMING / "s" / "i" / "8.json"
    file.write_text(file.read_text().replace('"latency_ms": 1.0', '"latency_ms": 2.0'))
    with pytest.raises(CollectFault) as fault:
        find_environments(folders)
    said = str(fault.value)
    assert "\n" not in said
    assert f"{one} and {two} both say that they are k, and differ in timing/s/i/8.json" in said
    assert "(latency_ms = 1.0 and latency_ms = 2.0)" in said
    assert "allowed in `collect`: one of the two folders" in said
    file.unlink()
    with pytest.raises(CollectFault, match=r"8\.json \(latency_ms = 1\.0 and not there\)"):
        find_environments(folders)


@pytest.mark.parametrize("where", ["spec", "circumstances"])
def test_a_record_of_another_environment_in_a_folder_is_refused(tmp_path, where):
    one = empty(tmp_path / "results" / "k", "k")
    empty(tmp_path / "results" / "l", "l")
    stray = {"spec": {"environment": "k"}, "circumstances": {"key": "k"}}
    key = {"spec": "environment", "circumstances": "key"}[where]
    stray[where][key] = "l"
    path = one / TIMING / "s" / "i" / "9.json"
    timed = Record(TIMING, stray["spec"], OK, values={"latency_ms": 1.0})
    write_record(replace(timed, circumstances=stray["circumstances"]), path)
    with pytest.raises(CollectFault) as fault:
        find_environments([str(tmp_path / "results")])
    assert str(fault.value).startswith(f"{path}: {where}.{key} = l, in the folder of k: two environments are")
    assert "allowed: a folder for each" in str(fault.value)


def test_a_folder_that_lost_its_environment_or_says_nothing_of_it_is_refused(tmp_path):
    one = empty(tmp_path / "results" / "k", "k")
    empty(tmp_path / "results" / "l", "l")
    (one / "environment.json").unlink()
    with pytest.raises(CollectFault, match=r"k/environment\.json: does not say what was measured on"):
        find_environments([str(tmp_path / "results")])
    (one / "environment.json").write_text('{"key": "k", "device": "abacus"}')
    with pytest.raises(CollectFault, match=r"key = 'k', device = 'abacus': must be text, and cuda or cpu"):
        find_environments([str(tmp_path / "results")])
    (one / "environment.json").write_text('{"key": "k\\nk", "device": "cpu"}')
    with pytest.raises(CollectFault, match=r"key = 'k\\nk', device = 'cpu': must be text, and cuda or cpu"):
        find_environments([str(tmp_path / "results")])
    (one / "environment.json").write_text('{"key": "k", "device": "cuda", "gpu": "mine"}')
    with pytest.raises(CollectFault, match=r"gpu = 'mine': must be an object, or not there"):
        find_environments([str(tmp_path / "results")])


@pytest.mark.parametrize("entry", ["source", "problem", "implementation"])
def test_a_record_whose_spec_no_run_wrote_is_refused(tmp_path, entry):
    one = empty(tmp_path / "results" / "k", "k")
    empty(tmp_path / "results" / "l", "l")
    path = one / TIMING / "s" / "i" / "8.json"
    path.write_text(path.read_text().replace('"environment"', f'"{entry}": "x", "environment"', 1))
    with pytest.raises(CollectFault) as fault:
        find_environments([str(tmp_path / "results")])
    assert str(fault.value).startswith(f"{path}: spec.{entry} = 'x': must be an object")
    assert "\n" not in str(fault.value)


def test_one_environment_alone_and_folders_without_any_are_refused(tmp_path):
    one = empty(tmp_path / "results" / "k", "k")
    empty(tmp_path / "results" / "history" / "l", "l")  # a history is no environment
    with pytest.raises(CollectFault, match=r"one environment only \(.*k\), and nothing to compare it with"):
        find_environments([str(tmp_path / "results")])
    for nothing in (tmp_path / "gone", one / TIMING):
        with pytest.raises(CollectFault, match="holds no environment's results; allowed in `collect`: "):
            find_environments([str(tmp_path / "results"), str(nothing)])


def test_what_is_seen_changes_with_any_record_and_with_none_else(tmp_path):
    one = empty(tmp_path / "results" / "k", "k")
    folders = [str(tmp_path / "results")]
    before = seen(folders)
    (one / "notes.txt").write_text("mine")
    (one / TIMING / "s" / "i" / "8.json").touch()
    assert seen(folders) == before
    file = one / TIMING / "s" / "i" / "8.json"
    file.write_text(file.read_text().replace("1.0", "1.5", 1))
    assert seen(folders) != before
    assert seen([str(tmp_path / "gone")]) == seen([])


@pytest.mark.parametrize(
    ("keys", "short"),
    [
        (["nvidia-h200_driver1_torch2", "nvidia-b200_driver1_torch3"], ["h200", "b200"]),
        (["nvidia-h200_driver1_torch2", "nvidia-h200_driver9_torch2"], ["h200 driver1", "h200 driver9"]),
        (["cpu-x-2-threads_torch2", "nvidia-h200_driver1_torch2"], ["cpu", "h200"]),
        (["cpu-x-2-threads_torch2", "cpu-y-2-threads_torch2"], ["cpu-x-2-threads", "cpu-y-2-threads"]),
        (["nvidia-h200_torch2", "h200_torch2"], ["nvidia-h200_torch2", "h200_torch2"]),
    ],
)
def test_environments_have_short_names_that_tell_them_apart(keys, short):
    environments = [
        Environment(key, Path(key), {"device": "cpu" if key.startswith("cpu") else "cuda"}) for key in keys
    ]
    assert list(names_of(environments).values()) == short
