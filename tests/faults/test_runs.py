"""Whole runs by a real Snakemake: after the fault is gone, the same command goes on and completes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.faults.bench import until
from tests.faults.test_disk import mounted
from tests.workflow.checkout import Checkout, small_config
from tests.workflow.test_resume import Gate

pytestmark = pytest.mark.slow

TARGETS = ("report/benchmark.md", "results/benchmark.csv", "results/correctness.csv")
JOBS = {"correctness/attention/right/32", "correctness/attention/right/33", "memory/tiny/right/32"}


def make(folder: Path, *kernels: str) -> Checkout:
    """Without timings, so without the machine's own measurement, which takes ten seconds on a CPU."""
    checkout = Checkout.make(folder, *{"right", *kernels})
    config = small_config(**{name: name for name in kernels})
    config["correctness"]["seq_lens"]["cpu"] = [32, 33]
    config["sweeps"]["tiny"]["measure"] = ["memory"]
    checkout.configure(config)
    return checkout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A complete run. Each test makes a fault in it, and leaves it complete again."""
    checkout = make(tmp_path_factory.mktemp("finished") / "checkout", "right")
    complete(checkout)
    return checkout


def complete(checkout: Checkout, **variables: str) -> str:
    """Run, and see that everything is measured and nothing is left to do; what the run printed."""
    result = checkout.snakemake(*TARGETS, **variables)
    assert result.returncode == 0, result.stdout
    rows = checkout.csv("benchmark")
    assert set(rows["memory_status"]) == {"ok"}
    assert (rows["peak_memory_bytes"] > 0).all()
    assert not rows["marks"].astype(str).str.contains("stale|grid").any()
    assert set(checkout.csv("correctness")["status"]) == {"ok"}
    assert checkout.planned(*TARGETS) == {}
    return result.stdout


def count(checkout: Checkout) -> dict[str, int]:
    """How often each job was ever measured."""
    history = checkout.folder / "results" / "history"
    found: dict[str, int] = {}
    for path in history.rglob("*.json"):
        job = "/".join(path.relative_to(history).parts[1:-1])
        found[job] = found.get(job, 0) + 1
    return found


def copies(checkout: Checkout) -> dict[str, bytes]:
    history = checkout.folder / "results" / "history"
    return {str(path): path.read_bytes() for path in history.rglob("*.json")}


def assert_kept(before: dict[str, bytes], checkout: Checkout) -> None:
    after = copies(checkout)
    assert after | before == after


def record(checkout: Checkout, job: str) -> Path:
    (path,) = (checkout.folder / "results").glob(f"cpu*/{job}.json")
    return path


# ---- what is there is damaged or gone ----


def test_damaged_records_are_measured_again_and_no_others(finished: Checkout) -> None:
    before, counted = copies(finished), count(finished)
    half, empty, other = (record(finished, job) for job in sorted(JOBS))
    half.write_text(half.read_text()[:200])
    empty.write_text("")
    other.write_text(other.read_text().replace('"schema_version": 1', '"schema_version": 7'))
    complete(finished)
    assert_kept(before, finished)
    assert count(finished) == {job: counted[job] + 1 for job in JOBS}


def test_a_folder_where_a_record_should_be_is_named_and_left_alone(finished: Checkout) -> None:
    before = copies(finished)
    path = record(finished, "memory/tiny/right/32")
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("a person's own\n")
    result = finished.snakemake(*TARGETS)
    assert result.returncode != 0
    assert "cannot be written: Is a directory" in result.stdout
    assert "Move away what is in its place, and run the same command again." in result.stdout
    assert (path / "mine").read_text() == "a person's own\n"
    shutil.rmtree(path)
    (finished.folder / "results" / "benchmark.csv").unlink()  # it is whole, and would ask for no record
    complete(finished)
    assert path.is_file()
    assert_kept(before, finished)


@pytest.mark.parametrize("text", ['{"half', None])
def test_an_account_of_the_machine_that_is_damaged_or_lost_is_written_again(
    finished: Checkout, text: str | None
) -> None:
    path = record(finished, "environment")
    before = count(finished)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    said = complete(finished)
    assert "environment.json is lost or cannot be read: written once more" in said
    assert count(finished) == before


def test_tables_that_are_deleted_are_made_again_without_measuring(finished: Checkout) -> None:
    before = count(finished)
    for name in TARGETS:
        (finished.folder / name).unlink()
    complete(finished)
    assert count(finished) == before


def test_snakemakes_own_notes_that_are_deleted_cost_no_measurement(finished: Checkout) -> None:
    before = count(finished)
    shutil.rmtree(finished.folder / ".snakemake")
    complete(finished)
    assert count(finished) == before


# ---- the system ----


def test_a_clock_that_was_set_back_an_hour_stops_no_run(finished: Checkout) -> None:
    before = copies(finished)
    record(finished, "memory/tiny/right/32").unlink()
    (finished.folder / "results" / "benchmark.csv").unlink()
    later = time.time() + 3600
    for folder in ("results", "report"):
        for path in (finished.folder / folder).rglob("*"):
            os.utime(path, (later, later))
    assert "the system's clock went back" in complete(finished)
    assert_kept(before, finished)


def test_a_run_whose_disk_fills_up_goes_on_once_there_is_space(tmp_path: Path) -> None:
    checkout = make(tmp_path / "checkout", "right")
    results = checkout.folder / "results"
    with mounted(results, "-t", "tmpfs", "-o", "size=400k", "tmpfs"):
        assert checkout.snakemake("correctness").returncode == 0
        before = copies(checkout)
        filling = results / "filling"
        subprocess.run(["dd", "if=/dev/zero", f"of={filling}", "bs=1k"], capture_output=True, check=False)
        result = checkout.snakemake(*TARGETS)
        assert result.returncode != 0
        assert "No space left on device" in result.stdout
        assert "Free some space, and run the same command again." in result.stdout
        assert copies(checkout) == before
        filling.unlink()
        complete(checkout)
        assert_kept(before, checkout)
        assert set(count(checkout).values()) == {1}


BROKEN_TORCH = 'raise ImportError("libcudart.so.13: cannot open shared object file")\n'


def test_torch_that_does_not_import_is_named_by_the_server_and_by_each_job(
    finished: Checkout, tmp_path: Path
) -> None:
    before = copies(finished)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(BROKEN_TORCH)
    record(finished, "memory/tiny/right/32").unlink()
    (finished.folder / "results" / "benchmark.csv").unlink()
    result = finished.snakemake(*TARGETS, PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    assert "no fork server: torch does not import (ImportError: libcudart.so.13: cannot open" in result.stdout
    assert "ImportError: libcudart.so.13: cannot open shared object file\n" in result.stdout
    assert copies(finished) == before
    complete(finished)
    assert_kept(before, finished)


def test_a_checkout_with_an_odd_name_under_a_locale_without_utf_8(tmp_path: Path) -> None:
    """And a kernel that raises bytes which are no text: table and verdict are printed all the same."""
    checkout = make(tmp_path / 'it\'s a "kernel" bench: 1', "right")
    config = small_config(right="right", raising_bytes="raising_bytes")
    config["sweeps"]["tiny"]["measure"] = ["memory"]
    checkout.configure(config)
    source = (
        "def attention(q, k, v, *, causal, scale=None):\n"
        '    raise ValueError(b"caf\\xe9".decode("utf-8", "surrogateescape"))\n'
    )
    (checkout.folder / "kernels" / "raising_bytes.py").write_text(source)
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    result = checkout.snakemake("results/verdict.txt", **locale)
    assert result.returncode != 0
    assert r"ValueError: caf\udce9" in result.stdout
    assert "cells are wrong, errors or timeouts: they are listed above" in result.stdout
    for log in (checkout.folder / "logs").rglob("*.log"):
        assert "UnicodeEncodeError" not in log.read_text()
    assert "no fork server" not in result.stdout
    rows = checkout.csv("benchmark").set_index("implementation")
    assert dict(rows["memory_status"]) == {"right": "ok", "raising_bytes": "error"}
    assert pd.isna(rows.loc["raising_bytes", "peak_memory_bytes"])

    (checkout.folder / "kernels" / "raising_bytes.py").write_text(
        "from kernels import right\n\n\ndef attention(q, k, v, *, causal, scale=None):\n"
        "    return right.attention(q, k, v, causal=causal)\n"
    )
    complete(checkout)


# ---- in the middle of a run ----


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Checkout]:
    checkout = make(tmp_path / "checkout", "gated")
    yield checkout
    for pid in checkout.processes():
        os.kill(pid, signal.SIGKILL)


def test_a_run_that_is_told_to_end_in_the_middle_goes_on_with_the_same_command(
    gated: Checkout, gate: Gate, tmp_path: Path
) -> None:
    """SIGTERM, as a batch system sends it: Snakemake lets its jobs end, and starts no other."""
    gate.close(33)
    run = gated.start(tmp_path / "output", *TARGETS, **gate.variables)
    until(gate.reached.exists)
    run.terminate()
    time.sleep(0.5)
    gate.open()
    assert run.wait(timeout=60) != 0
    until(lambda: not gated.processes())
    before = copies(gated)
    complete(gated, **gate.variables)
    assert_kept(before, gated)
    assert set(count(gated).values()) == {1}


def test_a_kernel_that_is_deleted_in_the_middle_of_a_run(gated: Checkout, gate: Gate, tmp_path: Path) -> None:
    kernel = gated.folder / "kernels" / "gated.py"
    source = kernel.read_text()
    gate.close(33)
    run = gated.start(tmp_path / "output", *TARGETS, **gate.variables)
    until(gate.reached.exists)
    kernel.unlink()
    gate.open()
    assert run.wait(timeout=60) != 0
    assert re.search(r"Missing files.*\n.*/kernels/gated.py", (tmp_path / "output").read_text())
    before = copies(gated)
    assert set(count(gated)) <= {"correctness/attention/gated/32", "correctness/attention/gated/33"}

    refused = gated.snakemake(*TARGETS, **gate.variables)
    assert refused.returncode != 0
    assert 'config: implementations.gated.kernel = "gated": ' in refused.stdout
    kernel.write_text(source)
    complete(gated, **gate.variables)
    assert_kept(before, gated)
