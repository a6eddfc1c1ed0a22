"""Publishing a run: its rendered pages copied under docs/, and parts of README and docs taken from there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INCLUDE = re.compile(
    r"(<!-- included from (?P<file>\S+) by `snakemake publish`; do not edit -->\n)"
    r".*?"
    r"(<!-- end of what is included -->)",
    re.DOTALL,
)


def machine_name(environment: dict[str, Any]) -> str:
    """The folder name of what was measured on: a GPU's model without its maker, or cpu."""
    gpu = environment.get("gpu")
    if gpu is None:
        return "cpu"
    words = re.sub(r"[^a-z0-9]+", " ", gpu["name"].lower()).split()
    return "-".join(word for word in words if word != "nvidia")


def publish(files: Sequence[Path], folder: Path) -> None:
    """Copy files into the folder, figures into its figures/; what a former run left there goes."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in files:
        target = folder / "figures" if file.suffix == ".svg" else folder
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / file.name)


def including_pages(root: Path) -> list[Path]:
    """The pages written by hand into which parts of published runs are taken."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [page for page in pages if INCLUDE.search(page.read_text(encoding="utf-8"))]


def with_included(text: str, root: Path, folder: Path | None = None) -> str:
    """A page with each included part as its file has it now: a page (its headings two levels down) or a
    figure. The part's file is named from root; folder, root unless given, is the one that holds the page.

    Raises FileNotFoundError for a part whose file is not there.
    """

    def include(match: re.Match[str]) -> str:
        if match["file"].endswith(".svg"):
            if not (root / match["file"]).is_file():
                raise FileNotFoundError(match["file"])
            title = Path(match["file"]).stem.replace("_", ", ")
            link = Path(os.path.relpath(root / match["file"], folder or root)).as_posix()
            return f"{match[1]}\n![{title}]({link})\n\n{match[3]}"
        page = (root / match["file"]).read_text(encoding="utf-8")
        body = "\n".join(line for line in page.splitlines() if not line.startswith("# ")).strip()
        return f"{match[1]}\n{re.sub(r'(?m)^## ', '#### ', body)}\n\n{match[3]}"

    return INCLUDE.sub(include, text)
