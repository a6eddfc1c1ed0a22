"""From the configuration to jobs: every measurement of a run, with its spec and its record's path.

The Snakefile takes its jobs from here, and so does the script that reads the records back, so that
a table can tell which records still are what today's configuration and code ask for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.digest import defines_function, source_digest
from harness.problem import ATTENTION, DECODE, WORKLOADS, Problem
from harness.record import spec_digest

CORRECTNESS = "correctness"
TUNING = "tuning"
TIMING = "timing"
MEMORY = "memory"
ROOFLINE = "roofline"
DIAGNOSTIC = "sdpa_diagnostic"
SCRIPTS = {
    CORRECTNESS: "workflow/scripts/check_correctness.py",
    TUNING: "workflow/scripts/tune.py",
    TIMING: "workflow/scripts/measure_timing.py",
    MEMORY: "workflow/scripts/measure_memory.py",
    ROOFLINE: "workflow/scripts/measure_roofline.py",
    DIAGNOSTIC: "workflow/scripts/diagnose_sdpa.py",
}

DIAGNOSTIC_BACKENDS = ("default", "cudnn", "flash", "efficient", "math")
# What a process of the diagnostic does first, and the kernel that it takes (harness/diagnostic.py).
DIAGNOSTIC_PRIMINGS = {"isolated": None, "isolated_again": None, "after_naive": "naive", "after_matmul": None}
WIDE_TOLERANCE = {"absolute": 0.016, "relative": 0.016}


@dataclass(frozen=True)
class Job:
    """One measuring job; `sweep` is None for the correctness grid.

    `implementation` is the implementation's name; for a tuning job, which all implementations of the
    same kernel and options share, it is the name of that pair. The job that measures the machine has
    neither, and no seq_len.
    """

    phase: str
    sweep: str | None
    implementation: str
    seq_len: int | None
    path: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """All jobs of a run: of a checked configuration, on a device, in an environment, from a checkout."""

    config: dict[str, Any]
    device: str
    environment: str
    root: Path

    @property
    def folder(self) -> str:
        return f"results/{self.environment}"

    @property
    def environment_file(self) -> str:
        return f"{self.folder}/environment.json"

    @cached_property
    def kernel_digests(self) -> dict[str, str]:
        """Digest of the source of each kernel that the configuration names."""
        kernels = {implementation["kernel"] for implementation in self.config["implementations"].values()}
        return {name: source_digest(self.root / "kernels" / f"{name}.py", self.root) for name in kernels}

    @cached_property
    def harness_digests(self) -> dict[str, str]:
        """Digest of the code that measures, a phase each."""
        return {phase: source_digest(self.root / script, self.root) for phase, script in SCRIPTS.items()}

    def at_seq_len(self, seq_len: int) -> Plan:
        """The part of this plan that is about one length."""
        config = copy.deepcopy(self.config)
        grid = config["correctness"]
        for part in (grid, grid["decode"], *config["sweeps"].values()):
            part["seq_lens"][self.device] = [n for n in part["seq_lens"][self.device] if n == seq_len]
        return replace(self, config=config)

    def workloads(self) -> list[str]:
        """The workloads that a sweep has: each has its own grid."""
        asked = {sweep["workload"] for sweep in self.config["sweeps"].values()}
        return [workload for workload in WORKLOADS if workload in asked]

    def grid_seq_lens(self, workload: str) -> list[int]:
        grid = self.config["correctness"]
        seq_lens: list[int] = (grid if workload == ATTENTION else grid[workload])["seq_lens"][self.device]
        return seq_lens

    def seq_lens(self, sweep: str) -> list[int]:
        seq_lens: list[int] = self.config["sweeps"][sweep]["seq_lens"][self.device]
        return seq_lens

    def implementations(self, sweep: str) -> list[str]:
        implementations: list[str] = self.config["sweeps"][sweep]["implementations"]
        return implementations

    def cells(self) -> Iterator[tuple[str, int, str]]:
        """(sweep, seq_len, implementation) of every row of the benchmark table, in its order."""
        for sweep in self.config["sweeps"]:
            for seq_len in self.seq_lens(sweep):
                for implementation in self.implementations(sweep):
                    yield sweep, seq_len, implementation

    def measures(self, sweep: str, phase: str) -> bool:
        return phase in self.config["sweeps"][sweep]["measure"]

    def jobs(self) -> list[Job]:
        """Every job of the run that makes a record."""
        jobs = [
            self.grid_job(workload, name, n)
            for workload in self.workloads()
            for name in self.checked()
            if self.answers(name, workload)
            for n in self.grid_seq_lens(workload)
        ]
        tuned = {
            (sweep, self.tuned_name(implementation), seq_len): None
            for sweep, seq_len, implementation in self.cells()
            if self.tunes(implementation)
        }
        jobs += [self.tuning_job(*key) for key in tuned]
        for phase in (TIMING, MEMORY):
            jobs += [
                self.sweep_job(phase, sweep, implementation, seq_len)
                for sweep, seq_len, implementation in self.cells()
                if self.measures(sweep, phase)
            ]
        if any(job.phase == TIMING for job in jobs):
            jobs.append(self.roofline_job())
        return jobs

    def answers(self, implementation: str, workload: str) -> bool:
        """Whether the implementation's kernel has the function of a workload."""
        kernel = self.config["implementations"][implementation]["kernel"]
        return kernel in self._kernels_that_define[workload]

    def tunes(self, implementation: str) -> bool:
        """Whether there is something to tune: on a GPU, for a kernel that offers candidates."""
        kernel = self.config["implementations"][implementation]["kernel"]
        return self.device == "cuda" and kernel in self._kernels_that_define["candidates"]

    @cached_property
    def _kernels_that_define(self) -> dict[str, set[str]]:
        """For each function of the plug-in contract that matters here, the kernels that have it."""
        return {
            function: {
                name
                for name in self.kernel_digests
                if defines_function(self.root / "kernels" / f"{name}.py", function)
            }
            for function in (*WORKLOADS, "candidates")
        }

    def tuned_name(self, implementation: str) -> str:
        """What tuning is shared by: the kernel, and a digest of its options if it has any."""
        settings = self.config["implementations"][implementation]
        options = settings["options"]
        return f"{settings['kernel']}-{spec_digest(options)[:8]}" if options else str(settings["kernel"])

    def winner_file(self, sweep: str, implementation: str, seq_len: int) -> str | None:
        """The file with the launch options that timing and memory take; None where nothing is tuned."""
        if not self.tunes(implementation):
            return None
        return f"{self.folder}/{TUNING}/{sweep}/{self.tuned_name(implementation)}/{seq_len}.winner.json"

    def tuning_job(self, sweep: str, tuned_name: str, seq_len: int) -> Job:
        implementation = next(name for name in self.checked() if self.tuned_name(name) == tuned_name)
        settings = self.config["sweeps"][sweep]
        spec = self._spec(
            TUNING,
            implementation,
            problem=self._problem(sweep, seq_len),
            tuning=self.config["tuning"],
            tolerance=self.config["correctness"]["tolerances"][settings["dtype"]],
            **self._clock_lock(),
        )
        del spec["implementation"]["name"]
        path = f"{self.folder}/{TUNING}/{sweep}/{tuned_name}/{seq_len}.json"
        return Job(TUNING, sweep, tuned_name, seq_len, path, spec)

    def twin_of(self, implementation: str) -> str:
        """The first implementation with the same kernel and options, which may be this one.

        Two names of one thing are an A/A test. They are checked once, under the first name.
        """
        name = self.tuned_name(implementation)
        names: list[str] = list(self.config["implementations"])
        return next(other for other in names if self.tuned_name(other) == name)

    def checked(self) -> list[str]:
        """The implementations that the grid checks: every one but the second names of an A/A test."""
        return [name for name in self.config["implementations"] if self.twin_of(name) == name]

    def grid_job(self, workload: str, implementation: str, seq_len: int) -> Job:
        grid = self.config["correctness"]
        problems = self._grid_problems(seq_len) if workload == ATTENTION else self._decode_problems(seq_len)
        dtypes = {problem["dtype"] for problem in problems}
        tolerances = {dtype: grid["tolerances"][dtype] for dtype in sorted(dtypes)}
        spec = self._spec(CORRECTNESS, implementation, problems=problems, tolerances=tolerances)
        path = f"{self.folder}/{CORRECTNESS}/{workload}/{implementation}/{seq_len}.json"
        return Job(CORRECTNESS, None, implementation, seq_len, path, spec)

    def _grid_problems(self, seq_len: int) -> list[dict[str, Any]]:
        grid = self.config["correctness"]
        heads = grid["heads"][self.device]
        return [
            Problem(
                batch=batch,
                heads=heads,
                kv_heads=heads,
                seq_len_q=seq_len,
                seq_len_k=seq_len,
                head_dim=head_dim,
                causal=causal,
                dtype=dtype,
            ).to_dict()
            for head_dim in grid["head_dims"]
            for batch in grid["batches"]
            for causal in grid["causal"]
            for dtype in grid["dtypes"]
        ]

    def _decode_problems(self, seq_len: int) -> list[dict[str, Any]]:
        grid = self.config["correctness"][DECODE]
        kv_heads = grid["kv_heads"][self.device]
        return [
            Problem(
                workload=DECODE,
                batch=batch,
                heads=kv_heads * group_size,
                kv_heads=kv_heads,
                seq_len_q=form["queries"],
                seq_len_k=seq_len,
                head_dim=head_dim,
                causal=True,
                dtype=dtype,
                lengths=form["lengths"],
                page_size=form["page_size"],
            ).to_dict()
            for head_dim in grid["head_dims"]
            for batch in grid["batches"]
            for group_size in grid["group_sizes"]
            for form in grid["forms"]
            for dtype in grid["dtypes"]
        ]

    def _problem(self, sweep: str, seq_len: int) -> dict[str, Any]:
        settings = self.config["sweeps"][sweep]
        decode = settings["workload"] == DECODE
        return Problem(
            workload=settings["workload"],
            lengths=settings["lengths"],
            page_size=settings["page_size"],
            batch=settings["batch"] if "batch" in settings else max(1, settings["tokens"] // seq_len),
            heads=settings["heads"],
            kv_heads=settings["kv_heads"],
            seq_len_q=settings["queries"] if decode else seq_len,
            seq_len_k=seq_len,
            head_dim=settings["head_dim"],
            causal=settings["causal"],
            dtype=settings["dtype"],
        ).to_dict()

    def sweep_job(self, phase: str, sweep: str, implementation: str, seq_len: int) -> Job:
        settings = self.config["sweeps"][sweep]
        extra: dict[str, Any] = {"problem": self._problem(sweep, seq_len)}
        if phase == TIMING:
            timing = dict(self.config["timing"])
            extra["processes"] = timing.pop("processes")[self.device]
            # A length added to the list concerns the rows of that length only.
            extra["second_timer"] = seq_len in timing.pop("second_timer_seq_lens")
            del timing["lock_sm_clock_mhz"]
            extra["timing"] = timing
            extra |= self._clock_lock()
            extra["tolerance"] = self.config["correctness"]["tolerances"][settings["dtype"]]
        spec = self._spec(phase, implementation, **extra)
        path = f"{self.folder}/{phase}/{sweep}/{implementation}/{seq_len}.json"
        return Job(phase, sweep, implementation, seq_len, path, spec)

    def roofline_job(self) -> Job:
        """The job that measures what the machine can do."""
        spec = {
            "phase": ROOFLINE,
            "device": self.device,
            "environment": self.environment,
            "source": {"harness": self.harness_digests[ROOFLINE]},
            **self._clock_lock(),
        }
        return Job(ROOFLINE, None, "", None, f"{self.folder}/{ROOFLINE}.json", spec)

    def diagnostic_jobs(self) -> list[Job]:
        """The jobs of the SDPA diagnostic, which are no part of the run: a backend and a priming each."""
        return [
            self.diagnostic_job(backend, priming)
            for backend in DIAGNOSTIC_BACKENDS
            for priming in DIAGNOSTIC_PRIMINGS
        ]

    def diagnostic_job(self, backend: str, priming: str) -> Job:
        """A job of the SDPA diagnostic; its `implementation` is the backend, its `sweep` the priming."""
        settings = self.config[DIAGNOSTIC]
        seq_len = settings["seq_len"][self.device]
        primer = DIAGNOSTIC_PRIMINGS[priming]
        kernels = {"kernel": "sdpa"} | ({"primer": primer} if primer else {})
        sources = {
            part: source_digest(self.root / "kernels" / f"{name}.py", self.root)
            for part, name in kernels.items()
        }
        dtype, heads = settings["dtype"], settings["heads"]
        problem = Problem(
            batch=settings["batch"],
            heads=heads,
            kv_heads=heads,
            seq_len_q=seq_len,
            seq_len_k=seq_len,
            head_dim=settings["head_dim"],
            causal=settings["causal"],
            dtype=dtype,
        )
        spec = {
            "phase": DIAGNOSTIC,
            "device": self.device,
            "environment": self.environment,
            "implementation": {"name": backend, "kernel": "sdpa", "options": {"backend": backend}},
            "priming": priming,
            "primer": primer,
            "source": {**sources, "harness": self.harness_digests[DIAGNOSTIC]},
            "problem": problem.to_dict(),
            "processes": settings["processes"][self.device],
            "diagnostic": {name: settings[name] for name in ("samples", "priming_s", "warm_up_s")},
            # A configuration need not say what is right in a dtype that it uses nowhere else.
            "tolerance": self.config["correctness"]["tolerances"].get(dtype, WIDE_TOLERANCE),
            **self._clock_lock(),
        }
        path = f"{self.folder}/{DIAGNOSTIC}/{backend}/{priming}.json"
        return Job(DIAGNOSTIC, priming, backend, seq_len, path, spec)

    def _clock_lock(self) -> dict[str, Any]:
        """What the spec of a job that is timed says of the GPU's clock: nothing where it is left alone."""
        mhz = self.config["timing"]["lock_sm_clock_mhz"]
        return {"lock_sm_clock_mhz": mhz} if mhz is not None and self.device == "cuda" else {}

    def _spec(self, phase: str, implementation: str, **extra: Any) -> dict[str, Any]:
        settings = self.config["implementations"][implementation]
        return {
            "phase": phase,
            "device": self.device,
            "environment": self.environment,
            "implementation": {
                "name": implementation,
                "kernel": settings["kernel"],
                "options": settings["options"],
            },
            "source": {
                "kernel": self.kernel_digests[settings["kernel"]],
                "harness": self.harness_digests[phase],
            },
            **extra,
        }
