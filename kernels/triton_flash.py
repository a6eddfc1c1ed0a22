"""FlashAttention's forward pass in portable Triton: tiles of keys, online softmax, only O is stored.

One program owns TILE_Q query rows of one head. It walks over the keys TILE_K at a time and keeps, for
each row, the maximum score so far, the sum of the exponentials and the sum of V weighted with them,
all in fp32; when the maximum grows, what was summed before is rescaled. Exponentials are powers of two:
log2(e) is folded into the scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.inputs import check_inputs, fp32

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32's numbers


@triton.jit  # type: ignore[untyped-decorator]
def _load_tile(
    pointers: tl.tensor,
    in_length: tl.tensor,
    in_head_dim: tl.tensor,
    CHECK_LENGTH: tl.constexpr,
    CHECK_HEAD_DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """Load a tile of Q, K or V with no more of a mask than it needs; what lies outside is 0."""
    if CHECK_LENGTH and CHECK_HEAD_DIM:
        tile = tl.load(pointers, mask=in_length & in_head_dim, other=0.0)
    elif CHECK_LENGTH:
        tile = tl.load(pointers, mask=in_length, other=0.0)
    elif CHECK_HEAD_DIM:
        tile = tl.load(pointers, mask=in_head_dim, other=0.0)
    else:
        tile = tl.load(pointers)
    # The interpreter multiplies the bit patterns of bf16, and is slow in fp16.
    if INTERPRETED:
        tile = tile.to(tl.float32)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def _described_tile(
    descriptor: tl.tensor,
    batch: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    TILE_K: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """Load a tile of K or V, (TILE_K, PADDED_DIM), by its tensor descriptor; what lies outside is 0."""
    tile = descriptor.load([batch, kv_head, start, 0]).reshape([TILE_K, PADDED_DIM])
    if INTERPRETED:
        tile = tile.to(tl.float32)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def _visit_keys(
    weighted_sum: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    q: tl.tensor,
    k_source: tl.tensor,
    v_source: tl.tensor,
    batch: tl.tensor,
    kv_head: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    queries: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    seq_len_k: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    UNROLL: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEY_TAIL: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold the keys from begin to end into the weighted sum of V, the row maximum and the row sum.

    k_source and v_source are pointers to the head, or with DESCRIPTORS tensor descriptors: then the copy
    engine computes the addresses, and reads 0 past the end.
    """
    PAD: tl.constexpr = PADDED_DIM != HEAD_DIM
    dims = tl.arange(0, PADDED_DIM)
    columns = tl.arange(0, TILE_K)
    if not DESCRIPTORS:
        k_offsets = columns[None, :] * k_stride + dims[:, None]
        v_offsets = columns[:, None] * v_stride + dims[None, :]
        k_tile = k_source + tl.cast(begin, tl.int64) * k_stride
        v_tile = v_source + tl.cast(begin, tl.int64) * v_stride
    for start in tl.range(begin, end, TILE_K, loop_unroll_factor=UNROLL):
        keys = start + columns
        in_length = keys < seq_len_k
        if DESCRIPTORS:
            k = _described_tile(k_source, batch, kv_head, start, TILE_K, PADDED_DIM, INTERPRETED).T
        else:
            k = _load_tile(
                k_tile + k_offsets, in_length[None, :], dims[:, None] < HEAD_DIM,
                MASKED and KEY_TAIL, PAD, INTERPRETED,
            )  # fmt: skip
        scores = tl.dot(q, k)
        if MASKED and KEY_TAIL:
            scores = tl.where(in_length[None, :], scores, float("-inf"))
        if MASKED and CAUSAL:
            scores = tl.where(keys[None, :] <= queries[:, None], scores, float("-inf"))

        # The scale is positive: it commutes with the maximum, and a score costs one multiply-add.
        # The maximum begins at a number, so it is one where a row has seen nothing but -inf yet.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_max = new_max
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        weighted_sum = weighted_sum * rescale[:, None]

        if DESCRIPTORS:
            v = _described_tile(v_source, batch, kv_head, start, TILE_K, PADDED_DIM, INTERPRETED)
        else:
            v = _load_tile(
                v_tile + v_offsets, in_length[:, None], dims[None, :] < HEAD_DIM,
                MASKED and KEY_TAIL, PAD, INTERPRETED,
            )  # fmt: skip
        weighted_sum = tl.dot(weights.to(v.dtype), v, weighted_sum)
        if not DESCRIPTORS:
            k_tile += tl.cast(k_stride, tl.int64) * TILE_K
            v_tile += tl.cast(v_stride, tl.int64) * TILE_K
    return weighted_sum, row_max, row_sum


