"""The real rules and scheduler, with GPUs that are not there and jobs that only note when they ran."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workflow.checkout import Checkout, small_config

NVML = """
class NVMLError(Exception): pass
UUIDS = ["GPU-1", "GPU-2"]
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return len(UUIDS)
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return UUIDS[handle]
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetMigMode(handle): return [0, 0]
def nvmlSystemGetDriverVersion(): return "580.65.06"
"""
# In place of measuring: a record, and a line in the log of who ran when.
NOTE = """
parse = job_arguments
def job_arguments(description, **options):
    import os, time
    from harness.record import Record, write_atomically
    arguments = parse(description, **options)
    began = time.monotonic()
    time.sleep(0.4)
    path = str(arguments.output)
    line = {"path": path, "kept_gpu": arguments.kept_gpu, "began": began, "ended": time.monotonic()}
    with open(os.environ["RAN"], "a") as log:
        log.write(json.dumps(line) + "\\n")
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


def ran(folder: Path, *arguments: str, **settings: Any) -> list[dict[str, Any]]:
    """When each timing of two sweeps ran, on a machine with two GPUs."""
    checkout = Checkout.make(folder / "checkout", "right")
    config = small_config(a="right")
    config |= {"device": "cuda", **settings}
    config["sweeps"]["other"] = copy.deepcopy(config["sweeps"]["tiny"])
    for sweep in config["sweeps"].values():
        sweep["seq_lens"]["cuda"] = [128, 256]
    checkout.configure(config)
    (folder / "nvml").mkdir()
    (folder / "nvml" / "pynvml.py").write_text(NVML)
    with (checkout.folder / "harness" / "command.py").open("a") as command:
        command.write(NOTE)
    (checkout.folder / "workflow" / "scripts" / "capture_environment.py").write_text(WRITE_NOTHING)
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "timing", "--cores", "4", *arguments],
        cwd=checkout.folder,
        env=checkout.environment(PYTHONPATH=str(folder / "nvml"), RAN=str(folder / "ran")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    found = [json.loads(line) for line in (folder / "ran").read_text().splitlines()]
    timings = [job for job in found if "/timing/" in job["path"]]
    assert len(timings) == 2 * 2
    return timings


def most_at_once(jobs: list[dict[str, Any]]) -> int:
    """The largest number of jobs that ran at the same time."""
    return max(sum(job["began"] <= one["began"] < job["ended"] for job in jobs) for one in jobs)


@pytest.mark.parametrize("limit", [1, 2])
def test_as_many_measure_at_once_as_the_resource_allows(tmp_path: Path, limit: int) -> None:
    resources = ["--resources", f"gpu={limit}"] if limit > 1 else []  # one, if nothing is said
    jobs = ran(tmp_path, *resources, one_gpu_per_sweep=False)
    assert most_at_once(jobs) == limit
    assert {job["kept_gpu"] for job in jobs} == {None}


def test_a_sweep_keeps_to_its_gpu_and_no_job_is_started_to_wait_for_it(tmp_path: Path) -> None:
    jobs = ran(tmp_path, "--resources", "gpu=4")
    kept = {sweep: [job for job in jobs if f"/timing/{sweep}/" in job["path"]] for sweep in ("tiny", "other")}
    assert {sweep: {job["kept_gpu"] for job in jobs} for sweep, jobs in kept.items()} == {
        "tiny": {0},
        "other": {1},
    }
    assert [most_at_once(jobs) for jobs in kept.values()] == [1, 1]
    assert most_at_once(jobs) == 2
    assert any(
        one["began"] < two["ended"] and two["began"] < one["ended"]
        for one, two in itertools.product(*kept.values())
    )
