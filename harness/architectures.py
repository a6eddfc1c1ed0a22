"""What a multiprocessor of each architecture holds, and what GPUs of it are said to reach.

Two small tables of published figures, for judging a kernel that was compiled for a GPU that is not there.
Limits: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the 1 KiB of
shared memory that the system keeps of each block from 8.0 on, and the granules by which registers are
handed out, from the same guide and NVIDIA's occupancy calculator; the columns of tensor memory from the
PTX ISA (tcgen05). Rates: data sheets and architecture white papers of NVIDIA.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.target import Target

KIB = 1024
WARP_THREADS = 32
# The same in every architecture of the table.
REGISTERS = 64 * KIB  # 32 bits each, of a multiprocessor, and the most that one block may have
REGISTER_GRANULE = 256  # a warp gets a multiple of this
PARTITIONS = 4  # of a multiprocessor; a block's warps are spread over them
TENSOR_MEMORY_COLUMNS = 512  # where there is tensor memory


@dataclass(frozen=True)
class Peak:
    """What a GPU is said to reach, in TFLOP/s without sparsity: the fp32 pipes, and the tensor cores.

    The tensor cores' rate is that of fp16 or bf16 operands with sums in fp32.
    """

    gpu: str
    fp32_teraflops_per_second: float
    tensor_teraflops_per_second: float


@dataclass(frozen=True)
class Architecture:
    """The limits of one multiprocessor, and the published peak of one GPU of the architecture."""

    warps: int
    blocks: int
    shared_memory_bytes: int
    block_shared_memory_bytes: int
    reserved_shared_memory_bytes: int
    peak: Peak


def _architecture(warps: int, blocks: int, shared_kib: int, block_kib: int, peak: Peak) -> Architecture:
    return Architecture(
        warps, blocks, shared_kib * KIB, block_kib * KIB, (shared_kib - block_kib) * KIB, peak
    )


ARCHITECTURES = {
    (7, 5): _architecture(32, 16, 64, 64, Peak("T4", 8.1, 65)),
    (8, 0): _architecture(64, 32, 164, 163, Peak("A100 SXM", 19.5, 312)),
    (8, 6): _architecture(48, 16, 100, 99, Peak("A10", 31.2, 125)),
    (8, 9): _architecture(48, 24, 100, 99, Peak("RTX 4090", 82.6, 165.2)),
    (9, 0): _architecture(64, 32, 228, 227, Peak("H200 SXM", 67, 989)),
    (10, 0): _architecture(64, 32, 228, 227, Peak("B200 SXM", 80, 2250)),
    (12, 0): _architecture(48, 24, 100, 99, Peak("RTX 5090", 104.8, 209.5)),
}


def target_of(name: str) -> Target:
    """The target that a name such as `sm_90` means: no device at hand, an architecture.

    Raises KeyError for one that the table does not have.
    """
    known = {target_name(capability): capability for capability in ARCHITECTURES}
    capability = known[name]
    shared = ARCHITECTURES[capability].block_shared_memory_bytes
    return Target("cuda", name, capability, None, shared)


def target_name(capability: tuple[int, int]) -> str:
    """`sm_90` for (9, 0)."""
    return f"sm_{capability[0]}{capability[1]}"


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel one multiprocessor holds at once, and what keeps it from holding more.

    `share` is the share of the multiprocessor's warps; `limiter` names what allows the fewest blocks.
    """

    blocks: int
    warps: int
    share: float
    limiter: str


def occupancy(
    architecture: Architecture,
    *,
    threads: int,
    registers: int,
    shared_memory_bytes: int,
    tensor_memory_columns: int = 0,
) -> Occupancy:
    """The occupancy by the limits alone, for a grid that is large enough.

    `threads` and `shared_memory_bytes` are a block's, `registers` a thread's at the launch.
    """
    warps = -(-threads // WARP_THREADS)
    allowed = {
        "warps": architecture.warps // warps,
        "blocks": architecture.blocks,
        "registers": _blocks_by_registers(warps, registers),
    }
    shared = shared_memory_bytes + architecture.reserved_shared_memory_bytes
    if shared_memory_bytes > architecture.block_shared_memory_bytes:
        allowed["shared memory"] = 0
    elif shared:
        allowed["shared memory"] = architecture.shared_memory_bytes // shared
    if tensor_memory_columns:
        allowed["tensor memory"] = TENSOR_MEMORY_COLUMNS // tensor_memory_columns
    limiter = min(allowed, key=allowed.__getitem__)
    blocks = allowed[limiter]
    return Occupancy(blocks, blocks * warps, blocks * warps / architecture.warps, limiter)


def _blocks_by_registers(warps: int, registers: int) -> int:
    """Registers are handed out a warp at a time, from the quarter of them that its partition has."""
    a_warp = -(-registers * WARP_THREADS // REGISTER_GRANULE) * REGISTER_GRANULE
    if not a_warp:
        return REGISTERS
    in_a_partition = REGISTERS // PARTITIONS // a_warp
    of_a_block = -(-warps // PARTITIONS) * PARTITIONS  # whole rounds over the partitions
    return in_a_partition * PARTITIONS // of_a_block
