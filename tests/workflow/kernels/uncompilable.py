"""A kernel that names something to compile which no compiler takes."""


def attention(q, k, v, *, causal, scale=None):
    raise NotImplementedError


def unsupported(problem, target):
    return "not below 9.0" if target.compute_capability and target.compute_capability < (9, 0) else None


def compile_units(problem, options, target):
    raise ValueError("no such | instruction")