@triton.jit(  # type: ignore[untyped-decorator]
    # Alignment reaches the compiler through STRIDE_UNIT, so that no length or stride compiles it again.
    do_not_specialize=[
        *("q_stride_batch", "q_stride_head", "q_stride_row"),
        *("k_stride_batch", "k_stride_head", "k_stride_row"),
        *("v_stride_batch", "v_stride_head", "v_stride_row"),
        *("o_stride_batch", "o_stride_head", "o_stride_row"),
        *("batch_heads", "heads", "kv_group", "seq_len_q", "seq_len_k"),
    ]
)
def _flash_forward(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    v_pointer: tl.tensor,
    o_pointer: tl.tensor,
    q_stride_batch: tl.tensor,
    q_stride_head: tl.tensor,
    q_stride_row: tl.tensor,
    k_stride_batch: tl.tensor,
    k_stride_head: tl.tensor,
    k_stride_row: tl.tensor,
    v_stride_batch: tl.tensor,
    v_stride_head: tl.tensor,
    v_stride_row: tl.tensor,
    o_stride_batch: tl.tensor,
    o_stride_head: tl.tensor,
    o_stride_row: tl.tensor,
    batch_heads: tl.tensor,
    heads: tl.tensor,
    kv_group: tl.tensor,
    seq_len_q: tl.tensor,
    seq_len_k: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    UNROLL: tl.constexpr,
    OFFSET: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEY_TAIL: tl.constexpr,
    SCALE_SIGN: tl.constexpr,
    HEAD_GROUP: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    Q_IN_REGISTERS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """Compute TILE_Q rows of the output of one head.

    Strides count STRIDE_UNIT elements, so that the compiler sees that rows are aligned. OFFSET is the
    integer type of an offset inside a tile. With DESCRIPTORS k_pointer and v_pointer are tensor descriptors
    of tiles (1, 1, TILE_K, PADDED_DIM).
    """
    # Programs run through HEAD_GROUP heads at a time, and there through the query tiles; a causal
    # mask makes the last tile the longest, and the longest goes first, so that none is left for the end.
    program = tl.program_id(0)
    tiles = tl.cdiv(seq_len_q, TILE_Q)
    first_head = program // (tiles * HEAD_GROUP) * HEAD_GROUP
    heads_here = tl.minimum(HEAD_GROUP, batch_heads - first_head)
    in_group = program - first_head * tiles
    tile = in_group // heads_here
    batch_head = first_head + in_group % heads_here
    if CAUSAL:
        tile = tiles - 1 - tile

    # 64 bits: a batch, a head or the way to a tile can lie more than 2^31 elements apart.
    batch = tl.cast(batch_head // heads, tl.int64) * STRIDE_UNIT
    head = tl.cast(batch_head % heads, tl.int64) * STRIDE_UNIT
    first_query = tile * TILE_Q
    first_row = tl.cast(first_query, tl.int64) * STRIDE_UNIT
    q_tile = q_pointer + batch * q_stride_batch + head * q_stride_head + first_row * q_stride_row
    o_tile = o_pointer + batch * o_stride_batch + head * o_stride_head + first_row * o_stride_row
    kv_head = batch_head % heads // kv_group
    if DESCRIPTORS:
        k_source = k_pointer
        v_source = v_pointer
    else:
        kv_offset = tl.cast(kv_head, tl.int64) * STRIDE_UNIT
        k_source = k_pointer + batch * k_stride_batch + kv_offset * k_stride_head
        v_source = v_pointer + batch * v_stride_batch + kv_offset * v_stride_head

    PAD: tl.constexpr = PADDED_DIM != HEAD_DIM
    rows = tl.arange(0, TILE_Q)
    dims = tl.arange(0, PADDED_DIM)
    queries = first_query + rows
    in_length = queries[:, None] < seq_len_q
    in_head_dim = dims[None, :] < HEAD_DIM
    q_offsets = rows[:, None] * (tl.cast(q_stride_row, OFFSET) * STRIDE_UNIT) + dims[None, :]
    q = _load_tile(q_tile + q_offsets, in_length, in_head_dim, True, PAD, INTERPRETED)
    if SCALE_SIGN < 0:
        q = -q
    elif SCALE_SIGN == 0:
        q = q * 0.0
    if Q_IN_REGISTERS:
        # Times the identity, Q is what it was, and lies where a product leaves its result: there Hopper's
        # wgmma can take it from. From shared memory it would be read again for every tile of keys.
        identity = tl.where(dims[:, None] == dims[None, :], 1.0, 0.0).to(q.dtype)
        q = tl.dot(q, identity).to(q.dtype)

    row_max = tl.full([TILE_Q], LOWEST, tl.float32)
    row_sum = tl.zeros([TILE_Q], tl.float32)
    weighted_sum = tl.zeros([TILE_Q, PADDED_DIM], tl.float32)

    # Whole tiles of keys that every row sees, and then the rest: the diagonal, the tail.
    if CAUSAL:
        seen = tl.minimum(first_query + TILE_Q, seq_len_k)
        whole = tl.minimum(first_query + 1, seq_len_k) // TILE_K * TILE_K
    else:
        seen = seq_len_k
        whole = seq_len_k // TILE_K * TILE_K
    k_stride = tl.cast(k_stride_row, OFFSET) * STRIDE_UNIT
    v_stride = tl.cast(v_stride_row, OFFSET) * STRIDE_UNIT
    weighted_sum, row_max, row_sum = _visit_keys(
        weighted_sum, row_max, row_sum, q,
        k_source, v_source, batch_head // heads, kv_head, k_stride, v_stride,
        queries, 0, whole, seq_len_k, scale,
        HEAD_DIM, PADDED_DIM, TILE_K, UNROLL, False, CAUSAL, KEY_TAIL, DESCRIPTORS, INTERPRETED,
    )  # fmt: skip
    if CAUSAL or KEY_TAIL:
        weighted_sum, row_max, row_sum = _visit_keys(
            weighted_sum, row_max, row_sum, q,
            k_source, v_source, batch_head // heads, kv_head, k_stride, v_stride,
            queries, whole, seen, seq_len_k, scale,
            HEAD_DIM, PADDED_DIM, TILE_K, UNROLL, True, CAUSAL, KEY_TAIL, DESCRIPTORS, INTERPRETED,
        )  # fmt: skip

    # The sum is near 1 or above, but 0 where all scores were -inf: then so is the output.
    output = weighted_sum / tl.maximum(row_sum, 1e-37)[:, None]
    o_offsets = rows[:, None] * (tl.cast(o_stride_row, OFFSET) * STRIDE_UNIT) + dims[None, :]
    tl.store(o_tile + o_offsets, output.to(o_pointer.dtype.element_ty), mask=in_length & in_head_dim)


# ---- on the host ----

LOG2_E = math.log2(math.e)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
VECTOR_ELEMENTS = 8  # of fp16 or bf16 in the 16 bytes that one load instruction of a thread can fetch
# Enough heads to fill the GPU with long rows, few enough that their K and V stay in the L2 cache.
CAUSAL_HEAD_GROUP = 16
TILE_OPTIONS = ("tile_q", "tile_k", "num_warps", "num_stages")
OTHER_OPTIONS = ("max_registers", "unroll", "tensor_descriptors", "q_in_registers")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    tile_q: int | None = None,
    tile_k: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    max_registers: int | None = None,
    unroll: int | None = None,
    tensor_descriptors: bool | None = None,
    q_in_registers: bool | None = None,
) -> torch.Tensor:
    """softmax(scale * Q K^T) V, forward only.

    q is (batch, heads, seq_len_q, head_dim), k and v are (batch, kv_heads, seq_len_k, head_dim), fp16 or
    bf16, 16 <= head_dim <= 256, any strides with a last one of 1; consecutive heads // kv_heads query
    heads share one head of k and v. A causal mask is aligned to the top left, as SDPA's `is_causal`: row
    i sees keys 0 to i. scale is 1 / sqrt(head_dim) unless given. A row that sees no key (seq_len_k is 0),
    or scores of -inf alone, gives 0. Returns a new tensor of q's shape and dtype, with q's strides where q is
    dense in memory and contiguous otherwise.

    The launch: tile_q query rows a program, tile_k keys a step, num_warps warps of 32 threads, num_stages
    steps of keys in flight, at most max_registers 32-bit registers a thread (None: no limit), unroll steps
    a round of the loop (None: 1); with tensor_descriptors K and V come by tensor descriptors (TMA, on GPUs
    that have it) where their addresses and strides are multiples of 16 bytes, as descriptors want, and by
    pointers where not; with q_in_registers Q stays in registers (of use on Hopper alone). Give the first
    four together, or none of the eight for the first of `candidates`.

    Raises ValueError for a bad argument (see `check_inputs`), for a head_dim out of range, and for an
    incomplete set of launch options.
    """
    check_inputs(q, k, v, scale=scale, forward_only=True)
    batch, heads, seq_len_q, head_dim = q.shape
    kv_heads, seq_len_k = k.shape[1], k.shape[2]
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q has head_dim {head_dim}: expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")
    options = {
        "tile_q": tile_q,
        "tile_k": tile_k,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "max_registers": max_registers,
        "unroll": unroll,
        "tensor_descriptors": tensor_descriptors,
        "q_in_registers": q_in_registers,
    }
    if all(value is None for value in options.values()):
        options = _default_options(_compute_capability(q.device), head_dim)
    _check_options(options)

    # The interpreter cuts fp32 off where it should round to bf16: there PyTorch rounds.
    output = torch.empty_like(q, dtype=torch.float32 if INTERPRETED else q.dtype)
    if output.numel() and seq_len_k:
        scale = fp32(head_dim**-0.5 if scale is None else scale)
        strides = [stride for tensor in (q, k, v, output) for stride in tensor.stride()[:3]]
        descriptors = bool(options["tensor_descriptors"]) and _describable(k) and _describable(v)
        constants = _constants(options, head_dim, seq_len_k, causal, scale, strides, descriptors)
        sources = [_descriptor(tensor, constants) for tensor in (k, v)] if descriptors else (k, v)
        grid = (triton.cdiv(seq_len_q, constants["TILE_Q"]) * batch * heads,)
        with _current(q.device):
            _flash_forward[grid](
                *(q, *sources, output),
                *(stride // constants["STRIDE_UNIT"] for stride in strides),
                *(batch * heads, heads, heads // kv_heads, seq_len_q, seq_len_k, _base_2(scale)),
                **constants,
                **_launch_options(options),
            )
    else:
        output.zero_()
    return output.to(q.dtype)


def unsupported(problem: Any, target: Any, **options: Any) -> str | None:
    """Why the problem cannot run on the target with these launch options; None if it can."""
    if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
        return f"head_dim {problem.head_dim} is outside {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if options:
        try:
            _check_options(options)
        except ValueError as fault:
            return str(fault)
    if not target.is_cuda:
        return None if INTERPRETED else "Triton runs on a CPU only with TRITON_INTERPRET=1"
    if target.compute_capability < (7, 5):
        major, minor = target.compute_capability
        return f"compute capability {major}.{minor} is below 7.5, the oldest that Triton compiles for"
    return None


def candidates(problem: Any, target: Any, **options: Any) -> list[dict[str, Any]]:
    """Launch options worth tuning over, the default first; only the given ones if any are given."""
    if options:
        return [options]
    return _candidates(target.compute_capability if target.is_cuda else None, problem.head_dim)


def memory_law(problem: Any, **options: Any) -> int:
    """Bytes that a call peaks at on a GPU, the inputs included: Q, K, V and O, and no scores."""
    query = problem.batch * problem.heads * problem.seq_len_q * problem.head_dim
    key = problem.batch * problem.kv_heads * problem.seq_len_k * problem.head_dim
    return int(2 * (2 * query + 2 * key))


class CompileUnit(NamedTuple):
    """What `triton.compile` needs for a target that need not be there.

    `triton.compile(ASTSource(function, signature, constexprs, attrs), target=..., options=options)`, in
    a process without TRITON_INTERPRET.
    """

    function: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]


def compile_units(problem: Any, options: Mapping[str, Any], target: Any) -> list[CompileUnit]:
    """The one kernel that a call compiles for contiguous inputs; empty options mean the default."""
    options = dict(options) or candidates(problem, target)[0]
    _check_options(options)
    strides = [problem.head_dim]
    # Contiguous inputs: rows begin at multiples of 16 bytes if they have them.
    descriptors = bool(options.get("tensor_descriptors")) and problem.head_dim % VECTOR_ELEMENTS == 0
    constants = _constants(
        options, problem.head_dim, problem.seq_len_k, problem.causal, problem.head_dim**-0.5, strides,
        descriptors,
    )  # fmt: skip
    tile = [1, 1, constants["TILE_K"], constants["PADDED_DIM"]]
    pointers = ("q_pointer", "k_pointer", "v_pointer", "o_pointer")
    signature = {}
    for name in _flash_forward.arg_names:
        if name in ("k_pointer", "v_pointer") and descriptors:
            signature[name] = f"tensordesc<{problem.dtype}{tile}>"
        elif name in pointers:
            signature[name] = {"fp16": "*fp16", "bf16": "*bf16"}[problem.dtype]
        elif name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    # PyTorch's allocations are aligned to 16 bytes and more, and the launcher tells the compiler so.
    aligned: dict[tuple[int, ...], list[list[Any]]] = {
        (_flash_forward.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in pointers
        if signature[name].startswith("*")
    }
    return [CompileUnit(_flash_forward, signature, constants, aligned, _launch_options(options))]


INTERPRETED = not isinstance(_flash_forward, triton.JITFunction)


def _describable(tensor: torch.Tensor) -> bool:
    """Whether a tensor descriptor can say where the tensor lies; a copy engine reads by no other."""
    strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False) if size > 1]
    return tensor.data_ptr() % 16 == 0 and all(
        0 < stride < 2**39 and stride % VECTOR_ELEMENTS == 0 for stride in strides
    )


def _descriptor(tensor: torch.Tensor, constants: Mapping[str, Any]) -> TensorDescriptor:
    """A descriptor of tiles of one head of a (batch, kv_heads, seq_len, head_dim) tensor."""
    tile = [1, 1, constants["TILE_K"], constants["PADDED_DIM"]]
    # The stride of a dimension of size 1 has no meaning, but must look right to the copy engine.
    strides = [
        stride if size > 1 else constants["PADDED_DIM"]
        for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False)
    ]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], tile)


