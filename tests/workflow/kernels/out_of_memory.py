"""Asks for more memory than there is."""

import torch


def attention(q, k, v, *, causal, scale=None):
    return torch.empty(1 << 60, dtype=torch.uint8, device=q.device)
