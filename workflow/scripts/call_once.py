"""Make one call of an implementation for a profiler to watch: --spec JSON --options JSON --answer FILE.

It is the program that `ncu` runs. The answer says whether there was a call, or why there was none.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.device import open_device, pin_to_gpu
from harness.ncu import call_once
from harness.plugin import interpret_triton, load_kernel
from harness.problem import Problem

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--spec", required=True, type=json.loads)
parser.add_argument("--options", required=True, type=json.loads)
parser.add_argument("--gpu", help="the UUID of the GPU to call on; without it the CPU is")
parser.add_argument("--answer", required=True, type=Path)
arguments = parser.parse_args()

if arguments.gpu:
    pin_to_gpu(arguments.gpu)
else:
    interpret_triton()
kernel = load_kernel(arguments.spec["implementation"]["kernel"], arguments.options)
device = open_device("cuda" if arguments.gpu else "cpu")
reason = call_once(kernel, Problem.from_dict(arguments.spec["problem"]), device)
arguments.answer.write_text(json.dumps({"unsupported": reason}), encoding="utf-8")
