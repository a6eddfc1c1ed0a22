"""What kernels/gluon_hopper.py's partitions do with barriers and buffers, in barrier_model.py's words.

The partitions' own Python is run, with numbers for the integers; what computes is replaced by what does
nothing, and what waits, arrives, copies or multiplies by what writes that down.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace

from kernels import gluon_hopper

HEAD_DIM, TILE_K, ROWS, SLOTS = 64, 128, 64, gluon_hopper.Q_SLOTS.value
RUN = ("_producer", "_consumer", "_step", "_locate", "_blocks")


class Value:
    """A tensor or a layout that nobody looks into."""

    def __getattr__(self, name):
        return self

    def __call__(self, *arguments, **options):
        return self

    def __getitem__(self, key):
        return self

    def __mul__(self, other):
        return self

    __add__ = __rtruediv__ = __mul__


class Buffer:
    """A place in shared memory under its name in the model; what views it is the same place."""

    def __init__(self, trace, name):
        self.trace, self.name = trace, name
        self.shape = (1, 1, 1, TILE_K, HEAD_DIM)

    def reshape(self, shape):
        return self

    def slice(self, start, length):
        return self

    def permute(self, order):
        return self

    def load(self, layout):
        self.trace.note("begin", self.name)
        self.trace.note("end", self.name)
        return Value()

    def store(self, value):
        self.trace.note("write", self.name)


class Buffers:
    """An array of places."""

    def __init__(self, trace, name_of):
        self.trace, self.name_of = trace, name_of
        self.shape = (1, 1, 1, TILE_K, HEAD_DIM)

    def index(self, number):
        return Buffer(self.trace, self.name_of(number))


class Trace:
    """The operations of the producer and of each consumer over the tiles of a few heads."""

    def __init__(
        self, *, heads, seq_len_q, seq_len_k, causal, consumers, stages, ping_pong, q_in_registers=False,
        softmax_first=False, first_keys=TILE_K, head_group=1,
    ):  # fmt: skip
        self.consumers, self.stages = consumers, stages
        self.operations, self.published, self.products = [], [], []
        self.read = self.turns_taken = 0
        self.over = False
        tile_q = consumers * ROWS
        query_tiles = -(-seq_len_q // tile_q)
        names = {
            "k": Buffers(self, lambda number: ("k", number)),
            "v": Buffers(self, lambda number: ("v", number)),
            "q": Buffers(self, lambda number: ("q", number // consumers, number % consumers)),
        }
        globals_ = self._globals()
        functions = {name: _native(getattr(gluon_hopper, name).fn, globals_) for name in RUN}
        globals_.update(functions)
        described = SimpleNamespace(block_type=SimpleNamespace(shape=[1, 1, TILE_K, HEAD_DIM]), dtype=Value())
        functions["_producer"](
            "Q", described, described, None, names["q"], names["k"], names["v"],
            Buffers(self, self._barrier), heads, 1, heads, query_tiles, head_group, seq_len_k,
            consumers, TILE_K, stages, causal, 0,
        )  # fmt: skip
        self.roles = {"producer": self.operations}
        for number in range(consumers):
            self.operations, self.products, self.read, self.turns_taken = [], [], 0, 0
            self.over = False
            functions["_consumer"](
                number, described, names["q"], names["k"], names["v"], seq_len_k, 1.0, consumers, TILE_K,
                stages, causal, seq_len_k % TILE_K != 0, ping_pong, True, True, q_in_registers, 0,
                softmax_first, first_keys, 0,
            )  # fmt: skip
            self.roles[f"consumer {number}.0"] = self.operations

    def note(self, *operation):
        self.operations.append(operation)

    def _barrier(self, number):
        kinds = (
            ("full",) * self.stages + ("empty",) * self.stages + ("q_full",) * SLOTS + ("q_empty",) * SLOTS
        )
        kind = kinds[number]
        return kind, number - kinds.index(kind)

    def _globals(self):
        found = dict(vars(gluon_hopper))
        found["Q_SLOTS"], found["WARPGROUP_ROWS"] = SLOTS, ROWS
        tickets = iter(range(10**6))
        gl = _Language(
            static_range=range, minimum=min, cdiv=lambda a, b: -(-a // b),
            maximum=lambda a, b: a if isinstance(a, Value) else max(a, b),
            where=lambda chosen, a, b: a if chosen else b,
            program_id=lambda axis: 0, num_programs=lambda axis: 1,
        )  # fmt: skip
        fakes = {
            "_wait": lambda number, parity, at: self.note("wait", self._barrier(number), parity),
            "_wait_after": lambda number, parity, total, at: self.note("wait", self._barrier(number), parity),
            "_arrive": lambda number, at: self.note("arrive", self._barrier(number)),
            "_publish": self._publish,
            "_read_tile": self._read_tile,
            "_draw": lambda counter: next(tickets),
            "_drawn": lambda ticket: ticket,
            "_copy_to_shared": self._copy_to_shared,
            "_copy_to_global": lambda descriptor, at, buffer: self.note("begin", buffer.name),
            "_take_turn": self._take_turn,
            "_pass_turn": lambda number: self.note("arrive", ("turn", number)),
            "mbarrier": SimpleNamespace(expect=self._expect),
            "tma": SimpleNamespace(store_wait=lambda left: self.note("end", self.stored())),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_products,
            "fence_async_shared": lambda: None,
            "_mask": lambda s, *rest: s,
            "_begin_softmax": lambda s, *rest: (Value(),) * 3,
            "_go_on_softmax": lambda s, *rest: (Value(),) * 5,
            "_rescaled": lambda o, *rest: o,
            "_pack": lambda *rest: Value(),
            "_unpack": lambda *rest: Value(),
        }
        return {**found, "gl": gl, **fakes}

    def stored(self):
        return next(subject for kind, subject, *_ in reversed(self.operations) if kind == "write")

    def _publish(self, slot, first_query, blocks, batch, head, q_bytes, stages, at):
        self.published.append((first_query, blocks, batch, head))
        self.note("write", ("tile", slot))
        self.note("expect", ("q_full", slot), q_bytes // (ROWS * HEAD_DIM * 2))

    def _read_tile(self, slot, stages, at):
        found = self.published[self.read]
        self.read += 1
        self.over = found[1] == 0
        self.note("begin", ("tile", slot))
        self.note("end", ("tile", slot))
        return found

    def _copy_to_shared(self, descriptor, place, barrier, buffer, pred=True):
        if pred:
            self.note("copy", barrier.name, buffer.name, tuple(place))

    def _expect(self, barrier, size, pred=True):
        if pred:
            self.note("expect", barrier.name, size // (TILE_K * HEAD_DIM * 2))

    def _take_turn(self, number):
        self.note("arrive", ("turn", number))
        self.note("wait", ("turn", number), self.turns_taken & 1)
        self.turns_taken += 1

    def _multiply(self, left, right, total, **options):
        """A product reads its operands in shared memory until it is waited for; after the last tile none."""
        read = [operand.name for operand in (left, right) if isinstance(operand, Buffer)]
        if self.over and read[-1][0] == "k":
            read = []
        for name in read:
            self.note("begin", name)
        self.products.append(read)
        return Value()

    def _wait_products(self, left, deps):
        while len(self.products) > left:
            for name in self.products.pop(0):
                self.note("end", name)
        return deps[0]


class _Language:
    """Gluon's language: a few functions on integers, and else what makes values."""

    def __init__(self, **functions):
        vars(self).update(functions)

    def __getattr__(self, name):
        return Value()


def _native(function, names):
    """The function, with these names in place of its module's."""
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)
