"""The project's own scripts in a checkout of their own, run as Snakemake runs them, but one at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.environment import environment_key
from harness.forkserver import ADDRESS_VARIABLE, ForkServer
from harness.record import Record, canonical_json, read_record
from tests.workflow.checkout import Checkout, small_config
from workflow.config import load_config
from workflow.plan import SCRIPTS, TIMING, Job, Plan

KERNELS = Path(__file__).parent / "kernels"
PATIENCE_S = 60.0


def until(condition: Callable[[], Any]) -> Any:
    """Wait until the condition holds; its value."""
    give_up = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.005)
    return value


@dataclass(frozen=True)
class Ended:
    """How a job's process ended, what it printed, and the record that is there afterwards."""

    code: int
    said: str
    record: Record | None


class Bench:
    """Jobs of the kernels `faulty` and `right`, and all that they leave."""

    def __init__(self, folder: Path, *, server: bool) -> None:
        self.checkout = Checkout.make(folder, "right")
        self.folder = folder
        shutil.copy(KERNELS / "faulty.py", folder / "kernels")
        config = small_config(right="right", faulty="faulty")
        config.pop("baseline", None)  # nothing is compared here
        config["timing"]["warm_up_max_s"] = config["timing"]["warm_up_min_s"]
        self.config = load_config(config, folder / "kernels")
        self.environment = environment_key("cpu")
        self.plan = Plan(self.config, "cpu", self.environment, folder)
        self.server = ForkServer(folder) if server else None
        self.address: str | None = None
        if self.server is not None:
            self.server.start()
            self.address = os.environ.pop(ADDRESS_VARIABLE)

    def job(self, phase: str = TIMING, implementation: str = "faulty") -> Job:
        return next(
            job for job in self.plan.jobs() if (job.phase, job.implementation) == (phase, implementation)
        )

    def path(self, job: Job) -> Path:
        return self.folder / job.path

    def start(
        self, job: Job, *, time_limit_s: float = 30.0, stdout: Any = subprocess.PIPE, **variables: str
    ) -> subprocess.Popen[str]:
        server = {} if self.address is None else {ADDRESS_VARIABLE: self.address}
        return subprocess.Popen(
            [
                *(sys.executable, str(self.folder / SCRIPTS[job.phase])),
                *("--spec", canonical_json(job.spec), "--output", job.path),
                *("--time-limit-s", str(time_limit_s)),
            ],
            cwd=self.folder,
            env={**self.checkout.environment(), **server, **variables},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE if stdout is not subprocess.PIPE else subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def run(self, job: Job, **options: Any) -> Ended:
        process = self.start(job, **options)
        out, err = process.communicate(timeout=PATIENCE_S)
        return self.ended(job, process.returncode, (out or "") + (err or ""))

    def ended(self, job: Job, code: int, said: str) -> Ended:
        return Ended(code, said, read_record(self.path(job)) if self.path(job).is_file() else None)

    def kept(self) -> dict[str, bytes]:
        """Every record and every copy in the history, byte for byte."""
        files = (self.folder / "results").rglob("[!.]*.json")
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files if path.is_file()}

    def end(self) -> None:
        if self.server is not None:
            self.server.stop()


def assert_kept(before: dict[str, bytes], after: dict[str, bytes], job: Job | None = None) -> None:
    """Nothing of what was there is lost or changed, but for the record of a job that was done again."""
    changed = {name for name, content in before.items() if after.get(name) != content}
    assert changed <= ({job.path} if job is not None else set())


def assert_measured(ended: Ended) -> None:
    """The job did what it is for."""
    reason = None if ended.record is None else (ended.record.status, ended.record.reason)
    assert ended.code == 0, (ended.said, reason)
    assert ended.record is not None
    assert ended.record.status == "ok", reason
    assert ended.record.values["latency_ms"] > 0
    assert ended.record.samples["cold_ms"]


def assert_no_number(record: Record | None) -> None:
    """A record that is not ok, with nothing in it that could be taken for a measurement."""
    assert record is not None
    assert record.status != "ok"
    assert record.samples == {}
    assert not {name for name in record.values if name.endswith(("_ms", "_us", "_cycles", "_second"))}
