import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from kernels import read_floor, split_keys, triton_decode
from kernels.triton_decode import decode
from tests.kernels.compiler import output_of
from tests.kernels.decode_oracle import assert_decode_close, cache, decode_formula, paged
from tests.kernels.oracle import DEVICE

CPU = SimpleNamespace(is_cuda=False, device="cpu", compute_capability=None, multiprocessors=None)
SHARED_MEMORY_KIB = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
gpu_only = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


def gpu(*compute_capability):
    return SimpleNamespace(
        is_cuda=True, device="cuda", compute_capability=compute_capability, multiprocessors=132
    )


def problem(**changes):
    values = {
        "batch": 1,
        "heads": 32,
        "kv_heads": 8,
        "seq_len_q": 1,
        "seq_len_k": 4096,
        "head_dim": 128,
        "dtype": "bf16",
        "workload": "decode",
        "causal": True,
        "lengths": "equal",
        "page_size": 0,
        "input_bytes": 1000,
        "output_bytes": 10,
    }
    return SimpleNamespace(**{**values, **changes})


def tiles(tile_k=32, **rest):
    return {"tile_k": tile_k, "num_warps": 4, "num_stages": 1, **rest}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("context", "queries"), [(1, 1), (63, 2), (65, 8), (1000, 1), (1000, 5)])
def test_a_context_that_nothing_divides_is_the_formula(context, queries, head_dim, dtype):
    q, k, v, _ = cache(1, 4, 2, queries, context, head_dim, dtype)
    for splits in (1, 3):
        output = decode(q, k, v, **tiles(64, splits=splits))
        assert_decode_close(output, q, k, v, [context])


@pytest.mark.parametrize("combine", triton_decode.COMBINE)
def test_a_long_context_is_the_formula(combine):
    q, k, v, _ = cache(1, 2, 1, 1, 4097, 16)
    assert_decode_close(decode(q, k, v, **tiles(128, splits=4, combine=combine)), q, k, v, [4097])


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 16, 32])
@pytest.mark.parametrize("queries", [1, 3])
def test_consecutive_query_heads_share_a_head_of_k_and_v(group, queries):
    q, k, v, lengths = cache(2, 2 * group, 2, queries, 70, 32, lengths=[70, 33])
    output = decode(q, k, v, seq_lens=lengths, **tiles(splits=2))
    assert_decode_close(output, q, k, v, lengths.tolist())


@pytest.mark.parametrize("queries", range(1, 9))
def test_query_i_sees_the_keys_up_to_its_own(queries):
    lengths = [40, 9, 3, 0]
    q, k, v, seq_lens = cache(4, 4, 2, queries, 40, 16, torch.bfloat16, lengths)
    output = decode(q, k, v, seq_lens=seq_lens, **tiles(16, splits=3))
    assert_decode_close(output, q, k, v, lengths)
    for index, length in enumerate(lengths):
        unseeing = max(0, queries - length)
        assert not output[index, :, :unseeing].any()
        assert output[index, :, unseeing:].any(-1).all()


def test_more_rows_than_a_tile_holds_are_all_visited():
    q, k, v, seq_lens = cache(2, 20, 2, 8, 50, 16, lengths=[50, 20])
    assert triton_decode._row_constants(80, 16)["ROW_TILES"] == 2
    for combine in triton_decode.COMBINE:
        output = decode(q, k, v, seq_lens=seq_lens, **tiles(16, splits=3, combine=combine))
        assert_decode_close(output, q, k, v, [50, 20])


@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 100, 256])
def test_every_head_dim_is_the_formula(head_dim):
    q, k, v, _ = cache(1, 4, 2, 2, 70, head_dim, torch.bfloat16)
    assert_decode_close(decode(q, k, v, **tiles(splits=2)), q, k, v, [70])


