"""Right, with the help of a module of its own."""

from kernels.helping import attend


def attention(q, k, v, *, causal, scale=None):
    return attend(q, k, v, causal)
