"""Never comes back."""

import time


def attention(q, k, v, *, causal, scale=None):
    time.sleep(3600)
