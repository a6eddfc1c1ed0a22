"""Loading a kernel: a module `kernels/<name>.py` that follows the plug-in contract.

The contract (docs/design.md has the reasons):

    attention(q, k, v, *, causal, scale=None, **options) -> Tensor
    decode(q, k, v, *, seq_lens=None, block_table=None, scale=None, **options) -> Tensor
        one of the two, or both: the workloads that it answers (harness/problem.py)
    unsupported(problem, target, **options) -> str | None      optional
    candidates(problem, target, **options) -> list[dict]       optional
    memory_law(problem, **options) -> int | None               optional
    compile_units(problem, options, target) -> list            optional: objects with the attributes
        function (one of Triton's or of Gluon's), signature, constexprs, attrs (as triton's ASTSource
        takes them) and options
    NOT_ATTENTION: str, with reference(q, k, v, ...) -> Tensor     optional: what it computes instead, on
        purpose, and the right answer to that in fp64: a floor to hold attention against
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.problem import ATTENTION, WORKLOADS, Problem
from harness.target import Target

if TYPE_CHECKING:
    import torch

    from harness.tensors import Inputs


class KernelError(Exception):
    """A kernel module that cannot be loaded, or answers no workload."""


@dataclass(frozen=True)
class Kernel:
    """A kernel with one set of options: what the config calls an implementation."""

    module: ModuleType
    options: dict[str, Any]

    def answer(self, inputs: Inputs, problem: Problem) -> torch.Tensor:
        """The kernel's answer to a problem, shaped as Q; AttributeError without its workload."""
        given = {"causal": problem.causal} if problem.workload == ATTENTION else inputs.extras
        function = getattr(self.module, problem.workload)
        output: torch.Tensor = function(inputs.q, inputs.k, inputs.v, **given, **self.options)
        return output

    @property
    def is_attention(self) -> bool:
        """Whether the kernel means to compute attention; a floor does not."""
        return not hasattr(self.module, "NOT_ATTENTION")

    def exact(self, inputs: Inputs, problem: Problem) -> torch.Tensor | None:
        """In fp64 what a kernel that is not attention ought to compute; None for attention."""
        if self.is_attention:
            return None
        given = {"causal": problem.causal} if problem.workload == ATTENTION else inputs.extras
        output: torch.Tensor = self.module.reference(inputs.q, inputs.k, inputs.v, **given)
        return output

    def with_options(self, options: dict[str, Any]) -> Kernel:
        """The same kernel with other options."""
        return Kernel(self.module, dict(options))

    def candidates(self, problem: Problem, target: Target) -> list[dict[str, Any]]:
        """Option sets worth tuning over; none if the kernel offers none. The first is the default."""
        ask = getattr(self.module, "candidates", None)
        if ask is None:
            return []
        return [{**self.options, **options} for options in ask(problem, target, **self.options)]

    def compile_for(self, problem: Problem, target: Target) -> list[Any]:
        """Compile what a call needs into Triton's cache, without the device; what `compile_unit` returns.

        A kernel that does not say what to compile is left alone. Raises what the compiler raises.
        """
        ask = getattr(self.module, "compile_units", None)
        if ask is None or target.compute_capability is None:
            return []
        return [compile_unit(unit, target) for unit in ask(problem, self.options, target)]

    def unsupported(self, problem: Problem, target: Target) -> str | None:
        """Why the problem cannot run on the target; None if it can, or if the kernel does not say."""
        if not hasattr(self.module, problem.workload):
            return f"{self.module.__name__.replace('.', '/')}.py defines no {problem.workload}()"
        ask = getattr(self.module, "unsupported", None)
        return None if ask is None else ask(problem, target, **self.options)

    def memory_law(self, problem: Problem) -> int | None:
        """The bytes a call should peak at by the kernel's own arithmetic; None if it does not say."""
        ask = getattr(self.module, "memory_law", None)
        return None if ask is None else ask(problem, **self.options)

    @property
    def interpreted(self) -> bool:
        """Whether this kernel runs in Triton's interpreter instead of as compiled code."""
        return any(
            type(member).__name__ == "InterpretedFunction"
            for module in self._own_modules()
            for member in list(vars(module).values())
        )

    def _own_modules(self) -> list[ModuleType]:
        """The kernel's module and those of its package that it uses, directly or through others."""
        package = self.module.__name__.split(".")[0]
        found = [self.module]
        for module in found:
            for member in list(vars(module).values()):
                name = (
                    member.__name__ if isinstance(member, ModuleType) else getattr(member, "__module__", "")
                )
                used = sys.modules.get(name) if isinstance(name, str) else None
                if used is not None and name.split(".")[0] == package and used not in found:
                    found.append(used)
        return found


def compile_unit(unit: Any, target: Target) -> Any:
    """Compile one of a kernel's `compile_units` for a target that need not be there.

    Returns Triton's CompiledKernel: `asm` has each stage by its name (ttir, ttgir, llir, ptx, cubin; a Gluon
    function begins at ttgir), `metadata` the rest (shared memory in bytes, warps). The process must not
    interpret Triton (TRITON_INTERPRET). Raises what the compiler raises, and ValueError for a target that
    is no GPU.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if target.compute_capability is None:
        raise ValueError(f"{target.name} is no GPU: there is nothing to compile for")
    major, minor = target.compute_capability
    attributes: dict[tuple[int, ...], list[Any]] = dict(unit.attrs)
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7):
        # From 3.7 on a launch names its constants here too, and finds in the cache what is named alike.
        for index, name in enumerate(unit.signature):
            if name in unit.constexprs:
                attributes[(index,)] = []
        attributes = dict(sorted(attributes.items()))
    source_kind = ASTSource
    if unit.function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_kind = GluonASTSource
    return triton.compile(
        source_kind(unit.function, unit.signature, unit.constexprs, attributes),
        target=GPUTarget("cuda", major * 10 + minor, 32),
        options=unit.options,
    )


def interpret_triton() -> None:
    """Make Triton interpret its kernels; must come before the first import of triton.

    Raises RuntimeError when triton was imported before, since the switch would have no effect.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before the interpreter was asked for")
    os.environ["TRITON_INTERPRET"] = "1"


def load_kernel(name: str, options: dict[str, Any], package: str = "kernels") -> Kernel:
    """Import `<package>.<name>`; raises KernelError when that fails or it answers no workload."""
    try:
        module = importlib.import_module(f"{package}.{name}")
    except Exception as fault:
        raise KernelError(f"{package}/{name}.py does not import: {type(fault).__name__}: {fault}") from fault
    if not any(callable(getattr(module, workload, None)) for workload in WORKLOADS):
        raise KernelError(
            f"{package}/{name}.py defines no {' and no '.join(f'{name}()' for name in WORKLOADS)}"
        )
    return Kernel(module, dict(options))
