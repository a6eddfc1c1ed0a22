"""What one Snakemake process sets up for the jobs it starts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.lock import LockFault, hold_checkout
from harness.record import WriteError, require_writable

INSIDE_VARIABLE = "ATTENTION_BENCH_RUN"
# What a command line asks for, by the names of Snakemake's options, that runs no job.
LOOKS = (
    *("dryrun", "lint", "list_rules", "list_target_rules", "dag", "rulegraph", "filegraph", "d3dag"),
    *("summary", "detailed_summary", "list_changes", "list_input_changes", "list_params_changes"),
    *("list_untracked", "print_compilation", "unlock", "report"),
)


def use_this_python() -> None:
    """Have jobs run with the Python that runs Snakemake, whether or not its environment is activated.

    What they and Snakemake print reaches the terminal whatever its encoding lacks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:replace"


def only_looks(arguments: list[str]) -> bool:
    """Whether a command line of Snakemake looks at the workflow (-n, --lint, --report) and runs nothing.

    While a Snakefile is read, Snakemake itself cannot say yet.
    """
    from snakemake.cli import get_argument_parser

    try:
        parsed, _ = get_argument_parser().parse_known_args(arguments)
    except SystemExit:  # not Snakemake's command line: it was started from a program
        return False
    return not parsed.report_after_run and any(getattr(parsed, look, None) for look in LOOKS)


def workflow_profile(arguments: list[str]) -> list[str]:
    """The options with which a run that is started from this one is given the same workflow profile."""
    from snakemake.cli import get_argument_parser

    try:
        parsed, _ = get_argument_parser().parse_known_args(arguments)
    except SystemExit:  # not Snakemake's command line: it was started from a program
        return []
    return ["--workflow-profile", parsed.workflow_profile] if parsed.workflow_profile else []


def begin_run(folder: Path) -> None:
    """Wait for another run in this folder to end, and keep others waiting until this process ends.

    A run that a job of this run starts (the HTML report, retry_failed) is part of it and does not wait.
    """
    if INSIDE_VARIABLE in os.environ:
        return
    try:
        hold_checkout(folder, lambda sentence: print(sentence, file=sys.stderr, flush=True))
        require_writable(folder / "results" / "record.json")
    except (LockFault, WriteError) as fault:
        sys.exit(str(fault))
    bring_back_from_the_future([folder / "results", folder / "report"])
    os.environ[INSIDE_VARIABLE] = str(os.getpid())


def bring_back_from_the_future(folders: list[Path]) -> None:
    """Give files made before the system's clock was set back a modification time of just now, in order.

    Snakemake takes each output made after them for a fault.
    """
    now = time.time_ns()
    made = {path: path.lstat().st_mtime_ns for folder in folders for path in folder.rglob("*")}
    late = sorted({moment for moment in made.values() if moment > now})
    if not late:
        return
    print("the system's clock went back: what was made later than now counts as made now", file=sys.stderr)
    for path, moment in made.items():
        if moment > now:
            now_in_order = now - 1000 * (len(late) - late.index(moment))
            with contextlib.suppress(PermissionError):  # another user's
                os.utime(path, ns=(now_in_order, now_in_order), follow_symlinks=False)


def in_random_order(priority: int) -> Callable[[Any], float]:
    """A rule's `priority` under which its jobs run in an order drawn anew for each run.

    What drifts with time (heat, clocks, a neighbour) then favours nobody for coming first. The jobs stay
    between those of this priority and of the next.
    """
    return lambda wildcards: priority + random.random()


def renew_environment(file: Path, command: list[str]) -> None:
    """Have the command write what this machine is once more, where its file is lost or unreadable.

    Not left to the workflow: a job before the measurements that has to run has all of them run again. Where
    nothing is measured yet it is the workflow's.
    """
    if _is_damaged(file):
        print(f"{file} is lost or cannot be read: written once more", file=sys.stderr, flush=True)
        subprocess.run(command, check=False)


def require_environment(file: Path, command: list[str]) -> None:
    """End the run, in one line, where measurements have lost the account of a machine that is not this one.

    `command` is what writes it once more, on a machine of that environment.
    """
    if _is_damaged(file):
        sys.exit(
            f"{file} is lost or cannot be read, and this is not the machine that it describes. On one of that"
            f" environment, in this folder: {shlex.join(command)}"
        )


def _is_damaged(file: Path) -> bool:
    """Whether there are measurements of an environment, and no account of it."""
    if not any(file.parent.glob("*/**/*.json")):
        return False
    try:
        return not isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        return True
