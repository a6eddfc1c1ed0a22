import contextlib
import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton

from kernels import gluon_hopper
from kernels.gluon_hopper import attention
from tests.kernels import barrier_model
from tests.kernels.compiler import output_of
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
    for head_dim, mask, seq_len in itertools.product((64, 128), (False, True), (1024, 1537, 4096)):
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
    **{"ping_pong": False, "lazy_rescale": False, "packed_p": False, "short_tail": False},
    **{"q_in_registers": False, "cubic_exp2": 0, "softmax_first": False},
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"consumers": 2},
            "tile_k is None: expected a number; give all of "
            "consumers, tile_k, stages, ping_pong, lazy_rescale, packed_p, short_tail, q_in_registers, "
            "cubic_exp2, softmax_first",
        ),
        ({**GOOD, "consumers": 4}, "consumers is 4"),
        ({**GOOD, "tile_k": 96}, "tile_k is 96"),
        ({**GOOD, "stages": 1}, "stages is 1: expected 2 at least"),
        ({**GOOD, "stages": 9}, "bytes of shared memory"),
        ({**GOOD, "consumers": 3, "short_tail": True}, "short_tail is True: expected False with 3 consumers"),
        ({**GOOD, "consumers": 3, "q_in_registers": True}, "q_in_registers is True: expected False with 3"),
        ({**GOOD, "cubic_exp2": 5}, "cubic_exp2 is 5: expected 0 to 4"),
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


@pytest.mark.parametrize(
    ("seq_len_k", "causal", "keys"),
    [
        (1537, False, 32),
        (1568, False, 32),
        (1569, False, 64),
        (1601, False, 128),
        (1536, False, 128),
        (1537, True, 128),
        (100, False, 128),
    ],
)
def test_a_short_tail_multiplies_the_keys_that_are_there_rounded_up(seq_len_k, causal, keys):
    assert gluon_hopper._first_keys({**GOOD, "short_tail": True}, seq_len_k, causal) == keys
    assert gluon_hopper._first_keys(GOOD, seq_len_k, causal) == 128


def run_assembly(text, *arguments):
    """What a line of PTX makes of arrays of fp32: its $0 and so on are the results, then the arguments."""
    values = {f"${index}": np.float32(value) for index, value in enumerate(arguments, len(arguments))}

    def operand(name):
        return np.uint32(int(name[2:], 16)).view(np.float32) if name.startswith("0f") else values[name]

    def nan_max(a, b):
        return np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), np.fmax(a, b))

    operations = {
        "max.NaN.f32": nan_max,
        "add.f32": np.add,
        "sub.f32": np.subtract,
        "mul.f32": np.multiply,
        "fma.rn.f32": lambda a, b, c: (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32),
        "ex2.approx.ftz.f32": np.exp2,
    }
    body = text.strip("{} ").split(";")
    for statement in (line.strip() for line in body if line.strip() and ".reg" not in line):
        name, rest = statement.split(" ", 1)
        result, *inputs = (part.strip() for part in rest.split(","))
        if name == "mov.b32":
            values[result] = values[inputs[0]].view(
                np.uint32 if values[inputs[0]].dtype == np.float32 else np.float32
            )
        elif name == "shl.b32":
            values[result] = values[inputs[0]] << np.uint32(inputs[1])
        else:
            values[result] = np.asarray(operations[name](*map(operand, inputs)), np.float32)
    return [values[f"${index}"] for index in range(len(arguments))]


@pytest.mark.parametrize("count", range(1, 5))
def test_the_cubic_powers_of_two_are_near_and_exact_where_a_score_is_the_reference(count):
    x = np.concatenate([np.linspace(-140, 9, 200_001), np.arange(-126, 9)]).astype(np.float32)
    found = run_assembly(gluon_hopper._exp2_assembly.fn(count), *[x] * 8)
    right = np.exp2(x.astype(np.float64))
    normal = x >= -126
    cubic = [row for row in found if not np.array_equal(row, np.exp2(x))]
    assert len(cubic) == count
    for row in cubic:
        assert np.abs(row[normal] / right[normal] - 1).max() < 1.1e-4
        assert np.array_equal(row[-135:], right[-135:])  # whole numbers
        assert np.abs(row[~normal]).max() < 2.0**-125
        assert (row >= 0).all()


