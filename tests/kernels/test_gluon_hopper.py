import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import gluon_hopper
from kernels.gluon_hopper import attention
from tests.kernels import barrier_model
from tests.kernels.oracle import DEVICE, assert_close, formula, inputs

CPU = SimpleNamespace(is_cuda=False, device="cpu", compute_capability=None)
HOPPER = SimpleNamespace(is_cuda=True, device="cuda", compute_capability=(9, 0))
SHARED_MEMORY_BYTES = 227 * 1024

on_hopper = pytest.mark.skipif(
    DEVICE != "cuda" or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def problem(head_dim=64, causal=False, **changes):
    values = {"batch": 1, "heads": 4, "kv_heads": 4, "seq_len_q": 512, "seq_len_k": 512, "dtype": "fp16"}
    return SimpleNamespace(head_dim=head_dim, causal=causal, **{**values, **changes})


def every_candidate(causal=None):
    """(head_dim, options), each once, of the problems with this mask or of all."""
    found = []
    for head_dim, mask, seq_len in itertools.product((64, 128), (False, True), (1024, 4096)):
        if causal in (None, mask):
            cell = problem(head_dim, mask, seq_len_q=seq_len, seq_len_k=seq_len)
            found += [(head_dim, option) for option in gluon_hopper.candidates(cell, HOPPER)]
    return [pair for index, pair in enumerate(found) if pair not in found[:index]]


# ---- what needs no GPU ----


def test_other_targets_and_head_dims_are_said_to_be_unsupported():
    assert "a CPU" in gluon_hopper.unsupported(problem(), CPU)
    for compute_capability in ((8, 0), (10, 0), (12, 0)):
        other = SimpleNamespace(is_cuda=True, device="cuda", compute_capability=compute_capability)
        assert "capability 9.0 alone" in gluon_hopper.unsupported(problem(), other)
        assert gluon_hopper.candidates(problem(), other) == []
    assert "head_dim 80" in gluon_hopper.unsupported(problem(80), HOPPER)
    assert gluon_hopper.unsupported(problem(128, True), HOPPER) is None


def test_tensors_elsewhere_are_refused():
    with pytest.raises(ValueError, match=r"q is on cpu: expected a GPU of compute capability 9\.0"):
        attention(*(torch.zeros(1, 1, 4, 64, dtype=torch.float16) for _ in range(3)), causal=False)


GOOD = {
    **{"consumers": 2, "tile_k": 128, "stages": 2},
    **{"ping_pong": False, "lazy_rescale": False, "packed_p": False},
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"consumers": 2},
            "tile_k is None: expected a number; give all of "
            "consumers, tile_k, stages, ping_pong, lazy_rescale, packed_p",
        ),
        ({**GOOD, "consumers": 4}, "consumers is 4"),
        ({**GOOD, "tile_k": 96}, "tile_k is 96"),
        ({**GOOD, "stages": 1}, "stages is 1: expected 2 at least"),
        ({**GOOD, "stages": 9}, "bytes of shared memory"),
        ({**GOOD, "speed": 1}, "speed is not a launch option"),
    ],
)
def test_launch_options_are_given_together_and_make_sense(options, message):
    assert message in gluon_hopper.unsupported(problem(64), HOPPER, **options)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_len", [1024, 16384])
def test_the_candidates_are_different_and_supported(head_dim, causal, seq_len):
    cell = problem(head_dim, causal, seq_len_q=seq_len, seq_len_k=seq_len)
    options = gluon_hopper.candidates(cell, HOPPER)
    assert len({json.dumps(option) for option in options}) == len(options) >= 1
    assert all(gluon_hopper.unsupported(cell, HOPPER, **option) is None for option in options)
    assert gluon_hopper.candidates(cell, HOPPER, **options[0]) == options[:1]


def test_the_barrier_model_has_as_many_slots_for_q_as_the_kernel():
    assert gluon_hopper.Q_SLOTS.value == barrier_model.Q_SLOTS


def test_only_what_tma_cannot_read_in_place_is_copied():
    tensor = torch.zeros(2, 3, 40, 64, dtype=torch.float16)
    in_place = [
        tensor,
        tensor.transpose(1, 2),
        torch.zeros(2, 40, 3, 3, 64, dtype=torch.float16)[:, :, 1].transpose(1, 2),
        torch.zeros(2, 3, 40, 72, dtype=torch.float16)[..., :64],
        tensor[:1].as_strided((1, 3, 40, 64), (5, 2560, 64, 1)),
    ]
    copied = [
        torch.zeros(2, 3, 40, 68, dtype=torch.float16)[..., :64],
        torch.zeros(2 * 3 * 40 * 64 + 1, dtype=torch.float16)[1:].view(2, 3, 40, 64),
        tensor[:, :1].expand(2, 3, 40, 64),
    ]
    assert all(gluon_hopper._readable(t) is t for t in in_place)
    for t in copied:
        copy = gluon_hopper._readable(t)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, t)
    for t in (*in_place, *map(gluon_hopper._readable, copied)):
        gluon_hopper._descriptor(t, 64)  # Triton's own checks of strides and alignment


