"""NVIDIA's compute-sanitizer over small calls of each Triton kernel: no access out of bounds, no race."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.oracle import DEVICE

ROOT = Path(__file__).parents[2]
CUDA = Path("/usr/local/cuda/bin/compute-sanitizer")
FOUND = 86  # the exit status for what the tool finds

CALLS = """
import torch
from kernels import gluon_hopper, triton_decode, triton_flash

torch.manual_seed(0)
hopper = torch.cuda.get_device_capability() == (9, 0)
for length, head_dim, causal in ((130, 64, True), (300, 128, False)):
    q = torch.randn(1, 4, length, head_dim, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1, 2, length, head_dim, dtype=torch.bfloat16, device="cuda")
    for kernel in (triton_flash, *([gluon_hopper] if hopper else [])):
        kernel.attention(q, k, v, causal=causal)
    triton_decode.decode(q[:, :, -1:].contiguous(), k, v)
    torch.cuda.synchronize()
print("all called")
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool):
    sanitizer = shutil.which("compute-sanitizer") or (str(CUDA) if CUDA.exists() else None)
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    # Each tensor has memory of its own, so that what lies behind it is out of bounds.
    variables = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-c", CALLS]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this machine's GPU")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "all called" in done.stdout
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout
