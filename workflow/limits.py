"""What limits an implementation: words that stated rules make of measured numbers, with those numbers.

The rules stand in RULES and on the page. Shares are of what the same run measured the machine to do, the
matrix rate of the same dtype and the bandwidth (harness/roofline.py), not of a data sheet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.kernel_names import short_kernel_name
from harness.problem import ATTENTION, DECODE, TORCH_DTYPE_NAMES
from harness.record import OK, Record
from harness.static_profile import NO_TENSOR_CORES, SPILLS
from workflow.plan import MEMORY, TIMING, Plan
from workflow.profiling import PROFILE, counter_job
from workflow.render import RATES
from workflow.static_profile import Row, options_text
from workflow.tables import held_against, load, load_measurement, one_line

LAUNCH = "launch-bound"
COMPUTE = "compute-bound"
MEMORY_BOUND = "memory-bound"
LATENCY = "latency-bound"
UNDECIDED = "undecided"
NO_TENSOR = "no tensor cores"
SPILLING = "spilling"
POWER = "power-capped"
HALF = 0.5  # a rate that is used by more than this limits
PRODUCTS = 5.0  # percent of the tensor pipe: on an H200 kernels without a product were seen at up to 2.9
SPILL_SHARE = 0.01  # of the bytes that L2 moves, in local memory: less is no spilling to speak of
RULES = {
    LAUNCH: "the host takes longer to launch a call than the device to run it (the mark `launch_bound`)",
    COMPUTE: "more than half of the measured matrix rate is reached, and no greater share of the bandwidth is"
    " known to be used",
    MEMORY_BOUND: "more than half of the measured bandwidth is used, a greater share than of the matrix rate",
    LATENCY: "neither rate is used by more than half, the bytes were counted, and the host is not what it"
    " waits for: instructions wait for each other",
    UNDECIDED: "less than half of the matrix rate is reached, and the bytes that moved were not counted here:"
    " the least that they can be does not show that memory is idle",
    NO_TENSOR: "the counters show an idle tensor pipe; or the machine code that ran does not use it, and no"
    " counter shows 5 % or more",
    SPILLING: "local memory takes 1 % or more as many bytes as L2 moves, or loops of the machine code load or"
    " store it",
    POWER: "the GPU named its power cap as a reason to throttle while samples were taken",
}
# What a warp waits for, by the reasons that ncu names (NVIDIA's Kernel Profiling Guide, Warp Stall Reasons).
NOT_SELECTED = "not_selected"
STALLS = {
    "barrier": "the other warps of the block at a barrier",
    "branch_resolving": "the target of a branch",
    "dispatch_stall": "the dispatcher, which holds an instruction back",
    "drain": "the last stores, before the end",
    "gmma": "the tensor cores, which work on a wgmma",
    "imc_miss": "a constant that is not in the cache",
    "lg_throttle": "room in the queue for global and local memory",
    "long_scoreboard": "data from global or local memory",
    "math_pipe_throttle": "an arithmetic pipe that is taken",
    "membar": "a memory fence",
    "mio_throttle": "room in the queue for shared memory and special functions",
    "no_instruction": "the next instruction, which is not in the cache",
    NOT_SELECTED: "a turn: another warp that could issue did",
    "short_scoreboard": "data from shared memory, or a special function's result",
    "sleeping": "the end of a sleep",
    "tex_throttle": "room in the queue for textures",
    "wait": "the fixed time that the last instruction takes",
}
# Of a buffer of so many times the cache nothing stays in it (the controls of harness/bounds.py). What a call
# allocates besides is several tensors, of each of which a cacheful may never reach memory.
CACHES = 4
COUNTED, ALLOCATED, NEEDED = "counted", "allocated", "needed"
WHERE_FROM = {
    COUNTED: "DRAM bytes that ncu counted",
    ALLOCATED: "inputs, output, and what a call allocates besides, written once and read once, but for four"
    " times the cache",
    NEEDED: "inputs read once and output written once",
}


@dataclass(frozen=True)
class Evidence:
    """One timed row, with what else is known of it.

    `matrix_rate` is in operations and `bandwidth` in bytes a second, both measured; `counters` are the
    values of a profile record, `kernels` its cells; `static` the row of the machine code that ran. Of the
    workload decode there are besides the bytes of K and V a second, and their share of the bandwidth of
    reading. `counted_near` is the row of the same implementation at the nearest length of the sweep at which
    bytes were counted, where they were not at this one.
    """

    sweep: str
    seq_len: int
    implementation: str
    latency_ms: float
    flop_count: int
    minimal_bytes: int
    bytes_moved: int
    bytes_from: str
    matrix_rate: float
    bandwidth: float
    marks: tuple[str, ...] = ()
    host_time_us: float | None = None
    throttle_reasons: str = ""
    power_w: float | None = None
    counters: dict[str, Any] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    static: Row | None = None
    workload: str = ATTENTION
    key_value_bytes_per_second: float | None = None
    share_of_read_bandwidth: float | None = None
    counted_near: Evidence | None = None
    measured_at: str = ""
    commit: str | None = None
    dirty: bool | None = None

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.flop_count / self.latency_ms * 1e3

    @property
    def matrix_share(self) -> float:
        return self.rate / self.matrix_rate

    @property
    def memory_share(self) -> float:
        """The share of the bandwidth that the bytes it moves at least take up."""
        return self.bytes_moved / self.latency_ms * 1e3 / self.bandwidth

    @property
    def is_counted(self) -> bool:
        """Whether the bytes are those that moved, and no lower bound."""
        return self.bytes_from == COUNTED

    @property
    def is_floor(self) -> bool:
        """Whether it computes less than attention on purpose, and so is no contender."""
        return "not_attention" in self.marks

    @property
    def throughput(self) -> str:
        """The workload's figure of merit without its unit: TFLOP/s, or TB/s of K and V."""
        if self.workload == DECODE:
            assert self.key_value_bytes_per_second is not None  # every decode record has it
            return f"{self.key_value_bytes_per_second / RATES[DECODE].divisor:.3g}"
        return rate_text(self.rate)

    @property
    def throughput_share(self) -> float | None:
        """Which share it has of what was measured: of the matrix rate, or of the bandwidth of reading."""
        return self.share_of_read_bandwidth if self.workload == DECODE else self.matrix_share

    @property
    def intensity(self) -> float:
        """Operations for each byte that it moves at least."""
        return self.flop_count / self.bytes_moved


