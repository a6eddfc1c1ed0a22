"""What a compiler made of a kernel, for a GPU that need not be there: registers, spills, instructions.

A unit is one of the kernel's `compile_units`. It is compiled for the target, and its machine code is read
(harness/sass.py) and held against the limits of the architecture (harness/architectures.py). Nothing is
run and nothing timed: a verdict says what the machine code shows, and a ceiling what the pipe in use is
published to reach.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.architectures import ARCHITECTURES, Architecture, Occupancy, Peak, occupancy
from harness.plugin import Kernel, compile_unit
from harness.problem import Problem
from harness.record import ERROR, OK, UNSUPPORTED
from harness.sass import (
    TENSOR_CORE_GROUPS,
    ToolError,
    block_threads,
    disassemble,
    mix,
    serialisation_warnings,
    tool_version,
    usage,
)
from harness.target import Target

NO_TENSOR_CORES = "no tensor cores"
SPILLS = "spills"
DOES_NOT_FIT = "does not fit"
SERIALISED_WGMMA = "serialised wgmma"
# What each verdict says, for the reader of a table.
VERDICTS = {
    NO_TENSOR_CORES: "the machine code has no tensor-core instruction: products run on the fp32 pipes",
    SPILLS: "registers do not suffice: values are stored to local memory and loaded again (STL, LDL)",
    DOES_NOT_FIT: "one block needs more shared memory or registers than a multiprocessor has",
    SERIALISED_WGMMA: "ptxas says that it runs wgmma instructions one after the other",
}
Options = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """A function compiled for an architecture; `mix` is of the whole text, `loop_mix` of its loops.

    `registers` and `stack_bytes` are a thread's, `threads` and `shared_memory_bytes` a block's;
    `tensor_memory_columns` is 0 where there is no tensor memory.
    """

    function: str
    threads: int
    registers: int
    stack_bytes: int
    shared_memory_bytes: int
    tensor_memory_columns: int
    mix: dict[str, int]
    loop_mix: dict[str, int]
    warnings: list[str]

    @property
    def uses_tensor_cores(self) -> bool:
        return any(self.mix[group] for group in TENSOR_CORE_GROUPS)

    @property
    def spills(self) -> bool:
        return bool(self.mix["local_load"] or self.mix["local_store"])


def option_sets(
    kernel: Kernel, problem: Problem, target: Target, at_most: int, others: Sequence[Options]
) -> list[Options]:
    """The launch options to compile: the kernel's first candidates for the target, and these others."""
    offered = kernel.candidates(problem, target)[:at_most] or [kernel.options]
    wanted = [*offered, *({**kernel.options, **options} for options in others)]
    given = [{name: value for name, value in options.items() if value is not None} for options in wanted]
    return [options for place, options in enumerate(wanted) if given[place] not in given[:place]]


def profile_kernel(kernel: Kernel, problem: Problem, target: Target) -> list[dict[str, Any]]:
    """A cell for every unit of the kernel with its options; one with a reason where there is none.

    What the compiler or a tool raises is a cell with the status `error`.
    """
    about = {"options": kernel.options, "problem": problem.to_dict(), "target": target.name}
    reason = kernel.unsupported(problem, target)
    if reason is not None:
        return [{**about, "status": UNSUPPORTED, "reason": reason}]
    began = time.monotonic()
    try:
        units = list(kernel.module.compile_units(problem, kernel.options, target))
        cells = [profile_unit(unit, target) for unit in units]
    except Exception as fault:  # whatever a compiler raises: this row's message
        reason = f"{type(fault).__name__}: {fault}"
        return [{**about, "status": ERROR, "reason": reason[:2000]}]
    if not kernel.is_attention:  # a floor has no products, and so nothing that tensor cores would do
        for cell in cells:
            cell["verdicts"] = [verdict for verdict in cell["verdicts"] if verdict != NO_TENSOR_CORES]
    seconds = round(time.monotonic() - began, 3)
    return [{**about, "status": OK, "reason": None, **cell, "seconds": seconds} for cell in cells]


def profile_unit(unit: Any, target: Target) -> dict[str, Any]:
    """Compile one unit for the target and read its machine code; a flat JSON object.

    Raises what the compiler raises, ToolError, and KeyError for an architecture that is not in the table.
    """
    assert target.compute_capability is not None
    architecture = ARCHITECTURES[target.compute_capability]
    found = read_unit(compile_unit(unit, target))
    held = _held(found, architecture)
    return {
        **asdict(found),
        "block_shared_memory_limit_bytes": architecture.block_shared_memory_bytes,
        "blocks_per_multiprocessor": held.blocks,
        "warps_per_multiprocessor": held.warps,
        "occupancy": held.share,
        "occupancy_limiter": held.limiter,
        "verdicts": verdicts(found, architecture),
        "ceiling_teraflops_per_second": ceiling(found, architecture.peak),
        "ceiling_of": architecture.peak.gpu,
    }


def read_unit(compiled: Any) -> Unit:
    """What there is to read of one of Triton's compiled kernels; raises ToolError."""
    metadata = compiled.metadata
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    code = disassemble(cubin)
    needs = usage(cubin, metadata.name)
    return Unit(
        function=metadata.name,
        threads=block_threads(ptx) or metadata.num_warps * 32,
        registers=needs.registers,
        stack_bytes=needs.stack_bytes,
        shared_memory_bytes=metadata.shared,
        tensor_memory_columns=getattr(metadata, "tmem_size", 0) or 0,
        mix=mix(code),
        loop_mix=mix(one for one in code if one.in_loop),
        warnings=serialisation_warnings(ptx),
    )


def _held(unit: Unit, architecture: Architecture) -> Occupancy:
    return occupancy(
        architecture,
        threads=unit.threads,
        registers=unit.registers,
        shared_memory_bytes=unit.shared_memory_bytes,
        tensor_memory_columns=unit.tensor_memory_columns,
    )


def verdicts(unit: Unit, architecture: Architecture) -> list[str]:
    """The verdicts that hold, in VERDICTS' words and order."""
    holds = {
        NO_TENSOR_CORES: not unit.uses_tensor_cores,
        SPILLS: unit.spills,
        DOES_NOT_FIT: _held(unit, architecture).blocks == 0,
        SERIALISED_WGMMA: bool(unit.warnings),
    }
    return [verdict for verdict in VERDICTS if holds[verdict]]


def ceiling(unit: Unit, peak: Peak) -> float:
    """TFLOP/s that the products cannot exceed on that GPU: the published rate of the pipe they run on."""
    return peak.tensor_teraflops_per_second if unit.uses_tensor_cores else peak.fp32_teraflops_per_second


def tools() -> dict[str, str]:
    """The versions of what compiled and read: Triton, ptxas and nvdisasm."""
    import triton

    found = {"triton": triton.__version__}
    for name in ("ptxas", "ptxas-blackwell", "nvdisasm"):
        try:
            found[name] = tool_version(name)
        except ToolError as fault:
            found[name] = str(fault)
    return found
