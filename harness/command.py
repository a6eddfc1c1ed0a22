"""The command line that all measuring scripts share."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class JobArguments:
    spec: dict[str, Any]
    output: Path
    time_limit_s: float


def job_arguments(description: str | None) -> JobArguments:
    """Parse sys.argv; the spec may be given as JSON, or as the path of a record that holds one."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--spec", required=True, help="the job as JSON, or a record whose spec to repeat")
    parser.add_argument("--output", required=True, type=Path, help="where to write the record")
    parser.add_argument("--time-limit-s", type=float, default=600.0)
    arguments = parser.parse_args()
    return JobArguments(_spec(parser, arguments.spec), arguments.output, arguments.time_limit_s)


def _spec(parser: argparse.ArgumentParser, text: str) -> dict[str, Any]:
    try:
        if text.lstrip().startswith("{"):
            content: dict[str, Any] = json.loads(text)
            return content
        recorded: dict[str, Any] = json.loads(Path(text).read_text(encoding="utf-8"))["spec"]
        return recorded
    except (OSError, KeyError, json.JSONDecodeError) as fault:
        parser.error(f"--spec: neither JSON nor a record: {fault}")
