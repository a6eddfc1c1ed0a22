"""Occupancy by the published limits, against cases worked out by hand from the programming guide's table."""

import pytest

from harness.architectures import ARCHITECTURES, occupancy, target_name, target_of


def held(capability, **needs):
    return occupancy(ARCHITECTURES[capability], **needs)


@pytest.mark.parametrize(
    ("capability", "needs", "blocks", "limiter"),
    [
        # 255 registers: 8 KiB of registers a warp, two warps in each quarter of the 64 Ki.
        ((7, 5), {"threads": 128, "registers": 255, "shared_memory_bytes": 0}, 2, "registers"),
        ((7, 5), {"threads": 128, "registers": 32, "shared_memory_bytes": 65536}, 1, "shared memory"),
        ((7, 5), {"threads": 64, "registers": 16, "shared_memory_bytes": 0}, 16, "warps"),
        ((9, 0), {"threads": 128, "registers": 168, "shared_memory_bytes": 0}, 3, "registers"),
        # From 8.0 on 1 KiB of each block is the system's: 113 + 1 KiB fit twice into 228, 114 + 1 do not.
        ((9, 0), {"threads": 128, "registers": 32, "shared_memory_bytes": 113 * 1024}, 2, "shared memory"),
        ((9, 0), {"threads": 128, "registers": 32, "shared_memory_bytes": 114 * 1024}, 1, "shared memory"),
        ((9, 0), {"threads": 32, "registers": 16, "shared_memory_bytes": 0}, 32, "blocks"),
        ((8, 6), {"threads": 128, "registers": 16, "shared_memory_bytes": 0}, 12, "warps"),
        # One warp takes its place in all four quarters: 64 registers allow 8 warps in each.
        ((8, 0), {"threads": 32, "registers": 64, "shared_memory_bytes": 0}, 8, "registers"),
    ],
)
def test_what_a_multiprocessor_holds(capability, needs, blocks, limiter):
    found = held(capability, **needs)
    assert (found.blocks, found.limiter) == (blocks, limiter)
    assert found.warps == blocks * needs["threads"] // 32
    assert found.share == found.warps / ARCHITECTURES[capability].warps


def test_a_block_that_is_too_large_is_held_no_time():
    found = held((7, 5), threads=128, registers=32, shared_memory_bytes=65537)
    assert (found.blocks, found.share, found.limiter) == (0, 0.0, "shared memory")
    assert held((9, 0), threads=512, registers=255, shared_memory_bytes=0).blocks == 0


def test_tensor_memory_limits_too():
    few = {"threads": 128, "registers": 32, "shared_memory_bytes": 0}
    assert held((10, 0), **few, tensor_memory_columns=512).limiter == "tensor memory"
    assert held((10, 0), **few, tensor_memory_columns=256).blocks == 2


def test_a_targets_name_means_an_architecture_and_its_shared_memory():
    for capability, architecture in ARCHITECTURES.items():
        target = target_of(target_name(capability))
        assert target.compute_capability == capability
        assert target.shared_memory_bytes == architecture.block_shared_memory_bytes
        assert target.is_cuda
    with pytest.raises(KeyError):
        target_of("sm_10")
