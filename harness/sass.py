"""Machine code of NVIDIA GPUs, read: what a cubin needs, and which instructions it is made of.

The tools are NVIDIA's own, in the versions that the Triton wheel brings along: `cuobjdump` for registers
and stack, `nvdisasm` for the instructions, `ptxas` for what it warns of.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TOOL_SECONDS = 300


class ToolError(Exception):
    """A tool that is not there, fails, or says something that this module cannot read."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: `opcode` is its first word (`LDG`), `modifiers` the rest of its name (`E`, `128`)."""

    opcode: str
    modifiers: tuple[str, ...]
    in_loop: bool


def _opcodes(*names: str) -> Callable[[Instruction], bool]:
    return lambda instruction: instruction.opcode in names


def _stores(instruction: Instruction) -> bool:
    return instruction.opcode == "UBLKCP" and instruction.modifiers[:2] == ("G", "S")


# What is counted, by the name that it has in a record. Instructions of one group are alike in what they
# cost and where they go; what stands in no group is arithmetic on integers, moves and control.
MIX: dict[str, Callable[[Instruction], bool]] = {
    # Tensor cores, a generation each: mma.sync of a warp, wgmma of four, tcgen05 of a block.
    "mma": _opcodes("HMMA", "IMMA", "DMMA", "BMMA", "QMMA", "OMMA"),
    "wgmma": _opcodes("HGMMA", "IGMMA", "QGMMA", "BGMMA"),
    "tcgen05": lambda one: one.opcode.startswith("UTC") and one.opcode.endswith("MMA"),
    "fp32_multiply_add": _opcodes("FFMA", "FFMA2"),
    "fp32_other": _opcodes("FADD", "FADD2", "FMUL", "FMUL2", "FMNMX", "FMNMX3", "FSEL", "FSETP"),
    "fp16_arithmetic": _opcodes("HFMA2", "HADD2", "HMUL2", "HMNMX2"),
    "special_function": _opcodes("MUFU"),
    "global_load": _opcodes("LDG", "LD"),
    "global_store": _opcodes("STG", "ST", "RED", "REDG", "ATOM", "ATOMG"),
    "shared_load": _opcodes("LDS", "LDSM"),
    "shared_store": _opcodes("STS", "STSM", "ATOMS"),
    "local_load": _opcodes("LDL"),
    "local_store": _opcodes("STL"),
    "async_copy": _opcodes("LDGSTS"),
    # UBLKCP names where it copies to and where from: S.G is from global to shared memory.
    "tma_load": lambda one: one.opcode in ("UTMALDG", "UTMAPF", "UBLKCP") and not _stores(one),
    "tma_store": lambda one: one.opcode in ("UTMASTG", "UTMAREDG", "UBLKRED") or _stores(one),
    "tensor_memory": _opcodes("LDTM", "STTM", "UTCCP"),
    "shuffle": _opcodes("SHFL", "REDUX"),
    "barrier": _opcodes(
        "BAR",
        "SYNCS",
        "WARPGROUP",
        "DEPBAR",
        "LDGDEPBAR",
        "MEMBAR",
        "UTCBAR",
        "WARPSYNC",
        "UCGABAR_ARV",
        "UCGABAR_WAIT",
    ),
}
TENSOR_CORE_GROUPS = ("mma", "wgmma", "tcgen05")

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P(?:\d+|T)\s+)?(?P<name>[A-Z][A-Z0-9_]*(?:\.[\w.]+)?)"
    r"(?P<operands>[^;]*);"
)
_TARGET = re.compile(r"(?<=`\()\.L_\w+(?=\))")
_TARGETS = re.compile(r"BRANCH_TARGETS ([^\"]*)")  # of a branch by a register, in a comment
_USAGE = re.compile(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) ")
_PTX_ARCHITECTURE = re.compile(r"^\.target\s+(\w+)", re.MULTILINE)
_BLOCK_THREADS = re.compile(r"^\s*\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", re.MULTILINE)
# ptxas's own numbers for wgmma instructions that it runs one after the other (C7510 and its neighbours).
_SERIALISED = re.compile(r"^.*\(C75\d\d\).*wgmma\.mma_async instructions are serialized.*$", re.MULTILINE)