def test_the_memory_law_counts_the_tensors_alone():
    assert gluon_hopper.memory_law(problem(kv_heads=2)) == 2 * (2 * 4 * 512 * 64 + 2 * 2 * 512 * 64)


# Compiles one option set after the other for sm_90, and says what the compiler and the assembler made of it.
COMPILE = """
import json, re, subprocess, sys, tempfile
from pathlib import Path
from types import SimpleNamespace
import triton
from harness.plugin import compile_unit
from harness.target import Target
from kernels import gluon_hopper

tools = Path(triton.__file__).parent / "backends/nvidia/bin"
hopper = Target("cuda", "Hopper", (9, 0))
for head_dim, causal, dtype, options in json.loads(sys.argv[1]):
    problem = SimpleNamespace(head_dim=head_dim, causal=causal, dtype=dtype, seq_len_k=1000)
    [unit] = gluon_hopper.compile_units(problem, options, hopper)
    compiled = compile_unit(unit, hopper)
    gluon_hopper.check_layout(compiled)
    moved = dict(compiled.asm)
    offset = re.search(r"global_smem, i32 (\\d+)", re.search("mbarrier.init.*", moved["llir"])[0])[1]
    moved["llir"] = moved["llir"].replace(f"@global_smem, i32 {offset})", "@global_smem, i32 64)")
    try:
        gluon_hopper.check_layout(SimpleNamespace(asm=moved))
        refusal = None
    except RuntimeError as fault:
        refusal = str(fault)
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        command = [tools / "ptxas", "-v", "--gpu-name=sm_90a", ptx.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True)
    said = said.stdout + said.stderr
    sizes = r"(\\d+) bytes stack frame, (\\d+) bytes spill stores, (\\d+) bytes spill loads"
    spills = re.search(sizes, said)
    print(json.dumps({
        "refusal": refusal,
        "offset": int(offset),
        "spills": [int(count) for count in spills.groups()],
        "warnings": re.findall("C75.*", said),  # of wgmma instructions that are serialized
        "shared": compiled.metadata.shared,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        "tma": compiled.asm["ptx"].count("cp.async.bulk.tensor"),
    }))
"""


@pytest.fixture(scope="module")
def compiled_candidates(tmp_path_factory):
    cells = [
        [head_dim, causal, "bf16", option]
        for causal in (False, True)
        for head_dim, option in every_candidate(causal)
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(cells)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(cells)
    return list(zip(cells, rows, strict=True))


@pytest.mark.slow
def test_every_candidate_compiles_for_hopper_within_its_shared_memory_and_without_spills(compiled_candidates):
    for cell, row in compiled_candidates:
        assert row["wgmma"] > 0
        assert row["tma"] > 0
        assert row["spills"] == [0, 0, 0], (cell, row)
        assert row["warnings"] == [], (cell, row)
        assert row["shared"] <= SHARED_MEMORY_BYTES, (cell, row)


@pytest.mark.slow
def test_the_barriers_of_every_candidate_lie_where_its_assembly_looks_for_them(compiled_candidates):
    for (head_dim, _, _, options), row in compiled_candidates:
        shape = (options["consumers"], options["tile_k"], options["stages"])
        assert row["offset"] == gluon_hopper._barriers_at(head_dim, *shape)


@pytest.mark.slow
def test_barriers_that_lie_elsewhere_are_refused(compiled_candidates):
    for _, row in compiled_candidates:
        assert "lays out shared memory otherwise" in row["refusal"]


# ---- what needs a Hopper GPU ----


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("head_dim", "option"), every_candidate())
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_candidate_is_the_formula_for_any_length(head_dim, option, causal, dtype):
    for length in (1, 3, 17, 63, 64, 65, 97, 127, 128, 129, 191, 193, 257, 385, 1000, 1023, 1025):
        q, k, v = inputs(2, 4, 2, length, length, head_dim, dtype, seed=length)
        assert_close(attention(q, k, v, causal=causal, **option), q, k, v, causal)
    for seq_len_q, seq_len_k in ((77, 500), (500, 77)):
        q, k, v = inputs(1, 3, 1, seq_len_q, seq_len_k, head_dim, dtype)
        assert_close(attention(q, k, v, causal=causal, **option), q, k, v, causal)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("head_dim", "option"), every_candidate())
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_call_is_bit_identical(head_dim, option, causal):
    q, k, v = inputs(2, 16, 4, 1111, 1111, head_dim)
    first = attention(q, k, v, causal=causal, **option)
    assert all(torch.equal(first, attention(q, k, v, causal=causal, **option)) for _ in range(50))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("head_dim", "option"), every_candidate())
