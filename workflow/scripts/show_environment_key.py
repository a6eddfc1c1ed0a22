"""Print the key of this machine's environment, for the configuration of a run that is started elsewhere."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.environment import EnvironmentFault, environment_key, require_gpu

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", required=True, choices=["cuda", "cpu"])
arguments = parser.parse_args()

try:
    if arguments.device == "cuda":
        require_gpu()
except EnvironmentFault as fault:
    sys.exit(str(fault))
print(environment_key(arguments.device))
