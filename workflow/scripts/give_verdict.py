"""Print the run's table and list every wrong, error or timeout cell; exit 1 if there is one."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pandas as pd

from harness.record import write_atomically
from workflow.render import fault_lines

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--benchmark", required=True, type=Path)
parser.add_argument("--correctness", required=True, type=Path)
parser.add_argument("--table", required=True, type=Path)
parser.add_argument("--output", required=True, type=Path)
arguments = parser.parse_args()

print(arguments.table.read_text(encoding="utf-8"))
faults = fault_lines(pd.read_csv(arguments.benchmark), pd.read_csv(arguments.correctness))
if faults:
    print(f"{len(faults)} cells are wrong, errors or timeouts:")
    print("\n".join(f"  {line}" for line in faults))
    print("The tables above are complete. `snakemake` measures again what you change, and")
    print("`snakemake retry_failed` what is an error or a timeout for a reason that is gone.")
    sys.exit(f"{len(faults)} cells are wrong, errors or timeouts: they are listed above")
write_atomically(arguments.output, "no cell is wrong, an error or a timeout\n")