@pytest.mark.parametrize("count", range(1, 5))
def test_a_hidden_score_weighs_nothing_by_the_polynomial_too_and_nan_stays_nan(count):
    special = np.array([-np.inf, np.nan, -3e38, -127.0], np.float32)
    for row in run_assembly(gluon_hopper._exp2_assembly.fn(count), *[special] * 8):
        assert row[0] == row[2] == 0
        assert np.isnan(row[1])
        assert 0 <= row[3] < 2.0**-125


def test_the_wait_that_comes_after_the_row_sums_waits_for_the_same_phase():
    text = gluon_hopper._wait_after_assembly.fn(1024)
    plain = gluon_hopper._wait_assembly.fn(1024)
    # The sums' signs, or-ed and shifted to the lowest bit, are all that changes the parity.
    assert "or.b32 parity, parity, other; shr.u32 parity, parity, 31; xor.b32 parity, parity, $4;" in text
    polled = "mbarrier.try_wait.parity.shared::cta.b64 done, [barrier],"
    assert f"{polled} parity;" in text
    assert f"{polled} $2;" in plain


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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tile_q", "tile_k"), [(128, 128), (192, 128), (128, 64)])
def test_every_block_that_holds_a_hidden_score_is_masked_and_no_more_than_that(tile_q, tile_k, causal):
    needed = set()
    for seq_len_k in (1, tile_k, 700, 1024, 1100):
        for first in range(0, 1024, tile_q):
            blocks = -(-min(seq_len_k, first + tile_q if causal else seq_len_k) // tile_k)
            last_seen = min(first, seq_len_k - 1) if causal else seq_len_k - 1  # of the tile's first row
            hidden = [block for block in range(blocks) if (block + 1) * tile_k - 1 > last_seen]
            given = gluon_hopper._masked_blocks.fn(tile_q, tile_k, causal, seq_len_k % tile_k != 0)
            assert len(hidden) <= given, (seq_len_k, first)
            needed.add(len(hidden))
    assert max(needed) == (gluon_hopper._masked_blocks.fn(tile_q, tile_k, causal, True))


def test_the_memory_law_counts_the_tensors_alone():
    assert gluon_hopper.memory_law(problem(kv_heads=2)) == 2 * (2 * 4 * 512 * 64 + 2 * 2 * 512 * 64)


# ---- launches, with stand-ins for what Triton and CUDA do ----


class Launcher:
    """Like Triton's: its `launch` is a closure that takes descriptors apart and calls a C function."""

    global_scratch_size = 0
    profile_scratch_size = 0

    def __init__(self, launcher):
        def launch(*call):
            flat = [[a.base.data_ptr(), *a.shape, *a.strides] if hasattr(a, "base") else a for a in call]
            launcher(*flat)

        self.launch = launch

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, *rest)


class Compiled:
    """Like Triton's compiled kernel: `c_calls` of its C function, and `launches` in Triton's own way."""

    function = 1
    packed_metadata = (4,)

    def __init__(self, barriers_at):
        self.asm = {
            "llir": f"add.s32 barrier, barrier, {barriers_at};\n mbarrier.init "
            "ptr addrspace(3) getelementptr (i8, ptr addrspace(3) @global_smem, i32 1024)"
        }
        self.c_calls, self.launches = [], []
        self.run = Launcher(lambda *call: self.c_calls.append(call))

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, arguments))


class Machine:
    """A process with a Hopper GPU, as far as gluon_hopper's launches see it."""

    def __init__(self, monkeypatch):
        self.stream, self.capturing, self.device, self.devices_entered = 7, False, None, []
        self.barriers_at, self.compiled = 1024, []
        self.runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
        for name, value in {
            "_attention_forward": SimpleNamespace(warmup=self.warmup),
            "_compute_capability": lambda device: (9, 0),
            "_multiprocessors": lambda device: 132,
            "_current_device": lambda: self.device,
            "_current_stream": lambda index: self.stream,
            "_is_capturing": lambda: self.capturing,
            "_runtime": self.runtime,
            "_plans": {},
            "_counters": {},
        }.items():
            monkeypatch.setattr(gluon_hopper, name, value)
        monkeypatch.setattr(torch.cuda, "device", self.enter)

    def warmup(self, *arguments, **constants):
        self.compiled.append(Compiled(self.barriers_at))
        return self.compiled[-1]

    def enter(self, index):
        self.devices_entered.append(index)
        return contextlib.nullcontext()

    @property
    def c_calls(self):
        return [call for compiled in self.compiled for call in compiled.c_calls]

    @property
    def launches(self):
        return [launch for compiled in self.compiled for launch in compiled.launches]


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def tensors(count=3, dtype=torch.float16):
    return [torch.zeros(1, 2, 100, 64, dtype=dtype) for _ in range(count)]


