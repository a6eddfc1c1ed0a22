import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kernels import triton_flash
from kernels.triton_flash import attention
from tests.kernels.compiler import output_of
from tests.kernels.oracle import DEVICE, assert_close, formula, inputs

CPU = SimpleNamespace(is_cuda=False, device="cpu", compute_capability=None)
SHARED_MEMORY_KIB = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
TAILS = [1, 3, 17, 63, 65, 97, 127, 129, 257, 1000, 1023, 1025]


def gpu(*compute_capability):
    return SimpleNamespace(is_cuda=True, device="cuda", compute_capability=compute_capability)


def problem(head_dim=64, causal=False, **changes):
    values = {"batch": 1, "heads": 4, "kv_heads": 4, "seq_len_q": 512, "seq_len_k": 512, "dtype": "fp16"}
    return SimpleNamespace(head_dim=head_dim, causal=causal, **{**values, **changes})


def tiles(tile_q, tile_k):
    return {"tile_q": tile_q, "tile_k": tile_k, "num_warps": 4, "num_stages": 1}


def in_layout(tensor, layout):
    """The same values, laid out otherwise in memory, among NaN where there is something between them."""
    batch, heads, seq_len, head_dim = tensor.shape
    if layout == "contiguous":
        return tensor
    if layout == "transposed":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    fused = torch.full(
        (batch, seq_len, 3, heads, head_dim), torch.nan, dtype=tensor.dtype, device=tensor.device
    )
    fused[:, :, 1] = tensor.transpose(1, 2)
    return fused[:, :, 1].transpose(1, 2)


# A failure is reported as it was found: shrinking it takes minutes in the interpreter.
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    seq_len_q=st.integers(1, 130),
    seq_len_k=st.integers(1, 130),
    head_dim=st.sampled_from([16, 40, 64, 80, 96, 128]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 3]),
    causal=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    layouts=st.tuples(*[st.sampled_from(["contiguous", "transposed", "fused"])] * 3),
    launch=st.sampled_from([{}, tiles(64, 64), tiles(32, 64)]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_layout_is_the_formula(
    seq_len_q, seq_len_k, head_dim, kv_heads, group, causal, dtype, layouts, launch, seed
):
    tensors = inputs(1, kv_heads * group, kv_heads, seq_len_q, seq_len_k, head_dim, dtype, seed)
    q, k, v = (in_layout(tensor, layout) for tensor, layout in zip(tensors, layouts, strict=True))
    assert_close(attention(q, k, v, causal=causal, **launch), q, k, v, causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 17, 32, 40, 64, 80, 96, 100, 128, 256])
def test_every_head_dim_is_the_formula(head_dim, dtype):
    q, k, v = inputs(1, 2, 1, 70, 90, head_dim, dtype)
    for causal in (False, True):
        assert_close(attention(q, k, v, causal=causal), q, k, v, causal)