def instructions(sass: str) -> list[Instruction]:
    """The instructions of nvdisasm's text (`nvdisasm -c`), without the NOPs that fill up.

    One is in a loop if it lies between a label and a later branch back to it. A branch to itself, the
    trap at the end of every function, is no loop.
    """
    found: list[tuple[str, tuple[str, ...]]] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif (match := _INSTRUCTION.match(line)) is not None:
            opcode, *modifiers = match["name"].split(".")
            if opcode == "NOP":
                continue
            place = len(found)
            found.append((opcode, tuple(modifiers)))
            if opcode in ("BRA", "BRX", "JMP"):
                starts = [labels.get(target, place) for target in _targets(match["operands"])]
                if starts and min(starts) < place:
                    loops.append((min(starts), place))
    inside = bytearray(len(found))
    for start, end in loops:
        inside[start : end + 1] = b"\1" * (end + 1 - start)
    return [
        Instruction(opcode, modifiers, bool(inside[place])) for place, (opcode, modifiers) in enumerate(found)
    ]


def _targets(operands: str) -> list[str]:
    """The labels that a branch may go to."""
    by_register = _TARGETS.search(operands)
    return by_register[1].split(",") if by_register else _TARGET.findall(operands)


def mix(code: Iterable[Instruction]) -> dict[str, int]:
    """How many instructions there are, altogether (`instructions`) and of each group of MIX.

    These are instructions of the program text: how often a loop runs is not in it.
    """
    counts: Counter[str] = Counter()
    for instruction in code:
        counts["instructions"] += 1
        for group, belongs in MIX.items():
            if belongs(instruction):
                counts[group] += 1
    return {name: counts[name] for name in ("instructions", *MIX)}


@dataclass(frozen=True)
class Usage:
    """Registers a thread has at the launch, and bytes of its stack in local memory."""

    registers: int
    stack_bytes: int


def usage(cubin: bytes, function: str) -> Usage:
    """What the function of that name needs; raises ToolError where cuobjdump does not say."""
    with _file(cubin, ".cubin") as path:
        text = _run("cuobjdump", "-res-usage", str(path))
    for name, registers, stack in _USAGE.findall(text):
        if name == function:
            return Usage(int(registers), int(stack))
    raise ToolError(f"cuobjdump says nothing of {function}: {text[:200]}")


def disassemble(cubin: bytes) -> list[Instruction]:
    """The instructions of all functions of a cubin; raises ToolError where there are none to read."""
    with _file(cubin, ".cubin") as path:
        code = instructions(_run("nvdisasm", "-c", str(path)))
    if not code:
        raise ToolError("nvdisasm prints no instruction that this module can read")
    return code


def block_threads(ptx: str) -> int | None:
    """The threads of a block, where the PTX fixes them."""
    found = _BLOCK_THREADS.search(ptx)
    if found is None:
        return None
    threads = 1
    for count in found.groups():
        threads *= int(count or 1)
    return threads


def serialisation_warnings(ptx: str) -> list[str]:
    """What ptxas says of wgmma instructions that it serialises; nothing for PTX that has none.

    Triton throws away what ptxas says when it succeeds, so it is asked once more, with the options that
    Triton gives it.
    """
    if "wgmma.mma_async" not in ptx:
        return []
    architecture = _PTX_ARCHITECTURE.search(ptx)
    if architecture is None:
        raise ToolError("the PTX names no .target")
    with _file(ptx.encode(), ".ptx") as path, tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/out.cubin"
        said = _run(
            "ptxas", "-v", *_ptxas_options(), f"--gpu-name={architecture[1]}", str(path), "-o", output
        )
    return [" ".join(line.split()) for line in _SERIALISED.findall(said)]


def _ptxas_options() -> list[str]:
    import triton

    from_3_7_on = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7)
    return ["-lineinfo", *(["--regAllocOptLevel=2"] if from_3_7_on else [])]


def tool_version(name: str) -> str:
    """The version of one of the tools, as `12.8.93`; raises ToolError."""
    text = _run(name, "--version")
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    if found is None:
        raise ToolError(f"{name} --version says no version: {text[:200]}")
    return found[1]


@contextmanager
def _file(contents: bytes, suffix: str) -> Iterator[Path]:
    """A temporary file with these contents, for a tool to read."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(contents)
        file.flush()
        yield Path(file.name)


def _run(name: str, *arguments: str) -> str:
    """What a tool prints, both streams together."""
    try:
        done = subprocess.run(
            [_tool(name), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TOOL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise ToolError(f"{name} does not run: {fault}") from fault
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        raise ToolError(f"{name} ended with {done.returncode}: {text.strip()[:500]}")
    return text


def _tool(name: str) -> str:
    """The path of a tool that Triton brings along."""
    from triton import knobs

    try:
        return str(getattr(knobs.nvidia, name.replace("-", "_")).path)
    except (AttributeError, RuntimeError) as fault:
        raise ToolError(f"Triton brings no {name} along: {fault}") from fault
