"""Killed, interrupted, or run twice at once: the same command goes on, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.record import read_record
from tests.workflow.checkout import Checkout, small_config

PATIENCE = 120.0  # seconds to wait for what should come soon
TARGET = "report/benchmark.md"
JOBS = {
    "roofline",
    "correctness/attention/right/33",
    "correctness/attention/gated/33",
    *(f"{phase}/tiny/{name}/32" for phase in ("timing", "memory") for name in ("right", "gated")),
}


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)


class Gate:
    """Where the kernel `gated` waits: at calls of a seq_len, while it is closed for that one."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "gate"
        self.reached = folder / "gate.reached"
        self.variables = {"GATE": str(self.file)}

    def close(self, seq_len: int) -> None:
        self.reached.unlink(missing_ok=True)
        self.file.write_text(str(seq_len))

    def open(self) -> None:
        self.file.unlink(missing_ok=True)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    checkout = Checkout.make(tmp_path / "checkout", "right", "gated")
    config = small_config(right="right", gated="gated")
    config["time_limit_s"] = 600  # a job that waits at the gate is not to end by itself
    checkout.configure(config)
    yield checkout
    for pid in checkout.processes():
        os.kill(pid, signal.SIGKILL)


@contextmanager
def every_record_readable(checkout: Checkout) -> Iterator[None]:
    """Read all records over and over meanwhile; each must be whole, at any moment."""
    faults: list[str] = []
    reads = 0
    stop = threading.Event()

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            for path in (checkout.folder / "results").rglob("[!.]*.json"):
                try:
                    text = path.read_text()
                except FileNotFoundError:  # Snakemake has just deleted it, to measure again
                    continue
                try:
                    json.loads(text)
                    reads += 1
                except ValueError as fault:
                    faults.append(f"{path}: {fault}")
            time.sleep(0.002)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()
    assert faults == []
    assert reads > 0


def assert_complete(checkout: Checkout) -> None:
    """The table is whole, each record valid and current, and none was measured twice."""
    rows = checkout.csv("benchmark")
    assert sorted(rows["implementation"]) == ["gated", "right"]
    assert set(rows["latency_status"]) == set(rows["memory_status"]) == {"ok"}
    assert not rows["marks"].fillna("").str.contains("stale|grid").any()
    for phase in ("correctness", "timing", "memory"):
        for path in (checkout.folder / "results").glob(f"cpu*/{phase}/**/*.json"):
            assert read_record(path).status == "ok"
    assert Counter({job: len(copies) for job, copies in checkout.history().items()}) == Counter(JOBS)
    assert checkout.planned(TARGET) == {}


def test_killed_at_any_moment_the_same_command_goes_on(
    checkout: Checkout, gate: Gate, tmp_path: Path
) -> None:
    output = tmp_path / "output"

    def run() -> subprocess.Popen[str]:
        return checkout.start(output, TARGET, **gate.variables)

    def kill(snakemake: subprocess.Popen[str]) -> None:
        """SIGKILL to Snakemake alone: whatever it started is on its own."""
        snakemake.kill()
        snakemake.wait()
        until(lambda: not checkout.processes())

    with every_record_readable(checkout):
        gate.close(33)
        killed = run()
        until(gate.reached.exists)
        kill(killed)  # in a check
        assert "correctness/attention/gated/33" not in checkout.history()

        gate.close(32)
        killed = run()
        until(gate.reached.exists)
        kill(killed)  # in a timing
        done = set(checkout.history())
        assert {"correctness/attention/right/33", "correctness/attention/gated/33"} <= done
        assert not {"timing/tiny/gated/32", "memory/tiny/gated/32"} & done

        gate.open()
        killed = run()
        until(lambda: "gather the records" in output.read_text())
        kill(killed)  # while the tables are made

        last = run()
        assert last.wait(timeout=PATIENCE) == 0, output.read_text()
    assert "--unlock" not in output.read_text()
    assert_complete(checkout)
    assert checkout.processes() == {}


def test_interrupted_it_ends_everything_and_the_same_command_goes_on(
    checkout: Checkout, gate: Gate, tmp_path: Path
) -> None:
    """Ctrl-C: the signal goes to every process of the terminal's foreground group."""
    gate.close(32)
    run = checkout.start(tmp_path / "output", TARGET, **gate.variables)
    until(gate.reached.exists)
    assert len(checkout.processes()) > 3  # Snakemake, the script, the server, the job, its child
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(timeout=PATIENCE) != 0
    until(lambda: not checkout.processes())

    gate.open()
    result = checkout.snakemake(TARGET, **gate.variables)
    assert result.returncode == 0, result.stdout
    assert_complete(checkout)


def test_two_runs_in_one_checkout_take_turns_and_a_look_waits_for_nobody(
    checkout: Checkout, gate: Gate, tmp_path: Path
) -> None:
    gate.close(33)
    outputs = [tmp_path / "first", tmp_path / "second"]
    first = checkout.start(outputs[0], TARGET, **gate.variables)
    with every_record_readable(checkout):
        until(gate.reached.exists)
        second = checkout.start(outputs[1], TARGET, **gate.variables)
        until(lambda: "waiting: another run is going on in this checkout" in outputs[1].read_text())

        for look in (["-n"], ["-np"], ["--lint"], ["--rulegraph"], ["--summary"]):
            shown = subprocess.run(
                checkout.command(*look, TARGET),
                cwd=checkout.folder,
                env=checkout.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE,
            )
            assert "waiting" not in shown.stdout
        assert first.poll() is None
        assert second.poll() is None

        gate.open()
        assert first.wait(timeout=PATIENCE) == 0, outputs[0].read_text()
        assert second.wait(timeout=PATIENCE) == 0, outputs[1].read_text()
    assert "waiting" not in outputs[0].read_text()
    assert "Nothing to be done" in outputs[1].read_text()
    assert_complete(checkout)
