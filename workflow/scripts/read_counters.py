"""Read the GPU's counters over one call of an implementation: --spec JSON --output RECORD."""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.forkserver import run_in_fork_server

run_in_fork_server(__file__)

from harness.command import job_arguments
from harness.environment import require_gpu
from harness.job import Supervision
from harness.ncu import NcuError, NotReadable, counter_values, kernel_cells, profile
from harness.plugin import Kernel
from harness.record import ERROR, OK, UNSUPPORTED, canonical_json, write_record
from harness.supervisor import ReportStep, Verdict

arguments = job_arguments(__doc__)
spec = arguments.spec
options = canonical_json(arguments.options)


def work(kernel: Kernel, device: str, report_step: ReportStep) -> dict[str, object]:
    """Have ncu run the call; that the kernel was loaded here shows that it is still the one of the spec."""
    report_step("ncu")
    gpu = require_gpu().uuid if device == "cuda" else None
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        application = [
            *(sys.executable, str(ROOT / "workflow/scripts/call_once.py")),
            *("--spec", canonical_json(spec), "--options", options, "--answer", str(answer)),
            *(["--gpu", gpu] if gpu else []),
        ]
        try:
            kernels, output = profile(application, arguments.time_limit_s)
        except NotReadable as fault:
            raise Verdict(UNSUPPORTED, str(fault)) from fault
        except NcuError as fault:
            reason = _unsupported(answer)
            if reason is not None:  # without a call there was nothing for ncu to see
                raise Verdict(UNSUPPORTED, reason) from fault
            raise Verdict(ERROR, str(fault)) from fault
    print(output)  # the log keeps it as it came
    return {"values": counter_values(kernels), "cells": kernel_cells(kernels)}


def _unsupported(answer: Path) -> str | None:
    try:
        reason: str | None = json.loads(answer.read_text(encoding="utf-8"))["unsupported"]
    except OSError:  # it did not come to that
        return None
    return reason


with Supervision(
    spec, ROOT, time_limit_s=arguments.time_limit_s, timed=True, options=arguments.options
) as job:
    (outcome,) = job.run_without_device([spec["device"]], work)
found = outcome.result if outcome.status == OK else {}
record = job.record(
    status=outcome.status,
    reason=outcome.reason,
    values={"options": options, **found.get("values", {})},
    cells=found.get("cells", []),
)
write_record(record, arguments.output)
