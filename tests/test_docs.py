"""What the documentation points to is there."""

from __future__ import annotations

import itertools
import re
import subprocess
import tomllib
from pathlib import Path

import yaml

from harness.digest import defines_function
from tests.workflow.checkout import Checkout

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


def rule_bodies() -> dict[str, str]:
    """The text of each rule of the workflow, by its name; targets without a command are left out."""
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in [ROOT / "Snakefile", *(ROOT / "workflow/rules").glob("*.smk")]
    )
    found = {}
    for block in re.split(r"(?m)^(?= *rule\b[ \w]*:$)", text)[1:]:
        head, _, body = block.partition(":\n")
        named = re.search(r'name:\s+f?"([^"]+)"', body)
        name = head.split()[1] if head.strip() != "rule" else named and named[1]
        if re.search(r"(?m)^ +(shell|script|run|notebook|wrapper):", body):
            found[name] = body
    return found


def test_every_rule_has_a_log_a_message_and_an_environment():
    rules = rule_bodies()
    assert len(rules) >= 17
    for directive in ("log", "message", "conda"):
        lacking = [name for name, body in rules.items() if not re.search(rf"(?m)^\s+{directive}:", body)]
        assert lacking == [], directive


def edges(text: str) -> set[tuple[str, str]]:
    """The arrows of a flowchart of Mermaid's, `a & b --> c` counting for two."""
    found = set()
    for line in text.splitlines():
        groups = [[name.strip() for name in group.split("&")] for group in line.split("-->")]
        for before, after in itertools.pairwise(groups):
            found |= set(itertools.product(before, after))
    return found


def reachable(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Which comes before which, by one arrow or several."""
    while True:
        further = {(a, d) for a, b in arrows for c, d in arrows if b == c} - arrows
        if not further:
            return arrows
        arrows = arrows | further


def test_the_readmes_graph_is_that_of_the_rules(tmp_path):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    drawn = edges(page.split("```mermaid\n")[1].split("```")[0])
    result = Checkout.make(tmp_path).snakemake("--rulegraph", "mermaid-js", "--forceall")
    assert result.returncode == 0, result.stdout
    names = dict(re.findall(r"(id\d+)\[(\w+)\]", result.stdout))
    real = {(names[a], names[b]) for a, b in re.findall(r"(id\d+) --> (id\d+)", result.stdout)}
    real = {arrow for arrow in real if arrow[1] != "all"}
    # Nothing is tuned on a CPU, so the rule is not in this graph.
    assert ("environment", "tune") in drawn
    on_a_cpu = {arrow for arrow in drawn if "tune" not in arrow}
    assert reachable(on_a_cpu) == reachable(real)


def test_the_changelog_and_the_citation_are_of_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    assert version in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_file_that_a_page_links_to_exists():
    tracked = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    pages = [ROOT / name for name in tracked.stdout.split()] or [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    missing = [
        (str(page.relative_to(ROOT)), link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert missing == []


def test_no_command_has_a_target_behind_its_config_file():
    # Snakemake takes every word behind --configfile for a further file, up to the next option.
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "config").iterdir(),
        ROOT / "Makefile",
    ]
    commands = [
        command
        for page in pages
        for command in re.findall(
            r"snakemake [^\n`;#]*--configfile [^\n`;#]*", page.read_text(encoding="utf-8")
        )
    ]
    assert len(commands) >= 5
    assert [command for command in commands if re.search(r"--configfile \S+ +[^-\s]", command)] == []


def test_the_readme_names_every_kernel():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    kernels = [path.stem for path in (ROOT / "kernels").glob("*.py") if defines_function(path, "attention")]
    assert len(kernels) >= 5
    assert [name for name in kernels if f"| `{name}` |" not in page] == []
