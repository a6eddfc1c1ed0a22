from types import SimpleNamespace

import pytest
import torch

from kernels import naive
from tests.kernels.oracle import DEVICE, assert_close, formula, inputs


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
