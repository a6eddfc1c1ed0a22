"""Says at the end how many of the wrong kernels were caught: counted, not asserted."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from tests.wrong_kernels import faulty

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
torch.set_num_threads(1)

CAUGHT = "wrong kernel, caught"


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[str, bool], None]:
    """Note of a wrong kernel whether it was caught, in the test's report: it may run in another process."""
    return lambda name, was: request.node.user_properties.append((CAUGHT, (name, was)))


@pytest.fixture(autouse=True)
def fresh_kernels() -> None:
    faulty.forget()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found]
    properties = [each for report in reports for each in getattr(report, "user_properties", ())]
    caught = dict(value for key, value in properties if key == CAUGHT)
    if caught:
        terminalreporter.write_line(f"wrong kernels: {sum(caught.values())} of {len(caught)} caught")
        for name in sorted(name for name, was in caught.items() if not was):
            terminalreporter.write_line(f"  not caught: {name}")
