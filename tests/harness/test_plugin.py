"""A kernel is a file: what it defines is used with its options, what is wrong with it is named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.plugin import KernelError, load_kernel
from harness.target import Target
from harness.tensors import Inputs
from tests.harness.attentions import kernel_of, make_problem, right

ROOT = Path(__file__).parents[2]
CPU = Target(device="cpu", name="a CPU")
FILES = {
    "raises": "raise OSError('no library')\n",
    "broken": "def (\n",
    "imports": "import a_module_that_is_not_there\n",
    "lacking": "def attend(): pass\n",
    "uncallable": "attention = 3\n",
    "good": "def attention(q, k, v, *, causal, factor=1):\n    return factor, causal\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of kernels under a name that no other test uses."""
    name = f"kernels_{tmp_path.name}"
    (tmp_path / name).mkdir()
    for module, text in FILES.items():
        (tmp_path / name / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raises", "raises.py does not import: OSError: no library"),
        ("broken", "broken.py does not import: SyntaxError"),
        ("imports", "imports.py does not import: ModuleNotFoundError: No module named 'a_module_that_is"),
        ("missing", "missing.py does not import: ModuleNotFoundError"),
        ("lacking", "lacking.py defines no attention() and no decode()"),
        ("uncallable", "uncallable.py defines no attention() and no decode()"),
    ],
)
def test_a_kernel_that_cannot_be_loaded_says_which_and_why(package: str, module: str, says: str) -> None:
    with pytest.raises(KernelError) as caught:
        load_kernel(module, {}, package)
    assert str(caught.value).startswith(f"{package}/{says}")


def test_the_options_reach_the_kernel(package: str) -> None:
    kernel = load_kernel("good", {"factor": 5}, package)
    tensor = torch.zeros(1)
    assert kernel.answer(Inputs(tensor, tensor, tensor), make_problem(causal=True)) == (5, True)


def test_the_options_reach_the_hooks() -> None:
    kernel = kernel_of(
        right,
        {"tile": 64},
        unsupported=lambda problem, target, tile: f"{tile} on {target.name}",
        memory_law=lambda problem, tile: problem.minimal_bytes + tile,
    )
    problem = make_problem()
    assert kernel.unsupported(problem, CPU) == "64 on a CPU"
    assert kernel.memory_law(problem) == problem.minimal_bytes + 64


def test_a_kernel_without_hooks_says_nothing() -> None:
    kernel = kernel_of(right)
    assert kernel.unsupported(make_problem(), CPU) is None
    assert kernel.memory_law(make_problem()) is None
    assert not kernel.interpreted


def test_the_options_of_the_caller_are_copied(package: str) -> None:
    options = {"factor": 5}
    kernel = load_kernel("good", options, package)
    options["factor"] = 6
    assert kernel.options == {"factor": 5}


def python(code: str, *arguments: str) -> str:
    """The output of a new Python, in which nothing has imported Triton yet."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_interpreter_cannot_be_asked_for_after_triton_was_imported() -> None:
    said = python(
        "import triton\n"
        "from harness.plugin import interpret_triton\n"
        "try:\n"
        "    interpret_triton()\n"
        "except RuntimeError as fault:\n"
        "    print(fault)\n"
    )
    assert said == "triton was imported before the interpreter was asked for"


TELL_WHICH_ARE_INTERPRETED = """
import sys
from harness.plugin import interpret_triton, load_kernel
interpret_triton()
interpret_triton()  # a second time is no fault
sys.path.insert(0, sys.argv[1])
print(load_kernel("native", {}, "some_kernels").interpreted)
print(load_kernel("jitted", {}, "some_kernels").interpreted)
"""


def test_a_kernel_that_triton_interprets_is_known_though_its_jit_function_lies_elsewhere(
    tmp_path: Path,
) -> None:
    package = tmp_path / "some_kernels"
    package.mkdir()
    (package / "native.py").write_text("def attention(): pass\n")
    (package / "parts.py").write_text("import triton\n\n@triton.jit\ndef part(x):\n    return x\n")
    (package / "jitted.py").write_text("from some_kernels import parts\ndef attention(): pass\n")
    assert python(TELL_WHICH_ARE_INTERPRETED, str(tmp_path)).split() == ["False", "True"]


def test_another_kernel_that_is_interpreted_does_not_make_this_one_so(tmp_path, monkeypatch):
    package = tmp_path / "sorts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    # A stand-in of the name that Triton gives what it interprets: triton is not imported in this process.
    (package / "tools.py").write_text("class InterpretedFunction: pass\n\ndouble = InterpretedFunction()\n")
    (package / "plain.py").write_text("def attention(q, k, v, *, causal, scale=None): return q\n")
    (package / "jitted.py").write_text(
        "from sorts.tools import double\n\n\ndef attention(q, k, v, *, causal, scale=None): return q\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    jitted = load_kernel("jitted", {}, package="sorts")
    assert jitted.interpreted
    assert not load_kernel("plain", {}, package="sorts").interpreted


def test_the_harness_knows_no_kernel_by_name():
    names = {path.stem for path in (ROOT / "kernels").glob("*.py")} - {"__init__", "cache", "inputs"}
    assert {"naive", "sdpa", "triton_flash", "gluon_hopper"} <= names
    said = re.compile(rf"(?<![\w-])(?:{'|'.join(sorted(names))})(?![\w-])")  # fa3-fwd is a package
    for path in (ROOT / "harness").glob("*.py"):
        text = path.read_text()
        assert said.findall(text) == [], path
        assert not re.search(r"^\s*(?:from|import) kernels\b", text, re.MULTILINE), path