def _constants(
    options: Mapping[str, Any],
    head_dim: int,
    seq_len_k: int,
    causal: bool,
    scale: float,
    strides: list[int],
    descriptors: bool,
) -> dict[str, Any]:
    tile_reach = max(options["tile_q"], options["tile_k"]) * max(strides)
    return {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "TILE_Q": options["tile_q"],
        "TILE_K": options["tile_k"],
        "UNROLL": options.get("unroll") or 1,
        # 64-bit offsets inside a tile cost registers: only for rows that lie very far apart.
        "OFFSET": tl.int32 if tile_reach < 2**31 else tl.int64,
        "CAUSAL": bool(causal),
        "KEY_TAIL": seq_len_k % options["tile_k"] != 0,
        "SCALE_SIGN": (scale > 0) - (scale < 0),
        "HEAD_GROUP": CAUSAL_HEAD_GROUP if causal else 1,
        "STRIDE_UNIT": 1 if any(stride % VECTOR_ELEMENTS for stride in strides) else VECTOR_ELEMENTS,
        "DESCRIPTORS": descriptors,
        "Q_IN_REGISTERS": bool(options.get("q_in_registers")),
        "INTERPRETED": INTERPRETED,
    }


def _base_2(scale: float) -> float:
    # The sign is the kernel's SCALE_SIGN. A scale of 0 makes Q zero, and then any finite factor will do.
    return abs(scale or 1.0) * LOG2_E