def pointers(call):
    """The addresses of q, k, v and the output, and of the counter, in a call of the C function."""
    descriptors = [argument for argument in call if isinstance(argument, list)]
    return [descriptor[0] for descriptor in descriptors], call[call.index(descriptors[-1]) + 1]


def test_a_call_like_an_earlier_one_is_neither_checked_nor_planned_nor_bound_again(machine, monkeypatch):
    q, k, v = tensors()
    output = torch.empty_like(q)
    monkeypatch.setattr(torch, "empty_like", lambda tensor: output)
    attention(q, k, v, causal=True)
    monkeypatch.setattr(gluon_hopper, "_plan", None)
    monkeypatch.setattr(gluon_hopper, "_descriptor", None)
    for _ in range(3):
        assert attention(q, k, v, causal=True) is output
    assert len(machine.compiled) == 1
    assert machine.launches == []
    assert len(machine.c_calls) == 4
    assert machine.c_calls == [machine.c_calls[0]] * 4
    addresses, _ = pointers(machine.c_calls[0])
    assert addresses == [q.data_ptr(), k.data_ptr(), v.data_ptr(), output.data_ptr()]


@pytest.mark.parametrize("scale", [None, 0.5, -0.5])
@pytest.mark.parametrize(("consumers", "stages"), [(2, 4), (3, 3)])
def test_a_launch_is_told_the_problem_in_the_kernels_own_terms(machine, consumers, stages, scale):
    q = torch.randn(3, 8, 300, 64, dtype=torch.float16)
    k, v = torch.randn(2, 3, 2, 20000, 64, dtype=torch.float16)
    machine.capturing = True  # Triton's own launch, whose arguments can be seen
    options = {**GOOD, "consumers": consumers, "stages": stages}
    attention(q, k, v, causal=False, scale=scale, **options)
    [(grid, arguments)] = machine.launches
    q_tiles = -(-300 // (64 * consumers))
    assert grid == (min(3 * 8 * q_tiles, 132), 1, 1)
    descriptors, scalars = arguments[:4], arguments[5:12]
    assert [descriptor.block_shape for descriptor in descriptors] == [
        [1, 1, rows, 64] for rows in (64, options["tile_k"], options["tile_k"], 64)
    ]
    # Heads whose K and V together fit in 24 MiB, and all that share one of K and V.
    together = 24 * 2**20 // (2 * 20000 * 64 * 2) * 4
    assert scalars[:6] == (8, 4, 24, q_tiles, together, 20000)
    assert scalars[6] == pytest.approx((0.125 if scale is None else 0.5) / math.log(2))
    sign = -1 if scale == -0.5 else 1
    assert torch.equal(descriptors[0].base, sign * q)
    assert torch.equal(descriptors[1].base, k)
    assert torch.equal(descriptors[2].base, v)


@pytest.mark.parametrize(("seq_len_q", "seq_len_k", "batch"), [(5, 0, 1), (0, 5, 1), (5, 5, 0)])
def test_where_there_is_nothing_to_compute_nothing_is_launched(machine, seq_len_q, seq_len_k, batch):
    q = torch.randn(batch, 2, seq_len_q, 64, dtype=torch.float16)
    k, v = torch.randn(2, batch, 2, seq_len_k, 64, dtype=torch.float16)
    output = attention(q, k, v, causal=False)
    assert output.shape == q.shape
    assert not output.any()
    assert machine.compiled == []


@pytest.mark.parametrize("position", range(4))
def test_a_tensor_at_another_address_is_not_taken_for_the_one_before(machine, monkeypatch, position):
    first, second = tensors(4), tensors(4)
    changed = [*first[:position], second[position], *first[position + 1 :]]
    for q, k, v, output in (first, changed, first):
        monkeypatch.setattr(torch, "empty_like", lambda tensor, output=output: output)
        attention(q, k, v, causal=True)
    found = [pointers(call)[0] for call in machine.c_calls]
    assert found == [[tensor.data_ptr() for tensor in used] for used in (first, changed, first)]


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q[:, :, :90], k, v),
        lambda q, k, v: (q, k[:, :, :90], v[:, :, :90]),
        lambda q, k, v: (q, k[:, :1], v[:, :1]),
        lambda q, k, v: (q.view(torch.bfloat16), k.view(torch.bfloat16), v.view(torch.bfloat16)),
        lambda q, k, v: (q, k.view(1, 100, 2, 64).transpose(1, 2), v),
        lambda q, k, v: (q, k, v.view(1, 100, 2, 64).transpose(1, 2)),
    ],
    ids=["queries", "keys", "heads", "dtype", "strides of k", "strides of v"],
)
def test_another_view_of_the_same_memory_is_planned_anew(machine, change):
    q, k, v = tensors()
    attention(q, k, v, causal=True)
    attention(*change(q, k, v), causal=True)
    assert len(machine.compiled) == 2
    assert len(machine.c_calls) == 2


