"""Write down what the run is measured on: --device cuda|cpu --key KEY --output FILE."""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.forkserver import run_in_fork_server

run_in_fork_server(__file__)

from harness.environment import EnvironmentFault, describe, use_every_cpu_thread
from harness.record import write_atomically

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", required=True, choices=["cuda", "cpu"])
parser.add_argument("--key", required=True)
parser.add_argument("--output", required=True, type=Path)
arguments = parser.parse_args()

use_every_cpu_thread()  # as the jobs do
try:
    account = describe(arguments.device, ROOT)
except EnvironmentFault as fault:
    sys.exit(str(fault))
if account["key"] != arguments.key:
    sys.exit(f"environment = {arguments.key}: this machine is {account['key']}")
write_atomically(arguments.output, json.dumps(account, indent=1) + "\n")