@pytest.mark.parametrize("seq_len", TAILS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_length_that_no_tile_divides_is_the_formula(seq_len, causal):
    for seq_len_q, seq_len_k in ((seq_len, seq_len), (64, seq_len), (seq_len, 64)):
        q, k, v = inputs(1, 1, 1, seq_len_q, seq_len_k, 32)
        assert_close(attention(q, k, v, causal=causal, **tiles(64, 32)), q, k, v, causal)


@pytest.mark.parametrize("strided", range(3))
def test_rows_that_lie_so_far_apart_that_a_tile_spans_two_to_the_31_elements_are_addressed_right(strided):
    tensors = inputs(1, 2, 2, 40, 40, 16)
    stride = 8 * (2**31 // 31 // 8 + 1)  # 31 of them lie between the first and the last of 32 rows
    memory = torch.empty(
        39 * stride + 64, dtype=tensors[0].dtype, device=DEVICE
    )  # touched at these rows alone
    apart = memory.as_strided((1, 2, 40, 16), (0, 16, stride, 1))
    apart.copy_(tensors[strided])
    q, k, v = (*tensors[:strided], apart, *tensors[strided + 1 :])
    assert_close(attention(q, k, v, causal=True, **tiles(32, 32)), *tensors, True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strided", [0, 1, 2])
def test_each_tensor_is_walked_over_many_tiles_by_its_own_strides(strided, causal):
    tensors = list(inputs(2, 4, 4, 70, 70, 32))
    tensors[strided] = in_layout(tensors[strided], "fused")
    assert_close(attention(*tensors, causal=causal, **tiles(16, 16)), *tensors, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_nan_after_the_last_row_and_between_heads_does_not_leak_in(causal):
    seq_len, head_dim = 49, 40
    views = []
    for tensor in inputs(2, 4, 2, seq_len, seq_len, head_dim):
        # 15 rows after each head's last and 8 elements after each row's last, as wide as a tile reads.
        buffer = torch.full(
            (*tensor.shape[:2], seq_len + 15, head_dim + 8), torch.nan, dtype=tensor.dtype, device=DEVICE
        )
        view = buffer[:, :, :seq_len, :head_dim]
        view.copy_(tensor)
        views.append(view)
    assert_close(attention(*views, causal=causal, **tiles(32, 32)), *views, causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_scaled_by_thirty_do_not_overflow(dtype):
    q, k, v = (30 * tensor for tensor in inputs(1, 2, 2, 65, 65, 64, dtype))
    for causal in (False, True):
        assert_close(attention(q, k, v, causal=causal), q, k, v, causal)


def test_scores_beyond_the_range_of_fp16_are_right():
    q, k, v = (tensor.clone() for tensor in inputs(1, 1, 1, 33, 40, 64))
    q[..., 0], k[..., 0] = 300.0, 300.0
    assert ((q.double() @ k.double().transpose(-1, -2)).abs() > 65504).all()
    # At 90,000 a score's fp32 unit in the last place is 2^-7, times the scale 2^-10: so the weights have
    # 3 digits, and the twin in fp16 has none.
    error = (attention(q, k, v, causal=False).double() - formula(q, k, v, False)).abs().max().item()
    assert error <= 4 * 2**-10


def test_an_outlier_channel_of_v_leaves_the_others_exact_enough():
    q, k, v = (tensor.clone() for tensor in inputs(1, 2, 2, 65, 65, 64))
    v[..., 5] *= 1000
    output = attention(q, k, v, causal=True)
    assert_close(output, q, k, v, True)
    others = [channel for channel in range(64) if channel != 5]
    error = (output.double() - formula(q, k, v, True))[..., others].abs().max().item()
    assert error < 4e-3


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 16, 32])
def test_consecutive_query_heads_share_a_head_of_k_and_v(group):
    q, k, v = inputs(2, 2 * group, 2, 20, 30, 32)
    for causal in (False, True):
        assert_close(attention(q, k, v, causal=causal, **tiles(32, 32)), q, k, v, causal)


def test_every_head_is_visited_where_the_last_group_of_heads_is_not_full():
    # 19 heads: one group of 16 and a rest, in each of them several query tiles.
    assert triton_flash.CAUSAL_HEAD_GROUP == 16
    q, k, v = inputs(1, 19, 19, 70, 70, 16)
    assert_close(attention(q, k, v, causal=True, **tiles(32, 64)), q, k, v, True)


def written_by_the_first(programs, monkeypatch, heads, causal):
    """The (head, query tile) pairs that the first programs of a call of tiles of 16 rows store."""
    kernel = triton_flash._flash_forward

    class First:
        def __getitem__(self, grid):
            return kernel[(programs,)]

    monkeypatch.setattr(triton_flash, "_flash_forward", First())
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *given, **kind: empty_like(*given, **kind).fill_(math.nan)
    )
    q, k, v = inputs(1, heads, heads, 40, 40, 16)
    output = attention(q, k, v, causal=causal, **tiles(16, 16))[0]
    return [
        (head, tile)
        for head in range(heads)
        for tile in range(3)
        if not output[head, 16 * tile : 16 * tile + 16].isnan().any()
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_with_a_causal_mask_the_longest_tiles_of_sixteen_heads_go_first(causal, monkeypatch):
    first = written_by_the_first(17, monkeypatch, 18, causal)
    if causal:
        assert first == sorted([(0, 1), *((head, 2) for head in range(16))])
    else:
        assert first == [(head, tile) for head in range(6) for tile in range(3)][:17]


def test_row_i_sees_keys_0_to_i_whatever_the_lengths():
    q, k, v = inputs(1, 1, 1, 40, 70, 32)
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[:, :, 20:] = 5.0
    changed_v[:, :, 20:] = -7.0
    before = attention(q, k, v, causal=True, **tiles(16, 16))
    after = attention(q, changed_k, changed_v, causal=True, **tiles(16, 16))
    assert torch.equal(before[:, :, :20], after[:, :, :20])
    assert (before[:, :, 20:] != after[:, :, 20:]).any(-1).all()
    assert torch.equal(before[:, :, 0], v[:, :, 0])


# The last two are 0 in fp32, and 0 times -inf is no number.
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0, 2, 1e-46, -1e-300])
@pytest.mark.parametrize("causal", [False, True])
def test_the_scale_is_the_callers(scale, causal):
    q, k, v = inputs(1, 2, 2, 40, 50, 32)
    assert_close(attention(q, k, v, causal=causal, scale=scale), q, k, v, causal, scale=scale)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_whose_scores_are_all_minus_infinity_gives_zero_as_sdpa(causal):
    q, k, v = inputs(1, 1, 1, 40, 50, 32)
    q[:, :, 7, 0] = math.inf
    k[..., 0] = -k[..., 0].abs() - 0.1
    output = attention(q, k, v, causal=causal, **tiles(16, 16))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert (output[:, :, 7] == 0).all()
    torch.testing.assert_close(output, expected)


def test_small_integers_give_the_exact_answer():
    # Equal scores: the output is the mean of V's rows, here of 32, which fp16 holds exactly.
    q, k, v = inputs(1, 2, 2, 40, 32, 32)
    v = v.mul(4).round().clamp(-8, 8)
    expected = v.double().mean(2, keepdim=True).expand_as(q)
    assert torch.equal(attention(torch.zeros_like(q), k, v, causal=False).double(), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_len_q", "seq_len_k", "batch"), [(5, 0, 1), (0, 5, 1), (5, 5, 0)])
def test_rows_that_see_no_key_give_zero_and_no_rows_give_none(causal, seq_len_q, seq_len_k, batch):
    q, k, v = inputs(batch, 2, 2, seq_len_q, seq_len_k, 16)
    output = attention(q, k, v, causal=causal)
    assert output.shape == q.shape
    assert output.dtype == q.dtype
    assert torch.equal(output, torch.zeros_like(q))


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_is_written_around_the_output_and_nothing_of_it_is_left_out(causal, monkeypatch):
    q, k, v = inputs(2, 3, 3, 33, 33, 40)
    given = []
    genuine = torch.empty_like

    def guarded_empty_like(tensor, dtype=None, **rest):
        shape = genuine(tensor, dtype=dtype, **rest)
        zone = 4096
        storage = torch.full((shape.numel() + 2 * zone,), 12345.0, dtype=shape.dtype, device=shape.device)
        given.append((storage, zone))
        storage[zone:-zone] = torch.nan
        return storage[zone:-zone].view(shape.shape)

    monkeypatch.setattr(torch, "empty_like", guarded_empty_like)
    output = attention(q, k, v, causal=causal, **tiles(32, 32))
    monkeypatch.undo()
    [(storage, zone)] = given
    marker = torch.full((zone,), 12345.0, dtype=storage.dtype, device=storage.device)
    assert torch.equal(storage[:zone], marker)
    assert torch.equal(storage[-zone:], marker)
    assert_close(output, q, k, v, causal)


def test_the_inputs_are_left_as_they_were():
    tensors = inputs(1, 2, 2, 33, 40, 40)
    before = [tensor.clone() for tensor in tensors]
    attention(*tensors, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_the_output_is_laid_out_as_q_where_q_is_dense_and_contiguous_otherwise():
    q, k, v = inputs(2, 3, 3, 20, 20, 16)
    transposed = in_layout(q, "transposed")
    assert attention(transposed, k, v, causal=False).stride() == transposed.stride()
    assert attention(in_layout(q, "fused"), k, v, causal=False).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("compute_capability", [None, *SHARED_MEMORY_KIB])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_a_target_has_two_to_six_different_candidates_of_one_form(compute_capability, head_dim):
    if compute_capability is None and not triton_flash.INTERPRETED:
        pytest.skip("a process that compiles for a GPU does not interpret")
    target = gpu(*compute_capability) if compute_capability else CPU
    for causal in (False, True):
        options = triton_flash.candidates(problem(head_dim, causal), target)
        assert (2 if compute_capability else 1) <= len(options) <= 6
        assert len({json.dumps(option) for option in options}) == len(options)
        assert all(triton_flash.unsupported(problem(head_dim, causal), target, **o) is None for o in options)


def test_options_that_are_given_are_the_only_candidate():
    assert triton_flash.candidates(problem(), gpu(9, 0), **tiles(64, 64)) == [tiles(64, 64)]


def test_a_changed_candidate_does_not_change_the_table():
    first = triton_flash.candidates(problem(), gpu(9, 0))
    first[0]["tile_q"] = 1
    assert triton_flash.candidates(problem(), gpu(9, 0))[0]["tile_q"] != 1


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_all_candidates_agree(head_dim, causal):
    # The interpreter knows no warps, stages and registers; a GPU tries each of its own candidates.
    seen = ("tile_q", "tile_k", "tensor_descriptors", "q_in_registers")
    different = {}
    for compute_capability in SHARED_MEMORY_KIB:
        for option in triton_flash.candidates(problem(head_dim, causal), gpu(*compute_capability)):
            if DEVICE == "cpu":
                different[tuple(option[name] for name in seen)] = option
            elif compute_capability == torch.cuda.get_device_capability():
                different[tuple(option.values())] = option
    assert len(different) >= 2
    q, k, v = inputs(1, 1, 1, 130, 140, head_dim)
    outputs = [attention(q, k, v, causal=causal, **option) for option in different.values()]
    for output in outputs:
        assert_close(output, q, k, v, causal)
        # One unit in the last place at magnitude 2 to 4: tiles differ in the order of the fp32 sums alone.
        assert (output.double() - outputs[0].double()).abs().max() <= 2**-9


def test_the_same_call_is_bit_identical():
    q, k, v = inputs(2, 4, 2, 70, 70, 64)
    first = attention(q, k, v, causal=True)
    assert all(
        torch.equal(first, attention(q, k, v, causal=True)) for _ in range(3 if DEVICE == "cpu" else 50)
    )


def test_a_bad_tensor_is_refused_by_name():
    q, k, v = inputs(1, 2, 2, 4, 4, 32)
    with pytest.raises(ValueError, match="k has a last stride of 2"):
        attention(q[..., :16], k[..., ::2], v[..., :16], causal=False)
    with pytest.raises(ValueError, match="v is bfloat16"):
        attention(q, k, v.bfloat16(), causal=False)
    with pytest.raises(ValueError, match=r"q requires a gradient.*forward only"):
        attention(q.clone().requires_grad_(), k, v, causal=False)
    with torch.no_grad():
        attention(q.clone().requires_grad_(), k, v, causal=False)


@pytest.mark.parametrize("head_dim", [8, 15, 257])
def test_a_head_dim_out_of_range_is_refused_and_said_to_be_unsupported(head_dim):
    with pytest.raises(ValueError, match=f"q has head_dim {head_dim}: expected 16 to 256"):
        attention(*inputs(1, 1, 1, 4, 4, head_dim), causal=False)
    assert f"head_dim {head_dim}" in triton_flash.unsupported(problem(head_dim), gpu(9, 0))


def test_launch_options_are_given_together_and_make_sense():
    tensors = inputs(1, 1, 1, 4, 4, 16)
    for options, message in (
        (
            {"tile_q": 64},
            "tile_k is None: expected a number; give all of tile_q, tile_k, num_warps, num_stages",
        ),
        ({"max_registers": 128}, "tile_q is None"),
        ({**tiles(64, 64), "tile_k": 48}, "tile_k is 48: expected a power of two"),
        ({**tiles(64, 64), "tile_q": 8}, "tile_q is 8: expected a power of two, 16 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(*tensors, causal=False, **options)
        assert triton_flash.unsupported(problem(), gpu(9, 0), **options) is not None
    assert "speed is not a launch option" in triton_flash.unsupported(
        problem(), gpu(9, 0), **tiles(64, 64), speed=1
    )


DESCRIBED = {"tile_q": 32, "tile_k": 32, "num_warps": 4, "num_stages": 1, "tensor_descriptors": True}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 1, 70, 70, 64), (2, 4, 2, 33, 100, 80), (1, 3, 3, 100, 33, 128)])
def test_tensor_descriptors_give_the_same_bits_as_pointers(shape, causal, dtype):
    batch, heads, kv_heads, seq_len_q, seq_len_k, head_dim = shape
    q = torch.randn(batch, heads, seq_len_q, head_dim, device=DEVICE).to(dtype)
    # Heads between rows, as after a projection; NaN behind the last row, which no tile may take in.
    room = torch.full((2, batch, seq_len_k + 7, kv_heads, head_dim), math.nan, device=DEVICE).to(dtype)
    room[:, :, :seq_len_k] = torch.randn(2, batch, seq_len_k, kv_heads, head_dim, device=DEVICE).to(dtype)
    k, v = room[:, :, :seq_len_k].transpose(2, 3)
    assert triton_flash._describable(k)
    described = attention(q, k, v, causal=causal, **DESCRIBED)
    pointers = attention(q, k, v, causal=causal, **{**DESCRIBED, "tensor_descriptors": False})
    assert torch.equal(described, pointers)
    assert described.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, -0.3, 0.0])
