"""What Triton's compiler makes of a kernel is asked in a process of its own: here Triton interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def output_of(program: str, argument: Any, cache: Path) -> str:
    """What a Python program prints that Triton compiles for, into a cache of its own.

    The program has the argument as JSON in sys.argv[1], and runs in the repository's root.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(argument)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
