"""Write the profile's page, its table and its figures; without them, print what limits each implementation.

Printing ends with 1 if a kernel could not be compiled or profiled.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.architectures import target_name
from harness.record import write_atomically
from workflow import static_profile
from workflow.command import plan_of, plan_parser
from workflow.limits import evidence
from workflow.plan import CORRECTNESS
from workflow.profile_page import counted, fault_lines, in_short, limits_page, profile_page
from workflow.roofline_figure import roofline_figure
from workflow.story import bullets

parser = plan_parser(__doc__)
parser.add_argument("--environment-file", required=True, type=Path)
parser.add_argument("--page", type=Path)
parser.add_argument("--table", type=Path)
parser.add_argument("--figures", nargs="*", type=Path, default=[])
arguments = parser.parse_args()

plan = plan_of(arguments, ROOT)
environment = json.loads(arguments.environment_file.read_text(encoding="utf-8"))
gpu = environment.get("gpu")
target = None
if gpu:
    major, minor = gpu["compute_capability"].split(".")
    target = target_name((int(major), int(minor)))
static = static_profile.static_rows(plan, Path.cwd())
counters = counted(plan, Path.cwd())
rows = evidence(plan, Path.cwd(), static, target)
if arguments.page:
    figures = {path.stem.removesuffix("_roofline"): path for path in arguments.figures}
    # The order in which the other figures give out their colours.
    names = list(dict.fromkeys(job.implementation for job in plan.jobs() if job.phase == CORRECTNESS))
    for sweep, path in figures.items():
        write_atomically(path, roofline_figure(sweep, [row for row in rows if row.sweep == sweep], names))
    linked = {sweep: os.path.relpath(path, arguments.page.parent) for sweep, path in figures.items()}
    write_atomically(arguments.table, limits_page(rows))
    page = profile_page(rows, counters, static, environment, plan.device, linked)
    write_atomically(arguments.page, page)
else:
    print(bullets([*in_short(rows, counters, plan.device), *static_profile.in_short(static)]))
    faults = [*fault_lines(counters), *static_profile.fault_lines(static)]
    if faults:
        print(bullets(faults))
        sys.exit(f"{len(faults)} could not be compiled or profiled: they are listed above")
