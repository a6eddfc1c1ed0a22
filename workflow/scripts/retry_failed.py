"""Measure again every job whose record says error or timeout, and bring the tables up to date."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from workflow.command import plan_of, plan_parser
from workflow.tables import failed_jobs

parser = plan_parser(__doc__)
parser.add_argument("--snakefile", required=True, type=Path)
parser.add_argument("--workflow-profile", help="the profile of the run around this one")
arguments = parser.parse_args()

failed = [job.path for job in failed_jobs(plan_of(arguments, ROOT), Path.cwd())]
if not failed:
    print("no record says error or timeout")
    sys.exit(0)
print(f"measuring {len(failed)} jobs again")
command = [sys.executable, "-m", "snakemake", "--snakefile", str(arguments.snakefile), "--nolock", "all"]
if arguments.workflow_profile:
    command += ["--workflow-profile", arguments.workflow_profile]
# The configuration as the run around this one has it, whatever files and options it came from.
configuration = Path("results") / ".retry_config.json"
configuration.write_text(json.dumps(arguments.config), encoding="utf-8")
finished = subprocess.run([*command, "--configfile", str(configuration), "--forcerun", *failed], check=False)
configuration.unlink()
sys.exit(finished.returncode)
