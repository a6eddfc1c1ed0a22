import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kernels import fa3
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


@pytest.fixture
def installed(monkeypatch):
    """A package of the same names that lacks fp16, as PyPI's wheel does."""
    interface, config = ModuleType(fa3.INTERFACE), ModuleType("fa3_fwd_config")
    interface.__spec__ = importlib.util.spec_from_loader(fa3.INTERFACE, None)
    interface.flash_attn_func = bottom_right
    config.CONFIG = {"build_flags": {"FLASHATTENTION_DISABLE_FP16": True}}
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
