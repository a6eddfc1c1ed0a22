"""A digest changes when the code that runs changes, and at no other time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.digest import import_closure, source_digest

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "kernels/__init__.py": '"""Kernels."""\n',
    "kernels/mine.py": (
        '"""My kernel."""\n'
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "import torch\n"
        "import kernels.direct\n"
        "from kernels import chosen\n"
        "from .sibling import helper\n"
        "if TYPE_CHECKING:\n"
        "    from kernels.types_only import Hint\n"
        "\n"
        "class Kernel:\n"
        '    """A class."""\n'
        "    def run(self):\n"
        '        """A method."""\n'
        "        return 1 + 2\n"
    ),
    "kernels/direct.py": "from kernels.far import value\n",
    "kernels/far.py": "value = 1\n",
    "kernels/chosen.py": "value = 2\n",
    "kernels/sibling.py": "from . import relative\ndef helper():\n    from kernels.lazy import late\n",
    "kernels/relative.py": "value = 3\n",
    "kernels/lazy.py": "late = 4\n",
    "kernels/types_only.py": "Hint = int\n",
    "kernels/stranger.py": "value = 5\n",
    "torch.txt": "",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def digest(checkout: Path) -> Callable[[], str]:
    return lambda: source_digest(checkout / "kernels/mine.py", checkout)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return 1 + 2", "return 1 + 2  # a comment"),
        ("return 1 + 2", "return (1\n                + 2)"),
        ("class Kernel", "\n\n# a comment\n\n\nclass Kernel"),
        ('"""My kernel."""', '"""My better kernel."""'),
        ('"""My kernel."""\n', ""),
        ('    """A class."""\n', ""),
        ('"""A method."""', '"""Another\n\n        text."""'),
    ],
)
def test_a_change_of_comments_docstrings_or_white_space_is_no_change(
    checkout: Path, digest: Callable[[], str], old: str, new: str
) -> None:
    before = digest()
    edit(checkout / "kernels/mine.py", old, new)
    assert digest() == before


def test_a_touch_is_no_change(checkout: Path, digest: Callable[[], str]) -> None:
    before = digest()
    os.utime(checkout / "kernels/mine.py", (1, 1))
    assert digest() == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return 1 + 2", "return 1 + 3"),
        ("return 1 + 2", "return 2 + 1"),
        ("def run(self)", "def run(self, fast=True)"),
        ("class Kernel", "@final\nclass Kernel"),
        ("        return 1 + 2", '        x = """not a docstring"""\n        return 1 + 2'),
    ],
)
def test_an_edit_of_the_code_is_a_change(
    checkout: Path, digest: Callable[[], str], old: str, new: str
) -> None:
    before = digest()
    edit(checkout / "kernels/mine.py", old, new)
    assert digest() != before


@pytest.mark.parametrize("module", ["direct", "far", "chosen", "sibling", "relative", "lazy", "__init__"])
def test_an_edit_of_an_imported_module_is_a_change(
    checkout: Path, digest: Callable[[], str], module: str
) -> None:
    before = digest()
    with (checkout / f"kernels/{module}.py").open("a") as stream:
        stream.write("more = 1\n")
    assert digest() != before


@pytest.mark.parametrize("module", ["stranger", "types_only"])
def test_an_edit_of_a_module_that_is_not_run_is_no_change(
    checkout: Path, digest: Callable[[], str], module: str
) -> None:
    before = digest()
    (checkout / f"kernels/{module}.py").write_text("more = 1\n")
    assert digest() == before


@pytest.mark.parametrize(
    ("block", "follows"),
    [
        ("import typing\nif typing.TYPE_CHECKING:\n    import kernels.stranger\n", False),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import kernels.stranger\n", True),
        ("if not TYPE_CHECKING:\n    import kernels.stranger\n", True),
        ("if a:\n    pass\nelif TYPE_CHECKING:\n    import kernels.stranger\n", False),
        ("try:\n    import kernels.stranger\nexcept ImportError:\n    pass\n", True),
    ],
)
def test_only_imports_that_can_run_are_followed(checkout: Path, block: str, follows: bool) -> None:
    (checkout / "kernels/mine.py").write_text(block)
    closure = import_closure(checkout / "kernels/mine.py", checkout)
    assert (checkout / "kernels/stranger.py" in closure) == follows


def test_a_relative_import_of_a_parent_package_is_followed(checkout: Path) -> None:
    (checkout / "kernels/deep").mkdir()
    (checkout / "kernels/deep/__init__.py").write_text("from ..stranger import value\n")
    closure = import_closure(checkout / "kernels/deep/__init__.py", checkout)
    assert checkout / "kernels/stranger.py" in closure


def test_an_import_cycle_ends(checkout: Path) -> None:
    (checkout / "kernels/a.py").write_text("import kernels.b\n")
    (checkout / "kernels/b.py").write_text("import kernels.a\n")
    both = {source_digest(checkout / f"kernels/{name}.py", checkout) for name in "ab"}
    assert len(both) == 1  # the closures are equal


def test_the_place_of_the_checkout_does_not_count(
    checkout: Path, digest: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    link = tmp_path_factory.mktemp("links") / "checkout"
    link.symlink_to(checkout)
    assert source_digest(link / "kernels/mine.py", link) == digest()


def test_a_file_that_does_not_parse_is_named(checkout: Path) -> None:
    (checkout / "kernels/far.py").write_text("def (\n")
    with pytest.raises(SyntaxError) as caught:
        source_digest(checkout / "kernels/mine.py", checkout)
    assert str(caught.value.filename).endswith("kernels/far.py")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_python_that_computes_it_does_not_count(version: str) -> None:
    # So that a kernel on two machines is known to be the same one.
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-V"], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no Python {version} here")
    program = (
        "import sys; from pathlib import Path; from harness.digest import source_digest; root = Path.cwd()\n"
        "for name in sys.argv[1:]: print(source_digest(root / name, root))"
    )
    names = [
        path.relative_to(ROOT) for folder in ("kernels", "workflow") for path in ROOT.glob(f"{folder}/*.py")
    ]
    command = ["-B", "-c", program, *names]
    theirs, ours = (
        subprocess.run([each, *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        for each in (python, sys.executable)
    )
    assert len(ours) == len(names) > 20
    assert theirs == ours


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('f"{1}a"', 'f"{1}" "a"'),
        ('f"a" f"b{1}"', 'f"ab{1}"'),
        ('f"{1}"', 'f"{1}" ""'),
    ],
)
def test_how_an_f_string_is_cut_up_does_not_count(
    checkout: Path, digest: Callable[[], str], old, new
) -> None:
    edit(checkout / "kernels/far.py", "value = 1", f"value = {old}")
    before = digest()
    edit(checkout / "kernels/far.py", old, new)
    assert digest() == before
    edit(checkout / "kernels/far.py", new, 'f"{1}b"')
    assert digest() != before


@pytest.mark.parametrize("other", ["None", "''", "()", "0", "False", "[]", "[None]", "...", "b''"])
def test_what_is_empty_is_not_all_the_same(checkout: Path, digest: Callable[[], str], other: str) -> None:
    edit(checkout / "kernels/far.py", "value = 1", f"value = {other}")
    before = digest()
    edit(checkout / "kernels/far.py", other, "{}")
    assert digest() != before
