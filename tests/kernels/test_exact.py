"""Attention whose exact answer is known, to the last bit: each query picks one key, or two that are alike.

Under Triton's own assembler, and under a newer one: older ones are reported to overwrite the registers that
a wgmma still reads (Triton's issues 9433 and 11781), which shows in such inputs alone.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import gluon_hopper, naive, sdpa, triton_decode, triton_flash
from tests.kernels.compiler import output_of
from tests.kernels.oracle import DEVICE

ROOT = Path(__file__).parents[2]
DTYPES = (torch.float16, torch.bfloat16)
SCALE = math.log(2)  # which makes powers of two of the weights
STATED = os.environ.get("NEWER_PTXAS")  # where nothing can be installed


@functools.cache
def choice(batch, heads, kv_heads, seq_len, head_dim, dtype, causal):
    """Q, K and V of small integers, and the one right answer.

    A key is a code of signs, and two neighbours have the same one; a query is the code of a key that it
    sees, 32 times as large. The scores of all other keys are lower by far more than fp32 can tell, so the
    answer is a value, or the mean of two.
    """
    generator = torch.Generator().manual_seed(seq_len + head_dim)
    codes = torch.randint(2, (batch, kv_heads, (seq_len + 1) // 2, head_dim), generator=generator) * 2 - 1
    k = codes.repeat_interleave(2, dim=2)[:, :, :seq_len]
    v = torch.randint(-8, 9, (batch, kv_heads, seq_len, head_dim), generator=generator)
    seen = torch.arange(1, seq_len + 1) if causal else torch.full((seq_len,), seq_len)
    picked = (torch.rand(batch, heads, seq_len, generator=generator) * seen).long()
    group = heads // kv_heads
    every_k, every_v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    q = 32 * every_k.gather(2, picked[..., None].expand(-1, -1, -1, head_dim))
    # The neighbour with the same code: behind an even key, before an odd one.
    other = picked ^ 1
    other = torch.where(other < seen, other, picked)
    answers = [every_v.gather(2, key[..., None].expand(-1, -1, -1, head_dim)) for key in (picked, other)]
    expected = (answers[0] + answers[1]) / 2
    return *(tensor.to(dtype).to(DEVICE) for tensor in (q, k, v)), expected.to(dtype).to(DEVICE)


def assert_exact(attention, seq_len, head_dim, dtype, causal, heads=(4, 2), batch=2, calls=1):
    q, k, v, expected = choice(batch, *heads, seq_len, head_dim, dtype, causal)
    for _ in range(calls):
        output = attention(q, k, v, causal=causal, scale=SCALE)
        assert torch.equal(output, expected), (output != expected).nonzero()[:4].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [naive, sdpa, triton_flash], ids=["naive", "sdpa", "triton_flash"])
def test_each_query_gets_the_value_it_picks(kernel, causal, dtype):
    for seq_len in (1, 2, 65, 130):
        assert_exact(kernel.attention, seq_len, 64, dtype, causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_newest_query_gets_the_value_it_picks_in_decode(dtype):
    for seq_len in (1, 2, 65, 130):
        q, k, v, expected = choice(2, 4, 2, seq_len, 64, dtype, causal=True)
        output = triton_decode.decode(q[:, :, -1:], k, v, scale=SCALE)
        assert torch.equal(output, expected[:, :, -1:])


def candidates_here(module, head_dim, causal):
    """Each candidate of a kernel for this GPU that is meant for this head_dim and mask, at any seq_len."""
    if DEVICE != "cuda":
        return []
    capability = torch.cuda.get_device_capability()
    target = SimpleNamespace(is_cuda=True, device="cuda", compute_capability=capability)
    found = []
    for seq_len in (1024, 1537, 4096, 16384):
        sizes = {"batch": 1, "heads": 4, "kv_heads": 4, "seq_len_q": seq_len, "seq_len_k": seq_len}
        cell = SimpleNamespace(head_dim=head_dim, causal=causal, dtype="bf16", **sizes)
        found += [options for options in module.candidates(cell, target) if options not in found]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("module", [triton_flash, gluon_hopper], ids=["triton_flash", "gluon_hopper"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_each_candidate_gives_each_query_the_value_it_picks(module, causal, head_dim, dtype):
    found = candidates_here(module, head_dim, causal)
    if not found:
        pytest.skip("no candidate is for this machine")
    for options in found:
        attention = functools.partial(module.attention, **options)
        for seq_len in (1, 63, 130, 1000, 1100, 1537):
            assert_exact(attention, seq_len, head_dim, dtype, causal, heads=(8, 4))
        assert_exact(attention, 2048, head_dim, dtype, causal, heads=(16, 16), batch=4, calls=10)


# ---- under a newer assembler ----


@pytest.fixture(scope="module")
def newer_ptxas(tmp_path_factory):
    """The path of a ptxas that is newer than Triton's own."""
    if STATED:
        return Path(STATED)
    folder = tmp_path_factory.mktemp("assembler")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    requirements = ["--requirement", str(ROOT / "requirements-assembler.txt")]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install a newer assembler: {' '.join(done.stderr.split())[-200:]}")
    [path] = folder.glob("nvidia/*/bin/ptxas")
    path.chmod(0o755)
    return path


# Compiles for sm_90 by the assembler in TRITON_PTXAS_PATH, and says what came of it.
COMPILE = """
import json, sys
from types import SimpleNamespace
from triton import knobs
from harness.plugin import compile_unit
from harness.static_profile import read_unit
from harness.target import Target
from kernels import gluon_hopper, triton_flash

hopper = Target("cuda", "Hopper", (9, 0))
for module in (gluon_hopper, triton_flash):
    for head_dim, causal in json.loads(sys.argv[1]):
        problem = SimpleNamespace(
            batch=1, heads=4, kv_heads=4, seq_len_q=1000, seq_len_k=1000,
            head_dim=head_dim, causal=causal, dtype="bf16",
        )
        options = next(
            one for one in module.candidates(problem, hopper) if one["q_in_registers"]
        )
        [unit] = module.compile_units(problem, options, hopper)
        compiled = compile_unit(unit, hopper)
        if module is gluon_hopper:
            gluon_hopper.check_layout(compiled)
        found = read_unit(compiled)
        print(json.dumps({
            "ptxas": knobs.nvidia.ptxas.path, "version": knobs.nvidia.ptxas.version,
            "spills": found.spills, "tensor_cores": found.uses_tensor_cores,
        }))
"""


@pytest.mark.slow
def test_a_newer_assembler_makes_of_the_kernels_what_was_meant(newer_ptxas, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(newer_ptxas))
    printed = output_of(COMPILE, [[64, False], [128, True]], tmp_path)
    rows = [json.loads(line) for line in printed.splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert row["ptxas"] == str(newer_ptxas)
        assert row["tensor_cores"]
        assert not row["spills"]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_the_answers_are_exact_under_a_newer_assembler_too(newer_ptxas, tmp_path):
    again = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", __file__]
    done = subprocess.run(
        [*again, "-k", "test_each_candidate_gives"],
        env={**os.environ, "TRITON_PTXAS_PATH": str(newer_ptxas), "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
