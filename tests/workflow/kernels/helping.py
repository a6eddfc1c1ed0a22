"""Not a kernel: what `helped` imports."""

import torch


def attend(q, k, v, causal):
    scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(mask, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ v.float()).to(q.dtype)
