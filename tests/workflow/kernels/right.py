"""Plain attention: the kernel that nothing is wrong with. It notes when each call ran, if asked to."""

import os
import time

import torch


def attention(q, k, v, *, causal, scale=None):
    began = time.monotonic()
    scores = q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(mask, float("-inf"))
    output = (torch.softmax(scores, dim=-1) @ v.float()).to(q.dtype)
    if "CALL_LOG" in os.environ:
        time.sleep(0.01)
        with open(os.environ["CALL_LOG"], "a") as log:
            log.write(f"{os.getpid()} {began} {time.monotonic()}\n")
    return output
