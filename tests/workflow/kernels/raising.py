"""Raises, with a message that would break a table, a terminal and a page."""

MESSAGE = "a | pipe, a \"quote\",\na new line, \x1b[31mred\x07, <script>alert('x')</script> and `code`"


def attention(q, k, v, *, causal, scale=None):
    raise RuntimeError(MESSAGE)