def test_every_argument_decides(machine):
    q, k, v = tensors()
    for arguments in (
        {"causal": True},
        {"causal": False},
        {"causal": True, "scale": 0.5},
        {"causal": True, "scale": 2},
        {"causal": True, **GOOD},
        {"causal": True, **GOOD, "ping_pong": True},
    ):
        planned = len(machine.compiled)
        for _ in range(2):
            attention(q, k, v, **arguments)
        assert len(machine.compiled) == planned + 1
    with pytest.raises(ValueError, match="scale is True"):
        attention(q, k, v, causal=True, scale=True)


def test_streams_have_counters_and_launches_of_their_own(machine, monkeypatch):
    q, k, v = tensors()
    output = torch.empty_like(q)
    monkeypatch.setattr(torch, "empty_like", lambda tensor: output)
    for stream in (7, 8, 7, 8):
        machine.stream = stream
        attention(q, k, v, causal=True)
    calls = machine.c_calls
    assert [call[3] for call in calls] == [7, 8, 7, 8]
    counters = [pointers(call)[1] for call in calls]
    assert counters[:2] == counters[2:]
    assert counters[0] != counters[1]


def test_captured_calls_have_counters_of_their_own_and_are_not_kept(machine):
    q, k, v = tensors()
    attention(q, k, v, causal=True)
    _, shared = pointers(machine.c_calls[0])
    machine.capturing = True
    for _ in range(2):
        attention(q, k, v, causal=True)
    machine.capturing = False
    assert len(machine.c_calls) == 1
    counters = [arguments[4] for _, arguments in machine.launches]
    assert len({shared, *(counter.data_ptr() for counter in counters)}) == 3
    attention(q, k, v, causal=True)
    assert len(machine.c_calls) == 2
    assert pointers(machine.c_calls[1])[1] == shared


def test_a_first_call_in_a_capture_leaves_nothing_behind_for_later_ones(machine):
    q, k, v = tensors()
    machine.capturing = True
    attention(q, k, v, causal=True)
    assert gluon_hopper._counters == {}
    assert len(machine.launches) == 1
    assert machine.c_calls == []


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chain", [True, False], ids=["chain of hooks", "hook"])
def test_launches_that_somebody_hooks_into_go_through_triton(machine, name, chain):
    q, k, v = tensors()
    empty = SimpleNamespace(calls=[])
    machine.runtime.launch_enter_hook = machine.runtime.launch_exit_hook = empty
    attention(q, k, v, causal=True)
    assert (len(machine.c_calls), len(machine.launches)) == (1, 0)
    setattr(machine.runtime, name, SimpleNamespace(calls=[print]) if chain else print)
    attention(q, k, v, causal=True)
    assert (len(machine.c_calls), len(machine.launches)) == (1, 1)
    machine.runtime.launch_enter_hook = machine.runtime.launch_exit_hook = None
    attention(q, k, v, causal=True)
    assert (len(machine.c_calls), len(machine.launches)) == (2, 1)


def test_the_tensors_device_is_made_the_current_one(machine):
    q, k, v = tensors()
    attention(q, k, v, causal=True)
    assert machine.devices_entered == []
    machine.device = 3
    for _ in range(2):
        attention(q, k, v, causal=True)
    assert machine.devices_entered == [q.device.index] * 2


