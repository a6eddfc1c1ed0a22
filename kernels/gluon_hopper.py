"""FlashAttention's forward pass for Hopper (sm_90): warp-specialised, asynchronous, persistent.

The arithmetic is triton_flash.py's: tiles of queries walk over blocks of keys with an online softmax, and
only O is stored. What differs is who does what, and when. One program lives on each multiprocessor and
takes tile after tile. Its warps have roles, called partitions:

    producer      one warp: asks for tiles and has the tensor memory accelerator (TMA) copy Q, K and V
                  from global to shared memory, several stages ahead of their use
    consumers     2 or 3 warpgroups of 4 warps with 64 query rows each: they multiply with asynchronous
                  wgmma instructions and compute the softmax between them

Two things run at once in a consumer: while the tensor cores multiply the weights P of block i - 1 with V,
the other units turn the scores S of block i into P. So K is needed one block earlier than V, and what
travels together through one stage of shared memory, a unit, is K of one block with V of the block before.
Units go on over the border of two tiles: one of them carries the last V of a tile and the first K of the
next one.

Partitions wait for each other at mbarriers in shared memory. A barrier completes a phase when all that it
counts have arrived, and whoever waits names the parity of the phase, which alternates:

    full[stage]     the unit's bytes have arrived (TMA counts them);  consumers wait
    empty[stage]    every consumer has done with the unit;            the producer waits
    q_full[slot]    the next tile's number and Q have arrived;        consumers wait
    q_empty[slot]   Q is read and the tile's O, which leaves
                    through Q's buffer, has left it;                  the producer waits

tests/kernels/barrier_model.py is this protocol in plain Python; it steps the partitions in all orders and
looks for deadlocks and for buffers that are overwritten while they are in use.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.inputs import check_inputs

WARPGROUP_ROWS = gl.constexpr(64)  # query rows of one consumer: the M of a wgmma instruction
Q_SLOTS = gl.constexpr(2)  # the next tile's Q arrives while this tile's is in use


# ---- tiles ----


@gluon.jit
def _locate(
    tile, heads, kv_group, batch_heads, query_tiles, head_group, TILE_Q: gl.constexpr, CAUSAL: gl.constexpr
):
    """Where tile number `tile` lies: batch, head, head of K and V, and first query row.

    Tiles are numbered through head_group heads at a time, so that the K and V of those that run at
    the same time stay in the L2 cache. With a causal mask the last query tile of a head is the longest,
    and the longest come first, so that none is left for the end.
    """
    first_head = tile // (query_tiles * head_group) * head_group
    in_group = tile - first_head * query_tiles
    if CAUSAL:
        heads_here = gl.minimum(head_group, batch_heads - first_head)
        batch_head = first_head + in_group % heads_here
        query_tile = query_tiles - 1 - in_group // heads_here
    else:
        batch_head = first_head + in_group // query_tiles
        query_tile = in_group % query_tiles
    batch = batch_head // heads
    head = batch_head % heads
    return batch, head, head // kv_group, query_tile * TILE_Q


@gluon.jit
def _blocks(first_query, seq_len_k, TILE_Q: gl.constexpr, TILE_K: gl.constexpr, CAUSAL: gl.constexpr):
    """How many blocks of keys the rows of a tile see together; at least 1."""
    keys = seq_len_k
    if CAUSAL:
        keys = gl.minimum(keys, first_query + TILE_Q)
    return gl.cdiv(keys, TILE_K)


# ---- the producer ----


@gluon.jit
def _producer(
    q_descriptor, k_descriptor, v_descriptor, counter,
    q_smem, k_smem, v_smem, tile_smem, q_full, q_empty, full, empty,
    heads, kv_group, batch_heads, query_tiles, head_group, seq_len_k,
    CONSUMERS: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Fill the buffers: Q of one tile after the other, and units of K and V, as they become empty."""
    TILE_Q: gl.constexpr = CONSUMERS * WARPGROUP_ROWS
    HEAD_DIM: gl.constexpr = k_descriptor.block_type.shape[3]
    K_BYTES: gl.constexpr = TILE_K * HEAD_DIM * 2
    Q_BYTES: gl.constexpr = TILE_Q * HEAD_DIM * 2
    number_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])

    tiles = batch_heads * query_tiles
    tile = gl.program_id(0)
    taken = 0  # tiles so far
    unit = 0  # units so far
    v_batch, v_head, v_row = 0, 0, 0  # the block before: its V belongs to the next unit
    while tile < tiles:
        slot = taken % Q_SLOTS
        mbarrier.wait(q_empty.index(slot), (taken // Q_SLOTS & 1) ^ 1)
        batch, head, kv_head, first_query = _locate(
            tile, heads, kv_group, batch_heads, query_tiles, head_group, TILE_Q, CAUSAL
        )
        # The number of the tile and its Q go to the consumers together.
        tile_smem.index(slot).store(gl.full([1], tile, gl.int32, number_layout))
        mbarrier.expect(q_full.index(slot), Q_BYTES)
        for consumer in gl.static_range(CONSUMERS):
            tma.async_copy_global_to_shared(
                q_descriptor, [batch, head, first_query + consumer * WARPGROUP_ROWS, 0],
                q_full.index(slot), q_smem.index(slot * CONSUMERS + consumer),
            )  # fmt: skip

        blocks = _blocks(first_query, seq_len_k, TILE_Q, TILE_K, CAUSAL)
        for i in range(blocks):
            row = (blocks - 1 - i) * TILE_K  # from right to left: the masked block comes first
            stage = unit % STAGES
            mbarrier.wait(empty.index(stage), (unit // STAGES & 1) ^ 1)
            has_v = unit > 0
            mbarrier.expect(full.index(stage), 2 * K_BYTES, pred=has_v)
            mbarrier.expect(full.index(stage), K_BYTES, pred=unit == 0)
            tma.async_copy_global_to_shared(
                k_descriptor, [batch, kv_head, row, 0], full.index(stage), k_smem.index(stage)
            )
            tma.async_copy_global_to_shared(
                v_descriptor, [v_batch, v_head, v_row, 0], full.index(stage), v_smem.index(stage), pred=has_v
            )
            v_batch, v_head, v_row = batch, kv_head, row
            unit += 1

        taken += 1
        # The first tile of a program is its own number, and the further ones are tickets of a counter
        # that all programs share. Each program draws one ticket too many, so `tiles` are drawn in all,
        # and whoever draws the last of them leaves the counter as it was, at 0.
        ticket = gl.atomic_add(counter, 1, sem="relaxed")
        if ticket == tiles - 1:
            gl.store(counter, 0)
        tile = ticket + gl.num_programs(0)

    # A number past the last tile ends the consumers' loop; there is no Q with it.
    slot = taken % Q_SLOTS
    mbarrier.wait(q_empty.index(slot), (taken // Q_SLOTS & 1) ^ 1)
    tile_smem.index(slot).store(gl.full([1], tiles, gl.int32, number_layout))
    mbarrier.arrive(q_full.index(slot), count=1)
    # The last unit: V alone.
    stage = unit % STAGES
    mbarrier.wait(empty.index(stage), (unit // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), K_BYTES)
    tma.async_copy_global_to_shared(
        v_descriptor, [v_batch, v_head, v_row, 0], full.index(stage), v_smem.index(stage)
    )


# ---- the consumers ----


@gluon.jit
def _lane_sum(p):
    """Sums over the columns that one lane holds: (64, TILE_K) to (64, 4), without talk between lanes.

    In wgmma's accumulator four lanes share a row, and each holds two of every eight columns.
    """
    parts = gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def _mask(s, first_row, first_key, seq_len_k, CAUSAL: gl.constexpr):
    """Set the scores of keys past the end to -inf, and of keys after the query with a causal mask."""
    layout: gl.constexpr = s.type.layout
    rows = first_row + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))
    keys = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    last_key = gl.full([s.shape[0]], seq_len_k - 1, gl.int32, gl.SliceLayout(1, layout))
    if CAUSAL:
        last_key = gl.minimum(last_key, rows)
    return gl.where(keys[None, :] <= last_key[:, None], s, float("-inf"))


@gluon.jit
def _row_max(s, scale):
    """Row maxima of the scaled scores, (64,); finite also where a mask leaves nothing of a row."""
    return gl.maximum(gl.max(s, 1) * scale, -3.0e38)


@gluon.constexpr_function
def _turn(instruction, consumer):
    # Named barriers 0 to 7 are the compiler's. Two warpgroups meet: one waits, the other only arrives.
    return f"bar.{instruction} {8 + consumer}, 256; mov.u32 $0, 0;"


@gluon.jit
def _take_turn(CONSUMER: gl.constexpr):
    """Wait until the consumer before this one has issued its products."""
    gl.inline_asm_elementwise(_turn("sync", CONSUMER), "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(CONSUMER: gl.constexpr):
    """Let another consumer issue its products."""
    gl.inline_asm_elementwise(_turn("arrive", CONSUMER), "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _step(
    q, k, v, p, o, row_max, row_sum, first_row, first_key, seq_len_k, scale, next_full, next_phase,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One block: its scores and weights, while O takes in the weights of the block before.

    q (64, HEAD_DIM), k (HEAD_DIM, TILE_K) and v (TILE_K, HEAD_DIM) lie in shared memory, p (64, TILE_K)
    and o (64, HEAD_DIM) in registers; row_max is (64,) and row_sum (64, 4).
    """
    zeros = gl.zeros([p.shape[0], p.shape[1]], gl.float32, S_LAYOUT)
    if PING_PONG:
        _take_turn(CONSUMER)
    s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    o = warpgroup_mma(p, v, o, is_async=True)
    if PING_PONG:
        # The others multiply while this one computes its softmax.
        _pass_turn((CONSUMER + 1) % CONSUMERS)

    s = warpgroup_mma_wait(1, deps=(s,))  # O is still under way
    if MASKED:
        s = _mask(s, first_row, first_key, seq_len_k, CAUSAL)
    new_max = gl.maximum(row_max, _row_max(s, scale))
    weights = gl.exp2(s * scale - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    row_sum = row_sum + _lane_sum(weights)

    # Waiting for the next unit here, and not where it is needed, keeps the exponentials above the wait
    # for O: without a branch in between the assembler moves them below it, and nothing overlaps.
    mbarrier.wait(next_full, next_phase)
    o = warpgroup_mma_wait(0, deps=(o,))
    return s, weights, o, new_max, row_sum, rescale


@gluon.jit
def _consumer(
    CONSUMER: gl.constexpr, o_descriptor,
    q_smem, k_smem, v_smem, tile_smem, q_full, q_empty, full, empty,
    heads, kv_group, batch_heads, query_tiles, head_group, seq_len_k, scale,
    CONSUMERS: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, KEY_TAIL: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of O, those with number CONSUMER, of one tile after the other."""
    TILE_Q: gl.constexpr = CONSUMERS * WARPGROUP_ROWS
    HEAD_DIM: gl.constexpr = o_descriptor.block_type.shape[3]
    DTYPE: gl.constexpr = o_descriptor.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    # As the left operand of a wgmma, P lies in the registers where S was: its conversion is free.
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    number_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # Blocks that the diagonal of a tile can cross: the first of each row of blocks.
    DIAGONAL: gl.constexpr = (TILE_Q + TILE_K - 1) // TILE_K

    tiles = batch_heads * query_tiles
    zeros = gl.zeros([WARPGROUP_ROWS, TILE_K], gl.float32, S_LAYOUT)
    mbarrier.wait(q_full.index(0), 0)
    tile = gl.max(tile_smem.index(0).load(number_layout), 0)
    q = q_smem.index(CONSUMER).reshape([WARPGROUP_ROWS, HEAD_DIM])
    mbarrier.wait(full.index(0), 0)
    k = k_smem.index(0).reshape([TILE_K, HEAD_DIM]).permute((1, 0))
    s = warpgroup_mma_wait(0, deps=(warpgroup_mma(q, k, zeros, use_acc=False, is_async=True),))
    mbarrier.arrive(empty.index(0), count=1)
    mbarrier.wait(full.index(1 % STAGES), 1 // STAGES & 1)

    if PING_PONG and CONSUMER == CONSUMERS - 1:
        _pass_turn(0)  # consumer 0 has the first turn
    taken = 0
    unit = 1  # it is full, and its K and V are the next to be multiplied
    while tile < tiles:
        batch, head, _kv_head, first_query = _locate(
            tile, heads, kv_group, batch_heads, query_tiles, head_group, TILE_Q, CAUSAL
        )
        blocks = _blocks(first_query, seq_len_k, TILE_Q, TILE_K, CAUSAL)
        first_row = first_query + CONSUMER * WARPGROUP_ROWS
        slot = taken % Q_SLOTS
        q_tile = q_smem.index(slot * CONSUMERS + CONSUMER)
        q = q_tile.reshape([WARPGROUP_ROWS, HEAD_DIM])

        # The scores of the last block are there already: the first step of the online softmax.
        if CAUSAL or KEY_TAIL:
            s = _mask(s, first_row, (blocks - 1) * TILE_K, seq_len_k, CAUSAL)
        row_max = _row_max(s, scale)
        weights = gl.exp2(s * scale - row_max[:, None])
        row_sum = _lane_sum(weights)
        p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
        o = gl.zeros([WARPGROUP_ROWS, HEAD_DIM], gl.float32, O_LAYOUT)

        masked = 1
        if CAUSAL and DIAGONAL > 1:
            masked = gl.minimum(blocks, DIAGONAL)
            for i in range(1, masked):
                stage = unit % STAGES
                k = k_smem.index(stage).reshape([TILE_K, HEAD_DIM]).permute((1, 0))
                v = v_smem.index(stage).reshape([TILE_K, HEAD_DIM])
                s, weights, o, row_max, row_sum, rescale = _step(
                    q, k, v, p, o, row_max, row_sum, first_row, (blocks - 1 - i) * TILE_K, seq_len_k, scale,
                    full.index((unit + 1) % STAGES), (unit + 1) // STAGES & 1,
                    CONSUMER, CONSUMERS, PING_PONG, True, CAUSAL, S_LAYOUT,
                )  # fmt: skip
                mbarrier.arrive(empty.index(stage), count=1)
                o = o * gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
                p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
                unit += 1
        for _i in range(masked, blocks):
            stage = unit % STAGES
            k = k_smem.index(stage).reshape([TILE_K, HEAD_DIM]).permute((1, 0))
            v = v_smem.index(stage).reshape([TILE_K, HEAD_DIM])
            s, weights, o, row_max, row_sum, rescale = _step(
                q, k, v, p, o, row_max, row_sum, first_row, 0, seq_len_k, scale,
                full.index((unit + 1) % STAGES), (unit + 1) // STAGES & 1,
                CONSUMER, CONSUMERS, PING_PONG, False, CAUSAL, S_LAYOUT,
            )  # fmt: skip
            mbarrier.arrive(empty.index(stage), count=1)
            o = o * gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
            p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
            unit += 1

        # The border of two tiles: this tile's last V and the next tile's first K lie in one unit. After
        # the last tile there is no next one; its K, and then Q, are whatever is left in the buffers.
        stage = unit % STAGES
        v = v_smem.index(stage).reshape([TILE_K, HEAD_DIM])
        o = warpgroup_mma(p, v, o, is_async=True)
        taken += 1
        next_slot = taken % Q_SLOTS
        mbarrier.wait(q_full.index(next_slot), taken // Q_SLOTS & 1)
        tile = gl.max(tile_smem.index(next_slot).load(number_layout), 0)
        q = q_smem.index(next_slot * CONSUMERS + CONSUMER).reshape([WARPGROUP_ROWS, HEAD_DIM])
        k = k_smem.index(stage).reshape([TILE_K, HEAD_DIM]).permute((1, 0))
        s_next = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)

        # O leaves through the buffer of this tile's Q, which nobody reads any more.
        o = warpgroup_mma_wait(1, deps=(o,))
        total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, O_LAYOUT))
        o = o * (1.0 / total)[:, None]
        q_tile.reshape([WARPGROUP_ROWS, HEAD_DIM]).store(o.to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_descriptor, [batch, head, first_row, 0], q_tile)
        s = warpgroup_mma_wait(0, deps=(s_next,))
        mbarrier.arrive(empty.index(stage), count=1)
        unit += 1
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(slot), count=1)
        if tile < tiles:
            mbarrier.wait(full.index(unit % STAGES), unit // STAGES & 1)


# ---- the kernel ----


@gluon.jit(
    # One compiled kernel for all lengths.
    do_not_specialize=["heads", "kv_group", "batch_heads", "query_tiles", "head_group", "seq_len_k"]
)
def _attention_forward(
    q_descriptor, k_descriptor, v_descriptor, o_descriptor, counter,
    heads, kv_group, batch_heads, query_tiles, head_group, seq_len_k, scale,
    CONSUMERS: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, KEY_TAIL: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """Allocate shared memory and barriers, and send the warps to their partitions."""
    HEAD_DIM: gl.constexpr = k_descriptor.block_type.shape[3]
    DTYPE: gl.constexpr = k_descriptor.dtype
    q_smem = gl.allocate_shared_memory(
        DTYPE, [Q_SLOTS * CONSUMERS, 1, 1, WARPGROUP_ROWS, HEAD_DIM], q_descriptor.layout
    )
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, TILE_K, HEAD_DIM], k_descriptor.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, TILE_K, HEAD_DIM], v_descriptor.layout)
    tile_smem = gl.allocate_shared_memory(gl.int32, [Q_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=CONSUMERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)

    # setmaxnreg moves registers from the producer, which needs few, to the consumers.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, o_descriptor, q_smem, k_smem, v_smem, tile_smem, q_full, q_empty, full, empty,
                             heads, kv_group, batch_heads, query_tiles, head_group, seq_len_k, scale,
                             CONSUMERS, TILE_K, STAGES, CAUSAL, KEY_TAIL, PING_PONG)),
                (_consumer, (1, o_descriptor, q_smem, k_smem, v_smem, tile_smem, q_full, q_empty, full, empty,
                             heads, kv_group, batch_heads, query_tiles, head_group, seq_len_k, scale,
                             CONSUMERS, TILE_K, STAGES, CAUSAL, KEY_TAIL, PING_PONG)),
                (_producer, (q_descriptor, k_descriptor, v_descriptor, counter,
                             q_smem, k_smem, v_smem, tile_smem, q_full, q_empty, full, empty,
                             heads, kv_group, batch_heads, query_tiles, head_group, seq_len_k,
                             CONSUMERS, TILE_K, STAGES, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_consumer, (0, o_descriptor, q_smem, k_smem, v_smem, tile_smem, q_full, q_empty, full, empty,
                             heads, kv_group, batch_heads, query_tiles, head_group, seq_len_k, scale,
                             CONSUMERS, TILE_K, STAGES, CAUSAL, KEY_TAIL, PING_PONG)),
                (_consumer, (1, o_descriptor, q_smem, k_smem, v_smem, tile_smem, q_full, q_empty, full, empty,
                             heads, kv_group, batch_heads, query_tiles, head_group, seq_len_k, scale,
                             CONSUMERS, TILE_K, STAGES, CAUSAL, KEY_TAIL, PING_PONG)),
                (_consumer, (2, o_descriptor, q_smem, k_smem, v_smem, tile_smem, q_full, q_empty, full, empty,
                             heads, kv_group, batch_heads, query_tiles, head_group, seq_len_k, scale,
                             CONSUMERS, TILE_K, STAGES, CAUSAL, KEY_TAIL, PING_PONG)),
                (_producer, (q_descriptor, k_descriptor, v_descriptor, counter,
                             q_smem, k_smem, v_smem, tile_smem, q_full, q_empty, full, empty,
                             heads, kv_group, batch_heads, query_tiles, head_group, seq_len_k,
                             CONSUMERS, TILE_K, STAGES, CAUSAL)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip


# ---- on the host ----

LOG2_E = math.log2(math.e)
HEAD_DIMS = (64, 128)
OPTIONS = ("consumers", "tile_k", "stages", "ping_pong")
# Registers a thread at the launch, by the number of consumers: 65,536 for all warps, rounded as setmaxnreg
# wants them.
MAX_REGISTERS = {2: 168, 3: 128}
SHARED_MEMORY_BYTES = 227 * 1024
# Bytes of K and V that the heads of a group may have together: less than half of the L2 cache.
GROUP_BYTES = 24 * 2**20


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    consumers: int | None = None,
    tile_k: int | None = None,
    stages: int | None = None,
    ping_pong: bool | None = None,
) -> torch.Tensor:
    """softmax(scale * Q K^T) V on a Hopper GPU, forward only.

    q is (batch, heads, seq_len_q, head_dim), k and v are (batch, kv_heads, seq_len_k, head_dim), fp16 or
    bf16, head_dim 64 or 128; consecutive heads // kv_heads query heads share one head of k and v. A
    causal mask is aligned to the top left, as SDPA's `is_causal`: row i sees keys 0 to i. scale is
    1 / sqrt(head_dim) unless given. A row that sees no key (seq_len_k is 0) gives 0. Returns a new tensor of
    q's shape and dtype, with q's strides where q is dense in memory and contiguous otherwise.

    TMA reads the inputs where they lie if they start at a multiple of 16 bytes and their strides, the last
    one of 1 left out, are positive multiples of 16 bytes; others are copied first.

    The launch: consumers warpgroups of 64 query rows each (2 or 3), tile_k keys a block, and stages units
    of K and V in shared memory (2 at least); with ping_pong the consumers take turns at the tensor cores,
    so that one's softmax runs beside another's products. Give all four, or none for the first of
    `candidates`.

    Raises ValueError for a bad argument (see `check_inputs`), for tensors that are not on a GPU of compute
    capability 9.0, for another head_dim, and for an incomplete or impossible set of launch options.
    """
    check_inputs(q, k, v, scale=scale, forward_only=True)
    head_dim, seq_len_k = q.shape[3], k.shape[2]
    if _compute_capability(q.device) != (9, 0):
        raise ValueError(f"q is on {q.device}: expected a GPU of compute capability 9.0 (Hopper)")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"q has head_dim {head_dim}: expected 64 or 128")
    options: dict[str, Any] = {
        "consumers": consumers,
        "tile_k": tile_k,
        "stages": stages,
        "ping_pong": ping_pong,
    }
    if all(value is None for value in options.values()):
        options = _candidates(head_dim, bool(causal), seq_len_k)[0]
    _check_options(options, head_dim)

    output = torch.empty_like(q)
    if not output.numel() or not seq_len_k:
        return output.zero_()
    scale = head_dim**-0.5 if scale is None else scale
    with _current(q.device):
        _launch(q, k, v, output, bool(causal), scale, options)
    return output


def unsupported(problem: Any, target: Any, **options: Any) -> str | None:
    """Why the problem cannot run on the target with these launch options; None if it can."""
    if not target.is_cuda or target.compute_capability != (9, 0):
        found = "a CPU"
        if target.is_cuda:
            found = "compute capability {}.{}".format(*target.compute_capability)
        return f"{found}: this kernel is written for Hopper's instructions, compute capability 9.0 alone"
    if problem.head_dim not in HEAD_DIMS:
        return f"head_dim {problem.head_dim} is not 64 or 128"
    if options:
        try:
            _check_options(options, problem.head_dim)
        except ValueError as fault:
            return str(fault)
    return None


def candidates(problem: Any, target: Any, **options: Any) -> list[dict[str, Any]]:
    """Launch options worth tuning over, the default first; only the given ones if any are given."""
    if options:
        return [options]
    if unsupported(problem, target) is not None:
        return []
    return _candidates(problem.head_dim, problem.causal, problem.seq_len_k)


def memory_law(problem: Any, **options: Any) -> int:
    """Bytes that a call peaks at, the inputs included: Q, K, V and O, and no scores.

    Left out: a counter of 4 bytes for each stream, and the copies of inputs that TMA cannot read in place.
    """
    query = problem.batch * problem.heads * problem.seq_len_q * problem.head_dim
    key = problem.batch * problem.kv_heads * problem.seq_len_k * problem.head_dim
    return int(2 * (2 * query + 2 * key))


class CompileUnit(NamedTuple):
    """What `triton.compile` needs for a target that need not be there; the function is one of Gluon's."""

    function: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]


def compile_units(problem: Any, options: Mapping[str, Any], target: Any) -> list[CompileUnit]:
    """The one kernel that a call compiles; empty options mean the default."""
    options = dict(options) or _candidates(problem.head_dim, problem.causal, problem.seq_len_k)[0]
    _check_options(options, problem.head_dim)
    constants = _constants(options, problem.seq_len_k, problem.causal)
    rows = dict.fromkeys(("q_descriptor", "o_descriptor"), WARPGROUP_ROWS.value)
    rows |= dict.fromkeys(("k_descriptor", "v_descriptor"), options["tile_k"])
    signature = {}
    for name in _attention_forward.arg_names:
        if name in rows:
            box = [1, 1, rows[name], problem.head_dim]
            signature[name] = f"tensordesc<{problem.dtype}{box},{_shared_layout()!r}>"
        elif name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = {"counter": "*i32", "scale": "fp32"}.get(name, "i32")
    # PyTorch's allocations are aligned to 16 bytes and more, and the launcher tells the compiler so.
    counter = _attention_forward.arg_names.index("counter")
    aligned: dict[tuple[int, ...], list[list[Any]]] = {(counter,): [["tt.divisibility", 16]]}
    return [CompileUnit(_attention_forward, signature, constants, aligned, _launch_options(options))]


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    causal: bool,
    scale: float,
    options: Mapping[str, Any],
) -> None:
    """Launch the kernel on the current stream; a call like an earlier one takes a short cut.

    Triton's launcher takes about 100 us to bind arguments and encode TMA descriptors, and all of that
    depends on nothing but the key below. So its result is kept: a call then takes about 35 us.
    """
    device = q.device
    counter = _counter(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    key = (
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), output.data_ptr(), counter.data_ptr()),
        *(q.shape, k.shape, q.stride(), k.stride(), v.stride(), output.stride(), q.dtype),
        *(causal, scale, *options.values(), device.index, stream),
    )
    launch = _launches.get(key)
    if launch is not None and not _hooks():
        launch()
        return

    tensors = (q, k, v)
    if scale <= 0:
        # The kernel multiplies row maxima by the scale, which only a positive one commutes with.
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    q, k, v = _readable(q), _readable(k), _readable(v)
    in_place = all(a is b for a, b in zip((q, k, v), tensors, strict=True))
    batch, heads, seq_len_q, head_dim = q.shape
    kv_group, seq_len_k = heads // k.shape[1], k.shape[2]
    query_tiles = triton.cdiv(seq_len_q, options["consumers"] * WARPGROUP_ROWS.value)
    programs = min(batch * heads * query_tiles, _multiprocessors(device))
    descriptors = (
        _descriptor(q, WARPGROUP_ROWS.value),
        _descriptor(k, options["tile_k"]),
        _descriptor(v, options["tile_k"]),
        _descriptor(output, WARPGROUP_ROWS.value),
    )
    head_group = _head_group(kv_group, seq_len_k, head_dim)
    scalars = (heads, kv_group, batch * heads, query_tiles, head_group, seq_len_k, scale * LOG2_E)
    constants = _constants(options, seq_len_k, causal)
    compiled = _attention_forward[(programs,)](
        *descriptors,
        counter,
        *scalars,
        **constants,
        **_launch_options(options),
    )
    # While a graph is captured the counter is new in every call.
    if in_place and not _hooks() and not torch.cuda.is_current_stream_capturing():
        launch = _short_cut(
            compiled, programs, stream, descriptors, (counter.data_ptr(), *scalars, *constants.values())
        )
        if launch is not None:
            if len(_launches) >= MAX_LAUNCHES:
                _launches.clear()
            _launches[key] = launch


_launches: dict[tuple[Any, ...], Callable[[], object]] = {}
MAX_LAUNCHES = 1024


def _hooks() -> bool:
    """Whether somebody, a profiler say, asks to be told of launches, which the short cut does not do."""
    runtime = triton.knobs.runtime
    return any(
        hook is not None and getattr(hook, "calls", True)
        for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook)
    )


