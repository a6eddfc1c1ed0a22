"""Ends its process in one cell of the grid (causal fp16), and is right elsewhere."""

import os

import torch

from kernels import right


def attention(q, k, v, *, causal, scale=None):
    if causal and q.dtype == torch.float16:
        os._exit(3)
    return right.attention(q, k, v, causal=causal)
