"""A measuring job: from its spec to its record."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from harness.device import Device, open_device, pin_to_gpu
from harness.environment import EnvironmentFault, describe, environment_key, require_gpu
from harness.lock import device_lock
from harness.monitor import GpuMonitor, Monitor, NoMonitor
from harness.plugin import Kernel, interpret_triton, load_kernel
from harness.record import ERROR, Record
from harness.supervisor import Outcome, Supervised, Verdict, Work, supervise

Task = TypeVar("Task")


@dataclass(frozen=True)
class Bench:
    """What a child works with: the opened device, the loaded kernel, and a monitor for the samples."""

    device: Device
    kernel: Kernel
    watch: Callable[[], Monitor]


def run_job(
    spec: dict[str, Any],
    root: Path,
    tasks: Sequence[Task],
    work: Work[Bench, Task],
    finish: Callable[[list[Outcome]], dict[str, Any]],
    *,
    time_limit_s: float,
    timed: bool,
    fresh_child_each: bool = False,
) -> Record:
    """Run a job's tasks under supervision, holding the device's lock, and make the record.

    `finish` turns the outcomes into the record's fields. A job that is not `timed` shares the CPU with
    others of its kind; a GPU is never shared. Waiting for the lock is not part of the time limit.
    """

    def start() -> tuple[Bench, dict[str, Any]]:
        return _start(spec, root, uuid)

    try:
        uuid = require_gpu().uuid if spec["device"] == "cuda" else None
    except EnvironmentFault as fault:
        supervised = Supervised([Outcome(ERROR, str(fault), {}, "start")] * len(tasks), {})
        return _record(spec, supervised, finish, datetime.now(UTC), 0.0)
    with device_lock(uuid or "cpu", shared=not timed and uuid is None, waiting=_say):
        began, started_at = time.monotonic(), datetime.now(UTC)
        supervised = supervise(
            tasks, start, work, time_limit_s=time_limit_s, fresh_child_each=fresh_child_each
        )
        return _record(spec, supervised, finish, started_at, time.monotonic() - began)


def _start(spec: dict[str, Any], root: Path, uuid: str | None) -> tuple[Bench, dict[str, Any]]:
    found = environment_key(spec["device"])
    if found != spec["environment"]:
        raise Verdict(ERROR, f"the job is for environment {spec['environment']}, this machine is {found}")
    if uuid is None:
        interpret_triton()
        # Snakemake limits OMP_NUM_THREADS to a rule's threads; a job by hand must measure the same.
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    else:
        pin_to_gpu(uuid)
    device = open_device(spec["device"])
    implementation = spec["implementation"]
    kernel = load_kernel(implementation["kernel"], implementation["options"])
    watch: Callable[[], Monitor] = NoMonitor if uuid is None else lambda: GpuMonitor(uuid)
    return Bench(device, kernel, watch), describe(spec["device"], root)


def _record(
    spec: dict[str, Any],
    supervised: Supervised,
    finish: Callable[[list[Outcome]], dict[str, Any]],
    started_at: datetime,
    duration_s: float,
) -> Record:
    return Record(
        phase=spec["phase"],
        spec=spec,
        circumstances=supervised.account,
        started_at=started_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        duration_s=round(duration_s, 3),
        **finish(supervised.outcomes),
    )


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
