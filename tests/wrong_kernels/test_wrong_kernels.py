"""Every wrong kernel is caught, by the kind of its fault; no right one is called wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from harness.correctness import FAULT_KINDS, Tolerance, check_problem, grid_cells, grid_status
from harness.device import CpuDevice, Device, open_device
from harness.monitor import NoMonitor
from harness.plugin import Kernel, load_kernel
from harness.problem import Problem
from harness.record import NOT_DETERMINISTIC, OK, UNSUPPORTED, WRONG
from harness.stopwatch import TimingSettings, time_attention
from harness.supervisor import Outcome, Verdict
from tests.wrong_kernels import faulty, triton_faulty

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = yaml.safe_load((Path(__file__).resolve().parents[2] / "config/config.yaml").read_text("utf-8"))
TOLERANCES = {
    dtype: Tolerance(**tolerance) for dtype, tolerance in CONFIG["correctness"]["tolerances"].items()
}
Count = Callable[[str, bool], None]


def cell(seq_len: int, causal: bool, dtype: str, **changes: Any) -> Problem:
    shape = {
        "batch": 2,
        "heads": 2,
        "kv_heads": 2,
        "seq_len_q": seq_len,
        "seq_len_k": seq_len,
        "head_dim": 64,
    }
    return Problem(**{**shape, **changes}, causal=causal, dtype=dtype)


GRID = [
    cell(97, True, "fp16"),
    cell(97, False, "bf16"),
    cell(70, True, "fp16", batch=1, heads=4),
    cell(48, True, "fp16", batch=1, seq_len_k=130),
    cell(130, True, "bf16", batch=1, seq_len_k=48),
    cell(97, True, "fp16", head_dim=128),
    cell(97, False, "bf16", head_dim=128),
    *(cell(n, causal, dtype) for n in (64, 200) for causal in (False, True) for dtype in ("fp16", "bf16")),
    cell(1040, False, "bf16", batch=1, heads=1, kv_heads=1, head_dim=16),
    cell(1040, True, "fp16", batch=1, heads=1, kv_heads=1, head_dim=16),
]
SQUARE = [problem for problem in GRID if problem.seq_len_q == problem.seq_len_k <= 128]
found_by_grid = [name for name, fault in faulty.FAULTS.items() if fault.found_by == "grid"]
found_by_timing = [name for name, fault in faulty.FAULTS.items() if fault.found_by == "timing"]
found_on_a_gpu = [name for name, fault in faulty.FAULTS.items() if fault.found_by == "gpu"]


def judge(kernel: Kernel, problems: Sequence[Problem], *, to_the_end: bool = True) -> list[dict[str, Any]]:
    """The rows of the grid's record, as the job makes them; up to the first wrong cell, or all."""
    device = open_device(DEVICE)
    outcomes = []
    for problem in problems:
        try:
            figures = check_problem(kernel, problem, device, TOLERANCES[problem.dtype])
            outcomes.append(Outcome(OK, None, figures, ""))
            if "fault_kind" in figures and not to_the_end:
                break
        except Verdict as verdict:
            outcomes.append(Outcome(verdict.status, verdict.reason, verdict.result, ""))
            if not to_the_end:
                break
    rows = grid_cells(problems[: len(outcomes)], outcomes)
    assert (grid_status(outcomes)[0] == WRONG) == any(row["status"] == WRONG for row in rows)
    return rows


def wrong(fault: str | None) -> Kernel:
    return load_kernel("faulty", {"fault": fault}, package="tests.wrong_kernels")


def test_there_are_enough_of_them_and_each_has_a_kind() -> None:
    assert len(faulty.FAULTS) + len(triton_faulty.KINDS) >= 50
    kinds = {fault.kind for fault in faulty.FAULTS.values()} | set(triton_faulty.KINDS.values())
    assert kinds == set(FAULT_KINDS)


@pytest.mark.parametrize("fault", found_by_grid)
def test_a_wrong_kernel_is_caught_and_its_cell_and_kind_are_named(fault: str, count: Count) -> None:
    count(fault, False)
    *right, last = judge(wrong(fault), GRID, to_the_end=False)
    kind = faulty.FAULTS[fault].kind
    assert last.get("fault_kind"), f"not caught in {len(right) + 1} cells"
    # What is within its bounds each time is right, and marked.
    assert last["status"] == (OK if last["fault_kind"] == NOT_DETERMINISTIC else WRONG)
    assert kind in last["fault_kind"].split(", ")
    assert f"({kind})" in last["reason"]
    assert Problem(**{name: last[name] for name in GRID[0].to_dict()}) == GRID[len(right)]
    count(fault, True)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no streams")
