"""What one Snakemake process sets up for the jobs it starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from harness.lock import hold_checkout

INSIDE_VARIABLE = "ATTENTION_BENCH_RUN"


def use_this_python() -> None:
    """Have jobs run with the Python that runs Snakemake, whether or not its environment is activated."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def begin_run(folder: Path) -> None:
    """Wait for another run in this folder to end, and keep others waiting until this process ends.

    A run that a job of this run starts (the HTML report, retry_failed) is part of it and does not wait.
    """
    if INSIDE_VARIABLE in os.environ:
        return
    hold_checkout(folder, lambda sentence: print(sentence, file=sys.stderr, flush=True))
    os.environ[INSIDE_VARIABLE] = str(os.getpid())


def notes_are_lost(folder: Path) -> bool:
    """Whether Snakemake has no notes on any file here, as in a new checkout or without its `.snakemake/`."""
    notes = folder / ".snakemake" / "metadata"
    return not notes.is_dir() or not any(notes.iterdir())
