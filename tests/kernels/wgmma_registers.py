"""Does machine code overwrite registers that an asynchronous wgmma may still be reading?

A wgmma whose left operand lies in registers (HGMMA in the machine code) reads them after it was issued, until
a wait (WARPGROUP.DEPBAR) covers its group. Assemblers before CUDA 13.3 are said to use them again earlier.
`overwritten` follows nvdisasm's text through its branches, and says where.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

_LINE = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?P<guard>@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)\s*(?P<rest>[^;]*);"
)
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_REGISTER = re.compile(r"^R(\d+)\b")
_NO_RESULT = ("ST", "RED", "BAR", "SYNCS", "UTMA", "EXIT", "WARPGROUP", "DEPBAR", "MEMBAR", "FENCE", "BR")
_LEFT_REGISTERS = 4  # of a thread: 64 rows of 16 elements, two to a register, over 128 threads
MOST_STATES = 200_000

Pending = tuple[
    frozenset[int], tuple[frozenset[int], ...]
]  # of the group that is open, and of those before it


def disassembled(cubin: bytes) -> str:
    """nvdisasm's text of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_TOOLS / "nvdisasm", "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def overwritten(sass: str) -> list[str]:
    """The instructions that overwrite what a wgmma may still read, as nvdisasm prints them."""
    code: list[tuple[str, str, str, str]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif match := _LINE.match(line):
            code.append((match["guard"] or "", match["name"], match["rest"].strip(), " ".join(line.split())))
    nothing: Pending = (frozenset(), ())
    # Labels that only a table of branches names are entered with nothing under way.
    waiting = [(place, nothing) for place in (0, *labels.values())]
    seen = set(waiting)
    found: dict[int, str] = {}
    while waiting:
        place, pending = waiting.pop()
        if place >= len(code):
            continue
        assert len(seen) < MOST_STATES, "too many states to follow"
        guard, name, rest, text = code[place]
        if _written(name, rest) & pending[0].union(*pending[1]):
            found[place] = text
        after = _after(name, rest, pending)
        always_leaves = (
            name.startswith(("EXIT", "BRX", "BRA")) and not guard and "P" not in rest.split("`")[0]
        )
        ways = [] if always_leaves else [place + 1]
        if name.startswith("BRA") and (target := _TARGET.search(rest)):
            ways.append(labels[target[1]])
        for way in ways:
            if (way, after) not in seen:
                seen.add((way, after))
                waiting.append((way, after))
    return [found[place] for place in sorted(found)]


def _after(name: str, rest: str, pending: Pending) -> Pending:
    still_open, groups = pending
    if name.startswith("HGMMA"):
        if left := _REGISTER.match(rest.split(",")[1].strip()):
            still_open |= set(range(int(left[1]), int(left[1]) + _LEFT_REGISTERS))
        if "gsb0" in rest:
            return frozenset(), (*groups, still_open)
    elif name.startswith("WARPGROUP.DEPBAR"):
        left_over = int(rest.rsplit(",", 1)[1], 16)
        groups = groups[len(groups) - min(left_over, len(groups)) :]
    return still_open, groups


def _written(name: str, rest: str) -> set[int]:
    """The registers that an instruction writes, the accumulators of an HGMMA left out."""
    if name.startswith((*_NO_RESULT, "HGMMA")) or "SETP" in name:
        return set()
    operands = [operand.strip() for operand in rest.split(",")]
    while operands and re.fullmatch(r"!?U?P(\d|T)", operands[0]):
        operands.pop(0)
    if not operands or (register := _REGISTER.match(operands[0])) is None:
        return set()
    modifiers = name.split(".")[1:]
    width = 1
    if "128" in modifiers:
        width = 4
    elif "64" in modifiers or "WIDE" in modifiers or (name.startswith("CS2R") and "32" not in modifiers):
        width = 2
    elif name.startswith("LDSM"):
        width = 4 if "4" in modifiers else 2 if "2" in modifiers else 1
    first = int(register[1])
    return set(range(first, first + width))