def _short_cut(
    compiled: Any,
    programs: int,
    stream: int,
    descriptors: tuple[TensorDescriptor, ...],
    rest: tuple[Any, ...],
) -> Callable[[], object] | None:
    """The same launch again, as a call of Triton's C function; None where Triton is built otherwise.

    Triton 3.6 keeps the C function in a closure that encodes the descriptors before each call.
    """
    try:
        run = compiled.run
        inside = inspect.getclosurevars(run.launch).nonlocals
        encode = inspect.getclosurevars(run.launch).globals["make_tensordesc_arg"]
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        encoded = [
            value
            for descriptor, meta in zip(descriptors, inside["tensordesc_meta"], strict=True)
            for value in encode(descriptor, meta)
        ]
        return functools.partial(
            inside["launcher"],
            *(programs, 1, 1, stream, compiled.function, run.launch_cooperative_grid, run.launch_pdl),
            *(None, None, compiled.packed_metadata, None, None, None),
            *encoded,
            *rest,
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _constants(options: Mapping[str, Any], seq_len_k: int, causal: bool) -> dict[str, Any]:
    return {
        "CONSUMERS": options["consumers"],
        "TILE_K": options["tile_k"],
        "STAGES": options["stages"],
        "CAUSAL": bool(causal),
        "KEY_TAIL": seq_len_k % options["tile_k"] != 0,
        "PING_PONG": bool(options["ping_pong"]),
    }


def _launch_options(options: Mapping[str, Any]) -> dict[str, Any]:
    # The launch has the warps of consumer 0; the other partitions add theirs.
    return {"num_warps": 4, "maxnreg": MAX_REGISTERS[options["consumers"]]}


def _candidates(head_dim: int, causal: bool, seq_len_k: int) -> list[dict[str, Any]]:
    # The first was ahead on an H200, in bf16 at 16,384 tokens. Turns are within the noise of two runs.
    two = {"consumers": 2, "tile_k": 128, "stages": {64: 4, 128: 2}[head_dim]}
    three = {"consumers": 3, "tile_k": 128, "stages": 3}
    shapes = [two]
    if head_dim == 64:
        shapes = [two, three] if causal and seq_len_k <= 4096 else [three, two]
        ping_pong = not causal and seq_len_k > 4096
    else:
        ping_pong = causal and seq_len_k >= 2048
    return [{**shape, "ping_pong": turns} for turns in (ping_pong, not ping_pong) for shape in shapes]


def _check_options(options: Mapping[str, Any], head_dim: int) -> None:
    for name in OPTIONS:
        if not isinstance(options.get(name), int):
            raise ValueError(
                f"{name} is {options.get(name)!r}: expected a number; give all of {', '.join(OPTIONS)}"
            )
    if unknown := set(options) - set(OPTIONS):
        raise ValueError(f"{sorted(unknown)[0]} is not a launch option of this kernel")
    if options["consumers"] not in MAX_REGISTERS:
        raise ValueError(f"consumers is {options['consumers']}: expected 2 or 3")
    if options["consumers"] == 3 and head_dim == 128:
        raise ValueError("consumers is 3: expected 2 at head_dim 128, more have too few registers")
    if options["tile_k"] not in (64, 128):
        raise ValueError(f"tile_k is {options['tile_k']}: expected 64 or 128")
    if options["stages"] < 2:
        raise ValueError(f"stages is {options['stages']}: expected 2 at least")
    rows = Q_SLOTS.value * options["consumers"] * WARPGROUP_ROWS.value
    needed = 2 * head_dim * (rows + 2 * options["stages"] * options["tile_k"])
    if needed + 1024 > SHARED_MEMORY_BYTES:
        raise ValueError(
            f"stages is {options['stages']}: the buffers would take {needed} bytes of shared memory"
        )


def _head_group(kv_group: int, seq_len_k: int, head_dim: int) -> int:
    return max(1, GROUP_BYTES // (2 * seq_len_k * head_dim * 2)) * kv_group


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if TMA can read it in place, otherwise a copy."""
    strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False) if size > 1]
    if tensor.data_ptr() % 16 or any(stride <= 0 or stride % 8 or stride >= 2**39 for stride in strides):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _descriptor(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """TMA's view of a (batch, heads, seq_len, head_dim) tensor: boxes of some rows of one head.

    What a box has past the last row is read as 0, and not written. So heads must stay a dimension of
    their own: with heads and rows made one, a box would go on into the next head.
    """
    head_dim = tensor.shape[3]
    # The stride of a dimension of size 1 has no meaning, but must look right to TMA.
    strides = [
        stride if size > 1 else head_dim for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return TensorDescriptor(
        tensor, list(tensor.shape), [*strides[:3], 1], [1, 1, rows, head_dim], _shared_layout()
    )


@functools.cache
def _shared_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


_counters: dict[tuple[int, int], torch.Tensor] = {}


def _counter(device: torch.device) -> torch.Tensor:
    """A counter that holds 0 whenever no call is under way: one for each stream, or for a captured call.

    Calls of one stream follow each other. A captured call may be replayed beside anything, so it has its
    own, zeroed by the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device the current one, on which Triton launches; free of charge when it is already."""
    if device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@functools.cache
def _compute_capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
