"""The floor of decode: K and V read once and added up, split and merged as a decode kernel does it.

No attention: nothing is multiplied, and Q is not read. What comes out is the mean of K + V over a sequence's
keys, and so proves that each of them was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.cache import gather_pages
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

NOT_ATTENTION = "reads K and V once and adds them up: what no kernel can beat"


@triton.jit  # type: ignore[untyped-decorator]
def _store_mean(
    output: tl.tensor,
    sums: tl.tensor,
    seq_len: tl.tensor,
    GROUP_ROWS: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    """Store the mean for each query of the group; 0 without a key."""
    rows = tl.arange(0, STORED_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    mean = sums / tl.maximum(seq_len, 1).to(tl.float32)
    tl.store(
        output + rows[:, None] * HEAD_DIM + dims[None, :],
        tl.broadcast_to(mean[None, :], [STORED_ROWS, PADDED_DIM]).to(output.dtype.element_ty),
        mask=(rows[:, None] < GROUP_ROWS) & (dims[None, :] < HEAD_DIM),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    partials: tl.tensor,
    output: tl.tensor,
    seq_len: tl.tensor,
    splits: tl.tensor,
    GROUP_ROWS: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MERGED: tl.constexpr,
) -> None:
    """Add up what the splits found, MERGED of them at a time, and store the mean."""
    parts = tl.arange(0, MERGED)
    dims = tl.arange(0, PADDED_DIM)
    sums = tl.zeros([PADDED_DIM], tl.float32)
    for first in tl.range(0, splits, MERGED):
        # Past the L1 cache: other multiprocessors wrote this.
        sums += tl.sum(
            tl.load(
                partials + (first + parts)[:, None] * PADDED_DIM + dims[None, :],
                mask=(first + parts)[:, None] < splits, other=0.0, cache_modifier=".cg",
            ),
            0,
        )  # fmt: skip
    _store_mean(output, sums, seq_len, GROUP_ROWS, STORED_ROWS, HEAD_DIM, PADDED_DIM)


@triton.jit(  # type: ignore[untyped-decorator]
    # Alignment reaches the compiler through STRIDE_UNIT, so that no length or stride compiles it again.
    do_not_specialize=[
        *("k_stride_batch", "k_stride_head", "k_stride_row"),
        *("v_stride_batch", "v_stride_head", "v_stride_row"),
        *("table_stride", "context"),
    ]
)
def _read_splits(
    k_pointer: tl.tensor,
    v_pointer: tl.tensor,
    o_pointer: tl.tensor,
    partial_pointer: tl.tensor,
    counter_pointer: tl.tensor,
    seq_lens_pointer: tl.tensor,
    block_table_pointer: tl.tensor,
    k_stride_batch: tl.tensor,
    k_stride_head: tl.tensor,
    k_stride_row: tl.tensor,
    v_stride_batch: tl.tensor,
    v_stride_head: tl.tensor,
    v_stride_row: tl.tensor,
    table_stride: tl.tensor,
    context: tl.tensor,
    GROUP_ROWS: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MERGED: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    LAST_PROGRAM: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """Read one split of the keys and values of one head: program (split, kv_head, batch).

    Strides count STRIDE_UNIT elements, so that the compiler sees that rows are aligned. With a PAGE_SIZE the
    batch's stride is that of pages. OFFSET is the integer type of an offset inside a tile.
    """
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    seq_len, splits = sequence_split(seq_lens_pointer, batch, context, tl.num_programs(0), SPLIT_KEYS)
    if split >= splits:
        return

    dims = tl.arange(0, PADDED_DIM)
    columns = tl.arange(0, TILE_K)
    # 64 bits: a batch, a head or a page can lie more than 2^31 elements apart.
    head_units = tl.cast(kv_head, tl.int64) * STRIDE_UNIT
    k_head = k_pointer + head_units * k_stride_head
    v_head = v_pointer + head_units * v_stride_head
    k_stride = tl.cast(k_stride_row, OFFSET) * STRIDE_UNIT
    v_stride = tl.cast(v_stride_row, OFFSET) * STRIDE_UNIT
    k_page = tl.cast(k_stride_batch, tl.int64) * STRIDE_UNIT
    v_page = tl.cast(v_stride_batch, tl.int64) * STRIDE_UNIT
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

    # One sum for each place in a tile: the threads need not meet before the end.
    sums = tl.zeros([TILE_K, PADDED_DIM], tl.float32)
    for start in tl.range(begin, seq_len, step, num_stages=STAGES):
        k_tile, k_rows = tile_of_cache(k_head, page, start, columns, k_stride, k_page, TILE_K, PAGE_SIZE)
        v_tile, v_rows = tile_of_cache(v_head, page, start, columns, v_stride, v_page, TILE_K, PAGE_SIZE)
        if PAGE_SIZE != 0:
            page = page_entries(table, start + step, columns, seq_len, TILE_K, PAGE_SIZE)
        inside = (start + columns < seq_len)[:, None]
        if PADDED_DIM != HEAD_DIM:
            inside = inside & (dims[None, :] < HEAD_DIM)
        k = tl.load(k_tile + k_rows[:, None] + dims[None, :], mask=inside, other=0.0)
        v = tl.load(v_tile + v_rows[:, None] + dims[None, :], mask=inside, other=0.0)
        sums += k.to(tl.float32) + v.to(tl.float32)
    total = tl.sum(sums, 0)

    group = batch * tl.num_programs(1) + kv_head
    output = o_pointer + tl.cast(group, tl.int64) * (GROUP_ROWS * HEAD_DIM)
    if SPLIT:
        if splits == 1:
            _store_mean(output, total, seq_len, GROUP_ROWS, STORED_ROWS, HEAD_DIM, PADDED_DIM)
        else:
            partials = partial_pointer + tl.cast(group, tl.int64) * tl.num_programs(0) * PADDED_DIM
            tl.store(partials + split * PADDED_DIM + dims, total)
            if LAST_PROGRAM:
                # All threads have stored before the one that counts releases it to the GPU.
                tl.debug_barrier()
                arrived = tl.atomic_add(counter_pointer + group, 1, sem="acq_rel", scope="gpu")
                if arrived == splits - 1:
                    tl.store(counter_pointer + group, 0)
                    _merge(
                        partials, output, seq_len, splits,
                        GROUP_ROWS, STORED_ROWS, HEAD_DIM, PADDED_DIM, MERGED,
                    )  # fmt: skip
    else:
        _store_mean(output, total, seq_len, GROUP_ROWS, STORED_ROWS, HEAD_DIM, PADDED_DIM)


@triton.jit(do_not_specialize=["context", "max_splits"])  # type: ignore[untyped-decorator]
def _merge_reads(
    o_pointer: tl.tensor,
    partial_pointer: tl.tensor,
    seq_lens_pointer: tl.tensor,
    context: tl.tensor,
    max_splits: tl.tensor,
    GROUP_ROWS: tl.constexpr,
    STORED_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MERGED: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
) -> None:
    """Merge the splits of one head, if there are several: program (kv_head, batch)."""
    batch = tl.program_id(1)
    seq_len, splits = sequence_split(seq_lens_pointer, batch, context, max_splits, SPLIT_KEYS)
    if splits == 1:
        return
    group = tl.cast(batch * tl.num_programs(0) + tl.program_id(0), tl.int64)
    _merge(
        partial_pointer + group * max_splits * PADDED_DIM,
        o_pointer + group * (GROUP_ROWS * HEAD_DIM),
        seq_len, splits, GROUP_ROWS, STORED_ROWS, HEAD_DIM, PADDED_DIM, MERGED,
    )  # fmt: skip


# ---- on the host ----

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MERGE_ELEMENTS = 8192  # floats that the merging program loads at a time: 64 for each of 128 threads
MAX_MERGED = 32
MAX_CANDIDATES = 12


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
) -> torch.Tensor:
    """For each query the sum of the rows of K and of V over the number of keys of its sequence; no attention.

    The arguments are those of a decode kernel, and what they mean (`kernels.triton_decode.decode`); of q only
    shape and dtype matter, and scale not at all. All keys within seq_lens count for every query, also those
    that a mask would hide; a sequence without a key gives 0. The sum is fp32. Returns a new contiguous tensor
    of q's shape and dtype.

    The launch: tile_k keys a step, num_warps warps of 32 threads, num_stages steps in flight; splits or
    split_keys as in `triton_decode`. Give the first three together, or none of the five.

    Raises ValueError for a bad argument (see `check_decode_inputs`), for a head_dim or a batch out of
    range, and for an incomplete or impossible set of launch options.
    """
    options = (tile_k, num_warps, num_stages, splits, split_keys)
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
        if plan.merge is not None:
            partials = torch.empty(plan.partial_size, dtype=torch.float32, device=q.device)
            counter = counters(q.device, plan.counters)
        tensors = (k, v, output, partials, counter, seq_lens, block_table)
        if plan.merge is None:
            plan.splits(*tensors)
        elif counter is not None:
            plan.counted_splits(*tensors)
        else:
            # A capture before any other call.
            plan.splits(*tensors)
            plan.merge(output, partials, seq_lens)
    return output if output.dtype == q.dtype else output.to(q.dtype)


class _Plan(NamedTuple):
    """How calls of one shape, layout and set of options are launched; no launch where nothing is asked."""

    splits: Any = None  # the launch that leaves merging to another one, or has nothing to merge
    counted_splits: Any = None  # the launch whose last program merges
    merge: Any = None  # the second launch; None where there is nothing to merge
    partial_size: int = 0  # floats
    counters: int = 0


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
    reason = _out_of_range(batch, kv_heads, head_dim)
    if reason is not None:
        raise ValueError(reason)
    options = dict(zip((*TILE_OPTIONS, *SPLIT_OPTIONS), given, strict=True))
    if all(value is None for value in given):
        options = _candidates(
            compute_capability(q.device), multiprocessors(q.device), batch * kv_heads, context, head_dim,
            page_size, seq_lens is not None,
        )[0]  # fmt: skip
    check_options(options, {})
    if not batch or not context:
        return _Plan()

    strides = [stride for tensor in (k, v) for stride in tensor.stride()[:3]]
    groups = batch * kv_heads
    max_splits = most_splits(options, groups, context, multiprocessors(q.device))

    def splits(counts: bool) -> Launch:
        constants = _constants(
            options, heads // kv_heads * queries, head_dim, page_size, max_splits, counts, strides
        )
        scalars = (
            *(stride // constants["STRIDE_UNIT"] for stride in strides),
            *(0 if block_table is None else block_table.stride(0), context),
        )
        return Launch(
            _read_splits, (max_splits, kv_heads, batch), scalars, constants, _launch_options(options)
        )

    alone = splits(False)
    if max_splits == 1:
        return _Plan(alone)
    names = ("GROUP_ROWS", "STORED_ROWS", "HEAD_DIM", "PADDED_DIM", "MERGED", "SPLIT_KEYS")
    constants = {name: alone.constants[name] for name in names}
    merging = {"num_warps": options["num_warps"]}
    return _Plan(
        alone,
        splits(True),
        Launch(_merge_reads, (kv_heads, batch, 1), (context, max_splits), constants, merging),
        groups * max_splits * constants["PADDED_DIM"],
        groups,
    )


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    seq_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """What `decode` ought to return, by PyTorch in fp64, shaped as q."""
    check_decode_inputs(q, k, v, seq_lens=seq_lens, block_table=block_table, scale=scale)
    if block_table is not None:
        k, v = gather_pages(k, block_table), gather_pages(v, block_table)
    batch, heads, queries, head_dim = q.shape
    kv_heads, context = k.shape[1], k.shape[2]
    lengths = [context] * batch if seq_lens is None else seq_lens.clamp(0, context).tolist()
    output = torch.zeros(batch, kv_heads, head_dim, dtype=torch.float64, device=q.device)
    for index, length in enumerate(lengths):
        if length:
            for tensor in (k, v):
                output[index] += tensor[index, :, :length].sum(1, dtype=torch.float64) / length
    rows = output.repeat_interleave(heads // kv_heads, 1)
    return rows[:, :, None].expand(batch, heads, queries, head_dim).contiguous()


def unsupported(problem: Any, target: Any, **options: Any) -> str | None:
    """Why the problem cannot run on the target with these launch options; None if it can."""
    reason = _out_of_range(problem.batch, problem.kv_heads, problem.head_dim)
    if reason is not None:
        return reason
    if problem.seq_len_q > MAX_QUERIES:
        return f"{problem.seq_len_q} queries a sequence: decode takes 1 to {MAX_QUERIES}"
    if problem.page_size and problem.page_size not in PAGE_SIZES:
        return f"pages of {problem.page_size} tokens: expected one of {', '.join(map(str, PAGE_SIZES))}"
    if options:
        try:
            check_options(options, {})
        except ValueError as fault:
            return str(fault)
    return cannot_run(target)


def candidates(problem: Any, target: Any, **options: Any) -> list[dict[str, Any]]:
    """Launch options worth tuning over, the default first; only the given ones if any are given."""
    if options:
        return [options]
    return _candidates(
        target.compute_capability if target.is_cuda else None, multiprocessors_of(target),
        problem.batch * problem.kv_heads, problem.seq_len_k, problem.head_dim, problem.page_size,
        problem.lengths != "equal",
    )  # fmt: skip


def memory_law(problem: Any, **options: Any) -> int | None:
    """Bytes that a call peaks at on a GPU, the inputs included: output, parts of the splits, counters.

    None where the number of splits depends on the GPU, which the problem does not say.
    """
    if options.get("splits") is None and options.get("split_keys") is None:
        return None
    groups = problem.batch * problem.kv_heads
    splits = most_splits(options, groups, room(problem), 1)
    own = 0
    if splits > 1:
        own = 4 * groups * splits * triton.next_power_of_2(problem.head_dim) + counter_bytes(groups)
    return int(problem.input_bytes + problem.output_bytes + own)


def compile_units(problem: Any, options: Mapping[str, Any], target: Any) -> list[CompileUnit]:
    """The one kernel that a call compiles for contiguous inputs; empty options mean the default."""
    options = dict(options) or candidates(problem, target)[0]
    check_options(options, {})
    groups = problem.batch * problem.kv_heads
    max_splits = most_splits(options, groups, room(problem), multiprocessors_of(target))
    counts = max_splits > 1
    constants = _constants(
        options, problem.heads // problem.kv_heads * problem.seq_len_q, problem.head_dim, problem.page_size,
        max_splits, counts, [problem.head_dim],
    )  # fmt: skip
    pointers, absent = pointer_types(problem, max_splits, counts)
    return [compile_unit(_read_splits, pointers, {**constants, **absent}, _launch_options(options))]


def _out_of_range(batch: int, kv_heads: int, head_dim: int) -> str | None:
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return f"q has head_dim {head_dim}: expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if batch > MAX_GRID:
        return f"q has batch {batch}: expected no more than {MAX_GRID}"
    if kv_heads > MAX_GRID:
        return f"k has {kv_heads} heads: expected no more than {MAX_GRID}"
    return None


def _constants(
    options: Mapping[str, Any],
    group_rows: int,
    head_dim: int,
    page_size: int,
    max_splits: int,
    counts: bool,
    strides: list[int],
) -> dict[str, Any]:
    padded_dim = triton.next_power_of_2(head_dim)
    return {
        "GROUP_ROWS": group_rows,
        "STORED_ROWS": triton.next_power_of_2(group_rows),
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "MERGED": min(MAX_MERGED, MERGE_ELEMENTS // padded_dim),
        "STAGES": options["num_stages"],
        **split_constants(options, page_size, max_splits, counts, strides),
    }


def _launch_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_warps": options["num_warps"], "num_stages": options["num_stages"]}


def _candidates(
    capability: tuple[int, int] | None,
    multiprocessors: int,
    groups: int,
    context: int,
    head_dim: int,
    page_size: int,
    uneven: bool,
) -> list[dict[str, Any]]:
    context, groups = max(1, context), max(1, groups)
    if capability is None:
        # Not one split, so that the interpreter, whose time means nothing, checks the merging.
        return [_launch(128, 4, 1, min(3, triton.cdiv(context, 128)))]
    # 64 sums a thread at most. Tiles in flight: about 64 KiB, then 96 and 32, where there is shared memory.
    tile_k = max(16, 8192 // triton.next_power_of_2(head_dim))
    tile_k = min(tile_k, page_size) if page_size >= MIN_PAGE_TILE else tile_k
    shapes = [(tile_k, 4, 3), (tile_k, 4, 4), (tile_k, 8, 3), (tile_k, 4, 2)]
    if capability < (8, 0):
        shapes = [(tile_k, 4, 1), (tile_k, 8, 1)]
    elif capability not in ((8, 0), (9, 0), (10, 0), (10, 3)):
        shapes = [(tile_k, 4, 3), (tile_k, 8, 3), (tile_k, 4, 2)]
    base = max(1, multiprocessors // groups)
    found = []
    for multiple in (1, 2, 4):
        for shape in shapes if multiple == 1 else shapes[:2]:
            splits = max(1, min(base * multiple, triton.cdiv(context, shape[0])))
            found.append(_launch(*shape, splits))
    # Loads straight into registers: more programs instead of more stages.
    wide = [max(1, min(base * multiple, triton.cdiv(context, tile_k))) for multiple in (2, 4)]
    found.extend(_launch(tile_k, 8, 1, splits) for splits in wide)
    if uneven:
        # A program for so many keys evens out lengths that the launch does not know.
        keys = [triton.cdiv(triton.cdiv(context, parts), tile_k) * tile_k for parts in (16, 8, 32)]
        found = [*(_launch(*shapes[0], None, number) for number in keys), *found]
    different = [option for index, option in enumerate(found) if option not in found[:index]]
    return different[:MAX_CANDIDATES]


MIN_PAGE_TILE = 64


def _launch(
    tile_k: int, num_warps: int, num_stages: int, splits: int | None, split_keys: int | None = None
) -> dict[str, Any]:
    return {
        "tile_k": tile_k,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "splits": splits,
        "split_keys": split_keys,
    }
