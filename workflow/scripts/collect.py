"""Put the results of several environments beside each other: a page, a CSV, a figure and a table a sweep."""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pandas as pd

from harness.record import write_atomically
from workflow.collect import CollectFault, collect, names_of
from workflow.collect_figure import collected_figure
from workflow.collect_pages import collected_page, collected_table, rows_table
from workflow.tables import BENCHMARK_COLUMNS

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--config", required=True, type=json.loads, help="the checked configuration, as JSON")
parser.add_argument("--page", required=True, type=Path)
parser.add_argument("--cells", required=True, type=Path, help="the CSV of all cells")
parser.add_argument("--figures", required=True, type=Path, nargs="+", help="`<sweep>.svg`")
parser.add_argument("--tables", required=True, type=Path, nargs="+", help="`<sweep>.html`")
arguments = parser.parse_args()

try:
    collection = collect(arguments.config, ROOT)
except CollectFault as fault:
    sys.exit(f"collect: {fault}")

names = names_of(collection.environments)
cells = pd.DataFrame(
    [*collection.rows, *collection.apart],
    columns=None if collection.rows or collection.apart else BENCHMARK_COLUMNS,
)
write_atomically(arguments.cells, cells.to_csv(index=False))
links = {}
for path in arguments.figures:
    rows = rows_table(collection.rows, path.stem)
    write_atomically(path, collected_figure(rows, path.stem, names))
    links[path.stem] = os.path.relpath(path, arguments.page.parent)
for path in arguments.tables:
    write_atomically(path, collected_table(collection, path.stem, names))
write_atomically(arguments.page, collected_page(collection, list(links), links))
print(f"{len(names)} environments beside each other: {', '.join(names.values())}")
print(f"{arguments.page}, {arguments.cells}")
