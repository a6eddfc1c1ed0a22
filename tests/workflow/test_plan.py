"""From a configuration to the specs of its jobs."""

from pathlib import Path

import pytest

from harness.stopwatch import TimingSettings
from harness.tuning import TuningSettings
from workflow.config import load_config
from workflow.plan import CORRECTNESS, MEMORY, ROOFLINE, TIMING, TUNING, Plan

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
    assert asked == {CORRECTNESS: None, TUNING: 1500, TIMING: 1500, MEMORY: None, ROOFLINE: 1500}


@pytest.mark.parametrize(("device", "mhz"), [("cuda", None), ("cpu", 1500), ("cpu", None)])
def test_otherwise_no_spec_says_anything_of_the_clock(device, mhz):
    assert specs(device, lock_sm_clock_mhz=mhz) == specs(device)
    assert not any("lock_sm_clock_mhz" in str(spec) for spec in specs(device).values())


def test_the_settings_of_a_spec_are_those_of_its_stopwatch():
    of = specs("cuda", lock_sm_clock_mhz=1500)
    TimingSettings(**of[TIMING]["timing"])
    TuningSettings(**of[TUNING]["tuning"])


def plan_of(device="cpu", **changes):
    sweep = {"batch": 1, "heads": 2, "head_dim": 64, "causal": False, "dtype": "fp16"}
    config = {
        "implementations": {
            "triton": {"kernel": "triton_flash"},
            "narrow": {"kernel": "triton_flash", "options": {"tile_q": 64}},
            "again": {"kernel": "triton_flash"},
        },
        "sweeps": {"tiny": {**sweep, "seq_lens": {"cuda": [64, 128], "cpu": [64, 128]}}},
        **changes,
    }
    return Plan(load_config(config, ROOT / "kernels"), device, "somewhere", ROOT)


def test_two_names_of_one_thing_are_checked_and_tuned_once_and_timed_twice():
    plan = plan_of("cuda")
    assert [plan.twin_of(name) for name in ("triton", "narrow", "again")] == ["triton", "narrow", "triton"]
    names = {
        phase: {job.implementation for job in plan.jobs() if job.phase == phase}
        for phase in (CORRECTNESS, TIMING)
    }
    assert names == {CORRECTNESS: {"triton", "narrow"}, TIMING: {"triton", "narrow", "again"}}
    tuned = [job.implementation for job in plan.jobs() if job.phase == TUNING and job.seq_len == 64]
    assert len(tuned) == 2


def test_the_machine_is_measured_once_where_something_is_timed():
    assert [job.path for job in plan_of().jobs() if job.phase == ROOFLINE] == [
        "results/somewhere/roofline.json"
    ]
    sweeps = plan_of().config["sweeps"]
    only_memory = {"sweeps": {"tiny": {**sweeps["tiny"], "measure": ["memory"]}}}
    assert not [job for job in plan_of(**only_memory).jobs() if job.phase == ROOFLINE]


def test_a_second_timer_at_one_length_changes_the_specs_of_that_length_only():
    before, after = (
        {job.path: job.spec for job in plan_of("cuda", timing={"second_timer_seq_lens": lengths}).jobs()}
        for lengths in ([], [128])
    )
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {path for path in before if "/timing/" in path and path.endswith("/128.json")}


def test_each_device_has_its_number_of_processes():
    processes = {"processes": {"cuda": 7, "cpu": 2}}
    assert specs("cuda", **processes)[TIMING]["processes"] == 7
    assert specs("cpu", **processes)[TIMING]["processes"] == 2


def test_tokens_divided_by_the_length_are_the_batch_and_one_at_least():
    sweep = {"tokens": 1024, "heads": 2, "head_dim": 64, "causal": False, "dtype": "fp16"}
    lengths = [128, 1000, 1024, 4096]
    plan = plan_of(sweeps={"tiny": {**sweep, "seq_lens": {"cpu": lengths}}})
    jobs = [job for job in plan.jobs() if job.phase == TIMING and job.implementation == "triton"]
    batches = {job.spec["problem"]["seq_len_q"]: job.spec["problem"]["batch"] for job in jobs}
    assert batches == {128: 8, 1000: 1, 1024: 1, 4096: 1}