@dataclass(frozen=True)
class Limit:
    """A word of RULES, and the sentence with the figures that it rests on."""

    word: str
    sentence: str


def limits(row: Evidence) -> list[Limit]:
    """What limits a row; by the rules, in the order in which they are asked."""
    found = []
    if "launch_bound" in row.marks:
        took = "" if row.host_time_us is None else f" {row.host_time_us:.3g} us"
        found.append(
            Limit(LAUNCH, f"a launch takes the host{took}, and the device runs it in {_us(row.latency_ms)}")
        )
    matrix, memory = row.matrix_share, row.memory_share
    if matrix > HALF and matrix >= memory:
        found.append(Limit(COMPUTE, f"{_matrix_text(row)}, and {_memory_text(row)}"))
    elif memory > HALF:
        # How few operations a decode step has is no news: of the matrix rate only prefill is told.
        also = "" if row.workload == DECODE else f", and {_matrix_text(row)}"
        found.append(Limit(MEMORY_BOUND, f"{_memory_text(row)}{also}"))
    elif not found and row.is_counted:
        found.append(Limit(LATENCY, f"{_matrix_text(row)}, and {_memory_text(row)}{_waits(row)}"))
    elif not found:
        found.append(Limit(UNDECIDED, f"{_matrix_text(row)}, and {_unknown_bytes(row)}"))
    found += [limit for limit in (_tensor_cores(row), _spilling(row), _power(row)) if limit]
    return found


def _matrix_text(row: Evidence) -> str:
    if row.workload == DECODE:
        return f"its products reach {percent_text(row.matrix_share)} of the measured matrix rate"
    return f"{rate_text(row.rate)} TFLOP/s are {percent_text(row.matrix_share)} of the measured matrix rate"


def _memory_text(row: Evidence) -> str:
    least = "" if row.is_counted else "at least "
    text = (
        f"{least}{bytes_text(row.bytes_moved)} ({WHERE_FROM[row.bytes_from]}) take"
        f" {percent_text(row.memory_share)} of the measured bandwidth"
    )
    if row.workload == DECODE and row.throughput_share is not None:
        text += f"; K and V are read with {throughput_text(row)}"
    return text


