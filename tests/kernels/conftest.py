"""Where there is no GPU, Triton kernels are interpreted; Triton reads the switch when it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