@pytest.mark.parametrize("shape", [(1, 2, 1, 70, 70, 64), (2, 4, 2, 33, 100, 80), (1, 3, 3, 100, 33, 128)])
def test_q_from_registers_gives_the_same_bits_as_from_shared_memory(shape, scale, dtype):
    batch, heads, kv_heads, seq_len_q, seq_len_k, head_dim = shape
    q, k, v = inputs(batch, heads, kv_heads, seq_len_q, seq_len_k, head_dim, dtype)
    q = q.contiguous() * 100
    shared = attention(q, k, v, causal=True, scale=scale, **DESCRIBED)
    registers = attention(q, k, v, causal=True, scale=scale, **DESCRIBED, q_in_registers=True)
    assert torch.equal(shared, registers)


@pytest.mark.parametrize(
    "where", ["row stride", "head stride", "address", "no stride at all", "fits", "one head of one row"]
)
def test_what_no_tensor_descriptor_can_describe_is_read_by_pointers(where):
    memory = torch.randn(8192, device=DEVICE).half()
    shapes = {
        "row stride": ((1, 2, 40, 64), (0, 2680, 67, 1), 0),
        "head stride": ((1, 2, 40, 64), (0, 2564, 64, 1), 0),
        "address": ((1, 2, 40, 64), (0, 2560, 64, 1), 4),
        "no stride at all": ((1, 2, 40, 64), (0, 0, 64, 1), 0),
        "fits": ((1, 2, 40, 64), (0, 2560, 64, 1), 8),
        "one head of one row": ((1, 1, 1, 64), (3, 5, 7, 1), 0),
    }
    size, stride, offset = shapes[where]
    k = memory.as_strided(size, stride, offset)
    assert triton_flash._describable(k) == (where in ("fits", "one head of one row"))
    q = torch.randn(1, 2, 40, 64, device=DEVICE).half()
    assert_close(attention(q, k, k, causal=True, **DESCRIBED), q, k, k, causal=True)
    # V alone, beside a K that a descriptor can describe.
    plain = k.contiguous()
    assert_close(attention(q, plain, k, causal=True, **DESCRIBED), q, plain, k, causal=True)


