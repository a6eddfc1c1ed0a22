"""Nsight Compute's output, read: as it came from an H200 (tests/data/h200/ncu), and tables made by hand.

The ncu on the PATH of these tests is a stand-in: it runs the application that it is given, as ncu does, and
prints a table. It shows that the pipeline holds together, and nothing of any GPU.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness import ncu
from harness.environment import find_gpu
from harness.ncu import (
    METRICS,
    NcuError,
    NotReadable,
    command,
    counter_values,
    find_ncu,
    kernel_cells,
    profile,
    read_csv,
)

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "hand_made"
RAW, DETAILS = (DATA / f"ncu_{page}.csv" for page in ("raw", "details"))
RECORDED = sorted((ROOT / "tests" / "data" / "h200" / "ncu").glob("*.log.gz"))
SCORE_BYTES = 16 * 4096**2 * 2  # of the sweep article at 4096: 16 heads, fp16
TENSOR_BYTES = 16 * 4096 * 64 * 2  # of its Q, K, V or output


def recorded(name):
    """The log of a real job, as it lay under logs/<environment>/profile/<sweep>/<implementation>/."""
    (path,) = (path for path in RECORDED if path.name == f"{name}_4096.log.gz")
    return gzip.decompress(path.read_bytes()).decode()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.removesuffix(".log.gz"))
def test_every_number_of_a_real_log_is_what_the_log_says(path):
    """Held against the log's own lines, looked up by the name of the column alone."""
    log = gzip.decompress(path.read_bytes()).decode()
    names, units, *rows = csv.reader(line for line in log.splitlines() if line.startswith('"'))
    kernels = read_csv(log)
    assert [kernel.name for kernel in kernels] == [row[names.index("Kernel Name")] for row in rows]
    columns = {
        "dram_read_bytes": ("dram__bytes_read.sum", "byte"),
        "dram_write_bytes": ("dram__bytes_write.sum", "byte"),
        "l2_bytes": ("lts__t_bytes.sum", "byte"),
        "local_load_bytes": ("l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum", "byte"),
        "local_store_bytes": ("l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum", "byte"),
        "registers": ("launch__registers_per_thread", "register/thread"),
        "duration_ns": ("gpu__time_duration.sum", "ns"),
        "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", "%"),
        "issue_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active", "%"),
        "l2_hit_rate_percent": ("lts__t_sector_hit_rate.pct", "%"),
        "dram_percent": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "%"),
        "multiprocessor_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "%"),
    }
    for quantity, (column, unit) in columns.items():
        place = names.index(column)
        assert units[place] == unit
        shown = [float(row[place].replace(",", "")) for row in rows]
        assert [kernel.quantity(quantity) for kernel in kernels] == shown
        if unit == "byte":
            assert counter_values(kernels)[quantity] == sum(shown)
    for kernel, cell in zip(kernels, kernel_cells(kernels), strict=True):
        assert list(cell["stalls"].values()) == sorted(cell["stalls"].values(), reverse=True)
        assert "selected" not in cell["stalls"]
        assert 0 <= kernel.quantity("tensor_pipe_percent") <= 100
    values = counter_values(kernels)
    assert None not in values.values()
    assert values["kernel_count"] == len(rows)


def test_what_was_counted_on_a_real_gpu_is_what_the_algorithms_must_move():
    naive = read_csv(recorded("article_naive"))
    assert len(naive) == 5
    scores, scaled = naive[:2]
    # The product writes the scores, and the scaling reads them and writes them again; caches keep a little.
    assert scores.quantity("dram_read_bytes") == pytest.approx(2 * TENSOR_BYTES, rel=0.05)
    assert scores.quantity("dram_write_bytes") == pytest.approx(SCORE_BYTES, rel=0.1)
    assert scaled.quantity("dram_read_bytes") == pytest.approx(SCORE_BYTES, rel=0.01)
    assert scaled.quantity("dram_write_bytes") == pytest.approx(SCORE_BYTES, rel=0.1)
    for name in ("sdpa", "triton"):
        values = counter_values(read_csv(recorded(f"article_{name}")))
        assert values["kernel_count"] == 1
        assert values["dram_read_bytes"] == pytest.approx(3 * TENSOR_BYTES, rel=0.01)
        assert values["dram_write_bytes"] < TENSOR_BYTES  # the rest of it lies in L2 when the kernel ends
        assert values["local_load_bytes"] == values["local_store_bytes"] == 0


