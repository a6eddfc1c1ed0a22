"""Guard zones see every write outside, and change nothing about what lies between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.tensors import (
    GUARD_BYTE,
    GUARD_BYTES,
    GuardedAllocations,
    first_location,
    guards_touched,
    location,
    make_inputs,
    poison_free_memory,
    same_bits,
)
from tests.harness.attentions import make_problem, right, writes_its_output

Tensor = torch.Tensor
ALLOCATIONS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(3, 5),
    "empty with a dtype": lambda: torch.empty((3, 5), dtype=torch.bfloat16, device="cpu"),
    "empty_like": lambda: torch.empty_like(torch.ones(3, 5)),
    "empty_like transposed": lambda: torch.empty_like(torch.ones(5, 3).t()),
    "new_empty": lambda: torch.ones(1).new_empty((3, 5)),
    "empty_strided": lambda: torch.empty_strided((3, 5), (1, 3)),
    "empty_strided with holes": lambda: torch.empty_strided((3, 5), (16, 2)),
    "new_empty_strided": lambda: torch.ones(1).new_empty_strided((3, 5), (7, 1)),
    "empty channels_last": lambda: torch.empty(2, 3, 4, 5, memory_format=torch.channels_last),
    "scalar": lambda: torch.empty(()),
}


def poke(tensor: Tensor, element: int) -> None:
    tensor.as_strided((1,), (1,), tensor.storage_offset() + element).zero_()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_inputs_are_seeded_standard_normal_and_contiguous(dtype: str) -> None:
    problem = make_problem(dtype=dtype, heads=4, seq_len_q=100, seq_len_k=60, head_dim=64)
    q, k, v = make_inputs(problem, "cpu")
    assert q.shape == (2, 4, 100, 64)
    assert k.shape == v.shape == (2, 2, 60, 64)
    for tensor in (q, k, v):
        assert tensor.is_contiguous()
        assert tensor.dtype == problem.torch_dtype()
        assert tensor.data_ptr() % 64 == 0
        assert abs(float(tensor.double().mean())) < 0.03
        assert abs(float(tensor.double().std()) - 1) < 0.03
    assert not torch.equal(k, v)


def test_the_same_seed_gives_the_same_inputs_guarded_or_not() -> None:
    problem = make_problem(seed=5)
    sets = [make_inputs(problem, "cpu"), make_inputs(problem, "cpu", guarded=False)]
    assert all(torch.equal(a, b) for a, b in zip(*sets, strict=True))
    others = make_inputs(make_problem(seed=6), "cpu")
    assert not any(torch.equal(a, b) for a, b in zip(sets[0], others, strict=True))


def test_unguarded_inputs_take_no_more_memory_than_their_elements() -> None:
    problem = make_problem()
    inputs = make_inputs(problem, "cpu", guarded=False)
    assert sum(tensor.untyped_storage().nbytes() for tensor in inputs) == problem.input_bytes


def test_around_an_input_lies_nothing_but_nan() -> None:
    q, _, _ = make_inputs(make_problem(), "cpu")
    zone = GUARD_BYTES // q.element_size()
    for start in (q.storage_offset() - zone, q.storage_offset() + q.numel()):
        assert bool(q.as_strided((zone,), (1,), start).isnan().all())


@pytest.mark.parametrize("element", [-1, -GUARD_BYTES // 2, 2 * 2 * 48 * 16])
def test_a_write_outside_an_input_is_seen(element: int) -> None:
    q, k, _ = make_inputs(make_problem(), "cpu")
    assert not guards_touched(q)
    poke(q, element)
    assert guards_touched(q)
    assert not guards_touched(k)


def test_a_write_inside_an_input_touches_no_guard() -> None:
    q, _, _ = make_inputs(make_problem(), "cpu")
    q.zero_()
    assert not guards_touched(q)


@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_an_allocation_is_poisoned_and_looks_as_asked(allocate: Callable[[], Tensor]) -> None:
    plain = allocate()
    with GuardedAllocations() as allocations:
        guarded = allocate()
    assert guarded.shape == plain.shape
    assert guarded.stride() == plain.stride()
    assert guarded.dtype == plain.dtype
    assert bool(guarded.isnan().all())
    assert guarded.data_ptr() % 64 == plain.data_ptr() % 64
    guarded.fill_(1.0)
    assert not allocations.touched


@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)
@pytest.mark.parametrize("side", ["before", "behind"])
def test_a_write_outside_an_allocation_is_seen(allocate: Callable[[], Tensor], side: str) -> None:
    with GuardedAllocations() as allocations:
        tensor = allocate()
        extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        poke(tensor, -1 if side == "before" else extent)
    assert allocations.touched


def test_what_is_allocated_holds_the_bytes_asked_for_and_its_guards_are_the_same() -> None:
    with GuardedAllocations(0x7B) as allocations:
        tensor = torch.empty(4, dtype=torch.uint8)
        assert tensor.tolist() == [0x7B] * 4
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            large = torch.empty(3, dtype=dtype)
            assert bool((large.isfinite() & (large > 1e4)).all())
        assert not allocations.touched
        poke(tensor, 4)
    assert allocations.touched


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bits_are_compared_and_not_values(dtype: torch.dtype) -> None:
    nan = torch.tensor([1.0, float("nan")], dtype=dtype)
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype))
    turned = torch.arange(6).to(dtype).view(2, 3).t()
    assert same_bits(turned, turned.contiguous())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch's allocator for the CPU caches nothing")
def test_freed_memory_that_was_poisoned_is_handed_out_again() -> None:
    like = torch.zeros(100, 64, dtype=torch.float16, device="cuda")
    poison_free_memory(like, GUARD_BYTE)
    assert bool(torch.empty_like(like).isnan().all())


def test_a_write_outside_is_seen_though_the_tensor_is_gone() -> None:
    with GuardedAllocations() as allocations:
        poke(torch.empty(10), 10)
    assert allocations.touched


def test_allocations_without_elements_pass() -> None:
    with GuardedAllocations() as allocations:
        assert torch.empty(0).shape == (0,)
        assert torch.empty(2, 0, 3).stride() == (3, 3, 1)
        assert torch.empty_strided((0, 4), (4, 1)).numel() == 0
    assert not allocations.touched


def test_integers_are_poisoned_too() -> None:
    with GuardedAllocations():
        assert torch.empty(4, dtype=torch.int32).tolist() == [-1] * 4
        assert torch.empty(4, dtype=torch.uint8).tolist() == [255] * 4


def test_initialised_tensors_and_results_of_operators_are_left_alone() -> None:
    with GuardedAllocations() as allocations:
        assert torch.zeros(3).tolist() == [0.0] * 3
        assert torch.full((2,), 7.0).tolist() == [7.0] * 2
        assert (torch.ones(3) + 1).tolist() == [2.0] * 3
        assert torch.arange(3).tolist() == [0, 1, 2]
    assert not allocations.touched


def test_an_empty_into_a_given_tensor_stays_that_tensor() -> None:
    given = torch.zeros(3)
    with GuardedAllocations():
        result = torch.empty(3, out=given)
    assert result.data_ptr() == given.data_ptr()


def test_a_kernel_that_allocates_gives_the_same_result_between_guards() -> None:
    problem = make_problem(kv_heads=1)
    inputs = make_inputs(problem, "cpu")
    with GuardedAllocations() as allocations:
        output = writes_its_output(*inputs, causal=True)
    assert torch.equal(output, right(*inputs, causal=True))
    assert not allocations.touched


def test_nothing_is_guarded_outside_the_block() -> None:
    with GuardedAllocations() as allocations:
        pass
    tensor = torch.empty(10)
    assert tensor.untyped_storage().nbytes() == 40
    assert not allocations.touched


def test_places_are_found_in_tensors_of_any_layout() -> None:
    mask = torch.zeros(2, 3, 4, 5, dtype=torch.bool)
    mask[1, 2, 0, 3] = mask[1, 2, 3, 0] = True
    assert first_location(mask) == (1, 2, 0, 3)
    turned = mask.transpose(1, 3)
    assert first_location(turned) == tuple(turned.nonzero()[0].tolist())
    assert location(59, torch.Size((3, 4, 5))) == (2, 3, 4)
