"""Published runs, and the README's parts that are taken from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from workflow.publish import INCLUDE, including_pages, machine_name, publish, with_included

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_and_the_docs_show_the_published_runs_as_they_are():
    readme = ROOT / "README.md"
    assert len(list(INCLUDE.finditer(readme.read_text()))) >= 2  # a table and a figure
    assert readme in including_pages(ROOT)
    for page in including_pages(ROOT):
        assert with_included(page.read_text(), ROOT, page.parent) == page.read_text()


def test_a_page_of_the_docs_finds_its_figure_from_where_it_is(tmp_path):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "sweep_latency.svg").write_text("<svg/>")
    page = tmp_path / "docs" / "kernel.md"
    page.write_text(
        "<!-- included from docs/results/sweep_latency.svg by `snakemake publish`; do not edit -->\n"
        "<!-- end of what is included -->\n"
    )
    (tmp_path / "docs" / "other.md").write_text("nothing is included here\n")
    (tmp_path / "README.md").write_text("nor here\n")
    assert including_pages(tmp_path) == [page]
    renewed = with_included(page.read_text(), tmp_path, page.parent)
    assert "![sweep, latency](results/sweep_latency.svg)" in renewed


def test_an_included_page_follows_its_file_with_lower_headings_and_no_title(tmp_path):
    (tmp_path / "page.md").write_text("# Title\n\n## Part\n\n| a |\n")
    readme = (
        "before\n<!-- included from page.md by `snakemake publish`; do not edit -->\nold\n"
        "<!-- end of what is included -->\nafter\n"
    )
    renewed = with_included(readme, tmp_path)
    assert "#### Part" in renewed
    assert "Title" not in renewed
    assert "old" not in renewed
    assert renewed.startswith("before\n")
    assert renewed.endswith("after\n")
    assert with_included(renewed, tmp_path) == renewed


def test_a_part_whose_file_is_missing_is_an_error(tmp_path):
    readme = (
        "<!-- included from gone.svg by `snakemake publish`; do not edit -->\n"
        "<!-- end of what is included -->\n"
    )
    with pytest.raises(FileNotFoundError, match=r"gone\.svg"):
        with_included(readme, tmp_path)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"gpu": {"name": "NVIDIA H200"}}, "h200"),
        ({"gpu": {"name": "NVIDIA GeForce RTX 4090"}}, "geforce-rtx-4090"),
        ({"gpu": {"name": "Tesla T4"}}, "tesla-t4"),
        ({}, "cpu"),
    ],
)
def test_a_published_folder_is_named_after_the_machine(environment, name):
    assert machine_name(environment) == name


def test_publishing_again_leaves_nothing_of_the_former_run(tmp_path):
    page, figure = tmp_path / "page.md", tmp_path / "plot.svg"
    page.write_text("page")
    figure.write_text("<svg/>")
    folder = tmp_path / "docs" / "h200"
    publish([page, figure], folder)
    assert (folder / "page.md").read_text() == "page"
    assert (folder / "figures" / "plot.svg").read_text() == "<svg/>"
    publish([page], folder)
    assert [path.name for path in folder.rglob("*")] == ["page.md"]
