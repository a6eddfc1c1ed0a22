"""The command line that all measuring scripts share."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.record import RecordError, WriteError, read_record, require_writable


@dataclass(frozen=True)
class JobArguments:
    """A job from the command line; `options` are the spec's, with the tuned ones on top."""

    spec: dict[str, Any]
    output: Path
    time_limit_s: float
    options: dict[str, Any]
    winner: Path | None
    kept_gpu: int | None = None


def job_arguments(description: str | None, *, of_a_kernel: bool = True) -> JobArguments:
    """Parse sys.argv; the spec may be given as JSON, or as the path of a record that holds one.

    A job that measures the machine, and is not `of_a_kernel`, has no options.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--spec", required=True, help="the job as JSON, or a record whose spec to repeat")
    parser.add_argument("--output", required=True, type=Path, help="where to write the record")
    parser.add_argument("--time-limit-s", type=float, default=600.0)
    parser.add_argument("--tuned", nargs="*", type=Path, help="the file with the options that tuning found")
    parser.add_argument("--winner", type=Path, help="where a tuning job writes the fastest options")
    parser.add_argument("--kept-gpu", type=int, default=-1, help="the place of the GPU to take; -1: any")
    arguments = parser.parse_args()
    try:
        require_writable(arguments.output)
    except (ValueError, WriteError) as fault:
        parser.error(f"--output: {fault}")
    spec = _spec(parser, arguments.spec)
    try:
        options = dict(spec["implementation"]["options"]) if of_a_kernel else {}
    except (KeyError, TypeError):
        parser.error("--spec: it names no implementation with options")
    for path in arguments.tuned or []:
        options.update(_tuned(parser, path))
    kept = None if arguments.kept_gpu < 0 else arguments.kept_gpu
    return JobArguments(spec, arguments.output, arguments.time_limit_s, options, arguments.winner, kept)


def _spec(parser: argparse.ArgumentParser, text: str) -> dict[str, Any]:
    try:
        if text.lstrip().startswith("{"):
            content: dict[str, Any] = json.loads(text)
            return content
        return read_record(Path(text)).spec
    except (RecordError, json.JSONDecodeError) as fault:
        parser.error(f"--spec: neither JSON nor a record: {fault}")


def _tuned(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    try:
        options: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["options"]
        return options
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as fault:
        parser.error(f"--tuned: {path} does not say which options won: {fault}")
