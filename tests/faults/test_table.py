"""docs/faults.md names tests that exist, and every test of faults."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = [line for line in TABLE.splitlines() if re.match(r"\| (?!---|fault |\*\*)", line)]


def names_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {f"{path.relative_to(ROOT)}::{name}" for name in names if name.startswith("test_")}


def test_every_test_that_the_table_names_exists() -> None:
    named = [row.rsplit("`", 2)[1] for row in ROWS]
    assert len(named) >= 30
    for name in named:
        assert name in names_of(ROOT / name.split("::")[0])


def test_the_table_names_every_test_of_this_folder() -> None:
    there = {name for path in Path(__file__).parent.glob("test_*.py") for name in names_of(path)}
    assert {name for name in there - names_of(Path(__file__)) if name not in TABLE} == set()


def test_every_row_says_what_is_seen_and_what_is_kept() -> None:
    for row in ROWS:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 4
        assert all(cells)
