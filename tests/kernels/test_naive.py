from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import naive
from tests.kernels.decode_oracle import assert_decode_close, cache, paged
from tests.kernels.oracle import DEVICE, assert_close, formula, inputs


class Storages(TorchDispatchMode):
    """The bytes of every new piece of memory that an operation's result lies in."""

    def __init__(self, *known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.sizes.append(tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), [(1, 1), (33, 70), (70, 33), (64, 64), (1, 9)])
def test_it_is_the_formula_for_any_pair_of_lengths(dtype, causal, seq_len_q, seq_len_k):
    q, k, v = inputs(2, 4, 4, seq_len_q, seq_len_k, 40, dtype)
    assert_close(naive.attention(q, k, v, causal=causal), q, k, v, causal)


@pytest.mark.parametrize("heads", [2, 4, 8, 14, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_consecutive_query_heads_share_a_head_of_k_and_v(heads, causal):
    q, k, v = inputs(2, heads, 2, 20, 30, 32)
    assert_close(naive.attention(q, k, v, causal=causal), q, k, v, causal)


def test_a_transposed_layout_gives_the_same_output():
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(2, 4, 2, 20, 30, 32))
    assert not q.is_contiguous()
    assert_close(naive.attention(q, k, v, causal=True), q, k, v, True)


def test_the_scale_is_the_callers():
    q, k, v = inputs(1, 2, 2, 20, 30, 32)
    assert_close(naive.attention(q, k, v, causal=True, scale=-0.3), q, k, v, True, scale=-0.3)


def test_the_inputs_are_left_as_they_were():
    tensors = inputs(1, 2, 2, 20, 30, 32)
    before = [t.clone() for t in tensors]
    naive.attention(*tensors, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_it_can_be_differentiated(causal):
    q, k, v = (t.requires_grad_() for t in inputs(1, 4, 2, 12, 12, 16, torch.bfloat16))
    naive.attention(q, k, v, causal=causal).float().sum().backward()
    ours = [t.grad.double() for t in (q, k, v)]
    twins = [t.detach().double().requires_grad_() for t in (q, k, v)]
    formula(*twins, causal).sum().backward()
    for mine, twin in zip(ours, twins, strict=True):
        assert (mine - twin.grad).abs().max() <= 0.03 * max(1.0, twin.grad.abs().max().item())


def problem(**changes):
    values = {
        "batch": 1,
        "heads": 16,
        "kv_heads": 16,
        "seq_len_q": 512,
        "seq_len_k": 512,
        "head_dim": 64,
        "causal": False,
        "dtype": "fp16",
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(("seq_len", "gib"), [(512, 0.0420), (2048, 0.6367), (8192, 10.0469)])
def test_the_memory_law_is_the_published_table_without_the_workspace(seq_len, gib):
    # 0.0732, 0.6680 and 10.0781 GiB were measured on an H200, 32 MiB of them cuBLAS's workspace.
    law = naive.memory_law(problem(seq_len_q=seq_len, seq_len_k=seq_len))
    assert round(law / 2**30, 4) == gib
    assert law == 3 * 16 * seq_len * 64 * 2 + 10 * 16 * seq_len**2


def test_the_memory_law_counts_the_output_where_head_dim_outgrows_the_keys():
    law = naive.memory_law(problem(heads=1, kv_heads=1, seq_len_q=4, seq_len_k=1, head_dim=64))
    assert law == 2 * (4 * 64) + 2 * 2 * 64 + 6 * 4 + 2 * 4 * 64


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [16, 4])
def test_the_memory_law_is_what_the_gpu_allocates(causal, kv_heads):
    q, k, v = inputs(1, 16, kv_heads, 1024, 1024, 64)
    naive.attention(q, k, v, causal=causal)
    workspace = torch.cuda.memory_allocated() - 2 * (q.numel() + k.numel() + v.numel())
    torch.cuda.reset_peak_memory_stats()
    naive.attention(q, k, v, causal=causal)
    law = naive.memory_law(problem(seq_len_q=1024, seq_len_k=1024, kv_heads=kv_heads, causal=causal))
    assert torch.cuda.max_memory_allocated() - workspace == law


def test_a_bad_argument_is_refused_by_name():
    q, k, v = inputs(1, 2, 2, 4, 4, 16)
    with pytest.raises(ValueError, match="k is float32"):
        naive.attention(q, k.float(), v, causal=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 2, 8])
@pytest.mark.parametrize("heads", [2, 4, 14])
def test_decode_is_the_formula_for_every_length_among_nan(heads, queries, dtype):
    lengths = [65, 3, 0, 40]
    q, k, v, seq_lens = cache(4, heads, 2, queries, 65, 40, dtype, lengths)
    assert_decode_close(naive.decode(q, k, v, seq_lens=seq_lens), q, k, v, lengths)


@pytest.mark.parametrize("context", [1, 63, 1000])
@pytest.mark.parametrize("queries", [1, 3])
def test_decode_of_a_full_cache_needs_no_lengths(context, queries):
    q, k, v, _ = cache(2, 4, 2, queries, context, 64, torch.bfloat16)
    assert_decode_close(naive.decode(q, k, v, scale=0.2), q, k, v, [context] * 2, 0.2)


@pytest.mark.parametrize("lengths", [None, [400, 77]])
def test_decode_makes_no_copy_of_k_or_v_for_each_query_head(lengths):
    q, k, v, seq_lens = cache(2, 32, 4, 1, 500, 128, torch.bfloat16, lengths)
    with Storages(q, k, v) as storages:
        naive.decode(q, k, v, seq_lens=seq_lens)
    # Where there are lengths V is copied once, with zeros beyond them; the scores are far smaller.
    assert max(storages.sizes) <= (0 if lengths is None else v.nbytes) + 4 * 2 * 32 * 500
    assert min(k.nbytes, v.nbytes) > 4 * 2 * 32 * 500  # so that a copy would be seen


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_decode_finds_pages_through_a_table_with_garbage_beyond_the_end(page_size):
    lengths = [130, 16, 0]
    q, k, v, seq_lens = cache(3, 4, 2, 2, 130, 32, lengths=lengths)
    k_pages, v_pages, table = paged(k, v, page_size, lengths)
    output = naive.decode(q, k_pages, v_pages, seq_lens=seq_lens, block_table=table)
    assert_decode_close(output, q, k, v, lengths)


def test_decode_leaves_keys_and_values_as_they_were_and_refuses_a_bad_argument():
    q, k, v, seq_lens = cache(2, 4, 2, 1, 20, 16, lengths=[20, 5])
    before = [tensor.clone() for tensor in (k, v)]
    naive.decode(q, k, v, seq_lens=seq_lens)
    for tensor, kept in zip((k, v), before, strict=True):
        assert torch.equal(tensor.nan_to_num(7), kept.nan_to_num(7))
    with pytest.raises(ValueError, match="seq_lens is int64"):
        naive.decode(q, k, v, seq_lens=seq_lens.long())


def test_the_memory_law_of_decode_is_said_only_where_no_mask_is_made():
    values = {"workload": "decode", "seq_len_q": 1, "lengths": "equal", "page_size": 0, "causal": True}
    # What an H200 allocated: 9,441,280 bytes in fp16 and 9,703,424 in bf16.
    shape = {"batch": 2, "heads": 16, "kv_heads": 4, "seq_len_k": 4096, "head_dim": 64}
    assert naive.memory_law(problem(**values, **shape, dtype="fp16")) == 9_441_280
    assert naive.memory_law(problem(**values, **shape, dtype="bf16")) == 9_703_424
    for change in ({"lengths": "uneven"}, {"page_size": 16}, {"seq_len_q": 2}):
        assert naive.memory_law(problem(**{**values, **change})) is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_memory_law_of_decode_is_what_the_gpu_allocates(dtype):
    tensors = cache(2, 16, 4, 1, 4096, 64, {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype])[:3]
    naive.decode(*tensors)
    workspace = torch.cuda.memory_allocated() - 2 * sum(tensor.numel() for tensor in tensors)
    torch.cuda.reset_peak_memory_stats()
    naive.decode(*tensors)
    law = naive.memory_law(
        problem(
            batch=2,
            kv_heads=4,
            seq_len_q=1,
            seq_len_k=4096,
            dtype=dtype,
            workload="decode",
            lengths="equal",
            page_size=0,
        )
    )
    assert torch.cuda.max_memory_allocated() - workspace == law
