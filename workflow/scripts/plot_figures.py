"""Draw the figures named by --output: `<sweep>_<quantity>.svg`, `<goal>_goal.svg` and `error.svg`."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pandas as pd

from harness.record import write_atomically
from workflow.figures import error_figure, sweep_figure
from workflow.goals_figure import goal_figure
from workflow.render import first_names

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--benchmark", required=True, type=Path)
parser.add_argument("--correctness", required=True, type=Path)
parser.add_argument("--goals", required=True, type=Path)
parser.add_argument("--output", required=True, type=Path, nargs="+")
arguments = parser.parse_args()

benchmark = first_names(pd.read_csv(arguments.benchmark))
grid = pd.read_csv(arguments.correctness)
goals = pd.read_csv(arguments.goals)
for path in arguments.output:
    if path.stem == "error":
        drawing = error_figure(grid)
    else:
        name, _, quantity = path.stem.rpartition("_")
        of_a_goal = quantity == "goal"
        drawing = goal_figure(goals, name) if of_a_goal else sweep_figure(benchmark, grid, name, quantity)
    write_atomically(path, drawing)
