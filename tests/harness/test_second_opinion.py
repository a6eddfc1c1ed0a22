"""A second timer and a replay without the host: asked after the samples, and never instead of them."""

from __future__ import annotations

from typing import Any

import pytest

from harness.device import Call, CpuDevice, KernelSpans, NotAvailable
from harness.second_opinion import (
    PROFILED_CALLS,
    Question,
    second_opinion,
    timers_disagree,
)
from tests.harness import attentions
from tests.harness.attentions import kernel_of, make_problem

PROBLEM = make_problem()


class Offering(CpuDevice):
    """As a GPU with both ways."""

    def replayed_ms(self, call: Call) -> float:
        call()
        return 0.25

    def kernel_spans(self, call: Call, count: int) -> KernelSpans:
        assert count == PROFILED_CALLS
        return KernelSpans([0.5, 0.3, 0.4], ["scores", "softmax", "values"])


class Refusing(CpuDevice):
    def replayed_ms(self, call: Call) -> float:
        raise NotAvailable("a CUDA graph cannot capture it: RuntimeError: it waits for the device")

    def kernel_spans(self, call: Call, count: int) -> KernelSpans:
        raise NotAvailable("torch.profiler saw 7 kernels in 15 calls")


def ask(device: CpuDevice, question: Question) -> dict[str, Any]:
    return second_opinion(kernel_of(attentions.right), PROBLEM, device, question, lambda step: None)


def test_each_way_answers_where_it_is_asked() -> None:
    assert ask(Offering(), Question(graph=True, profiler=False)) == {"graph_latency_ms": 0.25}
    assert ask(Offering(), Question(graph=False, profiler=True)) == {
        "profiler_latency_ms": 0.4,
        "kernel_names": "scores; softmax; values",
    }


def test_a_way_that_is_not_there_says_why() -> None:
    found = ask(Refusing(), Question(graph=True, profiler=True))
    assert found == {
        "graph_reason": "a CUDA graph cannot capture it: RuntimeError: it waits for the device",
        "profiler_reason": "torch.profiler saw 7 kernels in 15 calls",
    }
    assert ask(CpuDevice(), Question(graph=True, profiler=False)) == {
        "graph_reason": "a CPU has no CUDA graphs"
    }


def test_an_opinion_that_was_not_given_is_a_reason_for_what_was_asked() -> None:
    question = Question(graph=True, profiler=False)
    assert question.any
    assert question.unanswered("killed by signal 9") == {"graph_reason": "killed by signal 9"}
    assert not Question(graph=False, profiler=False).any


@pytest.mark.parametrize(
    ("events_ms", "profiler_ms", "disagree"),
    [
        (0.0109, 0.0085, False),  # a launch gap: 2.4 us
        (0.561, 0.588, False),  # 5 %
        (0.561, 0.650, True),  # 16 %
        (0.561, 0.470, True),
        (0.010, 0.016, True),  # 6 us, and 60 %
    ],
)
def test_timers_disagree_beyond_ten_percent_and_five_microseconds(
    events_ms: float, profiler_ms: float, disagree: bool
) -> None:
    assert timers_disagree(events_ms, profiler_ms) is disagree
