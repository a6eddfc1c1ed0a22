"""From a configuration to the specs of its jobs."""

from pathlib import Path

import pytest

from harness.stopwatch import TimingSettings
from harness.tuning import TuningSettings
from workflow.config import load_config
from workflow.plan import CORRECTNESS, MEMORY, TIMING, TUNING, Plan

ROOT = Path(__file__).resolve().parents[2]


def specs(device, **timing):
    """The spec of one job of each phase."""
    sweep = {"batch": 1, "heads": 2, "head_dim": 64, "causal": False, "dtype": "fp16"}
    config = {
        "implementations": {"triton": {"kernel": "triton_flash"}},
        "timing": timing,
        "sweeps": {"tiny": {**sweep, "seq_lens": {"cuda": [64], "cpu": [64]}}},
    }
    plan = Plan(load_config(config, ROOT / "kernels"), device, "somewhere", ROOT)
    return {job.phase: job.spec for job in plan.jobs()}


def test_a_locked_clock_is_in_the_specs_of_what_is_timed_on_a_gpu():
    asked = {
        phase: spec.get("lock_sm_clock_mhz") for phase, spec in specs("cuda", lock_sm_clock_mhz=1500).items()
    }
    assert asked == {CORRECTNESS: None, TUNING: 1500, TIMING: 1500, MEMORY: None}


@pytest.mark.parametrize(("device", "mhz"), [("cuda", None), ("cpu", 1500), ("cpu", None)])
def test_otherwise_no_spec_says_anything_of_the_clock(device, mhz):
    assert specs(device, lock_sm_clock_mhz=mhz) == specs(device)
    assert not any("lock_sm_clock_mhz" in str(spec) for spec in specs(device).values())


def test_the_settings_of_a_spec_are_those_of_its_stopwatch():
    of = specs("cuda", lock_sm_clock_mhz=1500)
    TimingSettings(**of[TIMING]["timing"])
    TuningSettings(**of[TUNING]["tuning"])
