"""Publishing a run: its rendered pages copied under docs/, and the README's part taken from there."""

from __future__ import annotations

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


def with_included(readme: str, root: Path) -> str:
    """The README with each included part as its file has it now: a page (its headings two levels down)
    or a figure.

    Raises FileNotFoundError for a part whose file is not there.
    """

    def include(match: re.Match[str]) -> str:
        if match["file"].endswith(".svg"):
            if not (root / match["file"]).is_file():
                raise FileNotFoundError(match["file"])
            title = Path(match["file"]).stem.replace("_", ", ")
            return f"{match[1]}\n![{title}]({match['file']})\n\n{match[3]}"
        page = (root / match["file"]).read_text(encoding="utf-8")
        body = "\n".join(line for line in page.splitlines() if not line.startswith("# ")).strip()
        return f"{match[1]}\n{re.sub(r'(?m)^## ', '#### ', body)}\n\n{match[3]}"

    return INCLUDE.sub(include, readme)