def test_an_old_gpu_and_a_cpu_without_the_interpreter_are_unsupported(monkeypatch):
    assert "compute capability 7.0 is below 7.5" in triton_flash.unsupported(problem(), gpu(7, 0))
    assert triton_flash.unsupported(problem(), gpu(7, 5)) is None
    monkeypatch.setattr(triton_flash, "INTERPRETED", False)
    assert "TRITON_INTERPRET=1" in triton_flash.unsupported(problem(), CPU)
    monkeypatch.setattr(triton_flash, "INTERPRETED", True)
    assert triton_flash.unsupported(problem(), CPU) is None


def test_the_memory_law_is_the_published_table():
    for seq_len, gib in ((512, 0.0039), (2048, 0.0156), (8192, 0.0625)):
        law = triton_flash.memory_law(
            problem(heads=16, kv_heads=16, seq_len_q=seq_len, seq_len_k=seq_len, head_dim=64)
        )
        assert round(law / 2**30, 4) == gib


COMPILE = """
import json, os, re, subprocess, sys, tempfile
from types import SimpleNamespace
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import triton_flash
from tests.kernels.wgmma_registers import disassembled, overwritten

cuobjdump = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
for (major, minor), head_dim, causal, dtype, everything in json.loads(sys.argv[1]):
    target = SimpleNamespace(is_cuda=True, compute_capability=(major, minor))
    problem = SimpleNamespace(
        batch=1, heads=4, kv_heads=4, seq_len_q=1000, seq_len_k=1000,
        head_dim=head_dim, causal=causal, dtype=dtype,
    )
    for options in triton_flash.candidates(problem, target)[: None if everything else 1]:
        [unit] = triton_flash.compile_units(problem, options, target)
        compiled = triton.compile(
            ASTSource(unit.function, unit.signature, unit.constexprs, unit.attrs),
            target=GPUTarget("cuda", 10 * major + minor, 32),
            options=unit.options,
        )
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(compiled.asm["cubin"])
            cubin.flush()
            usage = subprocess.run([cuobjdump, "-res-usage", cubin.name], capture_output=True, text=True)
        stack = int(re.findall(r"STACK:(\\d+)", usage.stdout + usage.stderr)[-1])
        ptx = compiled.asm["ptx"]
        print(json.dumps({
            "target": [major, minor], "head_dim": head_dim, "causal": causal, "options": options,
            "stack": stack, "shared": compiled.metadata.shared,
            "tensor_core": ptx.count("wgmma.mma_async" if major == 9 else "mma.sync"),
            "copies": ptx.count("cp.async.cg.shared.global"),
            "described": ptx.count("cp.async.bulk.tensor"),
            "overwritten": overwritten(disassembled(compiled.asm["cubin"])) if major == 9 else [],
            "left_in_shared": len(re.findall(r"wgmma[.]mma_async[^{]*{[^}]*}, %rd", ptx)),
        }))
"""