@pytest.mark.parametrize("fault", found_on_a_gpu)
def test_work_on_another_stream_is_caught(fault: str, count: Count) -> None:
    count(fault, False)
    rows = judge(wrong(fault), GRID[:7])
    assert all("asynchronous" in row["fault_kind"] for row in rows)
    count(fault, True)


@pytest.mark.parametrize("fault", found_by_timing)
def test_what_a_few_calls_do_not_show_is_caught_after_the_samples(fault: str, count: Count) -> None:
    count(fault, False)
    problem = GRID[0]
    kernel = wrong(fault)
    assert judge(kernel, [problem])[0]["status"] == OK  # so that it needs another look
    faulty.forget()
    device: Device = open_device(DEVICE)
    if isinstance(device, CpuDevice):
        device.cache_bytes = 1 << 20  # a short flush
    settings = TimingSettings(samples=6, samples_interpreted=2, warm_up_min_s=0.0, warm_up_max_s=0.05)
    with pytest.raises(Verdict) as caught:
        time_attention(
            kernel, problem, device, TOLERANCES[problem.dtype], settings, NoMonitor, lambda step: None
        )
    assert caught.value.status == WRONG
    assert caught.value.reason.startswith("after timing: ")
    assert f"({faulty.FAULTS[fault].kind})" in caught.value.reason
    count(fault, True)


@pytest.mark.parametrize("fault", triton_faulty.KINDS)
def test_a_wrong_kernel_in_triton_is_caught(fault: int, count: Count) -> None:
    name = f"triton {fault}"
    count(name, False)
    kernel = load_kernel("triton_faulty", {"fault": fault}, package="tests.wrong_kernels")
    problems = [problem for problem in SQUARE if problem.heads == problem.kv_heads]
    last = judge(kernel, problems, to_the_end=False)[-1]
    assert last["status"] == WRONG
    assert triton_faulty.KINDS[fault] in last["fault_kind"].split(", ")
    count(name, True)


def test_without_a_fault_they_are_right_in_every_cell() -> None:
    assert {row["status"] for row in judge(wrong(None), GRID)} == {OK}
    kernel = load_kernel("triton_faulty", {}, package="tests.wrong_kernels")
    assert {row["status"] for row in judge(kernel, SQUARE[:1])} == {OK}


def random_problems(number: int, longest: int) -> list[Problem]:
    draw = random.Random(20251202)
    problems = []
    for seed in range(number):
        kv_heads = draw.choice([1, 1, 2, 3])
        problems.append(
            Problem(
                batch=draw.choice([1, 1, 2]),
                heads=kv_heads * draw.choice([1, 1, 2, 4]),
                kv_heads=kv_heads,
                seq_len_q=draw.randint(1, longest),
                seq_len_k=draw.randint(1, longest),
                head_dim=draw.choice([8, 16, 32, 40, 64, 80, 128]),
                causal=draw.random() < 0.5,
                dtype=draw.choice(["fp16", "bf16"]),
                seed=1000 + seed,
            )
        )
    return problems


@pytest.mark.parametrize(
    ("name", "package", "problems"),
    [
        ("faulty", "tests.wrong_kernels", random_problems(200, 150)),
        ("naive", "kernels", random_problems(200, 150)),
        ("sdpa", "kernels", random_problems(200, 150)),
        ("triton_flash", "kernels", random_problems(12, 40)),
    ],
    ids=["tiled", "naive", "sdpa", "triton"],
)
def test_a_right_kernel_is_never_called_wrong(name: str, package: str, problems: list[Problem]) -> None:
    kernel = load_kernel(name, {}, package=package)
    rows = judge(kernel, problems)
    assert [row for row in rows if row["status"] not in (OK, UNSUPPORTED)] == []
    judged = [row for row in rows if row["status"] == OK]
    assert len(judged) > 0.7 * len(problems)
    assert kernel.interpreted or {row["judged_calls"] for row in judged} == {3}
