"""Where there is no GPU, Triton kernels are interpreted; Triton reads the switch when it is imported."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Where there is a GPU, the tests of a module that puts its tensors there are tests of the GPU."""
    for item in items:
        if Path(__file__).parent in item.path.parents and getattr(item.module, "DEVICE", "cpu") == "cuda":
            item.add_marker(pytest.mark.gpu)