def compiled(cells, folder):
    """What the compiler makes of candidates for GPUs that are not there, without the interpreter."""
    printed = output_of(COMPILE, cells, folder)
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.slow
def test_defaults_use_tensor_cores_and_asynchronous_copies_and_hardly_spill(tmp_path):
    cells = [
        [cc, head_dim, causal, "bf16", False]
        for cc in ((8, 0), (9, 0))
        for head_dim in (40, 64, 128)
        for causal in (False, True)
    ]
    rows = compiled(cells, tmp_path)
    assert len(rows) == len(cells)
    for row in rows:
        assert row["tensor_core"] > 0, row
        assert row["copies"] + row["described"] > 0, row
        assert row["stack"] <= 256, row
        assert row["shared"] <= 1024 * SHARED_MEMORY_KIB[tuple(row["target"])], row


@pytest.mark.slow
@pytest.mark.parametrize("compute_capability", SHARED_MEMORY_KIB)
def test_every_candidate_compiles_within_the_shared_memory_of_its_gpu(compute_capability, tmp_path):
    # With a causal mask: more candidates, and the more shared memory where the two differ.
    cells = [[compute_capability, head_dim, True, "fp16", True] for head_dim in (32, 64, 128, 256)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda cell: compiled([cell], tmp_path / str(cell[1])), cells)
        rows = [row for rows in found for row in rows]
    offered = [
        option
        for _, head_dim, causal, _, _ in cells
        for option in triton_flash.candidates(problem(head_dim, causal), gpu(*compute_capability))
    ]
    assert [row["options"] for row in rows] == offered
    described = [row for row in rows if row["options"]["tensor_descriptors"]]
    assert bool(described) == (compute_capability in ((9, 0), (10, 0)))
    for row in described:
        # The copy engine computes the addresses, and so hardly a register is spilled.
        assert row["described"] > 0, row
        assert row["stack"] <= (0 if compute_capability == (9, 0) else 64), row
    kept = [row for row in rows if row["options"]["q_in_registers"]]
    assert bool(kept) == (compute_capability == (9, 0))
    for row in kept:
        # Only the product with the identity, 16 of its rows at a time, reads Q from shared memory.
        assert row["left_in_shared"] == row["head_dim"] // 16, row
        assert row["stack"] == 0, row
    for row in rows:
        assert row["overwritten"] == [], row
        assert row["shared"] <= 1024 * SHARED_MEMORY_KIB[compute_capability], row
        if compute_capability == (7, 5):  # where every accumulator is in registers, there are few to spare
            assert row["stack"] == 0, row