def test_small_integers_give_the_exact_answer(head_dim, option):
    # Equal scores: the output is the mean of V's rows, here of 256, which fp16 holds exactly.
    q, k, v = inputs(2, 16, 16, 512, 256, head_dim)
    v = v.mul(4).round().clamp(-8, 8)
    expected = v.double().mean(2, keepdim=True).half().double().expand(-1, -1, 512, -1)
    for _ in range(20):
        output = attention(torch.zeros_like(q), k, v, causal=False, **option)
        assert torch.equal(output.double(), expected)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True])
def test_nan_after_the_last_row_and_between_rows_does_not_leak_in(causal):
    views = []
    for tensor in inputs(2, 4, 2, 150, 150, 64):
        buffer = torch.full((*tensor.shape[:2], 300, 72), torch.nan, dtype=tensor.dtype, device=DEVICE)
        view = buffer[:, :, :150, :64]
        view.copy_(tensor)
        views.append(view)
    assert_close(attention(*views, causal=causal), *views, causal)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True])
def test_any_strides_and_an_odd_start_are_the_formula(causal):
    q, k, v = inputs(2, 3, 3, 140, 140, 64)
    odd = torch.zeros(q.numel() + 1, dtype=q.dtype, device=DEVICE)[1:].view(q.shape).copy_(q)
    broadcast = k[:, :1].expand(k.shape)
    transposed = v.transpose(1, 2).contiguous().transpose(1, 2)
    assert_close(attention(odd, broadcast, transposed, causal=causal), odd, broadcast, transposed, causal)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_the_scale_is_the_callers(scale, causal):
    q, k, v = inputs(1, 2, 2, 140, 150, 64)
    assert_close(attention(q, k, v, causal=causal, scale=scale), q, k, v, causal, scale=scale)


@pytest.mark.gpu
@on_hopper
def test_inputs_scaled_by_thirty_do_not_overflow():
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (30 * tensor for tensor in inputs(1, 2, 2, 300, 300, 64, dtype))
        for causal in (False, True):
            assert_close(attention(q, k, v, causal=causal), q, k, v, causal)


@pytest.mark.gpu
@on_hopper
def test_nothing_is_written_around_the_output(monkeypatch):
    q, k, v = inputs(2, 3, 3, 133, 133, 64)
    zone = 65536
    storage = torch.full((q.numel() + 2 * zone,), 12345.0, dtype=q.dtype, device=DEVICE)
    storage[zone:-zone] = torch.nan
    monkeypatch.setattr(torch, "empty_like", lambda tensor: storage[zone:-zone].view(tensor.shape))
    output = attention(q, k, v, causal=True)
    monkeypatch.undo()
    assert (storage[:zone] == 12345.0).all()
    assert (storage[-zone:] == 12345.0).all()
    assert_close(output, q, k, v, True)


@pytest.mark.gpu
@on_hopper
def test_calls_on_two_streams_and_replays_of_a_graph_beside_them_are_right():
    q, k, v = inputs(4, 16, 16, 1000, 1000, 64)
    expected = attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(q, k, v, causal=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    torch.cuda.synchronize()
    for _ in range(20):
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(attention(q, k, v, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in (captured, *outputs))


@pytest.mark.gpu
@on_hopper
def test_rows_that_see_no_key_give_zero_and_no_rows_give_none():
    for seq_len_q, seq_len_k, batch in ((5, 0, 1), (0, 5, 1), (5, 5, 0)):
        q, k, v = inputs(batch, 2, 2, seq_len_q, seq_len_k, 64)
        assert torch.equal(attention(q, k, v, causal=False), torch.zeros_like(q))


@pytest.mark.gpu
@on_hopper
def test_more_than_two_to_the_31_elements_are_addressed_right():
    length = 2**31 // 128 // 64 + 64
    q = torch.randn(1, 64, 16, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, 64, length, 128, dtype=torch.bfloat16, device="cuda")
    v = torch.randn_like(k)
    output = attention(q, k, v, causal=False)
    error = (output[:, -1:].double() - formula(q[:, -1:], k[:, -1:], v[:, -1:], False)).abs().max().item()
    assert error < 1e-3
