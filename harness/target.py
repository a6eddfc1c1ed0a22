"""A plain description of what a kernel is to run on; it need not be the device at hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A GPU, or the CPU on which Triton kernels are interpreted.

    `shared_memory_bytes` is the most that one block may ask for (the opt-in limit), and
    `compute_capability` is (major, minor); both are None on the CPU.
    """

    device: str  # "cuda" or "cpu"
    name: str
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    shared_memory_bytes: int | None = None

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"
