"""Nsight Compute's output, read; on tables made by hand (tests/data/hand_made), until a real run is recorded.

The ncu on the PATH of these tests is a stand-in: it runs the application that it is given, as ncu does, and
prints a table. It shows that the pipeline holds together, and nothing of any GPU.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_every_kernel_of_a_call_is_a_cell_with_its_names_and_its_share_of_the_time():
    gemm, softmax = kernel_cells(read_csv(RAW.read_text()))
    assert (gemm["short_name"], gemm["share"]) == ("gemm", 0.75)
    assert (softmax["short_name"], softmax["share"]) == ("softmax_kernel", 0.25)
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
    assert [cell["short_name"] for cell in record["cells"]] == ["gemm", "softmax_kernel"]
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
