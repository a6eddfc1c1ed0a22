import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kernels import fa3
from tests.kernels.decode_oracle import assert_decode_close, cache, decode_formula, paged
from tests.kernels.oracle import DEVICE, assert_close, formula, inputs

CPU = SimpleNamespace(is_cuda=False, device="cpu", compute_capability=None)
HOPPER = SimpleNamespace(is_cuda=True, device="cuda", compute_capability=(9, 0))
INSTALLED = importlib.util.find_spec(fa3.INTERFACE) is not None


def problem(**changes):
    values = {
        "batch": 1,
        "heads": 4,
        "kv_heads": 2,
        "seq_len_q": 20,
        "seq_len_k": 30,
        "head_dim": 64,
        "causal": True,
        "dtype": "bf16",
    }
    return SimpleNamespace(**{**values, **changes})


def bottom_right(q, k, v, softmax_scale=None, causal=False):
    """FlashAttention-3's interface, in fp64: its layout, and its alignment of the mask."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    if causal and rows < keys:
        padding = torch.zeros(*q.shape[:2], keys - rows, q.shape[3], dtype=q.dtype)
        q = torch.cat([padding, q], 2)
    output = formula(q, k, v, causal, softmax_scale)[:, :, -rows:]
    return output.to(v.dtype).transpose(1, 2)


def against_a_cache(
    q, k_cache, v_cache, cache_seqlens=None, page_table=None, softmax_scale=None, causal=False
):
    """The interface for a cache, in fp64, for a build with or without paging."""
    assert causal
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k_cache, v_cache))
    if page_table is not None:
        assert not fa3._build_flags()["FLASHATTENTION_DISABLE_PAGEDKV"]
        k, v = (pages[page_table.clamp(0, len(pages) - 1)].transpose(1, 2).flatten(2, 3) for pages in (k, v))
    lengths = [k.shape[2]] * len(q) if cache_seqlens is None else cache_seqlens.tolist()
    return decode_formula(q, k, v, lengths, softmax_scale).to(v.dtype).transpose(1, 2)


@pytest.fixture
def installed(monkeypatch):
    """A package of the same names that lacks fp16 and paging, as PyPI's wheel does."""
    interface, config = ModuleType(fa3.INTERFACE), ModuleType("fa3_fwd_config")
    interface.__spec__ = importlib.util.spec_from_loader(fa3.INTERFACE, None)
    interface.flash_attn_func = bottom_right
    interface.flash_attn_with_kvcache = against_a_cache
    lacks = {"FLASHATTENTION_DISABLE_FP16": True, "FLASHATTENTION_DISABLE_PAGEDKV": True}
    config.CONFIG = {"build_flags": lacks}
    monkeypatch.setitem(sys.modules, fa3.INTERFACE, interface)
    monkeypatch.setitem(sys.modules, "fa3_fwd_config", config)
    fa3._build_flags.cache_clear()
    yield
    fa3._build_flags.cache_clear()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("seq_len_k", [20, 30])
def test_layout_scale_and_alignment_are_translated(installed, causal, scale, seq_len_k):
    q, k, v = (tensor.cpu() for tensor in inputs(2, 4, 2, 20, seq_len_k, 64, torch.bfloat16))
    assert_close(fa3.attention(q, k, v, causal=causal, scale=scale), q, k, v, causal, scale)


def test_what_the_build_lacks_is_refused_and_said_to_be_unsupported(installed):
    tensors = [tensor.cpu() for tensor in inputs(1, 2, 2, 4, 4, 64)]
    with pytest.raises(ValueError, match="built without fp16"):
        fa3.attention(*tensors, causal=False)
    assert "built without fp16" in fa3.unsupported(problem(dtype="fp16"), HOPPER)
    assert "head_dim 20" in fa3.unsupported(problem(head_dim=20), HOPPER)
    assert "bottom right" in fa3.unsupported(problem(seq_len_q=40), HOPPER)
    assert fa3.unsupported(problem(seq_len_q=40, causal=False), HOPPER) is None
    assert fa3.unsupported(problem(), HOPPER) is None


