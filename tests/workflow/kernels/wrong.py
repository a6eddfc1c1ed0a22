"""Forgets the scale."""

import torch


def attention(q, k, v, *, causal, scale=None):
    scores = q.float() @ k.float().transpose(-1, -2)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(mask, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ v.float()).to(q.dtype)
