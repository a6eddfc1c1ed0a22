"""Where the configuration states the environment, this machine decides nothing, and is found not to be it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.environment import environment_key
from tests.workflow.checkout import Checkout, small_config
from workflow.session import workflow_profile

ELSEWHERE = "cpu-of-another-machine-64-threads"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = Checkout.make(tmp_path_factory.mktemp("elsewhere") / "checkout", "right")
    checkout.configure({**small_config(right="right"), "environment": ELSEWHERE})
    return checkout


def test_jobs_are_planned_for_the_stated_environment_whatever_this_machine_is(elsewhere: Checkout) -> None:
    said = elsewhere.snakemake("-n", "all", "--quiet", "host", CUDA_VISIBLE_DEVICES="").stdout
    assert f"results/{ELSEWHERE}/timing/tiny/right/32.json" in said
    assert environment_key("cpu") not in said
    gpu = ("--config", "device=cuda", "environment=nvidia-h200_driver580.65")
    said = elsewhere.snakemake("-n", "all", "--quiet", "host", *gpu, CUDA_VISIBLE_DEVICES="").stdout
    assert "results/nvidia-h200_driver580.65/timing/tiny/right/128.json" in said
    assert "no-gpu" not in said


def test_another_machine_than_the_stated_one_is_told_so_and_measures_nothing(elsewhere: Checkout) -> None:
    result = elsewhere.snakemake()
    assert result.returncode != 0
    line = f"environment = {ELSEWHERE}: this machine is {environment_key('cpu')}"
    assert result.stdout.count(line) == 1
    assert "Traceback" not in result.stdout
    assert not elsewhere.history()


def test_a_measuring_job_holds_the_stated_key_against_what_it_finds(elsewhere: Checkout) -> None:
    account = elsewhere.folder / "results" / ELSEWHERE / "environment.json"
    account.parent.mkdir(parents=True, exist_ok=True)
    account.write_text(json.dumps({"key": ELSEWHERE}))  # as the right machine wrote it
    elsewhere.snakemake("timing")
    record = elsewhere.records("timing")["tiny/right/32"]
    assert record["status"] == "error"
    assert record["reason"].startswith(
        f"the job is for environment {ELSEWHERE}, this machine is {environment_key('cpu')}"
    )
    assert record["samples"] == {}

    # That account is another machine's: lost, this one does not write it.
    account.unlink()
    result = elsewhere.snakemake("timing")
    assert result.returncode != 0
    assert "this is not the machine that it describes" in result.stdout
    assert f"--key {ELSEWHERE} --output results/{ELSEWHERE}/environment.json" in result.stdout
    assert not account.exists()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["retry_failed"], []),
        (["retry_failed", "--workflow-profile", "profiles/slurm"], ["--workflow-profile", "profiles/slurm"]),
        (["--workflow-profile=profiles/slurm", "-F"], ["--workflow-profile", "profiles/slurm"]),
        (["--no-such-option-of-snakemake"], []),
    ],
)
def test_a_run_within_a_run_has_the_same_profile(arguments: list[str], options: list[str]) -> None:
    assert workflow_profile(arguments) == options


def test_the_slurm_profile_says_what_the_default_profile_says() -> None:
    import yaml

    folder = Path(__file__).resolve().parents[2] / "profiles"
    default, slurm = (
        yaml.safe_load((folder / name / "config.yaml").read_text()) for name in ("default", "slurm")
    )
    assert {key: slurm.get(key) for key in default if key != "cores"} == {
        key: value for key, value in default.items() if key != "cores"
    }
