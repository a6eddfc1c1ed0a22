"""Copy a run as rendered to docs/results/<machine>/<config>/, and bring README and docs up to date."""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.record import write_atomically
from workflow.publish import including_pages, machine_name, publish, with_included

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--environment", type=Path, help="the run's environment.json, published too")
parser.add_argument("--config-name", help="what the run is called")
parser.add_argument("--files", nargs="*", type=Path, default=[])
parser.add_argument(
    "--pages-only", action="store_true", help="publish nothing; renew what README and docs include"
)
arguments = parser.parse_args()

if not arguments.pages_only:
    environment = json.loads(arguments.environment.read_text(encoding="utf-8"))
    folder = ROOT / "docs" / "results" / machine_name(environment) / arguments.config_name
    publish([arguments.environment, *arguments.files], folder)
    print(f"published under {folder.relative_to(ROOT)}")
for page in including_pages(ROOT):
    write_atomically(page, with_included(page.read_text(encoding="utf-8"), ROOT, page.parent))
