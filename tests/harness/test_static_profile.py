"""The static profile: kernels really compiled for GPUs that are not there, and what is said of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import static_profile
from harness.architectures import ARCHITECTURES, target_of
from harness.sass import MIX, Instruction, block_threads, instructions, mix
from harness.static_profile import (
    DOES_NOT_FIT,
    NO_TENSOR_CORES,
    SERIALISED_WGMMA,
    SPILLS,
    TENSOR_CORE_GROUPS,
    Unit,
    ceiling,
    profile_unit,
    verdicts,
)

ROOT = Path(__file__).resolve().parents[2]

# In a process of its own: the tests' own one has Triton interpret its kernels.
PROFILE = """
import json, sys
from harness.architectures import target_of
from harness.plugin import load_kernel
from harness.problem import Problem
from harness.static_profile import option_sets, profile_kernel, tools

cells = []
for kernel, target, changes, options in json.loads(sys.argv[1]):
    problem = Problem(**{
        "batch": 1, "heads": 1, "kv_heads": 1, "seq_len_q": 1024, "seq_len_k": 1024, "head_dim": 64,
        "causal": False, "dtype": "fp16", **changes,
    })
    loaded, there = load_kernel(kernel, {}, sys.argv[2]), target_of(target)
    chosen = options or option_sets(loaded, problem, there, 1, [])[0]
    cells.append(profile_kernel(loaded.with_options(chosen), problem, there))
print(json.dumps({"cells": cells, "tools": tools()}))
"""


def profiled(rows, folder, package="kernels"):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROFILE, json.dumps(rows), package],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(folder)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def tiles(tile_q, tile_k, num_warps, **others):
    return {"tile_q": tile_q, "tile_k": tile_k, "num_warps": num_warps, "num_stages": 1, **others}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    small = {"head_dim": 16}
    rows = {
        "turing": ("triton_flash", "sm_75", small, tiles(32, 16, 4)),
        "spilling": ("triton_flash", "sm_75", small, tiles(64, 32, 4, max_registers=32)),
        "ampere": ("triton_flash", "sm_80", {}, None),
        "hopper": ("triton_flash", "sm_90", {}, None),
        "starved": ("triton_flash", "sm_90", {}, tiles(128, 64, 4, max_registers=64)),
        "large": ("triton_flash", "sm_86", {"head_dim": 256}, tiles(128, 64, 8, num_stages=3)),
        "blackwell": ("triton_flash", "sm_100", {}, tiles(128, 64, 4)),
        "not_here": ("gluon_hopper", "sm_80", {}, {}),
        "wrong": ("triton_flash", "sm_80", {}, tiles(60, 64, 4)),
    }
    result = profiled(list(rows.values()), tmp_path_factory.mktemp("cache"))
    return {name: cells[0] for name, cells in zip(rows, result["cells"], strict=True)} | result


def test_below_sm_80_there_is_no_tensor_core_and_the_ceiling_is_that_of_the_fp32_pipes(found):
    turing = found["turing"]
    assert turing["verdicts"] == [NO_TENSOR_CORES]
    assert turing["mix"]["fp32_multiply_add"] > 100
    assert turing["mix"]["local_load"] == turing["mix"]["local_store"] == turing["stack_bytes"] == 0
    assert (turing["ceiling_of"], turing["ceiling_teraflops_per_second"]) == ("T4", 8.1)
    # The products are in the loop over the keys.
    assert turing["loop_mix"]["fp32_multiply_add"] > 0.9 * turing["mix"]["fp32_multiply_add"]


def test_what_a_kernel_does_before_and_after_its_loop_is_not_counted_in_the_loop(found):
    for name in ("turing", "ampere", "hopper"):
        whole, loops = found[name]["mix"], found[name]["loop_mix"]
        assert 0 < loops["instructions"] < whole["instructions"], name
        # The output is stored behind the loop over the keys.
        assert loops["global_store"] == 0 < whole["global_store"], name


def test_too_few_registers_spill_and_the_instructions_that_do_it_are_counted(found):
    spilling = found["spilling"]
    assert SPILLS in spilling["verdicts"]
    assert spilling["registers"] == 32
    assert spilling["stack_bytes"] > 0
    assert spilling["loop_mix"]["local_load"] > 0
    assert spilling["mix"]["local_store"] > 0


def test_each_generation_has_its_own_tensor_core_instructions(found):
    for name, group in (("ampere", "mma"), ("hopper", "wgmma"), ("blackwell", "tcgen05")):
        counted = found[name]["mix"]
        for other in ("mma", "wgmma", "tcgen05"):
            assert (counted[other] > 0) == (other == group), (name, other)
        assert NO_TENSOR_CORES not in found[name]["verdicts"]
    assert found["hopper"]["ceiling_teraflops_per_second"] == 989
    assert found["ampere"]["mix"]["async_copy"] > 0
    assert found["blackwell"]["tensor_memory_columns"] > 0


def test_wgmma_that_ptxas_serialises_is_found_and_its_words_are_kept(found):
    assert SERIALISED_WGMMA in found["starved"]["verdicts"]
    assert "serialized" in found["starved"]["warnings"][0]
    assert found["hopper"]["warnings"] == []
    assert SERIALISED_WGMMA not in found["hopper"]["verdicts"]


def test_a_block_that_no_multiprocessor_can_hold_does_not_fit(found):
    large = found["large"]
    assert DOES_NOT_FIT in large["verdicts"]
    assert large["shared_memory_bytes"] > large["block_shared_memory_limit_bytes"] == 99 * 1024
    assert (large["occupancy"], large["occupancy_limiter"]) == (0, "shared memory")
    assert DOES_NOT_FIT not in found["hopper"]["verdicts"]


def test_what_cannot_be_compiled_is_a_row_with_its_message(found):
    assert found["not_here"]["status"] == "unsupported"
    assert "compute capability 8.0" in found["not_here"]["reason"]
    assert found["wrong"]["status"] == "unsupported"
    assert "tile_q is 60" in found["wrong"]["reason"]


def test_the_compilers_are_named_with_their_versions(found):
    assert set(found["tools"]) == {"triton", "ptxas", "ptxas-blackwell", "nvdisasm"}
    assert all(text[0].isdigit() for text in found["tools"].values()), found["tools"]


BROKEN = """
import triton
import triton.language as tl