def test_the_local_memory_of_a_real_kernel_is_what_its_spilled_registers_take():
    (kernel,) = read_csv(recorded("llm_triton"))
    # ncu counts by itself how often a warp moves a spilled register: 32 threads, 4 bytes each.
    spilled = kernel.metrics["sass__inst_executed_register_spilling"] * 32 * 4
    moved = kernel.quantity("local_load_bytes") + kernel.quantity("local_store_bytes")
    assert moved == pytest.approx(spilled, rel=1e-4)
    assert moved > 500e6
    assert kernel.quantity("registers") == 128
    assert list(kernel.stalls())[:2] == ["barrier", "long_scoreboard"]


@pytest.mark.parametrize("page", [RAW, DETAILS], ids=["raw", "details"])
def test_both_forms_of_the_table_give_the_same_kernels_and_numbers(page):
    gemm, softmax = read_csv(page.read_text())
    assert gemm.name == "void gemm<float, 2>(Params)"
    assert gemm.quantity("dram_read_bytes") == pytest.approx(1e6)
    assert gemm.quantity("duration_ns") == 3000
    assert gemm.quantity("registers") == 128
    assert softmax.quantity("local_load_bytes") == 640
    # Of the names for the tensor pipe the busiest; one without a number is none.
    assert gemm.quantity("tensor_pipe_percent") == 60.5
    assert softmax.quantity("tensor_pipe_percent") == 0
    assert softmax.quantity("dram_percent") is None


@pytest.mark.parametrize("page", [RAW, DETAILS], ids=["raw", "details"])
def test_each_percentage_is_that_of_its_own_part_of_the_multiprocessor(page):
    quantities = {
        "tensor_pipe_percent": [60.5, 0],
        "fp32_pipe_percent": [10, 30],
        "issue_percent": [55, 15],
        "occupancy_percent": [25, 75],
        "l2_hit_rate_percent": [50, 25],
        "multiprocessor_percent": [70, 20],
    }
    kernels = read_csv(page.read_text())
    for quantity, shown in quantities.items():
        assert [kernel.quantity(quantity) for kernel in kernels] == shown, quantity


@pytest.mark.parametrize(
    ("metric", "unit", "base"),
    [
        *[("dram__bytes_read.sum", *pair) for pair in (("byte", 1), ("Kbyte", 1e3), ("Mbyte", 1e6))],
        *[("dram__bytes_read.sum", *pair) for pair in (("Gbyte", 1e9), ("Tbyte", 1e12))],
        *[("gpu__time_duration.sum", *pair) for pair in (("ns", 1), ("us", 1e3), ("usecond", 1e3))],
        *[("gpu__time_duration.sum", *pair) for pair in (("ms", 1e6), ("msecond", 1e6))],
        *[("gpu__time_duration.sum", *pair) for pair in (("s", 1e9), ("second", 1e9))],
    ],
)
def test_a_unit_with_a_prefix_is_undone_to_bytes_and_nanoseconds(metric, unit, base):
    table = f'"ID","Kernel Name","{metric}"\n"","","{unit}"\n"0","gemm","1,234.5"\n'
    (kernel,) = read_csv(table)
    assert kernel.metrics == {metric: pytest.approx(1234.5 * base)}


def test_stalls_are_listed_by_reason_and_the_warp_that_issues_is_no_stall():
    gemm, softmax = read_csv(RAW.read_text())
    assert list(gemm.stalls().items()) == [("long_scoreboard", 2.5), ("barrier", 0.25)]
    assert gemm.stalls().keys() > softmax.stalls().keys() == {"long_scoreboard"}


def test_a_call_adds_up_its_kernels_bytes_and_weighs_their_percentages_by_time():
    values = counter_values(read_csv(RAW.read_text()))
    assert values["kernel_count"] == 2
    assert values["dram_read_bytes"] == 4e6
    assert values["dram_write_bytes"] == 1.5e6
    assert values["registers"] == 128
    assert values["tensor_pipe_percent"] == pytest.approx((60.5 * 3000 + 0 * 1000) / 4000)
    assert values["l2_hit_rate_percent"] == pytest.approx((50 * 3 + 25) / 4)
    assert values["dram_percent"] is None
    # No duration leaves the reader: none can come to stand beside a latency.
    assert not [name for name in values if "duration" in name or name.endswith(("_ns", "_ms"))]


