"""Put two runs of one study beside each other: --before FOLDER --after FOLDER --output PAGE.

Each folder holds a run's benchmark.csv, comparison.csv and environment.json, as docs/results/ does.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pandas as pd

from harness.record import write_atomically
from workflow.repeated import repeated_page

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--before", required=True, type=Path, help="the folder of the earlier run")
parser.add_argument("--after", required=True, type=Path, help="the folder of the later run")
parser.add_argument("--output", required=True, type=Path, help="the page to write, Markdown")
arguments = parser.parse_args()

folders = (arguments.before, arguments.after)
try:
    tables = [pd.read_csv(folder / "benchmark.csv") for folder in folders]
    comparisons = [pd.read_csv(folder / "comparison.csv") for folder in folders]
    environments = [json.loads((folder / "environment.json").read_text("utf-8")) for folder in folders]
    page = repeated_page(
        tables[0], tables[1], (comparisons[0], comparisons[1]), (environments[0], environments[1])
    )
except (OSError, ValueError) as fault:
    sys.exit(f"compare_runs: {fault}")
write_atomically(arguments.output, page)
