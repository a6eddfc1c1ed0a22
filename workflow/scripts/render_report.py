"""Render report/report.md, and the tables as HTML pages for Snakemake's report."""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pandas as pd

from harness.record import write_atomically
from workflow.pages import (
    cells_page,
    comparison_page,
    correctness_page,
    environment_page,
    goals_page,
    latency_page,
    memory_page,
)
from workflow.story import report_page

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--benchmark", required=True, type=Path)
parser.add_argument("--correctness", required=True, type=Path)
parser.add_argument("--comparison", required=True, type=Path)
parser.add_argument("--goals", required=True, type=Path)
parser.add_argument("--environment", required=True, type=Path)
parser.add_argument("--figures", nargs="*", default=[], help="the figures that the page shows")
parser.add_argument("--page", required=True, type=Path)
parser.add_argument("--tables", required=True, type=Path, nargs="+", help="named by what they hold")
arguments = parser.parse_args()

benchmark = pd.read_csv(arguments.benchmark)
grid = pd.read_csv(arguments.correctness)
comparison = pd.read_csv(arguments.comparison)
goals = pd.read_csv(arguments.goals)
environment = json.loads(arguments.environment.read_text(encoding="utf-8"))

figures = [os.path.relpath(figure, arguments.page.parent) for figure in arguments.figures]
write_atomically(arguments.page, report_page(benchmark, grid, environment, figures, comparison, goals))
for path in arguments.tables:
    if path.stem == "environment":
        page = environment_page(environment)
    elif path.stem == "correctness":
        page = correctness_page(grid)
    elif path.stem == "correctness_cells":
        page = cells_page(grid)
    elif path.stem == "goals":
        page = goals_page(goals)
    else:
        sweep, _, quantity = path.stem.rpartition("_")
        if quantity == "comparison":
            write_atomically(path, comparison_page(comparison[comparison["sweep"] == sweep]))
            continue
        rows = benchmark[benchmark["sweep"] == sweep]
        page = {"latency": latency_page, "memory": memory_page}[quantity](rows)
    write_atomically(path, page)
