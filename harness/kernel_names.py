"""The names of a GPU's kernels, for people."""

from __future__ import annotations

import re


def short_kernel_name(name: str) -> str:
    """A kernel's name without its template arguments and parameters, which fill lines."""
    if name.startswith(("Memset", "Memcpy")):
        return name
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", plain, maxsplit=1)[0]