def test_every_kernel_of_a_call_is_a_cell_with_its_name_and_its_share_of_the_time():
    gemm, softmax = kernel_cells(read_csv(RAW.read_text()))
    assert (gemm["name"], gemm["share"]) == ("void gemm<float, 2>(Params)", 0.75)
    assert softmax["share"] == 0.25
    assert gemm["metrics"]["sm__throughput.avg.pct_of_peak_sustained_elapsed"] == 70
    json.dumps([gemm, softmax], allow_nan=False)


def test_output_without_a_table_is_an_error_that_shows_it():
    with pytest.raises(NcuError, match="no kernels were profiled"):
        read_csv("==PROF== Disconnected\n==WARNING== no kernels were profiled\n")


def test_the_clocks_are_left_alone_and_the_application_comes_last():
    words = command("ncu", ["python", "app.py"])
    assert words[words.index("--clock-control") + 1] == "none"
    assert words[words.index("--profile-from-start") + 1] == "off"
    assert words[-2:] == ["python", "app.py"]


def stand_in(folder, monkeypatch, program):
    """Put an ncu of these lines of Python on the PATH; `application` is what it is to run."""
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nfrom pathlib import Path\n"
        "words = sys.argv[1:]\nplace = words.index('--metrics') + 1\n"
        f"metrics, application = words[place].split(','), words[place + 1 :]\n{program}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return [sys.executable, "-c", "print('called')"]


SHOW = (
    "print(subprocess.run(application, capture_output=True, text=True).stdout)\n"
    f"print(Path({str(RAW)!r}).read_text())"
)


def test_the_application_is_run_and_its_kernels_come_back(tmp_path, monkeypatch):
    application = stand_in(tmp_path, monkeypatch, SHOW)
    kernels, output = profile(application, 60)
    assert "called" in output
    assert [kernel.name[:4] for kernel in kernels] == ["void", "soft"]


def test_a_metric_that_this_ncu_does_not_know_is_left_out_and_the_rest_is_asked_for_again(
    tmp_path, monkeypatch
):
    program = f"""
if "lts__t_bytes.sum" in metrics:
    sys.exit("==ERROR== Failed to find metric lts__t_bytes.sum")
assert len(metrics) == {len(METRICS) - 1}
{SHOW}"""
    application = stand_in(tmp_path, monkeypatch, program)
    assert len(profile(application, 60)[0]) == 2


def test_a_user_who_may_not_read_the_counters_hears_so(tmp_path, monkeypatch):
    application = stand_in(
        tmp_path, monkeypatch, "sys.exit('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission')"
    )
    with pytest.raises(NotReadable, match="may not read the GPU's counters"):
        profile(application, 60)


def test_an_ncu_that_fails_says_why(tmp_path, monkeypatch):
    with pytest.raises(NcuError, match=r"ended with 1: .*out of luck"):
        profile(stand_in(tmp_path, monkeypatch, "sys.exit('==ERROR== out of luck')"), 60)


def test_without_ncu_there_is_a_reason(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(NotReadable, match="not on the PATH"):
        find_ncu()


def test_of_several_installed_ncu_the_newest_is_taken(tmp_path, monkeypatch):
    for version in ("2023.3.1", "2025.1.0", "2025.10.0"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").touch()
    glob = Path.glob
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: glob(tmp_path, pattern))
    assert find_ncu() == str(tmp_path / "2025.10.0" / "ncu")


def asked_for(words, option):
    return [value for name, value in pairwise(words) if name == option]


def test_ncu_is_asked_for_cold_caches_free_clocks_and_units_without_prefix():
    words = command("ncu", ["python", "call.py"])
    assert asked_for(words, "--cache-control") == ["all"]
    assert asked_for(words, "--clock-control") == ["none"]
    assert asked_for(words, "--profile-from-start") == ["off"]
    assert asked_for(words, "--print-units") == ["base"]
    assert asked_for(words, "--page") == ["raw"]
    assert "--csv" in words
    assert words[-2:] == ["python", "call.py"]


def test_ncu_is_asked_for_the_sections_that_stalls_pipes_and_rates_come_from():
    sections = asked_for(command("ncu", []), "--section")
    wanted = {"WarpStateStats", "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis"}
    assert wanted <= set(sections)


def events_of_a_call(monkeypatch, kind):
    """What `call_once` does with a device and a kernel, in its order."""
    events = []
    monkeypatch.setattr(ncu, "make_inputs", lambda problem, kind: None)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: events.append(name))
    device = SimpleNamespace(kind=kind, target=lambda: None, synchronize=lambda: events.append("synchronize"))
    kernel = SimpleNamespace(
        unsupported=lambda problem, target: None, answer=lambda inputs, problem: events.append("call")
    )
    assert ncu.call_once(kernel, None, device) is None
    return events