def test_any_number_of_splits_gives_the_same_answer():
    q, k, v, seq_lens = cache(1, 2, 1, 1, 530, 32, lengths=[525])
    exact = decode_formula(q, k, v, [525])
    outputs = [decode(q, k, v, seq_lens=seq_lens, **tiles(16, splits=splits)) for splits in range(1, 33)]
    assert_decode_close(outputs[0], q, k, v, [525])
    # Half a unit in the last place of the largest output, twice: the rounding of either.
    unit = 2.0 ** (math.floor(math.log2(exact.abs().max().item())) - 10)
    for output in outputs:
        assert (output.double() - outputs[0].double()).abs().max() <= unit


@pytest.mark.parametrize("options", [{"splits": 5}, {"split_keys": 64}, {"splits": 40}])
def test_the_last_program_and_a_second_kernel_merge_alike(options):
    q, k, v, seq_lens = cache(2, 4, 2, 2, 300, 32, torch.bfloat16, [300, 64])
    first, second = (
        decode(q, k, v, seq_lens=seq_lens, **tiles(16, combine=combine, **options))
        for combine in triton_decode.COMBINE
    )
    assert torch.equal(first, second)
    assert_decode_close(first, q, k, v, [300, 64])


def launches(monkeypatch):
    """The functions that are launched from now on."""
    launched = []
    genuine = split_keys.Launch.__call__

    def launch(self, *tensors):
        launched.append(self.function)
        genuine(self, *tensors)

    monkeypatch.setattr(split_keys.Launch, "__call__", launch)
    return launched


def test_where_a_capture_finds_no_counters_a_second_kernel_merges(monkeypatch):
    q, k, v, _ = cache(1, 4, 2, 1, 200, 32)
    expected = decode(q, k, v, **tiles(splits=3))
    launched = launches(monkeypatch)
    monkeypatch.setattr(triton_decode, "counters", lambda device, count: None)
    assert torch.equal(decode(q, k, v, **tiles(splits=3)), expected)
    assert launched == [triton_decode._decode_splits, triton_decode._merge_splits]


def test_one_launch_is_enough_where_the_last_program_merges_or_nothing_is_split(monkeypatch):
    q, k, v, _ = cache(1, 4, 2, 1, 200, 32)
    launched = launches(monkeypatch)
    for options in ({"splits": 3}, {"splits": 1, "combine": "kernel"}, {"splits": 9, "tile_k": 256}):
        launched.clear()
        decode(q, k, v, **{**tiles(), **options})
        assert launched == [triton_decode._decode_splits]


@pytest.mark.parametrize("options", [{"splits": 3}, {"split_keys": 32}])
def test_a_sequences_answer_does_not_depend_on_its_neighbours_or_on_the_room(options):
    q, k, v, seq_lens = cache(4, 4, 2, 2, 200, 32, lengths=[130, 200, 0, 7])
    together = decode(q, k, v, seq_lens=seq_lens, **tiles(16, **options))
    for index in range(4):
        for room in (200, max(1, int(seq_lens[index]))):
            alone = decode(
                q[index : index + 1],
                k[index : index + 1, :, :room],
                v[index : index + 1, :, :room],
                seq_lens=seq_lens[index : index + 1],
                **tiles(16, **options),
            )
            assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("tile_k", [16, 64, 128])
def test_pages_give_the_same_bits_whatever_the_table_holds_beyond_the_end(page_size, tile_k):
    lengths = [201, 64, 0]
    q, k, v, seq_lens = cache(3, 4, 2, 2, 256, 32, torch.bfloat16, lengths)
    k_pages, v_pages, table = paged(k, v, page_size, lengths)
    expected = decode(q, k, v, seq_lens=seq_lens, **tiles(tile_k, splits=3))
    output = decode(q, k_pages, v_pages, seq_lens=seq_lens, block_table=table, **tiles(tile_k, splits=3))
    assert torch.equal(output, expected)
    assert_decode_close(output, q, k, v, lengths)


def test_without_lengths_every_page_of_the_table_is_full():
    q, k, v, _ = cache(2, 4, 2, 1, 64, 32)
    k_pages, v_pages, table = paged(k, v, 16)
    output = decode(q, k_pages, v_pages, block_table=table[:, :4], **tiles(32, splits=2))
    assert_decode_close(output, q, k, v, [64, 64])


