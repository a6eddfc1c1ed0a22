"""Write the page, the CSV and the table of the static profile; without them, print what it found.

Printing ends with 1 if a kernel could not be compiled for a target that it does not refuse.
"""

import csv
import io
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.record import write_atomically
from workflow.command import plan_of, plan_parser
from workflow.static_profile import (
    COLUMNS,
    fault_lines,
    in_short,
    static_page,
    static_rows,
    static_table_page,
)
from workflow.story import bullets

parser = plan_parser(__doc__)
parser.add_argument("--page", type=Path)
parser.add_argument("--csv", type=Path)
parser.add_argument("--table", type=Path)
arguments = parser.parse_args()

rows = static_rows(plan_of(arguments, ROOT), Path.cwd())
if arguments.page:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(arguments.csv, text.getvalue())
    write_atomically(arguments.table, static_table_page(rows))
    write_atomically(arguments.page, static_page(rows))
else:
    print(bullets(in_short(rows)))
    faults = fault_lines(rows)
    if faults:
        print(bullets(faults))
        sys.exit(f"{len(faults)} could not be compiled: they are listed above")