@pytest.mark.skipif(INSTALLED, reason="about a process that lacks the package")
def test_a_process_without_the_package_is_told_its_name():
    assert "fa3-fwd is not installed" in fa3.unsupported(problem(), HOPPER)


def test_another_target_is_refused():
    assert "a CPU" in fa3.unsupported(problem(), CPU)
    ampere = SimpleNamespace(is_cuda=True, device="cuda", compute_capability=(8, 0))
    assert "compute capability 8.0" in fa3.unsupported(problem(), ampere)


def test_the_memory_law_counts_one_number_a_row_beside_the_tensors():
    assert fa3.memory_law(problem()) == 2 * (2 * 4 * 20 * 64 + 2 * 2 * 30 * 64) + 4 * 4 * 20


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda" or not INSTALLED, reason="needs a Hopper GPU and fa3-fwd")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), [(130, 130), (70, 200)])
def test_the_package_itself_is_the_formula(causal, seq_len_q, seq_len_k):
    q, k, v = inputs(2, 4, 2, seq_len_q, seq_len_k, 128, torch.bfloat16)
    assert_close(fa3.attention(q, k, v, causal=causal), q, k, v, causal)


@pytest.mark.parametrize("lengths", [None, [65, 3, 0]])
@pytest.mark.parametrize("queries", [1, 4])
def test_decode_translates_layout_lengths_and_scale(installed, queries, lengths):
    q, k, v, seq_lens = (
        None if tensor is None else tensor.cpu()
        for tensor in cache(3, 4, 2, queries, 65, 64, torch.bfloat16, lengths)
    )
    output = fa3.decode(q, k, v, seq_lens=seq_lens, scale=0.3)
    assert_decode_close(output, q, k, v, lengths or [65] * 3, 0.3)


@pytest.mark.parametrize("paging", [False, True])
def test_decode_gathers_pages_only_for_a_build_without_paging(installed, paging):
    fa3._build_flags()["FLASHATTENTION_DISABLE_PAGEDKV"] = not paging
    lengths = [130, 16, 0]
    q, k, v, seq_lens = (t.cpu() for t in cache(3, 4, 2, 1, 130, 64, torch.bfloat16, lengths))
    k_pages, v_pages, table = paged(k, v, 64, lengths)
    output = fa3.decode(q, k_pages, v_pages, seq_lens=seq_lens, block_table=table)
    assert_decode_close(output, q, k, v, lengths)


def test_what_decode_cannot_do_is_refused_and_said_to_be_unsupported(installed):
    q, k, v, _ = (None if t is None else t.cpu() for t in cache(1, 4, 2, 1, 20, 64))
    with pytest.raises(ValueError, match="built without fp16"):
        fa3.decode(q, k, v)
    cell = problem(workload="decode", seq_len_q=8, seq_len_k=4, lengths="uneven", page_size=16)
    assert fa3.unsupported(cell, HOPPER) is None
    assert "a CPU" in fa3.unsupported(cell, CPU)
    assert fa3.memory_law(cell) is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda" or not INSTALLED, reason="needs a Hopper GPU and fa3-fwd")
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("page_size", [0, 64])
def test_decode_by_the_package_itself_is_the_formula(queries, page_size):
    lengths = [3000, 1, 0, 777]
    q, k, v, seq_lens = cache(4, 32, 8, queries, 3000, 128, torch.bfloat16, lengths)
    k, v = k.nan_to_num(60), v.nan_to_num(3000)
    given = {"seq_lens": seq_lens}
    keys, values = k, v
    if page_size:
        keys, values, given["block_table"] = paged(k, v, page_size, lengths)
    assert_decode_close(fa3.decode(q, keys, values, **given), q, k, v, lengths)
