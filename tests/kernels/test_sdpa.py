import os
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import sdpa
from tests.kernels.decode_oracle import assert_decode_close, cache, paged
from tests.kernels.oracle import DEVICE, assert_close, inputs

CPU = SimpleNamespace(is_cuda=False, device="cpu", compute_capability=None)
CUDA = SimpleNamespace(is_cuda=True, device="cuda", compute_capability=(9, 0))
PROBLEM = SimpleNamespace(
    batch=1, heads=4, kv_heads=2, seq_len_q=20, seq_len_k=30, head_dim=64, causal=True, dtype="fp16"
)
cpu_only = pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU's backends")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["default", "flash", "math"])
@pytest.mark.parametrize("causal", [False, True])
def test_each_backend_of_the_cpu_is_the_formula(dtype, backend, causal):
    q, k, v = inputs(2, 4, 4, 33, 33, 40, dtype)
    assert_close(sdpa.attention(q, k, v, causal=causal, backend=backend), q, k, v, causal)


@pytest.mark.parametrize("backend", ["default", "flash", "math"])
@pytest.mark.parametrize("heads", [2, 4, 14])
def test_grouped_heads_and_different_lengths_are_the_formula(backend, heads):
    q, k, v = inputs(2, heads, 2, 20, 30, 32)
    assert_close(sdpa.attention(q, k, v, causal=False, backend=backend), q, k, v, False)


def test_the_scale_is_the_callers():
    q, k, v = inputs(1, 2, 2, 20, 20, 32)
    assert_close(sdpa.attention(q, k, v, causal=True, scale=0.3), q, k, v, True, scale=0.3)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@cpu_only
@pytest.mark.parametrize(("backend", "flash"), [("flash", True), ("math", False)])
def test_a_pinned_backend_is_the_one_that_runs(backend, flash):
    q, k, v = inputs(1, 2, 2, 20, 20, 32)
    with Operations() as seen:
        sdpa.attention(q, k, v, causal=True, backend=backend)
    assert ("aten._scaled_dot_product_flash_attention_for_cpu" in seen.names) is flash


@cpu_only
@pytest.mark.parametrize("backend", ["cudnn", "efficient"])
def test_a_backend_the_cpu_lacks_is_said_to_be_unsupported_and_raises_when_called(backend):
    assert f"no {backend} backend for the CPU" in sdpa.unsupported(PROBLEM, CPU, backend=backend)
    with pytest.raises(RuntimeError):
        sdpa.attention(*inputs(1, 2, 2, 20, 20, 32), causal=False, backend=backend)


@pytest.mark.parametrize("backend", ["default", "flash", "math"])
def test_the_backends_of_the_cpu_are_supported(backend):
    assert sdpa.unsupported(PROBLEM, CPU, backend=backend) is None


def test_an_unknown_backend_is_refused_by_name():
    tensors = inputs(1, 2, 2, 4, 4, 16)
    for call in (
        lambda: sdpa.attention(*tensors, causal=False, backend="fast"),
        lambda: sdpa.unsupported(PROBLEM, CPU, backend="fast"),
        lambda: sdpa.memory_law(PROBLEM, backend="fast"),
    ):
        with pytest.raises(ValueError, match="backend is 'fast': expected one of default, flash"):
            call()


def test_what_cpp_writes_to_standard_error_is_captured_and_the_descriptor_restored(capfd):
    def call():
        os.write(2, b"a reason\n")
        return False

    assert sdpa._standard_error_of(call) == (False, "a reason\n")
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def test_standard_error_is_restored_when_the_call_raises(capfd):
    def call():
        os.write(2, b"inside")
        raise RuntimeError("no")

    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="no"):
        sdpa._standard_error_of(call)
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_pytorchs_reason_becomes_one_line_without_its_prefixes():
    said = (
        "[W1130 19:42:31.123456789 sdp_utils.cpp:216] Warning: Flash attention requires q,k,v to have the "
        "same last dimension. (function operator())\n"
        "[W1130 19:42:31.123456790 sdp_utils.cpp:78] Warning: Expected a GPU of sm80. (function check_sm)\n"
    )
    assert sdpa._one_line(said) == (
        "Flash attention requires q,k,v to have the same last dimension. Expected a GPU of sm80."
    )
    assert sdpa._one_line("") == ""


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_pytorchs_own_reason_is_given_on_a_gpu():
    wide = SimpleNamespace(**{**vars(PROBLEM), "head_dim": 512})
    reason = sdpa.unsupported(wide, CUDA, backend="flash")
    assert reason
    assert "sdp_utils" not in reason
    assert "\n" not in reason
    assert "512" in reason  # PyTorch's words, about this problem


