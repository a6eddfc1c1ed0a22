"""What the documentation points to is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    name
    for path in (ROOT / "tests").rglob("*.py")
    for name in re.findall(r"^\s*def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
}


def test_every_test_that_a_page_names_exists():
    named = {
        (path.name, name)
        for path in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8"))
    }
    assert len(named) >= 20
    assert sorted(pair for pair in named if pair[1] not in TESTS) == []


def test_every_fault_of_measurement_names_a_test():
    page = (ROOT / "docs/measurement.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*$", page, re.MULTILINE)
    assert rows == [str(number) for number in range(1, 21)]
    for line in re.findall(r"^\| \d+ \|.*$", page, re.MULTILINE):
        assert "`test_" in line.rsplit("|", 2)[1]
