"""Attention of the newest tokens against a cache of keys and values, the keys split over programs.

Few queries stand against many keys, so the time is that of reading K and V, and one program for each
sequence and head would leave most multiprocessors idle. So the tiles of keys of a sequence are dealt out to
several programs in turn (Flash-Decoding). The query heads that share a head of K and V, and the queries of
each, are rows of one tile, so that K and V are read once. Each program keeps for its rows the maximum
score, the sum of the exponentials and the sum of V weighted with them. The last program of a group to end
merges these, in the order of the splits, whoever it is; or a second kernel does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.inputs import MAX_QUERIES, PAGE_SIZES, check_decode_inputs
from kernels.split_keys import (
    INTERPRETED,
    MAX_GRID,
    MAX_PLANS,
    SPLIT_OPTIONS,
    TILE_OPTIONS,
    CompileUnit,
    Launch,
    call_key,
    cannot_run,
    check_options,
    compile_unit,
    compute_capability,
    counter_bytes,
    counters,
    current,
    most_splits,
    multiprocessors,
    multiprocessors_of,
    page_entries,
    pointer_types,
    room,
    sequence_split,
    split_constants,
    tile_of_cache,
)

# Finite, so that a row that has seen no key yet gives no NaN; below every score that is finite.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile(
    pointers: tl.tensor,
    in_length: tl.tensor,
    in_head_dim: tl.tensor,
    PAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """Load a tile of Q, K or V; what lies outside is 0."""
    if PAD:
        tile = tl.load(pointers, mask=in_length & in_head_dim, other=0.0)
    else:
        tile = tl.load(pointers, mask=in_length, other=0.0)
    # The interpreter multiplies the bit patterns of bf16, and is slow in fp16.
    if INTERPRETED:
        tile = tile.to(tl.float32)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch_rows(
    tile: tl.tensor,
    rows: tl.tensor,
    in_length: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    """Ask the L2 cache for the rows of a tile of K or V, and wait for nothing."""
    LINE: tl.constexpr = 1024 // tile.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    LINES: tl.constexpr = (PADDED_DIM + LINE - 1) // LINE
    # What lies outside is asked for at an element that lies inside.
    offsets = tl.minimum(tl.arange(0, LINES) * LINE, HEAD_DIM - 1)
    rows = tl.where(in_length, rows, 0)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [tile + rows[:, None] + offsets[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    partials: tl.tensor,
    output: tl.tensor,
    first_row: tl.tensor,
    splits: tl.tensor,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    PARTIAL: tl.constexpr,
    MERGED: tl.constexpr,
) -> None:
    """Merge what the splits of a group of rows found, MERGED of them at a time, and store the output.

    A split's part has PARTIAL floats: the weighted sums of V, then the maxima, then the sums of weights.
    """
    parts = tl.arange(0, MERGED)
    rows = tl.arange(0, STORED_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    row_max = tl.full([STORED_ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([STORED_ROWS], tl.float32)
    weighted_sum = tl.zeros([STORED_ROWS, PADDED_DIM], tl.float32)
    for first in tl.range(0, splits, MERGED):
        inside = first + parts < splits
        starts = partials + (first + parts) * PARTIAL
        # Past the L1 cache: other multiprocessors wrote this.
        maxima = tl.load(
            starts[:, None] + STORED_ROWS * PADDED_DIM + rows[None, :],
            mask=inside[:, None], other=LOWEST, cache_modifier=".cg",
        )  # fmt: skip
        sums = tl.load(
            starts[:, None] + STORED_ROWS * (PADDED_DIM + 1) + rows[None, :],
            mask=inside[:, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        weighted = tl.load(
            starts[:, None, None] + rows[None, :, None] * PADDED_DIM + dims[None, None, :],
            mask=inside[:, None, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(maxima, 0))
        rescale = tl.exp2(row_max - new_max)
        factors = tl.exp2(maxima - new_max[None, :])
        row_max = new_max
        row_sum = row_sum * rescale + tl.sum(sums * factors, 0)
        weighted_sum = weighted_sum * rescale[:, None] + tl.sum(weighted * factors[:, :, None], 0)
    _store_rows(output, weighted_sum, row_sum, first_row, rows, GROUP_ROWS, HEAD_DIM, PADDED_DIM)


@triton.jit  # type: ignore[untyped-decorator]
def _store_rows(
    output: tl.tensor,
    weighted_sum: tl.tensor,
    row_sum: tl.tensor,
    first_row: tl.tensor,
    rows: tl.tensor,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    """Store the rows of a group, divided by the sums of their weights; a row that saw no key is 0."""
    dims = tl.arange(0, PADDED_DIM)
    group_rows = first_row + rows
    result = weighted_sum / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    tl.store(
        output + group_rows[:, None] * HEAD_DIM + dims[None, :],
        result.to(output.dtype.element_ty),
        mask=(group_rows[:, None] < GROUP_ROWS) & (dims[None, :] < HEAD_DIM),
    )


@triton.jit(  # type: ignore[untyped-decorator]
    # Alignment reaches the compiler through STRIDE_UNIT, so that no length or stride compiles it again.
    do_not_specialize=[
        *("q_stride_batch", "q_stride_head", "q_stride_row"),
        *("k_stride_batch", "k_stride_head", "k_stride_row"),
        *("v_stride_batch", "v_stride_head", "v_stride_row"),
        *("table_stride", "context"),
    ]
)
def _decode_splits(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    v_pointer: tl.tensor,
    o_pointer: tl.tensor,
    partial_pointer: tl.tensor,
    counter_pointer: tl.tensor,
    seq_lens_pointer: tl.tensor,
    block_table_pointer: tl.tensor,
    q_stride_batch: tl.tensor,
    q_stride_head: tl.tensor,
    q_stride_row: tl.tensor,
    k_stride_batch: tl.tensor,
    k_stride_head: tl.tensor,
    k_stride_row: tl.tensor,
    v_stride_batch: tl.tensor,
    v_stride_head: tl.tensor,
    v_stride_row: tl.tensor,
    table_stride: tl.tensor,
    context: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    PARTIAL: tl.constexpr,
    MERGED: tl.constexpr,
    PREFETCH: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    LAST_PROGRAM: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """Compute one split of the keys for the rows of one group: program (split, kv_head and rows, batch).

    Strides count STRIDE_UNIT elements, so that the compiler sees that rows are aligned. With a PAGE_SIZE the
    batch's stride of K and V is that of pages. OFFSET is the integer type of an offset inside a tile.
    """
    split = tl.program_id(0)
    batch = tl.program_id(2)
    seq_len, splits = sequence_split(seq_lens_pointer, batch, context, tl.num_programs(0), SPLIT_KEYS)
    if split >= splits:
        return

    PAD: tl.constexpr = PADDED_DIM != HEAD_DIM
    GROUP_ROWS: tl.constexpr = GROUP * QUERIES
    kv_head = tl.program_id(1) // ROW_TILES
    first_row = tl.program_id(1) % ROW_TILES * ROWS
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    columns = tl.arange(0, TILE_K)
    group_rows = first_row + rows
    query = group_rows % QUERIES

    # 64 bits: a batch, a head or a page can lie more than 2^31 elements apart.
    batch_units = tl.cast(batch, tl.int64) * STRIDE_UNIT
    head_units = tl.cast(kv_head, tl.int64) * STRIDE_UNIT
    k_head = k_pointer + head_units * k_stride_head
    v_head = v_pointer + head_units * v_stride_head
    k_stride = tl.cast(k_stride_row, OFFSET) * STRIDE_UNIT
    v_stride = tl.cast(v_stride_row, OFFSET) * STRIDE_UNIT
    k_page = tl.cast(k_stride_batch, tl.int64) * STRIDE_UNIT
    v_page = tl.cast(v_stride_batch, tl.int64) * STRIDE_UNIT

    # The split takes every splits-th tile, so that all splits read side by side.
    begin = split * TILE_K
    step = splits * TILE_K
    table = block_table_pointer
    page = 0
    if PAGE_SIZE == 0:
        k_head += batch * k_page
        v_head += batch * v_page
    else:
        table += tl.cast(batch, tl.int64) * table_stride
        page = page_entries(table, begin, columns, seq_len, TILE_K, PAGE_SIZE)

    if PREFETCH and not INTERPRETED:
        # The copies of K and V begin behind the wait for Q, but their way from memory need not.
        first = begin + columns < seq_len
        if begin < seq_len:
            k_tile, k_rows = tile_of_cache(k_head, page, begin, columns, k_stride, k_page, TILE_K, PAGE_SIZE)
            v_tile, v_rows = tile_of_cache(v_head, page, begin, columns, v_stride, v_page, TILE_K, PAGE_SIZE)
            _prefetch_rows(k_tile, k_rows, first, HEAD_DIM, PADDED_DIM)
            _prefetch_rows(v_tile, v_rows, first, HEAD_DIM, PADDED_DIM)

    head = tl.cast(kv_head * GROUP + group_rows // QUERIES, tl.int64)
    q_rows = head * q_stride_head + query * tl.cast(q_stride_row, tl.int64)
    q = _load_tile(
        q_pointer + batch_units * q_stride_batch + q_rows[:, None] * STRIDE_UNIT + dims[None, :],
        group_rows[:, None] < GROUP_ROWS, dims[None, :] < HEAD_DIM, PAD, INTERPRETED,
    )  # fmt: skip

    # Query i of L sees no key of the later ones.
    visible = (seq_len - (QUERIES - 1) + query)[:, None]
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    weight_sums = tl.zeros([ROWS, TILE_K], tl.float32)
    weighted_sum = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in tl.range(begin, seq_len, step):
        keys = start + columns
        in_length = keys < seq_len
        k_tile, k_rows = tile_of_cache(k_head, page, start, columns, k_stride, k_page, TILE_K, PAGE_SIZE)
        v_tile, v_rows = tile_of_cache(v_head, page, start, columns, v_stride, v_page, TILE_K, PAGE_SIZE)
        if PAGE_SIZE != 0:
            # A step ahead, so that the way to K and V does not wait for the table.
            page = page_entries(table, start + step, columns, seq_len, TILE_K, PAGE_SIZE)

        k = _load_tile(
            k_tile + k_rows[None, :] + dims[:, None],
            in_length[None, :], dims[:, None] < HEAD_DIM, PAD, INTERPRETED,
        )  # fmt: skip
        scores = tl.dot(q, k) * scale
        if QUERIES == 1:
            scores = tl.where(in_length[None, :], scores, float("-inf"))
        else:
            scores = tl.where(keys[None, :] < visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_max = new_max
        # Summed over the keys once, at the end.
        weight_sums = weight_sums * rescale[:, None] + weights
        weighted_sum = weighted_sum * rescale[:, None]
        v = _load_tile(
            v_tile + v_rows[:, None] + dims[None, :],
            in_length[:, None], dims[None, :] < HEAD_DIM, PAD, INTERPRETED,
        )  # fmt: skip
        weighted_sum = tl.dot(weights.to(v.dtype), v, weighted_sum)
    row_sum = tl.sum(weight_sums, 1)

    kv_heads = tl.num_programs(1) // ROW_TILES
    output = o_pointer + (tl.cast(batch, tl.int64) * kv_heads + kv_head) * (GROUP_ROWS * HEAD_DIM)
    if SPLIT:
        if splits == 1:
            _store_rows(output, weighted_sum, row_sum, first_row, rows, GROUP_ROWS, HEAD_DIM, PADDED_DIM)
        else:
            group = batch * tl.num_programs(1) + tl.program_id(1)
            partials = partial_pointer + tl.cast(group, tl.int64) * tl.num_programs(0) * PARTIAL
            part = partials + split * PARTIAL
            stored = rows < STORED_ROWS
            tl.store(part + rows[:, None] * PADDED_DIM + dims[None, :], weighted_sum, mask=stored[:, None])
            tl.store(part + STORED_ROWS * PADDED_DIM + rows, row_max, mask=stored)
            tl.store(part + STORED_ROWS * (PADDED_DIM + 1) + rows, row_sum, mask=stored)
            if LAST_PROGRAM:
                # All threads have stored before the one that counts releases it to the GPU.
                tl.debug_barrier()
                arrived = tl.atomic_add(counter_pointer + group, 1, sem="acq_rel", scope="gpu")
                if arrived == splits - 1:
                    tl.store(counter_pointer + group, 0)
                    _merge(
                        partials, output, first_row, splits,
                        GROUP_ROWS, HEAD_DIM, PADDED_DIM, STORED_ROWS, PARTIAL, MERGED,
                    )  # fmt: skip
    else:
        _store_rows(output, weighted_sum, row_sum, first_row, rows, GROUP_ROWS, HEAD_DIM, PADDED_DIM)


@triton.jit(do_not_specialize=["context", "max_splits"])  # type: ignore[untyped-decorator]
def _merge_splits(
    o_pointer: tl.tensor,
    partial_pointer: tl.tensor,
    seq_lens_pointer: tl.tensor,
    context: tl.tensor,
    max_splits: tl.tensor,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    PARTIAL: tl.constexpr,
    MERGED: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
) -> None:
    """Merge the splits of one group of rows, if there are several: program (kv_head and rows, batch)."""
    batch = tl.program_id(1)
    _, splits = sequence_split(seq_lens_pointer, batch, context, max_splits, SPLIT_KEYS)
    if splits == 1:
        return
    group = tl.cast(batch * tl.num_programs(0) + tl.program_id(0), tl.int64)
    kv_heads = tl.num_programs(0) // ROW_TILES
    kv_head = tl.program_id(0) // ROW_TILES
    first_row = tl.program_id(0) % ROW_TILES * ROWS
    _merge(
        partial_pointer + group * max_splits * PARTIAL,
        o_pointer + (tl.cast(batch, tl.int64) * kv_heads + kv_head) * (GROUP_ROWS * HEAD_DIM),
        first_row, splits,
        GROUP_ROWS, HEAD_DIM, PADDED_DIM, STORED_ROWS, PARTIAL, MERGED,
    )  # fmt: skip


# ---- on the host ----

LOG2_E = math.log2(math.e)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MIN_ROWS, MAX_ROWS = 16, 64  # of a tile: what a matrix instruction takes, and what the registers hold
MERGE_ELEMENTS = 8192  # floats that the merging program loads at a time: 64 for each of 128 threads
MAX_MERGED = 32
COMBINE = ("last_program", "kernel")
PREFETCH = ("nothing", "first_tile")
OTHER_OPTIONS = {"combine": COMBINE, "prefetch": PREFETCH}


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seq_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
    tile_k: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    splits: int | None = None,
    split_keys: int | None = None,
    combine: str | None = None,
    prefetch: str | None = None,
) -> torch.Tensor:
    """softmax(scale * Q K^T) V for the newest tokens of each sequence against its cache, forward only.

    q is (batch, heads, queries, head_dim), 1 to 8 queries, fp16 or bf16, 16 <= head_dim <= 256. k and v are
    (batch, kv_heads, context, head_dim); or with block_table, (batch, pages_per_sequence) int32, they are
    pages, (pages, kv_heads, page_size, head_dim), page_size 16, 64 or 128. Any strides with a last one
    of 1; consecutive heads // kv_heads query heads share one head of k and v. seq_lens, (batch,) int32, says
    how many keys each sequence has, those of its queries included; None: as many as there is room for. A
    length is taken as 0 below 0 and as the room above it. The mask is aligned to the bottom right: query
    i of L sees keys j < seq_len - (L - 1 - i). A query that sees no key gives 0. Whatever lies in the
    cache at and beyond a sequence's length, and in the block table beyond its last page, has no effect.
    scale is 1 / sqrt(head_dim) unless given. Returns a new contiguous tensor of q's shape and dtype.

    The launch: tile_k keys a step, num_warps warps of 32 threads, num_stages steps of keys in flight; splits
    is the most programs that share the keys of a sequence (None: as many as there are multiprocessors for),
    or split_keys, a multiple of tile_k, gives each sequence one program for so many of its keys. combine
    says who merges the splits: "last_program" to end (the default) or a second "kernel"; a call captured into
    a graph before any other call falls back to "kernel". prefetch says what a program asks the L2 cache for
    before it waits for Q: its "first_tile" of K and V, or "nothing" (the default). Give the first three
    together, or none of the seven for the first of `candidates`.

    Batch invariance: with splits or split_keys given, a sequence's answer is bit for bit the same
    whatever its neighbours are and however large the cache.

    Raises ValueError for a bad argument (see `check_decode_inputs`), for a head_dim or a batch out of
    range, and for an incomplete or impossible set of launch options.
    """
    options = (tile_k, num_warps, num_stages, splits, split_keys, combine, prefetch)
    key = call_key((q, k, v, seq_lens, block_table), scale, options)
    plan = None if key is None else _plans.get(key)
    if plan is None:
        plan = _plan(q, k, v, seq_lens, block_table, scale, options)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    # The interpreter cuts fp32 off where it should round to bf16: there PyTorch rounds.
    output = torch.empty(q.shape, dtype=torch.float32 if INTERPRETED else q.dtype, device=q.device)
    if plan.splits is None:
        return output.zero_().to(q.dtype)
    with current(q.device):
        partials = counter = None
        if plan.partial_size:
            partials = torch.empty(plan.partial_size, dtype=torch.float32, device=q.device)
        if plan.counters:
            counter = counters(q.device, plan.counters)
        tensors = (q, k, v, output, partials, counter, seq_lens, block_table)
        if plan.merge is None:
            plan.splits(*tensors)
        elif counter is not None:
            plan.counted_splits(*tensors)
        else:
            plan.splits(*tensors)
            plan.merge(output, partials, seq_lens)
    return output if output.dtype == q.dtype else output.to(q.dtype)


class _Plan(NamedTuple):
    """How calls of one shape, layout and set of options are launched; no launch where nothing is asked."""

    splits: Any = None  # the launch that leaves merging to another one, or has nothing to merge
    counted_splits: Any = None  # the launch whose last program merges
    merge: Any = None  # the second launch; None where there is nothing to merge
    partial_size: int = 0  # floats
    counters: int = 0  # 0 where none are wanted


_plans: dict[Any, _Plan] = {}


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_lens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    scale: float | None,
    given: tuple[Any, ...],
) -> _Plan:
    check_decode_inputs(q, k, v, seq_lens=seq_lens, block_table=block_table, scale=scale)
    batch, heads, queries, head_dim = q.shape
    kv_heads, page_size = k.shape[1], 0
    context = k.shape[2]
    if block_table is not None:
        page_size, context = context, context * block_table.shape[1]
    reason = _out_of_range(batch, heads, kv_heads, queries, head_dim)
    if reason is not None:
        raise ValueError(reason)
    options = dict(zip((*TILE_OPTIONS, *SPLIT_OPTIONS, *OTHER_OPTIONS), given, strict=True))
    if all(value is None for value in given):
        options = _candidates(
            compute_capability(q.device), multiprocessors(q.device), batch, heads, kv_heads, queries,
            context, head_dim, page_size, seq_lens is not None,
        )[0]  # fmt: skip
    check_options(options, OTHER_OPTIONS)
    if not batch or not context:
        return _Plan()

    strides = [stride for tensor in (q, k, v) for stride in tensor.stride()[:3]]
    programs = kv_heads * _row_constants(heads // kv_heads * queries, head_dim)["ROW_TILES"]
    max_splits = most_splits(options, batch * programs, context, multiprocessors(q.device))
    scale = head_dim**-0.5 if scale is None else scale

    def splits(last_program: bool) -> Launch:
        constants = _constants(
            options, heads // kv_heads, queries, head_dim, page_size, max_splits, last_program, strides
        )
        scalars = (
            *(stride // constants["STRIDE_UNIT"] for stride in strides),
            *(0 if block_table is None else block_table.stride(0), context, scale * LOG2_E),
        )
        grid = (max_splits, programs, batch)
        return Launch(_decode_splits, grid, scalars, constants, _launch_options(options))

    alone = splits(False)
    if max_splits == 1:
        return _Plan(alone)
    constants = _merge_constants(alone.constants)
    merging = {"num_warps": options["num_warps"]}
    return _Plan(
        alone,
        splits(True),
        Launch(_merge_splits, (programs, batch, 1), (context, max_splits), constants, merging),
        batch * programs * max_splits * constants["PARTIAL"],
        0 if options.get("combine") == "kernel" else batch * programs,
    )


def unsupported(problem: Any, target: Any, **options: Any) -> str | None:
    """Why the problem cannot run on the target with these launch options; None if it can."""
    reason = _out_of_range(
        problem.batch, problem.heads, problem.kv_heads, problem.seq_len_q, problem.head_dim
    )
    if reason is not None:
        return reason
    if problem.seq_len_q > MAX_QUERIES:
        return f"{problem.seq_len_q} queries a sequence: decode takes 1 to {MAX_QUERIES}"
    if problem.page_size and problem.page_size not in PAGE_SIZES:
        return f"pages of {problem.page_size} tokens: expected one of {', '.join(map(str, PAGE_SIZES))}"
    if options:
        try:
            check_options(options, OTHER_OPTIONS)
        except ValueError as fault:
            return str(fault)
    return cannot_run(target)


def candidates(problem: Any, target: Any, **options: Any) -> list[dict[str, Any]]:
    """Launch options worth tuning over, the default first; only the given ones if any are given."""
    if options:
        return [options]
    return _candidates(
        target.compute_capability if target.is_cuda else None, multiprocessors_of(target),
        problem.batch, problem.heads, problem.kv_heads, problem.seq_len_q, problem.seq_len_k,
        problem.head_dim, problem.page_size, problem.lengths != "equal",
    )  # fmt: skip


def memory_law(problem: Any, **options: Any) -> int | None:
    """Bytes that a call peaks at on a GPU, the inputs included: output, parts of the splits, counters.

    None where the number of splits depends on the GPU, which the problem does not say: give splits or
    split_keys. The counters are kept, and are no more for later calls.
    """
    if options.get("splits") is None and options.get("split_keys") is None:
        return None
    rows = _row_constants(problem.heads // problem.kv_heads * problem.seq_len_q, problem.head_dim)
    groups = problem.batch * problem.kv_heads * rows["ROW_TILES"]
    context = room(problem)
    splits = most_splits(options, groups, context, 1)
    own = 0
    if splits > 1:
        own = 4 * groups * splits * rows["PARTIAL"]
        own += 0 if options.get("combine") == "kernel" else counter_bytes(groups)
    return int(problem.input_bytes + problem.output_bytes + own)


def compile_units(problem: Any, options: Mapping[str, Any], target: Any) -> list[CompileUnit]:
    """The kernels that a call compiles for contiguous inputs, one or two; empty options mean the default."""
    options = dict(options) or candidates(problem, target)[0]
    check_options(options, OTHER_OPTIONS)
    group = problem.heads // problem.kv_heads
    rows = _row_constants(group * problem.seq_len_q, problem.head_dim)
    groups = problem.batch * problem.kv_heads * rows["ROW_TILES"]
    max_splits = most_splits(options, groups, room(problem), multiprocessors_of(target))
    last_program = max_splits > 1 and options.get("combine") != "kernel"
    constants = _constants(
        options, group, problem.seq_len_q, problem.head_dim, problem.page_size, max_splits, last_program,
        [problem.head_dim],
    )  # fmt: skip
    pointers, absent = pointer_types(problem, max_splits, last_program)
    units = [compile_unit(_decode_splits, pointers, {**constants, **absent}, _launch_options(options))]
    if max_splits > 1 and not last_program:
        merging = {"num_warps": options["num_warps"]}
        units.append(
            compile_unit(_merge_splits, pointers, {**_merge_constants(constants), **absent}, merging)
        )
    return units


def _out_of_range(batch: int, heads: int, kv_heads: int, queries: int, head_dim: int) -> str | None:
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return f"q has head_dim {head_dim}: expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if batch > MAX_GRID:
        return f"q has batch {batch}: expected no more than {MAX_GRID}"
    if kv_heads * triton.cdiv(heads // kv_heads * queries, MAX_ROWS) > MAX_GRID:
        return f"k has {kv_heads} heads: expected no more than {MAX_GRID} with all rows of theirs"
    return None


@functools.cache
def _row_constants(group_rows: int, head_dim: int) -> dict[str, int]:
    """How the rows of a group are cut into tiles, and what of a tile is stored for each split."""
    padded_dim = triton.next_power_of_2(head_dim)
    needed = triton.next_power_of_2(group_rows)
    rows = min(max(needed, MIN_ROWS), MAX_ROWS if padded_dim <= 128 else MAX_ROWS // 2)
    stored_rows = min(needed, rows)
    merged = max(1, min(MAX_MERGED, MERGE_ELEMENTS // (stored_rows * padded_dim)))
    return {
        "PADDED_DIM": padded_dim,
        "ROWS": rows,
        "ROW_TILES": triton.cdiv(group_rows, rows),
        "STORED_ROWS": stored_rows,
        # Two more floats a row, and two to fill 16 bytes.
        "PARTIAL": stored_rows * (padded_dim + 4),
        "MERGED": merged,
    }


def _constants(
    options: Mapping[str, Any],
    group: int,
    queries: int,
    head_dim: int,
    page_size: int,
    max_splits: int,
    last_program: bool,
    strides: list[int],
) -> dict[str, Any]:
    rows = _row_constants(group * queries, head_dim)
    return {
        "GROUP": group,
        "QUERIES": queries,
        "HEAD_DIM": head_dim,
        **rows,
        "PREFETCH": options.get("prefetch") == "first_tile",
        **split_constants(options, page_size, max_splits, last_program, strides),
    }


def _merge_constants(constants: Mapping[str, Any]) -> dict[str, Any]:
    names = ("HEAD_DIM", "PADDED_DIM", "ROWS", "ROW_TILES", "STORED_ROWS", "PARTIAL", "MERGED", "SPLIT_KEYS")
    group_rows = constants["GROUP"] * constants["QUERIES"]
    return {"GROUP_ROWS": group_rows, **{name: constants[name] for name in names}}


def _launch_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_warps": options["num_warps"],
        "num_stages": options["num_stages"],
        # Today's default, said aloud: a later Triton has another one, and the answers would differ.
        "enable_fp_fusion": True,
    }


def _launch(
    tile_k: int,
    num_warps: int,
    num_stages: int,
    splits: int | None,
    split_keys: int | None = None,
    combine: str = "last_program",
    prefetch: str = "nothing",
) -> dict[str, Any]:
    return {
        "tile_k": tile_k,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "splits": splits,
        "split_keys": split_keys,
        "combine": combine,
        "prefetch": prefetch,
    }


MAX_CANDIDATES = 12


def _candidates(
    capability: tuple[int, int] | None,
    multiprocessors: int,
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    context: int,
    head_dim: int,
    page_size: int,
    uneven: bool,
) -> list[dict[str, Any]]:
    rows = _row_constants(heads // kv_heads * queries, head_dim)
    groups = max(1, batch * kv_heads * rows["ROW_TILES"])
    context = max(1, context)
    if capability is None:
        # Not one split, so that the interpreter, whose time means nothing, checks the merging.
        return [_launch(128, 4, 1, min(3, triton.cdiv(context, 128)))]
    if capability < (8, 0):
        table = _SCALAR
    elif capability in ((8, 0), (9, 0), (10, 0), (10, 3)):
        table = _LARGE_SHARED_MEMORY
    else:
        table = _SMALL_SHARED_MEMORY
    shapes = table[max(32, rows["PADDED_DIM"])]
    if rows["ROWS"] > MIN_ROWS:
        # Many rows: the accumulators of a wide tile of keys would spill.
        shapes = [shape for shape in shapes if shape[0] <= 64] or shapes[-1:]
    if page_size >= MIN_PAGE_TILE:
        # A tile inside a page needs one entry of the block table.
        shapes = [(min(tile_k, page_size), warps, stages) for tile_k, warps, stages in shapes]

    # One program for each multiprocessor, with a long way to go, and then fewer and more.
    base = max(1, multiprocessors // groups)
    found = []
    for multiple in (1, 2, 0.5):
        for shape in shapes if multiple == 1 else shapes[:2]:
            splits = max(1, min(int(base * multiple), triton.cdiv(context, shape[0])))
            found.append(_launch(*shape, splits))
            if multiple == 1 and len(found) <= 5:
                found.append(_launch(*shape, splits, prefetch="first_tile"))
    if uneven:
        # A program for so many keys evens out lengths that the launch does not know.
        narrow = min(shapes)
        alike = []
        for parts in (16, 8, 32):
            keys = triton.cdiv(triton.cdiv(context, parts), narrow[0]) * narrow[0]
            alike.append(_launch(*narrow, None, keys))
        alike.insert(1, _launch(*narrow, min(max(base, 16), triton.cdiv(context, narrow[0]))))
        found = [*alike, *found]
    different = [option for index, option in enumerate(found) if option not in found[:index]]
    return different[:MAX_CANDIDATES]


MIN_PAGE_TILE = 64

# The tables below go by head_dim rounded up to a power of two: (tile_k, num_warps, num_stages). Triton keeps
# one tile of K and V less in shared memory than there are stages. On an H200, in bf16 at head_dim 64 and 128,
# each of the five of _LARGE_SHARED_MEMORY was the fastest at some batch and context, the first one most
# often: with 64 to 96 KiB of K and V in flight, two programs fit on a multiprocessor. The rest was not timed.

# sm_75: Triton has neither a tensor-core path nor asynchronous copies there.
_SCALAR = {
    32: [(64, 4, 1), (32, 4, 1)],
    64: [(64, 4, 1), (32, 4, 1)],
    128: [(32, 4, 1), (64, 8, 1)],
    256: [(16, 4, 1), (32, 8, 1)],
}
# sm_80, sm_90 and sm_100: up to 163 KiB of shared memory.
_LARGE_SHARED_MEMORY = {
    32: [(256, 4, 4), (128, 4, 5), (256, 8, 4), (64, 4, 5)],
    64: [(128, 4, 4), (64, 4, 3), (128, 4, 3), (64, 4, 4), (256, 8, 3)],
    128: [(64, 4, 4), (64, 4, 3), (128, 4, 3), (32, 4, 4), (128, 4, 2)],
    256: [(64, 4, 3), (32, 4, 4), (64, 8, 3), (32, 4, 5)],
}
# sm_86, sm_89 and sm_120: all within 99 KiB.
_SMALL_SHARED_MEMORY = {
    32: [(128, 4, 4), (64, 4, 5), (128, 4, 3)],
    64: [(128, 4, 3), (64, 4, 4), (64, 4, 5)],
    128: [(64, 4, 3), (32, 4, 4), (32, 4, 5)],
    256: [(32, 4, 3), (16, 4, 4)],
}
