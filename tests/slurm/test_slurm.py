"""The workflow on a real Slurm of one node: it runs there, and what goes wrong stops nothing for good."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.environment import environment_key
from tests.slurm.cluster import Cluster, NoCluster, install, plugin_path
from tests.workflow.checkout import Checkout, small_config

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(420)]

RUN_LIMIT_S = 180.0


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What makes Snakemake find its plugin for Slurm."""
    try:
        path = plugin_path(tmp_path_factory.mktemp("plugin"))
    except NoCluster as why:
        pytest.skip(str(why))
    return {} if path is None else {"PYTHONPATH": path}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    try:
        install()
    except NoCluster as why:
        pytest.skip(str(why))
    with Cluster() as cluster:
        yield cluster
    assert cluster.processes() == {}


@dataclass
class Submitting:
    """A checkout on a host that submits to the cluster, and measures nothing itself."""

    cluster: Cluster
    checkout: Checkout
    variables: dict[str, str]
    key: str
    runs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, output: Path, *targets: str, device: str = "cpu", key: str | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a run with the profile; what is set here fits this cluster, and its short jobs."""
        stated = [f"environment={key or self.key}"] if key != "" else []
        command = [
            *(sys.executable, str(Path(__file__).parent / "attentive_snakemake.py"), *targets),
            *("--workflow-profile", "profiles/slurm"),
            *("--config", f"device={device}", *stated),
            *("--default-resources", "runtime=5", "mem_mb=1000"),
            *("--latency-wait", "10"),
        ]
        with output.open("w") as stream:
            run = subprocess.Popen(
                # One CPU, so that this host's own key would be another one than the node's.
                ["taskset", "--cpu-list", "0", *command],
                cwd=self.checkout.folder,
                env=self.checkout.environment(**self.variables),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.runs.append(run)
        return run

    def run(self, output: Path, *targets: str, **options: str) -> tuple[int, str]:
        """The exit code of a run, and what it printed."""
        return self.ended(self.start(output, *targets, **options), output)

    def ended(self, run: subprocess.Popen[bytes], output: Path) -> tuple[int, str]:
        try:
            code = run.wait(RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end after {RUN_LIMIT_S:g} s\n{output.read_text()}\n{self.cluster.logs()}")
        finally:
            run.kill()
        return code, output.read_text()

    def end(self) -> None:
        """Kill what a test that failed has left running."""
        for run in self.runs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()

    def measured(self) -> dict[str, int]:
        """How often the memory of each implementation was measured, records of failed jobs included."""
        return {
            job.split("/")[2]: len(copies)
            for job, copies in self.checkout.history().items()
            if job.startswith("memory/")
        }


@pytest.fixture(scope="module")
def host(
    cluster: Cluster, plugin: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Submitting]:
    folder = tmp_path_factory.mktemp("submitting")
    checkout = Checkout.make(folder / "checkout", "right", "killing", "gated")
    checkout.configure(small_config(right="right"))
    faults = {"GATE": str(folder / "gate"), "WORKS_NOW": str(folder / "works")}
    host = Submitting(cluster, checkout, {**cluster.variables, **plugin, **faults}, environment_key("cpu"))
    yield host
    host.end()


def test_a_run_goes_through_from_its_first_job_to_its_verdict(host: Submitting, tmp_path: Path) -> None:
    code, said = host.run(tmp_path / "output")
    assert code == 0, said
    rows = host.checkout.csv("benchmark")
    assert list(rows["latency_status"]) == ["ok"]
    assert list(rows["memory_status"]) == ["ok"]
    assert set(rows["environment"]) == {host.key}
    assert set(host.checkout.csv("correctness")["status"]) == {"ok"}
    # What measures was submitted, what only reads records was not; the last word is said here.
    assert len(set(re.findall(r"Job (\d+) has been submitted with SLURM jobid", said))) == 5
    assert "| 32        | right  |" in said


def test_a_gpu_is_asked_for_by_a_host_that_has_none_and_a_node_without_one_says_so(
    host: Submitting, tmp_path: Path
) -> None:
    """The key is stated and not looked up; the job holds it against what it finds."""
    code, said = host.run(tmp_path / "output", "memory", device="cuda", key="nvidia-none_driver0")
    assert code != 0
    assert re.search(r"device = cuda: NVML finds no NVIDIA GPU on this machine|this machine is nvidia-", said)
    (job,) = re.findall(r"has been submitted with SLURM jobid (\d+)", said)
    assert "TresPerJob=gres:gpu:1" in host.cluster.command("scontrol", "show", "job", job)
    assert not (host.checkout.folder / "results" / "nvidia-none_driver0" / "memory").exists()


def test_without_a_stated_environment_nothing_is_submitted(host: Submitting, tmp_path: Path) -> None:
    code, said = host.run(tmp_path / "output", "memory", key="")
    assert code != 0
    assert said.count("say which environment theirs is") == 1
    assert "has been submitted" not in said
    assert "Traceback" not in said


def test_a_job_that_fails_is_cancelled_or_loses_its_node_is_done_again_by_the_same_command(
    host: Submitting, tmp_path: Path
) -> None:
    cluster, gate = host.cluster, Path(host.variables["GATE"])
    host.checkout.configure(small_config(right="right", killing="killing", gated="gated"))
    reached = Path(f"{gate}.reached")
    gate.write_text("32")
    # `right` may have been measured by another test already.
    before = {"right": 1, **host.measured()}

    # One job fails, and one is cancelled while it measures; the others are done.
    run = host.start(tmp_path / "first", "memory")
    cluster.until(reached.exists)
    (cancelled,) = cluster.jobs("running")
    cluster.command("scancel", cancelled)
    code, said = host.ended(run, tmp_path / "first")
    assert code != 0
    assert f"SLURM-job '{cancelled}' failed, SLURM status is: 'CANCELLED'" in said
    assert len(re.findall(r"SLURM-job '\d+' failed, SLURM status is: 'FAILED'", said)) == 1
    assert said.count("Error in rule measure_memory") == 2
    assert host.measured() == before
    assert cluster.jobs("running,pending,completing") == []

    # The fault is removed; the node goes down under the other one, and comes back.
    Path(host.variables["WORKS_NOW"]).touch()
    reached.unlink()
    run = host.start(tmp_path / "second", "memory")
    cluster.until(reached.exists)
    (lost,) = cluster.jobs("running")
    cluster.take_node_down()
    cluster.until(lambda: lost in cluster.jobs("node_fail"))
    cluster.start_node()
    code, said = host.ended(run, tmp_path / "second")
    assert code != 0
    assert f"SLURM-job '{lost}' failed due to a node failure, SLURM status is: 'NODE_FAIL'" in said
    assert host.measured() == {**before, "killing": 1}

    gate.unlink()
    code, said = host.run(tmp_path / "third", "memory")
    assert code == 0, said
    assert host.measured() == {**before, "killing": 1, "gated": 1}
    statuses = {name: record["status"] for name, record in host.checkout.records("memory").items()}
    assert statuses == {f"tiny/{name}/32": "ok" for name in ("right", "killing", "gated")}
