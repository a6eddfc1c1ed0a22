"""The GPU's counters over one call, read by Nsight Compute (`ncu`).

ncu runs a program that makes one call between `start` and `stop` (`call_once`), and replays each kernel of
it as often as its counters need. It flushes the caches before each replay and leaves the clocks alone. Its
durations are those of kernels that are replayed with counters on: they are used for one thing alone, to
say which share of a call each kernel takes, and never stand beside a measured latency.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.device import Device
from harness.plugin import Kernel
from harness.problem import Problem
from harness.tensors import make_inputs

WARM_UP_CALLS = 3
# Sections hold the metrics that suit the GPU at hand; those below are asked for by name besides.
SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats"),
    *("Occupancy", "LaunchStats"),
)
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "lts__t_sector_hit_rate.pct",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
_TENSOR = re.compile(r"sm__(inst_executed_)?pipe_tensor\w*\.avg\.pct_of_peak_sustained_active")
_FP32 = re.compile(r"sm__(inst_executed_)?pipe_fma\w*\.avg\.pct_of_peak_sustained_active")
# What a quantity is called by ncu; of several names the first that is there.
_NAMES: dict[str, tuple[str, ...]] = {
    "duration_ns": ("gpu__time_duration.sum",),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "l2_hit_rate_percent": ("lts__t_sector_hit_rate.pct",),
    "local_load_bytes": ("l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",),
    "local_store_bytes": ("l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",),
    "dram_percent": (
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "multiprocessor_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed",),
    "issue_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active",),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
}
QUANTITIES = (*_NAMES, "tensor_pipe_percent", "fp32_pipe_percent")
# Units are asked for without prefixes; where ncu gives one all the same it is undone.
_UNITS = {
    "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12,
    "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
}  # fmt: skip
_IDENTITY = ("ID", "Kernel Name")


class NotReadable(Exception):
    """Counters that cannot be had on this machine or by this user; says why."""


class NcuError(Exception):
    """An ncu that failed, or whose output cannot be read."""


@dataclass(frozen=True)
class KernelCounters:
    """One kernel of a call: its name, and every metric that ncu gave as a number, in units without prefix."""

    name: str
    metrics: dict[str, float] = field(default_factory=dict)

    def quantity(self, name: str) -> float | None:
        """One of QUANTITIES; None where ncu has no number for it."""
        if name == "tensor_pipe_percent":
            return self._largest(_TENSOR)
        if name == "fp32_pipe_percent":
            return self._largest(_FP32)
        return next((self.metrics[one] for one in _NAMES[name] if one in self.metrics), None)

    def stalls(self) -> dict[str, float]:
        """Warps that wait, for each warp that issues, by the reason; the largest first."""
        found = {
            match[1]: value
            for name, value in self.metrics.items()
            if (match := _STALL.fullmatch(name)) and value > 0 and not match[1].startswith("selected")
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _largest(self, pattern: re.Pattern[str]) -> float | None:
        """The busiest of the pipes that a pattern names: ncu splits them differently for each GPU."""
        return max((value for name, value in self.metrics.items() if pattern.fullmatch(name)), default=None)


def find_ncu() -> str:
    """The path of ncu; raises NotReadable where there is none."""
    places = (shutil.which("ncu"), *map(str, _newest_first(Path("/opt/nvidia/nsight-compute").glob("*/ncu"))))
    found = next(
        (place for place in (*places, "/usr/local/cuda/bin/ncu") if place and Path(place).exists()), None
    )
    if found is None:
        raise NotReadable("Nsight Compute (ncu) is not on the PATH")
    return found


def _newest_first(places: Iterable[Path]) -> list[Path]:
    """By the numbers of the version that the folder is called: 2025.10 is newer than 2025.2."""
    return sorted(places, key=lambda place: [int(n) for n in re.findall(r"\d+", place.parent.name)])[::-1]


def command(ncu: str, application: Sequence[str], metrics: Sequence[str] = METRICS) -> list[str]:
    """The command line that profiles what the application calls between `start` and `stop`."""
    return [
        *(ncu, "--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off"),
        *("--csv", "--page", "raw", "--print-units", "base"),
        *(word for section in SECTIONS for word in ("--section", section)),
        *("--metrics", ",".join(metrics)),
        *application,
    ]


def profile(application: Sequence[str], time_limit_s: float) -> tuple[list[KernelCounters], str]:
    """The counters of every kernel of the application's call, in order, and ncu's whole output.

    A metric that this ncu does not know is left out, and the rest asked for again. Raises NotReadable and
    NcuError.
    """
    ncu = find_ncu()
    metrics = list(METRICS)
    while True:
        try:
            done = subprocess.run(
                command(ncu, application, metrics),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=time_limit_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise NcuError(f"ncu does not run: {fault}") from fault
        output = done.stdout.decode(errors="replace")
        if "ERR_NVGPUCTRPERM" in output:
            raise NotReadable("this user may not read the GPU's counters (ERR_NVGPUCTRPERM)")
        refused = _refused(output, metrics)
        if not refused:
            break
        metrics = [name for name in metrics if name not in refused]
    if done.returncode:
        raise NcuError(f"ncu ended with {done.returncode}: {_last_lines(output)}")
    kernels = read_csv(output)
    if not kernels:
        raise NcuError(f"ncu saw no kernel: {_last_lines(output)}")
    return kernels, output


def _refused(output: str, metrics: Sequence[str]) -> set[str]:
    """The metrics that ncu says it does not find."""
    errors = [line for line in output.splitlines() if line.startswith("==ERROR==")]
    return {name for name in metrics if any(name in line or name.split(".")[0] in line for line in errors)}


def _last_lines(output: str) -> str:
    return " ".join(output.split())[-500:]


def read_csv(output: str) -> list[KernelCounters]:
    """The kernels of ncu's CSV, in the order of their launches.

    Reads both of its forms: one row for each kernel with the units in a row of their own (`--page raw`),
    and one row for each metric (`--page details`). Lines that are no CSV, ncu's own and the application's,
    are passed over. Raises NcuError where there is no table.
    """
    lines = output.splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise NcuError(f"ncu printed no table: {_last_lines(output)}")
    table = [line for line in lines[start:] if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(table))))
    missing = [name for name in _IDENTITY if rows and name not in rows[0]]
    if missing:
        raise NcuError(f"ncu's table has no column {missing[0]}")
    return _by_metric(rows) if rows and "Metric Name" in rows[0] else _by_kernel(rows)


def _by_kernel(rows: list[dict[str, str]]) -> list[KernelCounters]:
    units: dict[str, str] = {}
    kernels = []
    for row in rows:
        if not row["ID"]:
            units = row
            continue
        metrics = {}
        for name, text in row.items():
            number = _number(text, units.get(name) or "") if name and "__" in name else None
            if number is not None:
                metrics[name] = number
        kernels.append(KernelCounters(row["Kernel Name"], metrics))
    return kernels


def _by_metric(rows: list[dict[str, str]]) -> list[KernelCounters]:
    kernels: dict[str, KernelCounters] = {}
    for row in rows:
        kernel = kernels.setdefault(row["ID"], KernelCounters(row["Kernel Name"]))
        number = _number(row["Metric Value"], row["Metric Unit"])
        if number is not None:
            kernel.metrics[row["Metric Name"]] = number
    return list(kernels.values())


def _number(text: str | None, unit: str) -> float | None:
    """A value without the commas between thousands; None for what is no number (`n/a`)."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value * _UNITS.get(unit.strip().lower(), 1.0)


