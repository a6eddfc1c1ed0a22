"""Print the rows of one seq_len, from its records."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pandas as pd

from workflow.command import plan_of, plan_parser
from workflow.render import benchmark_page
from workflow.tables import benchmark_rows, correctness_rows

parser = plan_parser(__doc__)
parser.add_argument("--environment-file", required=True, type=Path)
parser.add_argument("--seq-len", required=True, type=int)
arguments = parser.parse_args()

plan = plan_of(arguments, ROOT).at_seq_len(arguments.seq_len)
grid = correctness_rows(plan, Path.cwd())
rows = benchmark_rows(plan, Path.cwd(), grid)
environment = json.loads(arguments.environment_file.read_text(encoding="utf-8"))
print(benchmark_page(pd.DataFrame(rows), pd.DataFrame(grid), environment))