@triton.jit
def _broken(pointer):
    tl.store(pointer, tl.zeros([3], tl.float32))

class Unit:
    function, signature, constexprs, attrs, options = _broken, {"pointer": "*fp32"}, {}, {}, {}

def attention(q, k, v, *, causal, scale=None):
    raise NotImplementedError

def compile_units(problem, options, target):
    return [Unit]
"""


def test_what_the_compiler_says_against_a_kernel_is_its_rows_message(tmp_path):
    package = tmp_path / "broken_kernels"
    package.mkdir()
    (package / "broken.py").write_text(BROKEN)
    [[cell]] = profiled([("broken", "sm_90", {}, {})], tmp_path, "broken_kernels")["cells"]
    assert cell["status"] == "error"
    assert "CompilationError" in cell["reason"]


SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @P1  HGMMA.64x64x16.F32 R24, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*0040*/             @!UP0 UTMALDG.2D [UR8], [UR6], desc[URZ] ;
        /*0050*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0060*/                   STL.64 [R1+0x8], R4 ;
        /*0070*/                   EXIT ;
.L_x_2:
        /*0080*/                   BRA `(.L_x_2);
        /*0090*/                   NOP;
"""


def test_instructions_are_read_with_their_place_in_a_loop_and_the_trap_at_the_end_is_none():
    code = instructions(SASS)
    assert [one.opcode for one in code if one.in_loop] == ["LDG", "HGMMA", "UTMALDG", "BRA"]
    assert Instruction("STL", ("64",), False) in code
    counts = mix(code)
    assert counts["instructions"] == 9
    expected = {"global_load": 1, "wgmma": 1, "tma_load": 1, "local_store": 1}
    assert {name: count for name, count in counts.items() if count and name != "instructions"} == expected