def test_one_call_is_watched_to_its_end_after_a_warm_up_that_is_over(monkeypatch):
    events = events_of_a_call(monkeypatch, "cuda")
    start = events.index("start")
    assert events[:start] == ["call", "call", "call", "synchronize"]
    assert events[start:] == ["start", "call", "synchronize", "stop"]


def test_where_there_is_no_gpu_no_profiler_is_started(monkeypatch):
    assert not {"start", "stop"} & set(events_of_a_call(monkeypatch, "cpu"))


def spec_of(kernel, device="cpu"):
    problem = {
        "batch": 1, "heads": 2, "kv_heads": 2, "seq_len_q": 32, "seq_len_k": 32, "head_dim": 16,
        "causal": False, "dtype": "fp16",
    }  # fmt: skip
    return {
        "phase": "profile",
        "device": device,
        "environment": "here",
        "implementation": {"name": kernel, "kernel": kernel, "options": {}},
        "problem": problem,
    }


def record_of(folder, kernel, device="cpu"):
    output = folder / "results" / "record.json"
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "workflow/scripts/read_counters.py"),
            *("--spec", json.dumps(spec_of(kernel, device)), "--output", output),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "ATTENTION_BENCH_LOCKS": str(folder / "locks")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text()), done.stdout


def test_the_script_makes_a_record_of_a_call_that_is_really_made(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, SHOW)
    record, log = record_of(tmp_path, "naive")
    assert (record["status"], record["reason"]) == ("ok", None)
    assert record["values"]["dram_read_bytes"] == 4e6
    assert [cell["name"][:9] for cell in record["cells"]] == ["void gemm", "softmax_k"]
    assert "==PROF== Profiling" in log  # as it came: this is what is recorded on a GPU


@pytest.mark.parametrize(
    ("kernel", "program", "status", "reason"),
    [
        ("naive", "sys.exit('==ERROR== ERR_NVGPUCTRPERM')", "unsupported", "may not read"),
        ("naive", "sys.exit('==ERROR== out of luck')", "error", "out of luck"),
        # The call is refused by the kernel: ncu sees no kernel, and the kernel's reason is the record's.
        ("gluon_hopper", "subprocess.run(application)", "unsupported", "written for Hopper"),
    ],
)
def test_the_script_says_why_there_is_no_number(tmp_path, monkeypatch, kernel, program, status, reason):
    stand_in(tmp_path, monkeypatch, program)
    record, _ = record_of(tmp_path, kernel)
    assert record["status"] == status
    assert reason in record["reason"]
    assert record["cells"] == []


@pytest.mark.gpu
@pytest.mark.skipif(find_gpu() is None, reason="needs a GPU")
def test_on_a_gpu_the_counters_of_a_call_are_read_or_there_is_a_reason(tmp_path):
    record, _ = record_of(tmp_path, "naive", "cuda")
    if record["status"] == "unsupported":
        pytest.skip(record["reason"])
    assert record["status"] == "ok", record["reason"]
    assert len(record["cells"]) > 1, "naive attention launches several kernels"
    values = record["values"]
    missing = [name for name, value in values.items() if value is None]
    assert set(missing) <= {"dram_percent", "multiprocessor_percent", "issue_percent"}, missing
    assert values["l2_bytes"] > 4 * 2 * 32 * 16 * 2  # Q, K, V and O
    assert 0 < values["registers"] <= 255
    assert all(cell["stalls"] for cell in record["cells"])
