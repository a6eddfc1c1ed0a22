"""The command line that scripts share which need the plan of the run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from workflow.plan import Plan


def plan_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with what makes a plan: the checked configuration, the device, the environment."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, type=json.loads, help="the checked configuration, as JSON")
    parser.add_argument("--device", required=True, choices=["cuda", "cpu"])
    parser.add_argument("--environment", required=True, help="the environment's key")
    return parser


def plan_of(arguments: argparse.Namespace, root: Path) -> Plan:
    """The plan that the arguments of `plan_parser` describe, for the checkout at `root`."""
    return Plan(arguments.config, arguments.device, arguments.environment, root)