def test_a_tensor_that_asks_for_a_gradient_is_refused_after_a_call_without(machine):
    q, k, v = tensors()
    attention(q, k, v, causal=True)
    for tensor in (q, k, v):
        tensor.requires_grad_()
        with pytest.raises(ValueError, match="requires a gradient"):
            attention(q, k, v, causal=True)
        with torch.no_grad():
            attention(q, k, v, causal=True)
        tensor.requires_grad_(False)
    assert len(machine.compiled) == 1


def test_a_tensor_that_is_not_what_lies_in_memory_is_refused_after_a_call_like_it(machine):
    q, k, v = tensors()
    for _ in range(2):
        attention(q, k, v, causal=True)
        with pytest.raises(ValueError, match="k is a negative view"):
            attention(q, torch._neg_view(k), v, causal=True)
        with torch.autograd.forward_ad.dual_level():
            attention(q, k, v, causal=True)
            dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
            with pytest.raises(ValueError, match="v has a tangent"):
                attention(q, k, dual, causal=True)
    assert len(machine.compiled) == 1


def test_faulty_arguments_are_refused_after_a_good_call(machine):
    q, k, v = tensors()
    attention(q, k, v, causal=True)
    for arguments, message in (
        ((q, k, v.bfloat16()), "v is bfloat16"),
        ((q, k[:, :, :50], v), "v has shape"),
        ((q, k, v.transpose(2, 3).contiguous().transpose(2, 3)), "v has a last stride"),
        ((q, k, None), "v is a NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(*arguments, causal=True)
    with pytest.raises(ValueError, match="expected a number"):
        attention(q, k, v, causal=True, **{**GOOD, "stages": [2]})


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-46])
def test_inputs_that_are_changed_first_are_changed_in_every_call(machine, scale):
    q, k, v = tensors()
    q.normal_()
    for _ in range(3):
        attention(q, k, v, causal=True, scale=scale)
    assert machine.c_calls == []
    assert len(machine.launches) == 3
    for _, arguments in machine.launches:
        assert torch.equal(
            arguments[0].base.float(), -q.float() if scale < 0 else torch.zeros_like(q).float()
        )
        assert arguments[11] == pytest.approx((0.5 if scale < 0 else 1.0) / math.log(2))


def test_inputs_that_are_copied_first_are_copied_in_every_call(machine):
    q, k, v = tensors()
    broadcast = k[:, :1].expand(k.shape)
    for _ in range(3):
        attention(q, broadcast, v, causal=True)
    assert machine.c_calls == []
    assert all(arguments[1].base.is_contiguous() for _, arguments in machine.launches)


@pytest.mark.parametrize("fault", ["no closure", "another name", "scratch memory", "other arguments"])
def test_a_triton_that_is_built_otherwise_launches_by_itself(machine, monkeypatch, fault):
    def warmup(*arguments, **constants):
        compiled = Compiled(1024)
        machine.compiled.append(compiled)
        if fault == "no closure":
            compiled.run.launch = print
        elif fault == "another name":
            start = compiled.c_calls.append
            compiled.run.launch = lambda *call: start(call)
        elif fault == "scratch memory":
            compiled.run.global_scratch_size = 128
        else:
            compiled.run = type("Other", (Launcher,), {"__call__": lambda self: None})(print)
        return compiled

    monkeypatch.setattr(gluon_hopper, "_attention_forward", SimpleNamespace(warmup=warmup))
    q, k, v = tensors()
    for _ in range(2):
        attention(q, k, v, causal=True)
    assert len(machine.launches) == 2
    assert machine.c_calls == []


def test_a_kernel_with_its_barriers_elsewhere_is_never_launched(machine):
    machine.barriers_at = 2048
    q, k, v = tensors()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lays out shared memory otherwise"):
            attention(q, k, v, causal=True)
    assert machine.launches == machine.c_calls == []


def test_what_is_remembered_is_bounded(machine, monkeypatch):
    monkeypatch.setattr(gluon_hopper, "MAX_PLANS", 2)
    monkeypatch.setattr(gluon_hopper, "MAX_LAUNCHES", 2)
    q, k, v = tensors()
    for stream in range(5):
        machine.stream = stream
        attention(q, k, v, causal=True)
    [plan] = gluon_hopper._plans.values()
    assert len(plan._launches) <= 2
    for scale in range(1, 6):
        attention(q, k, v, causal=True, scale=scale)
    assert len(gluon_hopper._plans) <= 2