def throughput_text(row: Evidence) -> str:
    """The workload's figure of merit, and which share that is of what was measured."""
    what = "the measured read bandwidth" if row.workload == DECODE else "the measured matrix rate"
    share = "" if row.throughput_share is None else f", {percent_text(row.throughput_share)} of {what}"
    return f"{row.throughput} {RATES[row.workload].unit}{share}"


def _unknown_bytes(row: Evidence) -> str:
    text = (
        "the bytes that moved were not counted here, only that they are at least"
        f" {bytes_text(row.bytes_moved)} ({WHERE_FROM[row.bytes_from]})"
    )
    near = row.counted_near
    return (
        text if near is None else f"{text}; at seq_len {near.seq_len}, where they were, it is {words(near)}"
    )


def _tensor_cores(row: Evidence) -> Limit | None:
    busy = row.counters.get("tensor_pipe_percent")
    if row.is_floor or (busy is not None and busy >= PRODUCTS):
        return None
    # A short product, as in a decode step, keeps the pipe busy for as little as kernels that have none.
    if busy == 0:
        return Limit(NO_TENSOR, "its tensor pipe is idle all the time")
    if row.static is not None and NO_TENSOR_CORES in row.static["verdicts"]:
        return Limit(NO_TENSOR, f"its machine code for {row.static['target']} has no tensor-core instruction")
    return None


def _spilling(row: Evidence) -> Limit | None:
    loads, stores = row.counters.get("local_load_bytes"), row.counters.get("local_store_bytes")
    l2_bytes = row.counters.get("l2_bytes")
    if loads is not None and stores is not None and l2_bytes:
        local = loads + stores
        if local < SPILL_SHARE * l2_bytes:
            return None
        return Limit(
            SPILLING,
            f"{bytes_text(loads)} are loaded from local memory and {bytes_text(stores)} stored there, while"
            f" L2 moves {bytes_text(l2_bytes)}",
        )
    if row.static is not None and SPILLS in row.static["verdicts"]:
        loads, stores = row.static["loop_local_load"], row.static["loop_local_store"]
        if loads or stores:
            return Limit(SPILLING, f"its loops have {loads} loads and {stores} stores of spilled registers")
    return None


def _power(row: Evidence) -> Limit | None:
    if "power cap" not in row.throttle_reasons:
        return None
    watts = "" if row.power_w is None else f", and was seen to draw up to {row.power_w:.0f} W"
    return Limit(POWER, f"the GPU held its clock down for its power cap{watts}")


def _waits(row: Evidence) -> str:
    """The most frequent reason to wait of the kernel that takes longest, where the counters tell."""
    longest = longest_kernel(row)
    stalls = waiting(longest) if longest else {}
    if longest is None or not stalls:
        return ""
    reason, warps = next(iter(stalls.items()))
    return (
        f"; in {one_line(short_kernel_name(longest['name']))} {warps:.2g} warps wait for"
        f" {STALLS.get(reason, reason)} for each one that issues"
    )


def longest_kernel(row: Evidence) -> dict[str, Any] | None:
    """The kernel that takes the greatest share of a call; None without counters."""
    return max(row.kernels, key=lambda kernel: kernel["share"] or 0.0, default=None)


def waiting(kernel: dict[str, Any]) -> dict[str, float]:
    """A kernel's reasons to wait, the most frequent first; a warp that could issue does not wait."""
    return {reason: warps for reason, warps in kernel["stalls"].items() if reason != NOT_SELECTED}


def words(row: Evidence) -> str:
    return ", ".join(limit.word for limit in limits(row))


# --- where the evidence comes from


def evidence(plan: Plan, root: Path, static: list[Row], target: str | None) -> list[Evidence]:
    """All rows that were timed on this machine, as compiled code, by a run that measured its rates.

    `static` are the rows of the static profile, and `target` is what this machine is among their targets.
    """
    roofline = load(plan.roofline_job(), root)
    if roofline.status != OK:
        return []
    bandwidth = max(roofline.values[f"{what}_bytes_per_second"] for what in ("read", "copy"))
    found = []
    for sweep, seq_len, implementation in plan.cells():
        if plan.twin_of(implementation) != implementation or not plan.measures(sweep, TIMING):
            continue
        job = plan.sweep_job(TIMING, sweep, implementation, seq_len)
        timing = held_against(load_measurement(plan, job, root), roofline)
        if timing.status != OK or "interpreted" in timing.marks:
            continue
        # A CPU may compute in another dtype than it is given: there the best rate of any.
        dtype = TORCH_DTYPE_NAMES[job.spec["problem"]["dtype"]]
        rate = f"matrix_{dtype}" if plan.device == "cuda" else "matrix"
        profile = load(counter_job(plan, sweep, implementation, seq_len), root)
        memory = load(plan.sweep_job(MEMORY, sweep, implementation, seq_len), root)
        found.append(
            _evidence(
                (sweep, seq_len, implementation),
                timing,
                memory,
                profile,
                matrix_rate=roofline.values[f"{rate}_teraflops_per_second"] * 1e12,
                bandwidth=bandwidth,
                static=_static_row(plan, static, target, sweep, implementation, timing),
                workload=job.spec["problem"]["workload"],
            )
        )
    return with_counted_near(found)