def counter_values(kernels: Sequence[KernelCounters]) -> dict[str, Any]:
    """A call's counters as scalars, of all its kernels together.

    Bytes are sums, percentages are means weighted with the kernels' durations (of those kernels that have
    the number), registers are the most.
    """
    values: dict[str, Any] = {"kernel_count": len(kernels)}
    for name in QUANTITIES:
        found = [(value, kernel.quantity("duration_ns") or 0.0) for kernel in kernels
                 if (value := kernel.quantity(name)) is not None]  # fmt: skip
        if not found or name == "duration_ns":
            values.setdefault(name, None)
        elif name.endswith("_bytes"):
            values[name] = sum(value for value, _ in found)
        elif name == "registers":
            values[name] = max(value for value, _ in found)
        else:
            weight = sum(duration for _, duration in found)
            values[name] = (
                sum(value * duration for value, duration in found) / weight
                if weight
                else sum(value for value, _ in found) / len(found)
            )
    del values["duration_ns"]
    return values


def kernel_cells(kernels: Sequence[KernelCounters]) -> list[dict[str, Any]]:
    """A cell for every kernel of a call: its name, its share of the time, its counters and its stalls."""
    durations = [kernel.quantity("duration_ns") or 0.0 for kernel in kernels]
    whole = sum(durations)
    return [
        {
            "name": kernel.name,
            "share": duration / whole if whole else None,
            **{name: kernel.quantity(name) for name in QUANTITIES if name != "duration_ns"},
            "stalls": kernel.stalls(),
            "metrics": kernel.metrics,
        }
        for kernel, duration in zip(kernels, durations, strict=True)
    ]


# ---- in the application ----


def call_once(kernel: Kernel, problem: Problem, device: Device) -> str | None:
    """Make one call between `start` and `stop` of the profiler, after a few that nobody watches.

    Returns why the kernel does not take the problem, without a call, where it says so; else None.
    """
    reason = kernel.unsupported(problem, device.target())
    if reason is not None:
        return reason
    import torch

    inputs = make_inputs(problem, device.kind)
    for _ in range(WARM_UP_CALLS):
        kernel.answer(inputs, problem)
    device.synchronize()
    on_gpu = device.kind == "cuda"
    if on_gpu:
        torch.cuda.profiler.start()
    kernel.answer(inputs, problem)
    device.synchronize()
    if on_gpu:
        torch.cuda.profiler.stop()
    return None