def _launch_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_warps": options["num_warps"],
        "num_stages": options["num_stages"],
        "maxnreg": options.get("max_registers"),
        # Today's default, said aloud: a later Triton has another one, and the softmax relies on it.
        "enable_fp_fusion": True,
    }


def _check_options(options: Mapping[str, Any]) -> None:
    for name in TILE_OPTIONS:
        value = options.get(name)
        if not isinstance(value, int):
            raise ValueError(f"{name} is {value!r}: expected a number; give all of {', '.join(TILE_OPTIONS)}")
        if name in ("tile_q", "tile_k") and (value < 16 or value & (value - 1)):
            raise ValueError(f"{name} is {value}: expected a power of two, 16 or more")
    if unknown := set(options) - {*TILE_OPTIONS, *OTHER_OPTIONS}:
        raise ValueError(f"{sorted(unknown)[0]} is not a launch option of this kernel")


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make the device the current one, on which Triton launches; free of charge when it is already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@functools.cache
def _compute_capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@functools.cache
def _default_options(compute_capability: tuple[int, int] | None, head_dim: int) -> dict[str, int | None]:
    return _candidates(compute_capability, head_dim)[0]


def _launch(
    tile_q: int,
    tile_k: int,
    num_warps: int,
    num_stages: int,
    max_registers: int | None = None,
    unroll: int | None = None,
    tensor_descriptors: bool | None = None,
    q_in_registers: bool | None = None,
) -> dict[str, int | None]:
    return {
        "tile_q": tile_q,
        "tile_k": tile_k,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "max_registers": max_registers,
        "unroll": unroll,
        "tensor_descriptors": tensor_descriptors,
        "q_in_registers": q_in_registers,
    }