def with_counted_near(rows: Sequence[Evidence]) -> list[Evidence]:
    """The rows, each that was not counted with that of the nearest length at which it was."""
    found = []
    for row in rows:
        counted = [
            other
            for other in rows
            if (other.sweep, other.implementation) == (row.sweep, row.implementation) and other.is_counted
        ]
        near = min(counted, key=lambda other: abs(math.log(other.seq_len / row.seq_len)), default=None)
        found.append(replace(row, counted_near=None if row.is_counted else near))
    return found


def _evidence(
    place: tuple[str, int, str],
    timing: Record,
    memory: Record,
    profile: Record,
    *,
    matrix_rate: float,
    bandwidth: float,
    static: Row | None,
    workload: str,
) -> Evidence:
    values = timing.values
    # Counters of other launch options are those of other machine code than was timed.
    same = profile.values.get("options") == values.get("options")
    counters = profile.values if profile.phase == PROFILE and profile.status == OK and same else {}
    moved, source = _bytes_moved(
        values["working_set_bytes"], memory, counters, values.get("cache_bytes") or 0
    )
    return Evidence(
        *place,
        latency_ms=values["latency_ms"],
        flop_count=values["flop_count"],
        minimal_bytes=values["working_set_bytes"],
        bytes_moved=moved,
        bytes_from=source,
        matrix_rate=matrix_rate,
        bandwidth=bandwidth,
        marks=tuple(timing.marks),
        host_time_us=values.get("host_time_us"),
        throttle_reasons=str(values.get("throttle_reasons") or ""),
        power_w=values.get("power_w_max"),
        counters=counters,
        kernels=profile.cells if counters else [],
        static=static,
        workload=workload,
        key_value_bytes_per_second=values.get(RATES[DECODE].column),
        share_of_read_bandwidth=values.get("share_of_read_bandwidth"),
        measured_at=timing.started_at,
        commit=timing.circumstances.get("source", {}).get("commit"),
        dirty=timing.circumstances.get("source", {}).get("dirty"),
    )


def _bytes_moved(minimal: int, memory: Record, counters: dict[str, Any], cache_bytes: int) -> tuple[int, str]:
    """The best that is known of what a call moves, and where it is known from."""
    read, written = counters.get("dram_read_bytes"), counters.get("dram_write_bytes")
    if read is not None and written is not None and read + written > 0:
        return int(read + written), COUNTED
    extra = 0
    if memory.status == OK:
        # A library's workspace may be left alone, and what is in the cache need not go to memory.
        workspace = memory.values.get("workspace_bytes") or 0
        extra = (memory.values.get("extra_bytes") or 0) - workspace - CACHES * cache_bytes
    # What is smaller than the problem itself is bookkeeping.
    return (minimal + 2 * extra, ALLOCATED) if extra > minimal else (minimal, NEEDED)


def _static_row(
    plan: Plan, static: list[Row], target: str | None, sweep: str, implementation: str, timing: Record
) -> Row | None:
    """The static profile's row of the options that were timed; None where it has none."""
    used = options_text(json.loads(timing.values.get("options") or "{}"))
    return next(
        (
            row
            for row in static
            if (row["sweep"], row["kernel"], row["target"], row["options"], row["status"])
            == (sweep, plan.tuned_name(implementation), target, used, OK)
        ),
        None,
    )


# --- figures in words


def _us(milliseconds: float) -> str:
    return f"{milliseconds * 1e3:.3g} us"


def rate_text(operations_per_second: float) -> str:
    return f"{operations_per_second / 1e12:.3g}"


def percent_text(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def bytes_text(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            digits = 3 if count < 999.5 * size else 4
            return f"{count / size:.{digits}g} {unit}"
    return f"{count:.0f} bytes"