# ---- what the compiler makes of it ----

# Compiles one option set after the other for sm_90, and says what the compiler and the assembler made of it.
COMPILE = """
import json, re, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
import triton
from harness.plugin import compile_unit
from harness.target import Target
from kernels import gluon_hopper
from tests.kernels.wgmma_registers import disassembled, overwritten

tools = Path(triton.__file__).parent / "backends/nvidia/bin"
hopper = Target("cuda", "Hopper", (9, 0))
for head_dim, causal, dtype, options in json.loads(sys.argv[1]):
    problem = SimpleNamespace(head_dim=head_dim, causal=causal, dtype=dtype, seq_len_k=1537)
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
        # whose left operand a descriptor of shared memory names
        "left_in_shared": len(re.findall(r"wgmma[.]mma_async[^{]*{[^}]*}, %rd", compiled.asm["ptx"])),
        "tma": compiled.asm["ptx"].count("cp.async.bulk.tensor"),
        "overwritten": overwritten(disassembled(compiled.asm["cubin"])),
        # from each wait for products to the next one
        "between_waits": [
            [part.count("HGMMA"), part.count("MUFU.EX2")]
            for part in disassembled(compiled.asm["cubin"]).split("WARPGROUP.DEPBAR")
        ],
    }))
"""


@pytest.fixture(scope="module")
def compiled_candidates(tmp_path_factory):
    cells = [
        [head_dim, causal, "bf16", option]
        for causal in (False, True)
        for head_dim, option in every_candidate(causal)
    ]
    printed = output_of(COMPILE, cells, tmp_path_factory.mktemp("triton"))
    rows = [json.loads(line) for line in printed.splitlines()]
    assert len(rows) == len(cells)
    return list(zip(cells, rows, strict=True))


@pytest.mark.slow
def test_every_candidate_compiles_for_hopper_within_its_shared_memory_and_without_spills(compiled_candidates):
    for cell, row in compiled_candidates:
        assert row["wgmma"] > 0
        assert row["tma"] > 0
        assert row["spills"] == [0, 0, 0], (cell, row)
        assert row["warnings"] == [], (cell, row)
        assert row["overwritten"] == [], (cell, row)
        assert row["shared"] <= SHARED_MEMORY_BYTES, (cell, row)


@pytest.mark.slow
def test_the_barriers_of_every_candidate_lie_where_its_assembly_looks_for_them(compiled_candidates):
    for (head_dim, _, _, options), row in compiled_candidates:
        shape = (options["consumers"], options["tile_k"], options["stages"])
        assert row["offset"] == gluon_hopper._barriers_at(head_dim, *shape)


@pytest.mark.slow
def test_q_in_registers_is_read_from_shared_memory_for_a_tiles_first_block_alone(compiled_candidates):
    kept = [(cell, row) for cell, row in compiled_candidates if cell[3]["q_in_registers"]]
    assert {cell[0] for cell, _ in kept} == {64, 128}
    for (head_dim, _, _, options), row in kept:
        # The first block of the first tile, and that of the next one at the border of two tiles, by each
        # consumer, 16 columns of Q at a time.
        assert row["left_in_shared"] == 2 * options["consumers"] * head_dim // 16


@pytest.mark.slow
def test_the_exponentials_come_before_the_wait_for_the_product_beside_them(compiled_candidates):
    bound = [
        (cell[3], row)
        for cell, row in compiled_candidates
        if cell[3]["consumers"] == 2 or cell[3]["softmax_first"]
    ]
    assert {(options["consumers"], options["cubic_exp2"]) for options, _ in bound} == set(
        itertools.product((2, 3), (0, 2))
    )
    for options, row in bound:
        late = [exponentials for products, exponentials in row["between_waits"] if products]
        # Only those of a tile's first block, whose product comes after them, lie between products and a wait;
        # and at most the factors of the two rows of a lane and a few more.
        assert sum(count > 12 for count in late) == options["consumers"], (options, row)


