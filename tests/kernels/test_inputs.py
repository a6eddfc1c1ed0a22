import math

import pytest
import torch

from kernels.inputs import check_decode_inputs, check_inputs, is_plain


def tensor(*shape, dtype=torch.float16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


Q, K = tensor(2, 4, 5, 16), tensor(2, 2, 7, 16)

BAD = {
    "rank": ((tensor(4, 5, 16), K, K), ["q has 3 dimensions", "(4, 5, 16)", "expected 4"]),
    "not a tensor": ((Q, [1.0], K), ["k is a list", "expected a torch.Tensor"]),
    "fp32": ((tensor(2, 4, 5, 16, dtype=torch.float32), K, K), ["q is float32", "float16 or bfloat16"]),
    "mixed dtypes": ((Q, K, K.bfloat16()), ["v is bfloat16", "q's dtype, float16"]),
    "mixed devices": ((Q, K.to("meta"), K), ["k is on meta", "q's device, cpu"]),
    "batch": ((Q, tensor(3, 2, 7, 16), K), ["k has batch 3", "q's batch, 2"]),
    "head_dim of k": ((Q, tensor(2, 2, 7, 32), K), ["k has head_dim 32", "q's head_dim, 16"]),
    "head_dim of v": ((Q, K, tensor(2, 2, 7, 8)), ["v has head_dim 8", "q's head_dim, 16"]),
    "v's length": ((Q, K, tensor(2, 2, 8, 16)), ["v has shape (2, 2, 8, 16)", "k's shape, (2, 2, 7, 16)"]),
    "heads": ((Q, tensor(2, 3, 7, 16), tensor(2, 3, 7, 16)), ["q has 4 heads", "multiple of the 3 heads"]),
    "no head": ((Q, tensor(2, 0, 7, 16), K), ["k has shape (2, 0, 7, 16)", "at least one head"]),
    "last stride": ((Q, tensor(2, 2, 7, 32)[..., ::2], K), ["k has a last stride of 2", "expected 1"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_tensor_is_refused_by_name_with_what_it_was_and_what_was_expected(case):
    tensors, fragments = BAD[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what the next line checks
        check_inputs(*tensors)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, "0.1", True])
def test_a_scale_that_is_no_finite_number_is_refused(scale):
    with pytest.raises(ValueError, match=r"scale is .*: expected a finite number or None"):
        check_inputs(Q, K, K, scale=scale)


@pytest.mark.parametrize("scale", [None, 1, 0.0, -0.5])
def test_a_finite_scale_or_none_is_accepted(scale):
    check_inputs(Q, K, K, scale=scale)


def test_different_lengths_grouped_heads_and_empty_lengths_are_accepted():
    check_inputs(Q, K, K)
    check_inputs(tensor(2, 4, 0, 16), K, K)
    check_inputs(Q, tensor(2, 1, 0, 16), tensor(2, 1, 0, 16))
    check_inputs(tensor(0, 4, 5, 16), tensor(0, 2, 7, 16), tensor(0, 2, 7, 16))


def test_any_strides_but_the_last_are_accepted():
    q, k, v = tensor(2, 5, 3, 4, 16).permute(2, 0, 3, 1, 4)
    check_inputs(q, k, v)


def test_the_stride_of_a_last_dimension_of_size_one_does_not_matter():
    narrow = tensor(2, 4, 5, 16)[..., ::16]
    assert narrow.stride(3) != 1
    check_inputs(narrow, narrow, narrow)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_forward_only_kernel_refuses_a_gradient_only_while_gradients_are_recorded(name):
    tensors = {"q": Q.clone(), "k": K.clone(), "v": K.clone()}
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=rf"{name} requires a gradient.*forward only"):
        check_inputs(**tensors, forward_only=True)
    check_inputs(**tensors)
    with torch.no_grad():
        check_inputs(**tensors, forward_only=True)


NEWEST = tensor(2, 4, 1, 16)
PAGES = tensor(5, 2, 64, 16)
LENGTHS = torch.tensor([7, 0], dtype=torch.int32)
TABLE = torch.tensor([[0, 4, 1], [2, 3, -1]], dtype=torch.int32)

BAD_DECODE = {
    "no query": ((tensor(2, 4, 0, 16), K, K), {}, ["q has 0 queries", "expected 1 to 8"]),
    "nine queries": ((tensor(2, 4, 9, 16), K, K), {}, ["q has 9 queries", "expected 1 to 8"]),
    "rank": ((tensor(4, 1, 16), K, K), {}, ["q has 3 dimensions"]),
    "fp32": ((tensor(2, 4, 1, 16, dtype=torch.float32), K, K), {}, ["q is float32"]),
    "mixed dtypes": ((NEWEST, K.bfloat16(), K), {}, ["k is bfloat16", "q's dtype, float16"]),
    "batch": ((NEWEST, tensor(3, 2, 7, 16), tensor(3, 2, 7, 16)), {}, ["k has batch 3", "q's batch, 2"]),
    "head_dim": ((NEWEST, K, tensor(2, 2, 7, 8)), {}, ["v has head_dim 8"]),
    "v's length": ((NEWEST, K, tensor(2, 2, 8, 16)), {}, ["v has shape (2, 2, 8, 16)"]),
    "heads": ((NEWEST, tensor(2, 3, 7, 16), tensor(2, 3, 7, 16)), {}, ["q has 4 heads", "3 heads of k"]),
    "last stride": ((NEWEST, tensor(2, 2, 7, 32)[..., ::2], K), {}, ["k has a last stride of 2"]),
    "scale": ((NEWEST, K, K), {"scale": math.inf}, ["scale is inf"]),
    "lengths in a list": ((NEWEST, K, K), {"seq_lens": [7, 0]}, ["seq_lens is a list"]),
    "lengths in int64": ((NEWEST, K, K), {"seq_lens": LENGTHS.long()}, ["seq_lens is int64", "int32"]),
    "too few lengths": ((NEWEST, K, K), {"seq_lens": LENGTHS[:1]}, ["seq_lens has shape (1,)", "batch, 2"]),
    "lengths in a column": ((NEWEST, K, K), {"seq_lens": LENGTHS[:, None]}, ["seq_lens has shape (2, 1)"]),
    "lengths elsewhere": ((NEWEST, K, K), {"seq_lens": LENGTHS.to("meta")}, ["seq_lens is on meta", "cpu"]),
    "lengths apart": (
        (NEWEST, K, K),
        {"seq_lens": torch.zeros(4, dtype=torch.int32)[::2]},
        ["seq_lens has a last stride of 2"],
    ),
    "page size": (
        (NEWEST, tensor(5, 2, 32, 16), tensor(5, 2, 32, 16)),
        {"block_table": TABLE},
        ["k has pages of 32 tokens", "16, 64, 128"],
    ),
    "no table": ((NEWEST, PAGES, PAGES), {}, ["k has batch 5: expected q's batch, 2"]),
    "table of one row": (
        (NEWEST, PAGES, PAGES),
        {"block_table": TABLE[:1]},
        ["block_table has shape (1, 3)"],
    ),
    "flat table": ((NEWEST, PAGES, PAGES), {"block_table": TABLE[:, 0]}, ["block_table has shape (2,)"]),
    "table in int64": ((NEWEST, PAGES, PAGES), {"block_table": TABLE.long()}, ["block_table is int64"]),
    "table apart": (
        (NEWEST, PAGES, PAGES),
        {"block_table": TABLE[:, ::2]},
        ["block_table has a last stride of 2"],
    ),
}


@pytest.mark.parametrize("case", BAD_DECODE)
def test_a_bad_argument_of_a_decode_call_is_refused_by_name(case):
    tensors, indices, fragments = BAD_DECODE[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what the next line checks
        check_decode_inputs(*tensors, **indices)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_decode_call_refuses_a_gradient_only_while_gradients_are_recorded():
    q = NEWEST.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"q requires a gradient.*forward only"):
        check_decode_inputs(q, K, K)
    with torch.no_grad():
        check_decode_inputs(q, K, K)


def test_caches_with_and_without_lengths_and_pages_are_accepted():
    for queries in (1, 8):
        q = tensor(2, 4, queries, 16)
        check_decode_inputs(q, K, K)
        check_decode_inputs(q, K, K, seq_lens=LENGTHS, scale=0.5)
        check_decode_inputs(q, PAGES, PAGES, block_table=TABLE)
        check_decode_inputs(q, PAGES, PAGES, seq_lens=LENGTHS, block_table=TABLE[:, :2])
    check_decode_inputs(NEWEST, tensor(2, 1, 0, 16), tensor(2, 1, 0, 16))


def test_a_kernel_that_reads_memory_refuses_what_does_not_lie_there():
    q, k, v = Q, K, K
    negative = torch._neg_view(q)
    with pytest.raises(ValueError, match=r"^q is a negative view: .*q\.resolve_neg\(\)"):
        check_inputs(negative, k, v, forward_only=True)
    check_inputs(negative.resolve_neg(), k, v, forward_only=True)
    check_inputs(negative, k, v)


def test_a_forward_only_kernel_refuses_a_tangent():
    q, k, v = Q, K, K
    with torch.autograd.forward_ad.dual_level():
        check_inputs(q, k, v, forward_only=True)
        dual = torch.autograd.forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(ValueError, match=r"^k has a tangent \(forward-mode differentiation\)"):
            check_inputs(q, dual, v, forward_only=True)
        assert not is_plain(q, dual)
        check_inputs(q, dual, v)
    assert is_plain(q, k, v)


def test_a_forward_only_kernel_refuses_a_transformed_tensor():
    q, k, v = Q, K, K

    def checked(v):
        check_inputs(q, k, v, forward_only=True)
        return v

    with pytest.raises(ValueError, match=r"^v is transformed by torch\.func \(vmap, jvp, grad\)"):
        torch.func.vmap(checked)(torch.stack([v, v]))
