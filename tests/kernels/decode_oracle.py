"""What decode kernels are judged by here: the formula for each sequence in fp64, and its same-dtype twin."""

from __future__ import annotations

import math

import torch

from tests.kernels.oracle import DEVICE


def decode_formula(q, k, v, lengths, scale=None, dtype=torch.float64):
    """softmax(scale * Q K^T) V, one sequence and query at a time; a query does not see later keys."""
    group, queries = q.shape[1] // k.shape[1], q.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    output = torch.zeros(q.shape, dtype=dtype, device=q.device)
    for index, length in enumerate(lengths):
        keys, values = (t[index, :, :length].to(dtype).repeat_interleave(group, 0) for t in (k, v))
        for query in range(queries):
            visible = length - (queries - 1 - query)
            if visible > 0:
                scores = q[index, :, query : query + 1].to(dtype) @ keys[:, :visible].transpose(-1, -2)
                weights = torch.softmax(scores * scale, -1, dtype=wide).to(dtype)
                output[index, :, query : query + 1] = weights @ values[:, :visible]
    return output


def assert_decode_close(output, q, k, v, lengths, scale=None):
    """At most twice the error of the same formula in q's dtype, plus a few units in the last place."""
    exact = decode_formula(q, k, v, lengths, scale)
    assert output.shape == q.shape
    assert output.dtype == q.dtype
    assert output.is_contiguous()
    assert torch.isfinite(output).all()
    twin = decode_formula(q, k, v, lengths, scale, q.dtype).double()
    rounded = exact.to(q.dtype)
    floor = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    twin_error = (twin - exact).abs().max().item() if torch.isfinite(twin).all() else 0.0
    error = (output.double() - exact).abs().max().item()
    assert error <= 2 * twin_error + floor, f"error {error:.3g}, twin {twin_error:.3g}, floor {floor:.3g}"


def cache(batch, heads, kv_heads, queries, context, head_dim, dtype=torch.float16, lengths=None, seed=0):
    """Seeded q, k, v and lengths (seq_lens or None); the cache is NaN where no sequence is."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, queries, head_dim, generator=generator).to(dtype).to(DEVICE)
    k, v = (
        torch.randn(batch, kv_heads, context, head_dim, generator=generator).to(dtype).to(DEVICE)
        for _ in range(2)
    )
    if lengths is None:
        return q, k, v, None
    for index, length in enumerate(lengths):
        k[index, :, length:] = math.nan
        v[index, :, length:] = math.nan
    return q, k, v, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def paged(k, v, page_size, lengths=None, seed=0):
    """The same cache in pages in random order, among pages of NaN; the table has garbage past each end."""
    batch, kv_heads, context, head_dim = k.shape
    per_sequence = -(-context // page_size)
    count = batch * per_sequence + 3
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.full((batch, per_sequence + 1), 2**31 - 1, dtype=torch.int32)
    pages = [
        torch.full((count, kv_heads, page_size, head_dim), math.nan, dtype=k.dtype, device=k.device)
        for _ in range(2)
    ]
    for index in range(batch):
        length = context if lengths is None else lengths[index]
        for place in range(-(-length // page_size)):
            page = int(order[index * per_sequence + place])
            table[index, place] = page
            begin, end = place * page_size, min((place + 1) * page_size, length)
            for target, source in zip(pages, (k, v), strict=True):
                target[page, :, : end - begin] = source[index, :, begin:end]
    return *pages, table.to(k.device)
