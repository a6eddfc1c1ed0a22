"""Write the page and the figure of the SDPA diagnostic; without them, print what it found.

Printing ends with 1 if a measurement is wrong, an error or a timeout.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.record import write_atomically
from workflow.command import plan_of, plan_parser
from workflow.diagnostic import diagnostic_figure, diagnostic_page, fault_lines, in_short, load_cells
from workflow.story import bullets

parser = plan_parser(__doc__)
parser.add_argument("--environment-file", required=True, type=Path)
parser.add_argument("--page", type=Path)
parser.add_argument("--figure", type=Path)
arguments = parser.parse_args()

cells = load_cells(plan_of(arguments, ROOT), Path.cwd())
if arguments.page and arguments.figure:
    environment = json.loads(arguments.environment_file.read_text(encoding="utf-8"))
    figure = os.path.relpath(arguments.figure, arguments.page.parent)
    write_atomically(arguments.figure, diagnostic_figure(cells))
    write_atomically(arguments.page, diagnostic_page(cells, environment, figure))
else:
    print(bullets(in_short(cells)))
    faults = fault_lines(cells)
    if faults:
        print(bullets(faults))
        sys.exit(f"{len(faults)} measurements are wrong, errors or timeouts: they are listed above")
