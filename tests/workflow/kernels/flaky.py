"""Raises until the file $WORKS_NOW exists, and is right from then on."""

import os

from kernels import right


def attention(q, k, v, *, causal, scale=None):
    if not os.path.exists(os.environ["WORKS_NOW"]):
        raise RuntimeError("not yet")
    return right.attention(q, k, v, causal=causal)
