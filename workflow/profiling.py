"""The jobs of the two profiles, which are no part of the run: what was compiled, and what counters say.

The static profile has a job for each sweep, kernel and target; the dynamic one, on a GPU, for each row of
the benchmark table at the lengths that the configuration chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.digest import defines_function, source_digest
from harness.record import spec_digest
from workflow.plan import MEMORY, ROOFLINE, TIMING, Job, Plan
from workflow.tables import load

STATIC_PROFILE = "static_profile"
PROFILE = "profile"
PROFILE_SCRIPTS = {
    STATIC_PROFILE: "workflow/scripts/profile_statically.py",
    PROFILE: "workflow/scripts/read_counters.py",
}


def profiled_kernels(plan: Plan, sweep: str) -> Iterator[str]:
    """The kernels of a sweep that say what to compile, each with its options; by what tuning calls them."""
    names = dict.fromkeys(plan.tuned_name(name) for name in plan.implementations(sweep))
    for name in names:
        source = plan.root / "kernels" / f"{kernel_of(plan, sweep, name)}.py"
        if defines_function(source, "compile_units"):
            yield name


def first_of(plan: Plan, sweep: str, tuned_name: str) -> str:
    """The first implementation of a sweep that is this kernel with these options."""
    return next(name for name in plan.implementations(sweep) if plan.tuned_name(name) == tuned_name)


def kernel_of(plan: Plan, sweep: str, tuned_name: str) -> str:
    """The kernel that is compiled under this name in a sweep."""
    kernel: str = plan.config["implementations"][first_of(plan, sweep, tuned_name)]["kernel"]
    return kernel


def static_jobs(plan: Plan) -> list[Job]:
    """Every job of the static profile."""
    return [
        static_job(plan, sweep, kernel, target)
        for sweep in plan.config["sweeps"]
        for kernel in profiled_kernels(plan, sweep)
        for target in plan.config[STATIC_PROFILE]["targets"]
    ]


def static_job(plan: Plan, sweep: str, tuned_name: str, target: str) -> Job:
    """Compile a sweep's problem for a target, at the sweep's greatest length on a GPU.

    Lengths differ by nothing but whether a tile divides them; targets are GPUs, whatever the run is on.
    """
    settings = plan.config[STATIC_PROFILE]
    lengths = plan.config["sweeps"][sweep]["seq_lens"]
    seq_len = max(lengths["cuda"] or lengths["cpu"])
    name = first_of(plan, sweep, tuned_name)
    spec = _spec(plan, STATIC_PROFILE, name, plan.sweep_job(MEMORY, sweep, name, seq_len).spec["problem"])
    del spec["implementation"]["name"]
    spec |= {
        "target": target,
        "candidates": settings["candidates"],
        "options": settings["options"].get(spec["implementation"]["kernel"], []),
    }
    path = f"{plan.folder}/{STATIC_PROFILE}/{sweep}/{tuned_name}/{target}.json"
    return Job(STATIC_PROFILE, sweep, tuned_name, seq_len, path, spec)


def counter_jobs(plan: Plan) -> list[Job]:
    """Every job of the dynamic profile; none without a GPU, which has the counters."""
    if plan.device != "cuda":
        return []
    wanted = plan.config[PROFILE]["seq_lens"]
    return [
        counter_job(plan, sweep, implementation, seq_len)
        for sweep, seq_len, implementation in plan.cells()
        if seq_len in wanted and plan.twin_of(implementation) == implementation
    ]


def counter_job(plan: Plan, sweep: str, implementation: str, seq_len: int) -> Job:
    """Read the GPU's counters over one call of an implementation."""
    problem = plan.sweep_job(MEMORY, sweep, implementation, seq_len).spec["problem"]
    spec = _spec(plan, PROFILE, implementation, problem)
    path = f"{plan.folder}/{PROFILE}/{sweep}/{implementation}/{seq_len}.json"
    return Job(PROFILE, sweep, implementation, seq_len, path, spec)


def up_to_date(jobs: list[Job], root: Path, to_run: set[Any]) -> list[str]:
    """The paths of the jobs' records; those that are stale, unreadable or not there are put among `to_run`.

    Snakemake does not miss a record whose page is there, but who shows the page reads the record.
    """
    for job in jobs:
        record = load(job, root)
        # Where nothing can be read, `load` makes a record that says so and has no beginning.
        if record.spec != job.spec or not record.started_at:
            to_run.add(job.path)
    return [job.path for job in jobs]


def seen_on_disk(plan: Plan, root: Path) -> str:
    """A digest of when the records were made that the profile's page tells of, where they are there."""
    jobs = [job for job in plan.jobs() if job.phase in (TIMING, MEMORY, ROOFLINE)]
    return spec_digest({job.path: load(job, root).started_at for job in jobs})


def _spec(plan: Plan, phase: str, implementation: str, problem: dict[str, Any]) -> dict[str, Any]:
    settings = plan.config["implementations"][implementation]
    return {
        "phase": phase,
        "device": plan.device,
        "environment": plan.environment,
        "implementation": {
            "name": implementation,
            "kernel": settings["kernel"],
            "options": settings["options"],
        },
        "source": {
            "kernel": plan.kernel_digests[settings["kernel"]],
            "harness": source_digest(plan.root / PROFILE_SCRIPTS[phase], plan.root),
        },
        "problem": problem,
    }