def _candidates(compute_capability: tuple[int, int] | None, head_dim: int) -> list[dict[str, int | None]]:
    size = max(32, triton.next_power_of_2(head_dim))
    if compute_capability is None:
        # The interpreter's time goes by the number of operations, so large tiles are fast; these still
        # leave several of them to lengths that it can bear.
        return [_launch(128, 64, 4, 1)]
    if compute_capability < (8, 0):
        table = _SCALAR
    elif compute_capability == (9, 0):
        table = _HOPPER
    elif compute_capability in ((10, 0), (10, 3)):
        table = _LARGE_SHARED_MEMORY
    else:
        table = _WARP_MMA
    return [dict(options) for options in table[size]]


# The tables below go by head_dim rounded up to a power of two; the figures are what ptxas reports.

# sm_75: Triton has no tensor-core path there. None of these spills, with or without a mask or a tail
# (`snakemake static_profile`); from head_dim 64 on, a warp with twice the scores does.
_SCALAR = {
    32: [_launch(32, 32, 4, 1), _launch(64, 32, 8, 1), _launch(64, 32, 4, 1), _launch(128, 32, 8, 1)],
    64: [_launch(32, 32, 4, 1), _launch(64, 16, 4, 1), _launch(64, 32, 8, 1), _launch(128, 16, 8, 1)],
    128: [_launch(32, 16, 4, 1), _launch(32, 32, 8, 1), _launch(64, 16, 8, 1)],
    256: [_launch(16, 16, 4, 1), _launch(32, 16, 8, 1)],
}
# sm_100: up to 227 KiB of shared memory, as sm_90 has. Nothing was measured there.
_LARGE_SHARED_MEMORY = {
    32: [_launch(128, 64, 8, 3), _launch(128, 128, 8, 3), _launch(128, 64, 4, 3), _launch(64, 64, 4, 3)],
    64: [
        _launch(128, 64, 8, 3),
        _launch(64, 64, 4, 3),
        _launch(64, 64, 4, 3, tensor_descriptors=True),
    ],
    128: [
        _launch(64, 64, 4, 3, tensor_descriptors=True),
        _launch(128, 64, 8, 2, max_registers=128, tensor_descriptors=True),
        _launch(128, 64, 8, 2, max_registers=128),
        _launch(128, 128, 8, 3, tensor_descriptors=True),
    ],
    256: [
        _launch(128, 64, 8, 2, tensor_descriptors=True),
        _launch(128, 64, 8, 2),
        _launch(128, 32, 8, 3, tensor_descriptors=True),
    ],
}
# sm_90: in an H200's order, in bf16 at 16,384 tokens. Tensor descriptors take no registers for addresses: at
# head_dim 128 two programs of 4 warps then fit a multiprocessor without spills. Those with Q in registers are
# compiled without spills and not yet timed, hence behind the others.
_HOPPER = {
    32: _LARGE_SHARED_MEMORY[32],
    64: [
        _launch(64, 64, 4, 3),
        _launch(128, 64, 8, 3),
        _launch(64, 64, 4, 3, tensor_descriptors=True),
        _launch(64, 64, 4, 3, q_in_registers=True),
        _launch(64, 64, 4, 3, tensor_descriptors=True, q_in_registers=True),
        _launch(128, 64, 8, 3, q_in_registers=True),
    ],
    128: [
        _launch(64, 64, 4, 3, tensor_descriptors=True),
        _launch(128, 64, 8, 2, max_registers=128, tensor_descriptors=True),
        _launch(64, 64, 4, 3, tensor_descriptors=True, q_in_registers=True),
        _launch(128, 64, 8, 3, tensor_descriptors=True, q_in_registers=True),
        _launch(128, 128, 8, 3, tensor_descriptors=True, q_in_registers=True),
    ],
    256: _LARGE_SHARED_MEMORY[256],
}
# sm_80 and its kin (8.6, 8.9, 12.0): all within the 99 KiB of the small ones.
_WARP_MMA = {
    32: [_launch(128, 64, 4, 3), _launch(64, 64, 4, 3), _launch(128, 32, 4, 3)],
    64: [
        _launch(128, 64, 8, 3),
        _launch(128, 64, 4, 3),
        _launch(64, 64, 4, 3),
        _launch(128, 32, 4, 3),
        _launch(128, 128, 8, 2),
    ],
    128: [
        _launch(128, 64, 8, 2),
        _launch(128, 32, 8, 2),
        _launch(64, 64, 4, 2),
        _launch(64, 32, 4, 2),
        _launch(128, 64, 8, 3),
    ],
    256: [_launch(64, 32, 8, 2), _launch(64, 16, 4, 2), _launch(32, 32, 4, 2)],
}
