"""A measuring job: from its spec to its record."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from harness.clocks import Clock
from harness.device import Device, open_device, pin_to_gpu
from harness.digest import source_digest
from harness.environment import (
    EnvironmentFault,
    Gpu,
    describe,
    environment_key,
    gpus_of,
    use_every_cpu_thread,
)
from harness.lock import LockFault, any_device_lock, device_lock
from harness.monitor import GpuMonitor, Monitor, NoMonitor
from harness.neighbours import Neighbours
from harness.plugin import Kernel, interpret_triton, load_kernel
from harness.record import ERROR, OK, Record
from harness.supervisor import Outcome, Verdict, Work, supervise, supervise_side_by_side

Task = TypeVar("Task")


@dataclass
class Bench:
    """What a child works with: the opened device, the loaded kernel, and a monitor for the samples."""

    device: Device
    watch: Callable[[], Monitor]
    load: Callable[[], Kernel]

    @cached_property
    def kernel(self) -> Kernel:
        return self.load()


class Supervision:
    """Holds a job's device while its tasks run in supervised children, and makes its record.

    Used in a `with`. A job that is not `timed` shares the CPU with others of its kind; a GPU is never
    shared, and where the spec says `lock_sm_clock_mhz` its clock is locked meanwhile. Of several GPUs that
    are of the spec's environment it takes the first that is free, or waits for the one that `kept_gpu`
    numbers among them, whatever else is free. Waiting for the device is not part of the time limit, which
    holds for each `run`. On a machine without the GPU that the spec asks for every task is an error that
    says so.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        root: Path,
        *,
        time_limit_s: float,
        timed: bool,
        options: dict[str, Any] | None = None,
        kept_gpu: int | None = None,
    ) -> None:
        self._spec = spec
        self._root = root
        self._time_limit_s = time_limit_s
        # A job that measures the machine has no kernel.
        self._options = spec.get("implementation", {}).get("options", {}) if options is None else options
        self._timed = timed
        self._lock = ExitStack()
        self._kept_gpu = kept_gpu
        self._gpu: Gpu | None = None
        self._clock: Clock | None = None
        self._fault: str | None = None
        self._account: dict[str, Any] = {}
        self._began = 0.0
        self._started_at = datetime.now(UTC)

    def __enter__(self) -> Supervision:
        if self._spec["device"] == "cuda":
            try:
                gpus = gpus_of(self._spec["environment"])
            except EnvironmentFault as fault:
                self._fault = str(fault)
                return self
            self._gpu = self._take(gpus)
            clock = Clock(self._gpu.card_uuid, self._spec.get("lock_sm_clock_mhz"))
            self._clock = self._lock.enter_context(clock)
        else:
            try:
                self._lock.enter_context(device_lock("cpu", shared=not self._timed, waiting=_say))
            except LockFault as fault:
                sys.exit(str(fault))
        self._began, self._started_at = time.monotonic(), datetime.now(UTC)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def _take(self, gpus: Sequence[Gpu]) -> Gpu:
        """Hold the lock of the card that one of these is on, or is a slice of, and give that one."""
        if self._kept_gpu is not None:
            gpus = [gpus[self._kept_gpu % len(gpus)]]
        # Slices of one card share its clock and its power, and so its lock.
        cards = list(dict.fromkeys(gpu.card_uuid for gpu in gpus))
        try:
            card = self._lock.enter_context(any_device_lock(cards, waiting=_say))
        except LockFault as fault:
            sys.exit(str(fault))
        return next(gpu for gpu in gpus if gpu.card_uuid == card)

    def run(
        self, tasks: Sequence[Task], work: Work[Bench, Task], *, fresh_child_each: bool = False
    ) -> list[Outcome]:
        """Do the tasks one after the other; an outcome for each."""
        if self._fault is not None:
            return [Outcome(ERROR, self._fault, {}, "start")] * len(tasks)
        supervised = supervise(
            tasks, self._start, work, time_limit_s=self._time_limit_s, fresh_child_each=fresh_child_each
        )
        self._account = self._account or supervised.account
        for outcome in supervised.outcomes:
            steps = ", ".join(f"{step} {seconds:.2f}" for step, seconds in outcome.step_seconds.items())
            _say(f"{outcome.status}; seconds: {steps}")
        return supervised.outcomes

    def run_without_device(self, tasks: Sequence[Task], work: Work[Kernel, Task]) -> list[Outcome]:
        """Do the tasks side by side, a process each, as many as there are CPUs; an outcome for each.

        The processes do not open the device: for compiling.
        """
        if self._fault is not None:
            return [Outcome(ERROR, self._fault, {}, "start")] * len(tasks)
        at_most = len(os.sched_getaffinity(0))
        return supervise_side_by_side(
            tasks, self._start_without_device, work, time_limit_s=self._time_limit_s, at_most=at_most
        )

    def record(self, **fields: Any) -> Record:
        """The job's record: these fields, what there is to say of the clock, circumstances and duration."""
        if self._clock is not None:
            values, marks = self._clock.account(fields.get("values", {}))
            fields["values"] = {**fields.get("values", {}), **values}
            if fields["status"] == OK:
                fields["marks"] = [*fields.get("marks", []), *marks]
        return Record(
            phase=self._spec["phase"],
            spec=self._spec,
            circumstances=self._account,
            started_at=self._started_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            duration_s=round(time.monotonic() - self._began, 3) if self._began else 0.0,
            **fields,
        )

    def _load_kernel(self) -> Kernel:
        name = self._spec["implementation"]["kernel"]
        kernel = load_kernel(name, self._options)
        # Only now: an edit between the two would be measured under the name of the code before it.
        planned = self._spec.get("source", {}).get("kernel")
        if planned not in (None, source_digest(self._root / "kernels" / f"{name}.py", self._root)):
            raise Verdict(
                ERROR,
                f"kernels/{name}.py, or what it imports, was changed after this job was planned:"
                " run the same command again",
            )
        return kernel

    def _start_without_device(self) -> tuple[Kernel, dict[str, Any]]:
        if self._gpu is not None:
            pin_to_gpu(self._gpu.uuid)  # for what it may start
        return self._load_kernel(), {}

    def _start(self) -> tuple[Bench, dict[str, Any]]:
        spec, gpu = self._spec, self._gpu
        if gpu is not None:
            pin_to_gpu(gpu.uuid)
        found = environment_key(spec["device"])
        if found != spec["environment"]:
            raise Verdict(ERROR, f"the job is for environment {spec['environment']}, this machine is {found}")
        watch: Callable[[], Monitor] = NoMonitor
        if gpu is None:
            interpret_triton()
            use_every_cpu_thread()
            device = open_device("cpu")
        else:
            card_uuid = gpu.card_uuid
            neighbours = Neighbours(gpu.uuid)
            device = open_device("cuda")
            device.synchronize()  # NVML lists a process from when it has a CUDA context
            neighbours.opened()

            def watch() -> Monitor:
                return GpuMonitor(card_uuid, neighbours)

        bench = Bench(device, watch, self._load_kernel)
        if "implementation" in spec:
            assert bench.kernel  # loaded here: a fault of its source is one of the start
        return bench, describe(spec["device"], self._root)


def _say(sentence: str) -> None:
    try:
        print(sentence, file=sys.stderr, flush=True)
    except OSError:  # nobody reads it any more, or the disk is full: what is measured counts all the same
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, it stays open as stderr does
