import json
import math
from types import SimpleNamespace

import pytest
import torch

from kernels import read_floor, split_keys
from kernels.read_floor import decode, reference
from tests.kernels.decode_oracle import cache, paged
from tests.kernels.oracle import DEVICE
from tests.kernels.test_triton_decode import SHARED_MEMORY_KIB, gpu, problem

CPU = SimpleNamespace(is_cuda=False, device="cpu", compute_capability=None, multiprocessors=None)


def tiles(tile_k=32, **rest):
    return {"tile_k": tile_k, "num_warps": 4, "num_stages": 1, **rest}


def means(q, k, v, lengths):
    """The definition, a sequence, a head and a query at a time."""
    group = q.shape[1] // k.shape[1]
    output = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for index, length in enumerate(lengths):
        for head in range(q.shape[1]):
            if length:
                rows = [tensor[index, head // group, :length].double() for tensor in (k, v)]
                output[index, head] = (rows[0].sum(0) + rows[1].sum(0)) / length
    return output


def assert_mean(output, q, k, v, lengths):
    exact = means(q, k, v, lengths)
    assert output.shape == q.shape
    assert output.dtype == q.dtype
    assert output.is_contiguous()
    # Half a unit in the last place of q's dtype, and a sum in fp32.
    unit = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[q.dtype]
    assert (output.double() - exact).abs().max() <= unit / 2 * exact.abs().max() + 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_it_is_the_mean_of_keys_and_values_for_every_length_among_nan(splits, head_dim, dtype):
    lengths = [130, 1, 0, 63]
    q, k, v, seq_lens = cache(4, 6, 2, 3, 130, head_dim, dtype, lengths)
    assert_mean(decode(q, k, v, seq_lens=seq_lens, **tiles(splits=splits)), q, k, v, lengths)


@pytest.mark.parametrize("context", [1, 65, 1000, 4097])
def test_a_full_cache_needs_no_lengths_and_no_options(context):
    q, k, v, _ = cache(2, 2, 1, 1, context, 16)
    assert_mean(decode(q, k, v), q, k, v, [context] * 2)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("tile_k", [16, 64])
def test_pages_give_the_same_bits(page_size, tile_k):
    lengths = [130, 64, 0]
    q, k, v, seq_lens = cache(3, 4, 2, 1, 130, 32, torch.bfloat16, lengths)
    k_pages, v_pages, table = paged(k, v, page_size, lengths)
    output = decode(q, k_pages, v_pages, seq_lens=seq_lens, block_table=table, **tiles(tile_k, splits=3))
    assert torch.equal(output, decode(q, k, v, seq_lens=seq_lens, **tiles(tile_k, splits=3)))
    assert_mean(output, q, k, v, lengths)


def test_every_key_and_every_value_of_a_sequence_counts():
    q, k, v, _ = cache(1, 1, 1, 1, 100, 16)
    k.zero_()
    v.zero_()
    for tensor in (k, v):
        for key in (0, 15, 16, 31, 63, 64, 99):
            tensor[0, 0, key] = 100.0
            assert (decode(q, k, v, **tiles(16, splits=3)) == 1.0).all()
            tensor[0, 0, key] = 0.0


def test_views_are_walked_by_their_strides():
    q, k, v, _ = cache(2, 4, 2, 1, 70, 40)
    wide = torch.full((2, 2, 80, 2, 43), math.nan, dtype=k.dtype, device=DEVICE)
    wide[:, :, :70, 0, :40], wide[:, :, :70, 1, :40] = k, v
    output = decode(q, wide[:, :, :70, 0, :40], wide[:, :, :70, 1, :40], **tiles(16, splits=2))
    assert_mean(output, q, k, v, [70, 70])


def test_a_split_of_its_own_size_does_not_depend_on_neighbours():
    q, k, v, seq_lens = cache(2, 4, 2, 1, 200, 32, lengths=[130, 200])
    both = decode(q, k, v, seq_lens=seq_lens, **tiles(16, split_keys=64))
    alone = decode(q[:1], k[:1], v[:1], seq_lens=seq_lens[:1], **tiles(16, split_keys=64))
    assert torch.equal(both[:1], alone)


def test_a_second_kernel_merges_where_a_capture_finds_no_counters(monkeypatch):
    q, k, v, seq_lens = cache(2, 6, 2, 2, 200, 40, lengths=[200, 20])
    expected = decode(q, k, v, seq_lens=seq_lens, **tiles(splits=3))
    monkeypatch.setattr(read_floor, "counters", lambda device, count: None)
    assert torch.equal(decode(q, k, v, seq_lens=seq_lens, **tiles(splits=3)), expected)


@pytest.mark.parametrize("page_size", [0, 16])
def test_the_reference_is_the_same_mean_in_fp64(page_size):
    lengths = [130, 1, 0]
    q, k, v, seq_lens = cache(3, 6, 2, 2, 130, 40, torch.bfloat16, lengths)
    keys, values, extras = k, v, {"seq_lens": seq_lens}
    if page_size:
        keys, values, extras["block_table"] = paged(k, v, page_size, lengths)
    output = reference(q, keys, values, **extras)
    assert output.dtype == torch.float64
    assert torch.allclose(output, means(q, k, v, lengths), rtol=0, atol=1e-12)
    full = reference(q[1:2, :, :1], k[:1], v[:1])
    assert torch.allclose(full, means(q[1:2, :, :1], k[:1], v[:1], [130]), rtol=0, atol=1e-12)


def test_no_sequence_gives_none_and_no_room_gives_zero():
    for batch, context in ((0, 5), (1, 0)):
        q, k, v, _ = cache(batch, 2, 2, 1, context, 16)
        assert torch.equal(decode(q, k, v), torch.zeros_like(q))


def test_it_says_that_it_is_no_attention():
    assert "reads K and V once" in read_floor.NOT_ATTENTION
    assert not hasattr(read_floor, "attention")


def test_bad_arguments_are_refused_and_said_to_be_unsupported():
    q, k, v, _ = cache(1, 2, 2, 1, 4, 16)
    with pytest.raises(ValueError, match="tile_k is None"):
        decode(q, k, v, splits=4)
    with pytest.raises(ValueError, match="v is bfloat16"):
        decode(q, k, v.bfloat16())
    assert read_floor.unsupported(problem(), gpu(9, 0)) is None
    assert "head_dim 8" in read_floor.unsupported(problem(head_dim=8), gpu(9, 0))
    assert "9 queries" in read_floor.unsupported(problem(seq_len_q=9), gpu(9, 0))
    assert "combine is not a launch option" in read_floor.unsupported(
        problem(), gpu(9, 0), **tiles(combine="kernel")
    )


@pytest.mark.parametrize("compute_capability", SHARED_MEMORY_KIB)
@pytest.mark.parametrize("lengths", ["equal", "uneven"])
def test_a_target_has_a_few_different_candidates_that_it_supports(compute_capability, lengths):
    for head_dim, batch, page_size in ((16, 1, 0), (64, 16, 16), (128, 64, 64), (256, 1, 128)):
        cell = problem(head_dim=head_dim, batch=batch, page_size=page_size, lengths=lengths)
        options = read_floor.candidates(cell, gpu(*compute_capability))
        assert 2 <= len(options) <= read_floor.MAX_CANDIDATES
        assert len({json.dumps(option) for option in options}) == len(options)
        for option in options:
            assert read_floor.unsupported(cell, gpu(*compute_capability), **option) is None
            kept = max(0, option["num_stages"] - 1) * option["tile_k"] * head_dim * 4
            assert kept <= 1024 * SHARED_MEMORY_KIB[compute_capability]


def test_the_memory_law_counts_the_parts_of_the_splits_and_the_counters():
    law = read_floor.memory_law
    assert law(problem()) is None
    assert law(problem(), **tiles(splits=1)) == 1010
    assert law(problem(), **tiles(splits=16)) == 1010 + 4 * 8 * 16 * 128 + split_keys.counter_bytes(8)