def test_the_threads_of_a_block_are_those_that_the_ptx_fixes():
    assert block_threads(".entry f()\n.reqntid 128\n{") == 128
    assert block_threads(".entry f()\n.reqntid 32, 4, 2\n{") == 256
    assert block_threads(".entry f()\n{") is None


def test_a_floor_is_not_blamed_for_having_no_products(tmp_path):
    decode = {
        **{"workload": "decode", "seq_len_q": 1, "causal": True, "dtype": "bf16"},
        **{"heads": 2, "seq_len_k": 256},
    }
    cells = profiled([["read_floor", "sm_80", decode, None]], tmp_path)["cells"][0]
    assert {cell["status"] for cell in cells} == {"ok"}
    assert not any(cell["verdicts"] for cell in cells)
    assert not any(cell["mix"][group] for cell in cells for group in TENSOR_CORE_GROUPS)


def unit(*, shared_memory_bytes=0, registers=32, threads=128, tensor_memory_columns=0, warnings=(), **counts):
    none = dict.fromkeys(("instructions", *MIX), 0)
    return Unit(
        *("_forward", threads, registers, 0, shared_memory_bytes, tensor_memory_columns),
        mix=none | counts,
        loop_mix=none,
        warnings=list(warnings),
    )


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_a_block_may_have_all_the_shared_memory_that_a_block_can_get_and_no_byte_more(capability):
    architecture = ARCHITECTURES[capability]
    most = architecture.block_shared_memory_bytes
    assert DOES_NOT_FIT not in verdicts(unit(shared_memory_bytes=most), architecture)
    assert DOES_NOT_FIT in verdicts(unit(shared_memory_bytes=most + 1), architecture)


def test_a_block_may_have_all_registers_of_a_multiprocessor_and_no_more():
    hopper = ARCHITECTURES[9, 0]
    assert DOES_NOT_FIT not in verdicts(unit(registers=128, threads=512), hopper)
    assert DOES_NOT_FIT in verdicts(unit(registers=136, threads=512), hopper)
    assert DOES_NOT_FIT in verdicts(unit(registers=168, threads=512), hopper)
    # 65,280 of 65,536, but they are handed out to whole rounds of four warps.
    assert DOES_NOT_FIT in verdicts(unit(registers=136, threads=480), hopper)


@pytest.mark.parametrize(
    "spilled", [{"local_load": 1}, {"local_store": 1}, {"local_load": 30, "local_store": 9}]
)
def test_one_value_that_goes_through_local_memory_is_a_spill(spilled):
    assert verdicts(unit(wgmma=8, **spilled), ARCHITECTURES[9, 0]) == [SPILLS]
    assert verdicts(unit(wgmma=8, shared_load=30, global_store=9), ARCHITECTURES[9, 0]) == []


@pytest.mark.parametrize("group", TENSOR_CORE_GROUPS)
def test_products_on_any_generation_of_tensor_cores_have_the_tensor_cores_ceiling(group):
    peak = ARCHITECTURES[9, 0].peak
    products = unit(fp32_multiply_add=500, **{group: 1})
    assert ceiling(products, peak) == 989
    assert NO_TENSOR_CORES not in verdicts(products, ARCHITECTURES[9, 0])
    assert ceiling(unit(fp32_multiply_add=500), peak) == 67


def test_the_tensor_memory_of_a_block_keeps_others_off_its_multiprocessor(monkeypatch):
    held = {}
    for columns in (0, 256, 512):
        found = unit(tensor_memory_columns=columns, tcgen05=8)
        monkeypatch.setattr(static_profile, "compile_unit", lambda one, target: one)
        monkeypatch.setattr(static_profile, "read_unit", lambda compiled: compiled)
        cell = profile_unit(found, target_of("sm_100"))
        held[columns] = (cell["blocks_per_multiprocessor"], cell["occupancy"], cell["occupancy_limiter"])
    assert held == {
        0: (16, 1.0, "warps"),
        256: (2, 2 * 4 / 64, "tensor memory"),
        512: (1, 4 / 64, "tensor memory"),
    }