@pytest.mark.slow
def test_without_being_bound_to_they_do_not_where_three_consumers_share_the_registers(compiled_candidates):
    late = [
        sum(exponentials > 12 for products, exponentials in row["between_waits"] if products)
        for cell, row in compiled_candidates
        if cell[3]["consumers"] == 3 and not cell[3]["softmax_first"]
    ]
    assert late
    assert min(late) > 3


@pytest.mark.slow
def test_barriers_that_lie_elsewhere_are_refused(compiled_candidates):
    for _, row in compiled_candidates:
        assert "lays out shared memory otherwise" in row["refusal"]


# Triton's own launcher, with a C function that writes down what it is called with.
LAUNCHER = """
import json, sys
from types import SimpleNamespace
import torch
from triton.backends.nvidia import driver
from triton.runtime.driver import driver as active
from harness.plugin import compile_unit
from harness.target import Target
from kernels import gluon_hopper

def encoded(*what): return ("descriptor", *map(repr, what))
utils = SimpleNamespace(fill_tma_descriptor=encoded, fill_tma_descriptor_tiled=encoded)
active.set_active(SimpleNamespace(utils=utils))
hopper = Target("cuda", "Hopper", (9, 0))
head_dim, causal, dtype, options = json.loads(sys.argv[1])
problem = SimpleNamespace(head_dim=head_dim, causal=causal, dtype=dtype, seq_len_k=1000)
[unit] = gluon_hopper.compile_units(problem, options, hopper)
compiled = compile_unit(unit, hopper)
metadata = compiled.metadata
calls = []
def c_function(*call): calls.append(repr(call))
run = driver.CudaLauncher.__new__(driver.CudaLauncher)
run.launch = driver.wrap_handle_tensordesc(c_function, unit.signature, metadata.tensordesc_meta)
run.arg_annotations, run.kernel_signature, run.num_ctas = ["annotations"], b"signature", 1
for name in ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align"):
    setattr(run, name, getattr(metadata, name))
run.launch_cooperative_grid, run.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl
kernel = SimpleNamespace(run=run, function=12345, packed_metadata=compiled.packed_metadata)

tensors = [torch.zeros(2, 3, 1000, head_dim, dtype=torch.bfloat16) for _ in range(4)]
descriptors = [gluon_hopper._descriptor(t, rows) for t, rows in zip(tensors, (64, 128, 128, 64))]
constants = gluon_hopper._constants(options, 1000, causal).values()
arguments = (*descriptors, 4096, 3, 1, 6, 8, 3, 1000, 0.25, *constants)
short_cut = gluon_hopper._short_cut(kernel, (48, 1, 1), 77, arguments)
assert calls == []
short_cut()
run(48, 1, 1, 77, kernel.function, kernel.packed_metadata, None, None, None, *arguments)
short_cut()
assert len(calls) == 3 and calls.count(calls[0]) == 3, calls
assert calls[0].count("'descriptor'") == 4
assert "tensor(" not in calls[0]
"""


@pytest.mark.slow
def test_the_short_cut_calls_the_c_function_as_tritons_own_launcher_does(tmp_path):
    cell = [64, True, "bf16", gluon_hopper.candidates(problem(64, True), HOPPER)[0]]
    output_of(LAUNCHER, cell, tmp_path)  # asserts by itself


