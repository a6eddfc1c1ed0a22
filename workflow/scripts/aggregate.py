"""Gather the records of a run into results/benchmark.csv and results/correctness.csv."""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pandas as pd

from harness.record import write_atomically
from workflow.plan import Plan
from workflow.tables import benchmark_rows, correctness_rows

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--config", required=True, type=json.loads, help="the checked configuration, as JSON")
parser.add_argument("--device", required=True, choices=["cuda", "cpu"])
parser.add_argument("--environment", required=True)
parser.add_argument("--benchmark", required=True, type=Path)
parser.add_argument("--correctness", required=True, type=Path)
arguments = parser.parse_args()

plan = Plan(arguments.config, arguments.device, arguments.environment, ROOT)
grid = correctness_rows(plan, Path.cwd())
write_atomically(arguments.correctness, pd.DataFrame(grid).to_csv(index=False))
rows = benchmark_rows(plan, Path.cwd(), grid)
write_atomically(arguments.benchmark, pd.DataFrame(rows).to_csv(index=False))
