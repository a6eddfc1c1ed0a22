"""Right, but waits in every call at the seq_len that the file $GATE names, and says so in $GATE.reached."""

import os
import time
from pathlib import Path

from kernels import right

GATE = Path(os.environ["GATE"])


def attention(q, k, v, *, causal, scale=None):
    while GATE.exists() and GATE.read_text() == str(q.shape[-2]):
        Path(f"{GATE}.reached").touch()
        time.sleep(0.01)
    return right.attention(q, k, v, causal=causal)