ARTICLE = """
import json
from types import SimpleNamespace
from harness.plugin import compile_unit
from harness.static_profile import read_unit
from harness.target import Target
from kernels import triton_flash

problem = SimpleNamespace(
    batch=1, heads=16, kv_heads=16, seq_len_q=4096, seq_len_k=4096, head_dim=64, causal=False, dtype="fp16"
)
turing = Target("cuda", "Turing", (7, 5))
options = {"tile_q": 128, "tile_k": 64, "num_warps": 4, "num_stages": 1}
[unit] = triton_flash.compile_units(problem, options, turing)
found = read_unit(compile_unit(unit, turing))
print(json.dumps({
    "stack": found.stack_bytes, "spills": found.spills, "tensor_cores": found.uses_tensor_cores,
    "ffma": found.mix["fp32_multiply_add"],
}))
"""


@pytest.mark.slow
def test_on_the_articles_gpu_its_tiles_use_no_tensor_core_and_spill_by_kilobytes(tmp_path):
    found = json.loads(output_of(ARTICLE, [], tmp_path))
    assert not found["tensor_cores"]
    assert found["spills"]
    assert found["stack"] > 2000
    assert found["ffma"] > 1000


RESIDENT = """
import json, sys
from types import SimpleNamespace
from harness.static_profile import profile_unit
from harness.target import Target
from kernels import triton_flash

hopper = Target("cuda", "Hopper", (9, 0))
for head_dim, causal in json.loads(sys.argv[1]):
    problem = SimpleNamespace(
        batch=1, heads=16, kv_heads=16, seq_len_q=4096, seq_len_k=4096,
        head_dim=head_dim, causal=causal, dtype="bf16",
    )
    [unit] = triton_flash.compile_units(problem, {}, hopper)
    print(json.dumps(profile_unit(unit, hopper)["blocks_per_multiprocessor"]))
"""


