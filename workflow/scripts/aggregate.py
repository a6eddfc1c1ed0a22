"""Gather the records of a run into results/benchmark.csv, correctness.csv, comparison.csv, goals.csv."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pandas as pd

from harness.record import write_atomically
from workflow.command import plan_of, plan_parser
from workflow.comparisons import COMPARISON_COLUMNS, comparison_rows
from workflow.goals import GOAL_COLUMNS, goal_rows, problem_bytes_of
from workflow.tables import BENCHMARK_COLUMNS, CORRECTNESS_COLUMNS, benchmark_rows, correctness_rows

parser = plan_parser(__doc__)
parser.add_argument("--benchmark", required=True, type=Path)
parser.add_argument("--correctness", required=True, type=Path)
parser.add_argument("--comparison", required=True, type=Path)
parser.add_argument("--goals", required=True, type=Path)
arguments = parser.parse_args()

plan = plan_of(arguments, ROOT)
grid = correctness_rows(plan, Path.cwd())
rows = benchmark_rows(plan, Path.cwd(), grid)
comparison = comparison_rows(plan, Path.cwd())
goals = goal_rows(plan.config["goals"], rows, comparison, problem_bytes_of(plan))
for path, table, columns in (
    (arguments.correctness, grid, CORRECTNESS_COLUMNS),
    (arguments.benchmark, rows, BENCHMARK_COLUMNS),
    (arguments.comparison, comparison, COMPARISON_COLUMNS),
    (arguments.goals, goals, GOAL_COLUMNS),
):
    # A table without rows has its header all the same: whoever reads it asks for columns.
    write_atomically(path, pd.DataFrame(table, columns=None if table else columns).to_csv(index=False))
