"""What the tests of faults share: jobs run by a fork server, and stand-ins for NVML and nvidia-smi."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.bench import Bench
from tests.harness.conftest import as_root, install_nvml, is_running

__all__ = ["as_root", "bench", "install_nvml", "is_running"]


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One for all tests: what a fault has to leave intact is there from the tests before it."""
    bench = Bench(tmp_path_factory.mktemp("faults") / "checkout", server=True)
    yield bench
    bench.end()
