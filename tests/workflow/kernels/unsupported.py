"""Says that it cannot."""


def unsupported(problem, target):
    return f"no head_dim {problem.head_dim} on {target.device}"


def attention(q, k, v, *, causal, scale=None):
    raise AssertionError("called although unsupported")
