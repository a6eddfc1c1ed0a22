"""A process of the SDPA diagnostic does what its priming says, and nothing else, before the first call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.correctness import Tolerance
from harness.device import Call, CpuDevice, KernelSpans, Series
from harness.diagnostic import (
    AFTER_MATMUL,
    AFTER_NAIVE,
    ISOLATED,
    ISOLATED_AGAIN,
    PRIMINGS,
    Diagnosis,
    DiagnosticSettings,
    diagnose,
    diagnosis_marks,
    diagnosis_samples,
    diagnosis_values,
)
from harness.monitor import NoMonitor
from harness.supervisor import Verdict
from tests.harness import attentions
from tests.harness.attentions import kernel_of, make_problem
from workflow.plan import DIAGNOSTIC_PRIMINGS

SETTINGS = DiagnosticSettings(samples=3, priming_s=0.0, warm_up_s=0.0)


def run(
    priming: str, attention: Any = attentions.right, device: CpuDevice | None = None, **hooks: Any
) -> tuple[Diagnosis, list[str]]:
    """Diagnose on the CPU; the diagnosis, and the names of what was called, in order."""
    called: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def call(*tensors: torch.Tensor, **options: Any) -> Any:
            called.append(name)
            return function(*tensors, **options)

        return call

    found = diagnose(
        kernel_of(noting("sdpa", attention), **hooks),
        kernel_of(noting("naive", attentions.right)),
        priming,
        make_problem(),
        device or CpuDevice(),
        Tolerance(absolute=0.002, relative=0.002),
        SETTINGS,
        NoMonitor,
        lambda step: None,
    )
    return found, called


@pytest.mark.parametrize("priming", [ISOLATED, ISOLATED_AGAIN, AFTER_MATMUL])
def test_nothing_of_attention_runs_before_the_first_call(priming: str) -> None:
    found, called = run(priming)
    assert set(called) == {"sdpa"}
    assert found.first_call_ms > 0
    assert len(found.early_ms) == len(found.late_ms) == SETTINGS.samples


def test_naive_attention_runs_before_the_first_call_and_never_after() -> None:
    _, called = run(AFTER_NAIVE)
    assert called[0] == "naive"
    assert "naive" not in called[called.index("sdpa") :]


def test_the_plan_and_the_harness_know_the_same_primings() -> None:
    assert tuple(DIAGNOSTIC_PRIMINGS) == PRIMINGS
    with pytest.raises(ValueError, match="must be one of"):
        run("after_lunch")


def test_the_backends_own_words_are_the_reason_why_it_does_not_run() -> None:
    with pytest.raises(Verdict, match="needs sm80") as raised:
        run(ISOLATED, unsupported=lambda problem, target: "needs sm80")
    assert raised.value.status == "unsupported"


def test_a_wrong_output_takes_the_samples_away() -> None:
    def zeros(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return torch.zeros_like(q)

    with pytest.raises(Verdict) as raised:
        run(ISOLATED, zeros)
    assert raised.value.status == "wrong"


class Starved(CpuDevice):
    def series(self, call: Call, count: int, **how: Any) -> Series:
        return replace(super().series(call, count, **how), starved=True)


class Profiled(CpuDevice):
    def kernel_spans(self, call: Call, count: int) -> KernelSpans:
        return KernelSpans([1.0] * count, ["scores", "values"])


def test_samples_that_hold_host_time_are_withheld() -> None:
    with pytest.raises(Verdict, match="ran dry"):
        run(ISOLATED, device=Starved())


def test_the_kernels_of_a_call_are_named_or_there_is_a_reason() -> None:
    assert run(ISOLATED, device=Profiled())[0].kernel_names == "scores; values"
    found, _ = run(ISOLATED)
    assert found.kernel_names is None
    assert found.kernel_names_reason == "there is no second timer for the CPU"


def test_processes_that_ran_other_kernels_are_told_apart() -> None:
    one, _ = run(ISOLATED, device=Profiled())
    other = replace(one, kernel_names="flash", monitor={"throttle_reasons": "power cap"})
    values = diagnosis_values([one, other, one])
    assert values["kernel_names"] == "scores; values | flash"
    assert diagnosis_marks(values) == ["throttled"]
    assert diagnosis_marks(diagnosis_values([one])) == ["one_process"]
    samples = diagnosis_samples([one, other])
    assert [len(process) for process in samples["first_call_ms"]] == [1, 1]
    assert samples["early_sm_clock_mhz"] == [[], []]