@pytest.mark.slow
def test_on_hopper_a_multiprocessor_holds_two_programs_of_the_default_or_more(tmp_path):
    cells = [(head_dim, causal) for head_dim in (64, 128) for causal in (False, True)]
    blocks = [int(line) for line in output_of(RESIDENT, cells, tmp_path).splitlines()]
    assert len(blocks) == len(cells)
    assert min(blocks) >= 2, blocks


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_more_than_two_to_the_31_elements_are_addressed_right():
    length = 2**31 // 128 // 64 + 64
    q = torch.randn(1, 64, 16, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, 64, length, 128, dtype=torch.bfloat16, device="cuda")
    v = torch.randn_like(k)
    assert k.numel() > 2**31
    output = attention(q, k, v, causal=False)
    assert_close(output[:, -1:], q[:, -1:], k[:, -1:], v[:, -1:], False)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, DESCRIBED], ids=["default", "descriptors"])
def test_a_captured_call_is_right_for_what_its_tensors_hold_at_each_replay(options):
    tensors = inputs(2, 4, 2, 300, 300, 64)
    attention(*tensors, causal=True, **options)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attention(*tensors, causal=True, **options)
    for seed in (1, 2):
        for tensor, other in zip(tensors, inputs(2, 4, 2, 300, 300, 64, seed=seed), strict=True):
            tensor.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(output, *tensors, True)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_a_call_runs_on_the_stream_it_is_made_on():
    stream = torch.cuda.Stream()
    q, k, v = inputs(2, 4, 2, 300, 300, 64)
    expected = attention(q, k, v, causal=True)
    late = torch.zeros_like(q)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        late.copy_(q)  # on another stream, the call would not wait for this
        output = attention(late, k, v, causal=True)
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current_one_are_right():
    there = [tensor.to("cuda:1") for tensor in inputs(1, 4, 4, 300, 300, 64)]
    output = attention(*there, causal=True)
    assert output.device.index == 1
    assert torch.cuda.current_device() == 0
    assert_close(output, *there, True)