# ---- what needs a Hopper GPU ----


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("head_dim", "option"), every_candidate())
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_candidate_is_the_formula_for_any_length(head_dim, option, causal, dtype):
    for length in (1, 3, 17, 63, 64, 65, 97, 127, 128, 129, 191, 193, 257, 385, 1000, 1023, 1025, 1100, 1537):
        q, k, v = inputs(2, 4, 2, length, length, head_dim, dtype, seed=length)
        assert_close(attention(q, k, v, causal=causal, **option), q, k, v, causal)
    for seq_len_q, seq_len_k in ((77, 500), (500, 77)):
        q, k, v = inputs(1, 3, 1, seq_len_q, seq_len_k, head_dim, dtype)
        assert_close(attention(q, k, v, causal=causal, **option), q, k, v, causal)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_all_candidates_agree(head_dim, causal):
    q, k, v = inputs(2, 4, 2, 1100, 1100, head_dim)
    options = [option for dim, option in every_candidate() if dim == head_dim]
    outputs = [attention(q, k, v, causal=causal, **option).double() for option in options]
    assert len(outputs) >= 2
    for output in outputs:
        # Two units in the last place at magnitude 2 to 4: weights are rounded beside another reference.
        assert (output - outputs[0]).abs().max() <= 2**-8


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
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0, 1e-46])
@pytest.mark.parametrize("causal", [False, True])
def test_the_scale_is_the_callers(scale, causal):
    q, k, v = inputs(1, 2, 2, 140, 150, 64)
    assert_close(attention(q, k, v, causal=causal, scale=scale), q, k, v, causal, scale=scale)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_whose_scores_are_all_minus_infinity_gives_zero_as_sdpa(causal):
    q, k, v = inputs(1, 1, 1, 300, 300, 64)
    q[:, :, 7, 0] = math.inf
    k[..., 0] = -k[..., 0].abs() - 0.1
    output = attention(q, k, v, causal=causal)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert (output[:, :, 7] == 0).all()
    torch.testing.assert_close(output, expected, rtol=0.01, atol=0.01)


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
def test_a_capture_on_a_stream_that_had_calls_before_does_not_share_their_counter():
    q, k, v = inputs(4, 16, 16, 1000, 1000, 64)
    expected = attention(q, k, v, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            attention(q, k, v, causal=True)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    for _ in range(20):
        captured.zero_()
        torch.cuda.synchronize()
        graph.replay()  # on the current stream, while the other one is busy with calls of its own
        with torch.cuda.stream(stream):
            outputs = [attention(q, k, v, causal=True) for _ in range(3)]
        torch.cuda.synchronize()
        assert all(torch.equal(output, expected) for output in (captured, *outputs))


@pytest.mark.gpu
@on_hopper
def test_tensors_that_come_and_go_at_old_and_new_addresses_are_right():
    kept = []
    for turn in range(12):
        q, k, v = inputs(1, 4, 4, 300, 300, 64, seed=turn)
        assert_close(attention(q, k, v, causal=True), q, k, v, True)
        if turn % 3 == 0:
            kept.append((q, k, v))  # the next ones cannot lie here
        if turn == 8:
            del q, k, v
            torch.cuda.empty_cache()
    for q, k, v in kept:
        assert_close(attention(q, k, v, causal=True), q, k, v, True)


@pytest.mark.gpu
@on_hopper
def test_threads_with_streams_of_their_own_are_right():
    cells = [inputs(2, 8, 8, 500 + 100 * i, 500 + 100 * i, 64, seed=i) for i in range(4)]
    expected = [attention(*cell, causal=True) for cell in cells]
    torch.cuda.synchronize()

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            outputs = [attention(*cells[index], causal=True) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(output, expected[index]) for output in outputs)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.gpu
@on_hopper
def test_a_hook_is_told_of_every_launch_while_it_is_there():
    q, k, v = inputs(1, 2, 2, 300, 300, 64)
    expected = attention(q, k, v, causal=True)
    told = []
    hook = told.append
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        outputs = [attention(q, k, v, causal=True) for _ in range(3)]
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    outputs.append(attention(q, k, v, causal=True))
    assert len(told) == 3
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.gpu
@on_hopper
def test_the_short_cut_is_taken():
    q, k, v = inputs(1, 2, 2, 300, 300, 64)
    attention(q, k, v, causal=True, scale=0.123)
    plans = [
        plan for plan in gluon_hopper._plans.values() if plan._scalars[-1] == 0.123 * gluon_hopper.LOG2_E
    ]
    assert [len(plan._launches) for plan in plans] == [1]


@pytest.mark.gpu
@on_hopper
def test_a_gradient_is_refused_after_a_call_without():
    q, k, v = inputs(1, 2, 2, 300, 300, 64)
    attention(q, k, v, causal=True)
    with pytest.raises(ValueError, match="requires a gradient"):
        attention(q.requires_grad_(), k, v, causal=True)


@pytest.mark.gpu
@on_hopper
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current_one_are_right():
    q, k, v = inputs(1, 4, 4, 300, 300, 64)
    for _ in range(3):
        for index in (0, 1):
            there = [tensor.to(f"cuda:{index}") for tensor in (q, k, v)]
            output = attention(*there, causal=True)
            assert output.device.index == index
            assert_close(output, *there, True)
    assert torch.cuda.current_device() == 0


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