def test_the_memory_law_is_inputs_and_output_where_the_backend_is_fused_and_unknown_where_not():
    q, k = 4 * 20 * 64, 2 * 30 * 64
    assert sdpa.memory_law(PROBLEM) == sdpa.memory_law(PROBLEM, backend="flash") == 2 * (2 * q + 2 * k)
    assert sdpa.memory_law(PROBLEM, backend="math") is None


def test_a_bad_argument_is_refused_by_name():
    q, k, v = inputs(1, 2, 2, 4, 4, 16)
    with pytest.raises(ValueError, match="v is bfloat16"):
        sdpa.attention(q, k, v.bfloat16(), causal=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["default", "math"] if DEVICE == "cuda" else ["default", "flash", "math"])
@pytest.mark.parametrize(("queries", "heads"), [(1, 2), (1, 8), (5, 4)])
def test_decode_is_the_formula_with_full_and_with_uneven_lengths(queries, heads, backend, dtype):
    q, k, v, _ = cache(3, heads, 2, queries, 65, 40, dtype)
    assert_decode_close(sdpa.decode(q, k, v, backend=backend), q, k, v, [65] * 3)
    lengths = [65, 3, 0]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    output = sdpa.decode(q, k, v, seq_lens=seq_lens, scale=0.3, backend=backend)
    assert_decode_close(output, q, k, v, lengths, 0.3)


def test_decode_gathers_pages():
    q, k, v, _ = cache(2, 4, 2, 1, 64, 32)
    k_pages, v_pages, table = paged(k, v, 16)
    k_pages, v_pages = k_pages.nan_to_num(60), v_pages.nan_to_num(60)
    full = sdpa.decode(q, k_pages, v_pages, block_table=table[:, :4])
    assert_decode_close(full, q, k, v, [64, 64])
    seq_lens = torch.tensor([64, 17], dtype=torch.int32, device=DEVICE)
    output = sdpa.decode(q, k_pages, v_pages, seq_lens=seq_lens, block_table=table)
    assert_decode_close(output, q, k, v, [64, 17])


def test_decode_of_a_cache_without_room_is_zero():
    q, k, v, _ = cache(2, 4, 2, 3, 0, 32)
    assert not sdpa.decode(q, k, v).any()


def test_a_bad_argument_of_decode_is_refused_by_name():
    q, k, v, _ = cache(1, 2, 2, 1, 4, 16)
    with pytest.raises(ValueError, match="q has 9 queries"):
        sdpa.decode(q.expand(-1, -1, 9, -1), k, v)
    with pytest.raises(ValueError, match="backend is 'fast'"):
        sdpa.decode(q, k, v, backend="fast")


DECODE = {"workload": "decode", "seq_len_q": 1, "lengths": "equal", "page_size": 0}


def test_the_memory_law_of_decode_is_not_said():
    assert sdpa.memory_law(SimpleNamespace(**{**vars(PROBLEM), **DECODE}), backend="flash") is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("lengths", ["equal", "uneven"])
@pytest.mark.parametrize("heads", [2, 8])
def test_decode_on_a_gpu_runs_the_pinned_backend_or_is_said_to_be_unsupported(backend, lengths, heads):
    changes = {**DECODE, "batch": 2, "heads": heads, "kv_heads": 2, "seq_len_k": 1000, "lengths": lengths}
    cell = SimpleNamespace(**{**vars(PROBLEM), **changes})
    q, k, v, _ = cache(2, heads, 2, 1, 1000, 64)
    seq_lens = torch.tensor([1000, 77], dtype=torch.int32, device="cuda") if lengths == "uneven" else None
    reason = sdpa.unsupported(cell, CUDA, backend=backend)
    if reason is None:
        output = sdpa.decode(q, k, v, seq_lens=seq_lens, backend=backend)
        assert_decode_close(output, q, k, v, [1000, 1000 if seq_lens is None else 77])
    else:
        with pytest.raises(RuntimeError):
            sdpa.decode(q, k, v, seq_lens=seq_lens, backend=backend)
    if backend == "flash" and lengths == "uneven":
        assert "mask" in reason.lower()
