"""Render report/benchmark.md from the CSV files."""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pandas as pd

from harness.record import write_atomically
from workflow.render import benchmark_page

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--benchmark", required=True, type=Path)
parser.add_argument("--correctness", required=True, type=Path)
parser.add_argument("--environment", required=True, type=Path)
parser.add_argument("--output", required=True, type=Path)
arguments = parser.parse_args()

page = benchmark_page(
    pd.read_csv(arguments.benchmark, keep_default_na=True),
    pd.read_csv(arguments.correctness, keep_default_na=True),
    json.loads(arguments.environment.read_text(encoding="utf-8")),
)
write_atomically(arguments.output, page)