def test_lengths_outside_the_cache_are_taken_as_the_nearest_possible():
    q, k, v, _ = cache(2, 4, 2, 1, 50, 16)
    seq_lens = torch.tensor([-3, 5000], dtype=torch.int32, device=DEVICE)
    assert_decode_close(decode(q, k, v, seq_lens=seq_lens, **tiles(16, splits=2)), q, k, v, [0, 50])


@pytest.mark.parametrize("layout", ["transposed", "fused", "gaps"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_tensor_is_walked_by_its_own_strides(layout, which):
    tensors = list(cache(2, 4, 4, 3, 70, 40)[:3])
    tensor = tensors[which]
    if layout == "transposed":
        view = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "fused":
        batch, heads, rows, head_dim = tensor.shape
        buffer = torch.full((batch, rows, 3, heads, head_dim), math.nan, dtype=tensor.dtype, device=DEVICE)
        view = buffer[:, :, 1].transpose(1, 2)
        view.copy_(tensor)
    else:
        batch, heads, rows, head_dim = tensor.shape
        buffer = torch.full(
            (batch, heads, rows + 9, head_dim + 3), math.nan, dtype=tensor.dtype, device=DEVICE
        )
        view = buffer[:, :, :rows, :head_dim]
        view.copy_(tensor)
    tensors[which] = view
    assert_decode_close(decode(*tensors, **tiles(16, splits=2)), *tensors, [70, 70])


def test_pages_are_walked_by_their_strides():
    q, k, v, _ = cache(2, 4, 2, 1, 64, 32)
    k_pages, v_pages, table = paged(k, v, 16)
    # As vLLM keeps them: (2, pages, page_size, kv_heads, head_dim).
    both = torch.stack([k_pages, v_pages]).transpose(2, 3).contiguous().transpose(2, 3)
    output = decode(q, both[0], both[1], block_table=table[:, :4], **tiles(32, splits=2))
    assert_decode_close(output, q, k, v, [64, 64])


@pytest.mark.parametrize("scale", [0.0, -0.3, 2, 1e-46])
def test_the_scale_is_the_callers(scale):
    q, k, v, _ = cache(1, 2, 2, 2, 50, 32)
    assert_decode_close(decode(q, k, v, scale=scale, **tiles(16, splits=2)), q, k, v, [50], scale)


def test_inputs_scaled_by_thirty_do_not_overflow():
    q, k, v, _ = (t if t is None else 30 * t for t in cache(1, 4, 2, 2, 65, 64))
    assert_decode_close(decode(q, k, v, **tiles(16, splits=3)), q, k, v, [65])


def test_equal_scores_give_the_exact_mean():
    q, k, v, _ = cache(1, 2, 2, 1, 64, 32)
    v = v.mul(4).round().clamp(-8, 8)
    output = decode(torch.zeros_like(q), k, v, **tiles(16, splits=3))
    assert torch.equal(output.double(), v.double().mean(2, keepdim=True))


@pytest.mark.parametrize(("batch", "context"), [(0, 5), (1, 0)])
def test_no_sequence_gives_none_and_no_room_gives_zero(batch, context):
    q, k, v, _ = cache(batch, 2, 2, 1, context, 16)
    output = decode(q, k, v)
    assert output.dtype == q.dtype
    assert torch.equal(output, torch.zeros_like(q))


@pytest.mark.parametrize("combine", triton_decode.COMBINE)
def test_nothing_is_written_around_output_and_parts_and_nothing_is_left_out(combine, monkeypatch):
    q, k, v, seq_lens = cache(3, 6, 2, 2, 70, 40, lengths=[70, 0, 20])
    genuine = torch.empty
    given = []

    def guarded_empty(shape, **rest):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count, zone = math.prod(shape), 4096
        storage = torch.full((count + 2 * zone,), 12345.0, dtype=rest["dtype"], device=rest["device"])
        given.append((storage, zone))
        storage[zone:-zone] = torch.nan
        return storage[zone:-zone].view(shape)

    monkeypatch.setattr(torch, "empty", guarded_empty)
    output = decode(q, k, v, seq_lens=seq_lens, **tiles(16, splits=3, combine=combine))
    monkeypatch.setattr(torch, "empty", genuine)
    assert len(given) == 2
    for storage, zone in given:
        assert (storage[:zone] == 12345.0).all()
        assert (storage[-zone:] == 12345.0).all()
    assert_decode_close(output, q, k, v, [70, 0, 20])


def test_the_counters_are_zero_again_after_a_call(monkeypatch):
    kept = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(triton_decode, "counters", lambda device, count: kept[:count])
    q, k, v, seq_lens = cache(3, 4, 2, 1, 70, 16, lengths=[70, 0, 20])
    first = decode(q, k, v, seq_lens=seq_lens, **tiles(16, splits=3))
    assert not kept.any()
    assert torch.equal(decode(q, k, v, seq_lens=seq_lens, **tiles(16, splits=3)), first)


def test_the_inputs_are_left_as_they_were():
    q, k, v, seq_lens = cache(2, 4, 2, 1, 70, 16, lengths=[70, 20])
    k_pages, v_pages, table = paged(k, v, 16, [70, 20])
    tensors = (q, k_pages, v_pages, seq_lens, table)
    before = [tensor.clone() for tensor in tensors]
    decode(q, k_pages, v_pages, seq_lens=seq_lens, block_table=table)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(tensors, before, strict=True))


def test_a_bad_argument_is_refused_by_name():
    q, k, v, _ = cache(1, 2, 2, 1, 4, 16)
    with pytest.raises(ValueError, match="v is bfloat16"):
        decode(q, k, v.bfloat16())
    with pytest.raises(ValueError, match=r"q requires a gradient.*forward only"):
        decode(q.clone().requires_grad_(), k, v)
    with pytest.raises(ValueError, match="q has head_dim 8: expected 16 to 256"):
        decode(q[..., :8], k[..., :8], v[..., :8])


def test_a_call_like_an_earlier_one_is_not_checked_again_and_one_unlike_it_is(monkeypatch):
    q, k, v, seq_lens = cache(2, 4, 2, 1, 70, 16, lengths=[70, 20])
    options = tiles(16, splits=2)
    first = decode(q, k, v, seq_lens=seq_lens, scale=1, **options)
    checked = []
    genuine = triton_decode.check_decode_inputs
    monkeypatch.setattr(
        triton_decode, "check_decode_inputs", lambda *a, **b: (checked.append(a), genuine(*a, **b))
    )
    again = decode(q.clone(), k.clone(), v.clone(), seq_lens=seq_lens.clone(), scale=1, **options)
    assert torch.equal(again, first)
    assert not checked
    for changed, fault in (
        ({"scale": True}, "scale is True"),
        ({"seq_lens": seq_lens.long()}, "seq_lens is int64"),
        ({"q": q.clone().requires_grad_()}, "q requires a gradient"),
        ({"v": v.bfloat16()}, "v is bfloat16"),
        ({"k": [1.0]}, "k is a list"),
    ):
        call = {"q": q, "k": k, "v": v, "seq_lens": seq_lens, "scale": 1, **options, **changed}
        with pytest.raises(ValueError, match=fault):
            decode(**call)
    wide = torch.zeros(2, 2, 70, 32, dtype=k.dtype, device=DEVICE)[..., :16]
    wide.copy_(k)
    assert torch.equal(decode(q, wide, v, seq_lens=seq_lens, scale=1, **options), first)


def test_the_parameters_of_each_kernel_are_tensors_scalars_and_constants_in_the_order_of_a_launch():
    q, k, v, _ = cache(1, 4, 2, 1, 70, 16)
    for module in (triton_decode, read_floor):
        module._plans.clear()
        module.decode(q, k, v, **tiles(16, splits=2))
        [plan] = module._plans.values()
        for launch, tensors in (
            (plan.splits, 8 if module is triton_decode else 7),
            (plan.counted_splits, 8 if module is triton_decode else 7),
            (plan.merge, 3),
        ):
            names = launch.function.arg_names
            assert all(name.endswith("_pointer") for name in names[:tensors])
            assert names[tensors + len(launch.scalars) :] == list(launch.constants)


BAD_OPTIONS = [
    ({"tile_k": 64}, "num_warps is None: expected a number; give all of tile_k, num_warps, num_stages"),
    ({"splits": 4}, "tile_k is None"),
    (tiles(48), "tile_k is 48: expected a power of two"),
    (tiles(8), "tile_k is 8: expected a power of two, 16 or more"),
    (tiles(splits=0), "splits is 0: expected a number, 1 or more"),
    (tiles(split_keys=40), "split_keys is 40: expected a multiple of tile_k, 32"),
    (tiles(splits=2, split_keys=64), "splits and split_keys are given: expected one of them"),
    (tiles(combine="atomics"), "combine is 'atomics': expected one of last_program, kernel"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_launch_options_are_given_together_and_make_sense(options, message):
    q, k, v, _ = cache(1, 2, 2, 1, 4, 16)
    with pytest.raises(ValueError, match=message):
        decode(q, k, v, **options)
    assert message in triton_decode.unsupported(problem(), gpu(9, 0), **options)


def test_what_cannot_run_is_said_to_be_unsupported(monkeypatch):
    unsupported = triton_decode.unsupported
    assert unsupported(problem(), gpu(9, 0)) is None
    assert "9 queries a sequence" in unsupported(problem(seq_len_q=9), gpu(9, 0))
    assert "head_dim 8" in unsupported(problem(head_dim=8), gpu(9, 0))
    assert "batch 70000" in unsupported(problem(batch=70000), gpu(9, 0))
    assert "pages of 32 tokens" in unsupported(problem(page_size=32), gpu(9, 0))
    assert "speed is not a launch option" in unsupported(problem(), gpu(9, 0), **tiles(speed=1))
    assert "compute capability 7.0 is below 7.5" in unsupported(problem(), gpu(7, 0))
    monkeypatch.setattr(split_keys, "INTERPRETED", False)
    assert "TRITON_INTERPRET=1" in unsupported(problem(), CPU)
    monkeypatch.setattr(split_keys, "INTERPRETED", True)
    assert unsupported(problem(), CPU) is None


@pytest.mark.parametrize("compute_capability", SHARED_MEMORY_KIB)
@pytest.mark.parametrize("lengths", ["equal", "uneven"])
def test_a_target_has_a_few_different_candidates_that_it_supports(compute_capability, lengths):
    target = gpu(*compute_capability)
    for head_dim in (16, 64, 128, 256):
        for batch, context, page_size in ((1, 1024, 0), (1, 131072, 64), (16, 4096, 16), (64, 8192, 0)):
            cell = problem(
                head_dim=head_dim, batch=batch, seq_len_k=context, page_size=page_size, lengths=lengths
            )
            options = triton_decode.candidates(cell, target)
            assert 2 <= len(options) <= triton_decode.MAX_CANDIDATES
            assert len({json.dumps(option) for option in options}) == len(options)
            assert all(triton_decode.unsupported(cell, target, **option) is None for option in options)


def test_the_default_gives_each_multiprocessor_of_an_h200_a_program_where_there_are_tiles():
    def programs(batch, context):
        cell = problem(batch=batch, seq_len_k=context)
        [split, *_] = [option["splits"] for option in triton_decode.candidates(cell, gpu(9, 0))]
        return batch * 8 * split

    assert programs(1, 1024) == 128  # 16 tiles
    assert programs(1, 512) == 64  # 8 tiles
    assert programs(1, 131072) == 128
    assert programs(16, 4096) == 128
    assert programs(64, 8192) == 512


def test_options_that_are_given_are_the_only_candidate():
    assert triton_decode.candidates(problem(), gpu(9, 0), **tiles()) == [tiles()]


def test_all_shapes_of_all_targets_agree():
    found = {}
    for compute_capability in SHARED_MEMORY_KIB:
        for option in triton_decode.candidates(problem(seq_len_k=300, head_dim=64), gpu(*compute_capability)):
            if DEVICE == "cpu" or compute_capability == torch.cuda.get_device_capability():
                found[option["tile_k"], option["splits"]] = option
    assert len(found) >= 3
    q, k, v, _ = cache(1, 4, 2, 1, 300, 64)
    for option in found.values():
        assert_decode_close(decode(q, k, v, **option), q, k, v, [300])


def test_the_memory_law_counts_the_parts_of_the_splits_and_the_counters():
    law = triton_decode.memory_law
    assert law(problem()) is None
    assert law(problem(), **tiles(splits=1)) == 1010
    parts = 4 * 8 * 16 * 4 * (128 + 4)
    assert law(problem(), **tiles(splits=16, combine="kernel")) == 1010 + parts
    assert law(problem(), **tiles(splits=16)) == 1010 + parts + split_keys.counter_bytes(8)
    assert law(problem(), **tiles(split_keys=256, combine="kernel")) == 1010 + parts


COMPILE = """
import json, os, re, subprocess, sys, tempfile
import triton
from harness.plugin import compile_unit
from harness.problem import Problem
from harness.target import Target
from kernels import split_keys, triton_decode

bin = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin")
def ask(tool, *arguments):
    done = subprocess.run([os.path.join(bin, tool), *arguments], capture_output=True, text=True)
    return done.stdout + done.stderr

for major, minor, changes, options in json.loads(sys.argv[1]):
    target = Target("cuda", "absent", (major, minor), 132, None)
    values = dict(batch=1, heads=32, kv_heads=8, seq_len_q=1, seq_len_k=8192, head_dim=128, dtype="bf16")
    problem = Problem(**{**values, **changes}, causal=True, workload="decode")
    offered = [options] if options else triton_decode.candidates(problem, target)
    # How many splits there are does not show in the code.
    shapes = {tuple(option[name] for name in split_keys.TILE_OPTIONS): option for option in offered}
    for option in shapes.values():
        for unit in triton_decode.compile_units(problem, option, target):
            compiled = compile_unit(unit, target)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
                cubin.write(compiled.asm["cubin"])
                cubin.flush()
                usage = ask("cuobjdump", "-res-usage", cubin.name)
                sass = ask("nvdisasm", cubin.name)
            print(json.dumps({
                "options": option, "function": unit.function.fn.__name__, "shared": compiled.metadata.shared,
                "stack": int(re.findall(r"STACK:(\\\\d+)", usage)[-1]), "sass": sass,
            }))
"""


def compiled(cells, folder):
    """What the compiler makes of the candidates, or of the given options, for GPUs that are not there."""
    printed = output_of(COMPILE.replace("\\\\d", "\\d"), cells, folder)
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("compute_capability", [(8, 0), (9, 0)])
def test_the_machine_code_copies_asynchronously_multiplies_on_tensor_cores_and_does_not_spill(
    compute_capability, tmp_path
):
    options = triton_decode.candidates(problem(), gpu(*compute_capability))[0]
    cells = [
        (*compute_capability, {}, options),
        (*compute_capability, {}, {**options, "combine": "kernel"}),
        (*compute_capability, {"page_size": 16, "lengths": "uneven"}, options),
        (*compute_capability, {"page_size": 128, "seq_len_q": 8}, {**options, "tile_k": 64}),
    ]
    rows = compiled(cells, tmp_path)
    assert {row["function"] for row in rows} == {"_decode_splits", "_merge_splits"}
    for row in rows:
        note = (row["options"], row["function"], row["stack"])
        assert row["stack"] <= 32, note
        assert row["shared"] <= 1024 * SHARED_MEMORY_KIB[compute_capability], note
        if row["function"] == "_decode_splits":
            assert "HMMA.16816" in row["sass"], note
            assert re.search(r"LDGSTS\.E\.(BYPASS\.)?\S*128", row["sass"]), note


@pytest.mark.slow
def test_the_last_program_counts_after_all_threads_have_stored_and_reads_past_the_l1_cache(tmp_path):
    [row] = compiled([(9, 0, {}, tiles(64, splits=16))], tmp_path)
    code = [line.split("/*")[1] for line in row["sass"].splitlines() if line.count("/*") >= 1 and ";" in line]
    names = [line.split("*/")[1] for line in code]
    [count] = [index for index, name in enumerate(names) if "ATOMG" in name or "ATOM." in name]
    before, after = names[:count], names[count:]
    stores = [index for index, name in enumerate(before) if "STG" in name]
    fences = [index for index, name in enumerate(before) if "MEMBAR" in name and "GPU" in name]
    barriers = [index for index, name in enumerate(before) if "BAR.SYNC" in name]
    # Store, wait for the other threads, make it visible to the GPU, count.
    assert max(stores) < max(barriers) < max(fences)
    assert any("CCTL.IVALL" in name for name in after)
    reads = [name for name in after if "LDG" in name]
    assert reads
    assert all("STRONG.GPU" in name for name in reads)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [0, 64])
def test_the_first_tile_is_asked_for_before_q_is_waited_for(page_size, tmp_path):
    options = tiles(64, splits=16)
    cells = [
        (9, 0, {"page_size": page_size}, {**options, "prefetch": prefetch})
        for prefetch in triton_decode.PREFETCH
    ]
    nothing, first_tile = (row["sass"] for row in compiled(cells, tmp_path))
    assert "CCTL.E.PF2" not in nothing
    # One line of K and one of V for each of 128 threads: 64 rows of two lines.
    requests = [match.start() for match in re.finditer(r"CCTL\.E\.PF2", first_tile)]
    assert len(requests) == 2
    # Q is copied in 16 bytes a thread; an entry of the block table, which has to be known, in 4.
    q = re.search(r"LDG\.E\.128|LDG\.E\.\S*\.128", first_tile)
    assert max(requests) < q.start()


@pytest.mark.slow
@pytest.mark.parametrize("compute_capability", [(8, 6), (9, 0)])
def test_every_candidate_fits_the_shared_memory_of_its_gpu(compute_capability, tmp_path):
    # Many rows take the most; at head_dim 128, for the compiler is slow with more.
    cells = [(*compute_capability, {"heads": 64, "seq_len_q": 8}, None)]
    for row in compiled(cells, tmp_path):
        assert row["shared"] <= 1024 * SHARED_MEMORY_KIB[compute_capability], row["options"]


# A process that takes itself to be on a Hopper GPU, as far as compiling goes: it compiles the units, and then
# asks for what the calls would launch. The listener hears whether the cache had it.
LAUNCHES = """
import importlib, json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from harness.plugin import load_kernel
from harness.problem import Problem
from harness.target import Target
from harness.tensors import make_inputs
from kernels import split_keys

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

def warm_up(self, *tensors):
    tensors = [None if tensor is None else torch.zeros(8, dtype=tensor.dtype) for tensor in tensors]
    self.function.warmup(*tensors, *self.scalars, **self.constants, **self.options, grid=self.grid)

driver.set_active(Hopper())
split_keys.Launch.__call__ = warm_up
heard = []
triton.knobs.compilation.listener = lambda **said: heard.append(said["cache_hit"])
target = Target("cuda", "Hopper", (9, 0), 132, 227 * 1024)
for name, changes, options in json.loads(sys.argv[1]):
    values = dict(batch=2, heads=8, kv_heads=2, seq_len_q=1, seq_len_k=1000, head_dim=64, dtype="bf16")
    problem = Problem(**{**values, **changes}, causal=True, workload="decode")
    kernel = load_kernel(name, {})
    kernel = kernel.with_options({**kernel.candidates(problem, target)[0], **options})
    kernel.compile_for(problem, target)
    kernel.answer(make_inputs(problem, "cpu", guarded=False), problem)
print(json.dumps(heard))
"""


@pytest.mark.slow
def test_a_launch_finds_in_the_cache_what_was_compiled_without_a_gpu(tmp_path):
    cells = [
        ("triton_decode", {"page_size": 16, "lengths": "uneven"}, {}),
        ("triton_decode", {}, {"combine": "kernel"}),
        ("read_floor", {}, {}),
    ]
    printed = output_of(LAUNCHES, cells, tmp_path)
    assert json.loads(printed) == [False, True, False, False, True, True, False, True]


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("combine", triton_decode.COMBINE)
def test_a_thousand_calls_are_bit_identical(combine):
    q, k, v, seq_lens = cache(4, 32, 8, 1, 5000, 128, torch.bfloat16, lengths=[5000, 1, 999, 3000])
    options = {"tile_k": 64, "num_warps": 4, "num_stages": 3, "splits": 16, "combine": combine}
    first = decode(q, k, v, seq_lens=seq_lens, **options)
    assert_decode_close(first, q, k, v, [5000, 1, 999, 3000])
    assert torch.equal(decode(q, k, v, seq_lens=seq_lens, **options, prefetch="first_tile"), first)
    assert all(torch.equal(decode(q, k, v, seq_lens=seq_lens, **options), first) for _ in range(1000))


@pytest.mark.gpu
@gpu_only
def test_calls_on_two_streams_do_not_share_their_counters():
    streams = [torch.cuda.Stream() for _ in range(2)]
    cells = [cache(2, 32, 8, 1, 3000 + 500 * seed, 128, torch.bfloat16, seed=seed)[:3] for seed in range(2)]
    expected = [decode(*cell) for cell in cells]
    torch.cuda.synchronize()
    outputs = [[], []]
    for _ in range(300):
        for stream, cell, found in zip(streams, cells, outputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(decode(*cell))
    torch.cuda.synchronize()
    for found, right in zip(outputs, expected, strict=True):
        assert all(torch.equal(output, right) for output in found)


def captured(cell, stream=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = decode(*cell)
    return graph, output


@pytest.mark.gpu
@gpu_only
def test_a_captured_call_is_replayed_with_new_values_beside_another_one():
    cells = [cache(1, 32, 8, 1, 4000, 128, torch.bfloat16, seed=seed)[:3] for seed in range(2)]
    for cell in cells:
        decode(*cell)
    stream = torch.cuda.Stream()
    graphs = [captured(cell, stream) for cell in cells]
    for seed in (5, 6):
        for index, cell in enumerate(cells):
            for tensor, fresh in zip(cell, cache(1, 32, 8, 1, 4000, 128, seed=seed + index)[:3], strict=True):
                tensor.copy_(fresh)
        expected = [decode(*cell) for cell in cells]
        torch.cuda.synchronize()
        for _ in range(100):
            for graph, _output in graphs:
                with torch.cuda.stream(torch.cuda.Stream()):
                    graph.replay()
        torch.cuda.synchronize()
        for (_, output), right in zip(graphs, expected, strict=True):
            assert torch.equal(output, right)


@pytest.mark.gpu
@gpu_only
def test_a_capture_before_any_call_falls_back_to_two_kernels():
    split_keys._counters_of.cache_clear()
    cell = cache(1, 32, 8, 1, 4000, 128, torch.bfloat16)[:3]
    options = {"tile_k": 64, "num_warps": 4, "num_stages": 3, "splits": 16}
    right = decode(*cell, **options, combine="kernel")  # compiles, and takes no counters
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = decode(*cell, **options)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, right)


@pytest.mark.gpu
@gpu_only
def test_the_memory_law_is_what_the_gpu_allocates():
    split_keys._counters_of.cache_clear()
    q, k, v, _ = cache(1, 32, 8, 1, 4096, 128, torch.bfloat16)
    options = {"tile_k": 64, "num_warps": 4, "num_stages": 3, "splits": 16}
    decode(q, k, v, **options)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    decode(q, k, v, **options)
    extra = torch.cuda.max_memory_allocated() - held
    law = triton_decode.memory_law(problem(input_bytes=0, output_bytes=2 * q.numel()), **options)
    assert extra == law - split_keys.counter_bytes(8)


@pytest.mark.gpu
@gpu_only
def test_more_than_two_to_the_31_elements_are_addressed_right():
    context = 2**31 // 128 // 8 // 2 + 100
    q, k, v = (
        torch.randn(2, heads, length, 128, dtype=torch.bfloat16, device="cuda")
        for heads, length in ((8, 1), (8, context), (8, context))
    )
    assert k.numel() > 2**31
    output = decode(q, k, v)
    assert_decode_close(output[1:, -1:], q[1:, -1:], k[1:, -1:], v[1:, -1:], [context])
