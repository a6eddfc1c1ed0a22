import pytest

from tests.kernels.barrier_model import deal, explore, partitions
from tests.kernels.traced import Trace


def without(operations, kind, barrier):
    return [
        operation for operation in operations if not (operation[0] == kind and operation[1][0] == barrier)
    ]


TILES = [[1], [2], [1, 1, 1], [2, 1], [1, 3], [2, 1, 2]]


@pytest.mark.parametrize("blocks_of_tiles", TILES, ids=str)
@pytest.mark.parametrize("stages", [2, 3])
def test_no_order_of_the_partitions_deadlocks_or_overwrites_a_buffer_in_use(blocks_of_tiles, stages):
    assert explore(*partitions(blocks_of_tiles, consumers=2, stages=stages)) is None


@pytest.mark.parametrize("blocks_of_tiles", [[1, 3], [3, 2]], ids=str)
def test_consumers_that_take_turns_are_in_order_too(blocks_of_tiles):
    assert explore(*partitions(blocks_of_tiles, ping_pong=True)) is None


@pytest.mark.parametrize("blocks_of_tiles", [[1, 3], [2, 1, 2]], ids=str)
def test_q_in_registers_is_in_order_too(blocks_of_tiles):
    assert explore(*partitions(blocks_of_tiles, q_in_registers=True)) is None


def test_three_consumers_that_take_turns_are_in_order_too():
    assert explore(*partitions([1, 1], consumers=3, ping_pong=True)) is None


def test_a_first_turn_that_nobody_passes_deadlocks():
    counts, roles = partitions([3], ping_pong=True)
    roles["consumer 1.0"] = without(roles["consumer 1.0"], "arrive", "turn")
    assert explore(counts, roles).startswith("deadlock")


def test_three_consumers_and_more_stages_than_blocks_are_in_order_too():
    assert explore(*partitions([1, 1], consumers=3, stages=2)) is None
    assert explore(*partitions([1, 1], consumers=2, stages=4)) is None


def test_one_slot_for_q_deadlocks_at_the_border_of_two_tiles():
    # The next tile's Q would wait for this tile's O, and that for the next tile's first scores.
    assert explore(*partitions([1, 1], q_slots=1)).startswith("deadlock")


def test_one_stage_deadlocks():
    # A consumer waits for the next unit before it gives this one back.
    assert explore(*partitions([3], stages=1)).startswith("deadlock")


@pytest.mark.parametrize("barrier", ["q_full", "full"])
def test_a_consumer_that_does_not_wait_reads_a_buffer_that_is_not_there_yet(barrier):
    counts, roles = partitions([2, 1])
    roles["consumer 1.0"] = without(roles["consumer 1.0"], "wait", barrier)
    assert "holds" in explore(counts, roles)


@pytest.mark.parametrize("barrier", ["q_empty", "empty"])
def test_a_producer_that_does_not_wait_overwrites_a_buffer_in_use(barrier):
    counts, roles = partitions([3, 1, 1])
    roles["producer"] = without(roles["producer"], "wait", barrier)
    fault = explore(counts, roles)
    assert "overwritten" in fault or "holds" in fault


@pytest.mark.parametrize("barrier", ["q_empty", "empty"])
def test_a_consumer_that_never_arrives_is_waited_for_forever(barrier):
    counts, roles = partitions([2, 2, 2])
    roles["consumer 0.0"] = without(roles["consumer 0.0"], "arrive", barrier)
    assert explore(counts, roles).startswith("deadlock")


@pytest.mark.parametrize(("buffer", "barrier"), [("v", "empty"), ("q", "q_empty")])
def test_a_buffer_given_back_before_its_reader_was_waited_for_is_overwritten(buffer, barrier):
    counts, roles = partitions([3, 1, 2])
    operations = roles["consumer 0.0"]
    for index, operation in enumerate(operations):
        ends = [i for i in range(index) if operations[i][0] == "end" and operations[i][1][0] == buffer]
        if operation[0] == "arrive" and operation[1][0] == barrier and ends:
            operations.insert(ends[-1], operations.pop(index))
    assert "overwritten" in explore(counts, roles)


@pytest.mark.parametrize("role", ["producer", "consumer 0.0"])
def test_a_wait_for_the_other_parity_is_found(role):
    counts, roles = partitions([2, 1, 1])
    position = max(i for i, operation in enumerate(roles[role]) if operation[0] == "wait")
    kind, barrier, parity = roles[role][position]
    roles[role][position] = (kind, barrier, parity ^ 1)
    assert explore(counts, roles) is not None


# ---- the end of the work ----


def test_consumers_that_are_not_told_of_the_end_wait_forever():
    counts, roles = partitions([2, 1])
    operations = roles["producer"]
    last = max(i for i, operation in enumerate(operations) if operation[1] == ("q_full", 0))
    assert operations[last] == ("expect", ("q_full", 0), 0)
    roles["producer"] = operations[:last] + operations[last + 1 :]
    assert explore(counts, roles).startswith("deadlock")


def test_an_end_that_waits_for_a_q_never_comes():
    counts, roles = partitions([2, 1])
    operations = roles["producer"]
    roles["producer"] = [
        ("expect", operation[1], 1) if operation[0] == "expect" and operation[2] == 0 else operation
        for operation in operations
    ]
    assert explore(counts, roles).startswith("deadlock")


def test_a_description_that_is_written_before_its_slot_is_empty_is_found():
    counts, roles = partitions([1, 1, 1])
    operations = roles["producer"]
    third = [i for i, operation in enumerate(operations) if operation[0] == "write"][2]
    operations.insert(third - 1, operations.pop(third))  # before the wait
    fault = explore(counts, roles)
    assert "overwritten" in fault or "holds" in fault


# ---- warps that wait and arrive by themselves ----


@pytest.mark.parametrize(
    ("blocks_of_tiles", "consumers"), [([2, 1], 1), ([1, 1, 1], 1), ([1, 3], 1), ([1], 2)], ids=str
)
def test_warps_by_themselves_are_in_order_too(blocks_of_tiles, consumers):
    assert explore(*partitions(blocks_of_tiles, consumers=consumers, warps=2)) is None


@pytest.mark.parametrize("barrier", ["q_empty", "empty"])
def test_a_barrier_that_counts_warpgroups_where_warps_arrive_is_found(barrier):
    counts, roles = partitions([3, 1, 2], consumers=1, warps=2)
    counts = {name: 1 if name[0] == barrier else count for name, count in counts.items()}
    assert explore(counts, roles) is not None


@pytest.mark.parametrize("barrier", ["q_empty", "empty", "together"])
def test_a_warp_that_never_arrives_is_waited_for_forever(barrier):
    counts, roles = partitions([2, 2, 2], consumers=1, warps=2)
    roles["consumer 0.1"] = without(roles["consumer 0.1"], "arrive", barrier)
    assert explore(counts, roles).startswith("deadlock")


def test_warps_that_do_not_wait_for_each_other_overwrite_q_with_o():
    counts, roles = partitions([2], consumers=1, warps=2)
    for name in ("consumer 0.0", "consumer 0.1"):
        roles[name] = without(roles[name], "wait", "together")
    assert "overwritten" in explore(counts, roles)


# ---- the counter of tiles ----


@pytest.mark.parametrize(("programs", "tiles"), [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (3, 7), (4, 6)])
def test_every_tile_is_dealt_out_once_and_the_counter_ends_at_zero(programs, tiles):
    assert deal(programs, tiles) is None


def test_a_counter_that_nobody_or_the_wrong_one_puts_back_is_found():
    assert "left at 5" in deal(2, 5, resets=lambda ticket, tiles: False)
    assert "done twice" in deal(2, 5, resets=lambda ticket, tiles: ticket == 1)
    assert deal(2, 5, resets=lambda ticket, tiles: ticket == tiles - 2) is not None


def test_a_program_that_does_not_draw_one_ticket_too_many_is_found():
    assert "left at" in deal(2, 5, draws=lambda program: program != 0)


# ---- the model is the kernel's protocol ----


def in_words_of_the_model(operations):
    """Without what the compiler adds, and without what a buffer holds, which a trace knows as places."""
    kept = [operation for operation in operations if operation[1][0] != "together"]
    return [operation[:2] if operation[0] in ("write", "begin", "end") else operation for operation in kept]


@pytest.mark.parametrize("softmax_first", [False, True])
@pytest.mark.parametrize("q_in_registers", [False, True])
@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize(("causal", "first_keys"), [(False, 128), (False, 64), (True, 128)])
@pytest.mark.parametrize(("consumers", "stages"), [(2, 2), (2, 4), (3, 3)])
def test_the_kernels_partitions_do_what_the_model_says(
    consumers, stages, causal, first_keys, ping_pong, q_in_registers, softmax_first
):
    heads, seq_len = 3, 700
    trace = Trace(
        heads=heads, seq_len_q=seq_len, seq_len_k=seq_len, causal=causal, consumers=consumers, stages=stages,
        ping_pong=ping_pong, q_in_registers=q_in_registers, softmax_first=softmax_first,
        first_keys=first_keys,
    )  # fmt: skip
    tiles = trace.published[:-1]
    # Every tile once, with as many blocks of keys as its rows see together.
    rows = 64 * consumers
    assert sorted((head, first) for first, _, _, head in tiles) == [
        (head, first) for head in range(heads) for first in range(0, seq_len, rows)
    ]
    blocks = [-(-min(seq_len, first + rows if causal else seq_len) // 128) for first, _, _, _ in tiles]
    assert [found for _, found, _, _ in tiles] == blocks
    _, roles = partitions(blocks, consumers, stages, ping_pong=ping_pong, q_in_registers=q_in_registers)

    def place(content, number):
        if content[0] == "Q":
            first, _, batch, head = tiles[content[1]]
            return (batch, head, first + 64 * number, 0)
        _, _, batch, head = tiles[content[0]]
        return (batch, head, 128 * content[1], 0)

    expected = {name: in_words_of_the_model(operations) for name, operations in roles.items()}
    expected["producer"] = [
        (*operation[:3], place(operation[3], operation[2][-1])) if operation[0] == "copy" else operation
        for operation in expected["producer"]
    ]
    assert trace.roles.keys() == expected.keys()
    for name, operations in expected.items():
        assert trace.roles[name] == operations


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_go_by_groups_of_heads_the_leftover_in_the_last_and_with_a_causal_mask_the_longest_first(
    causal,
):
    trace = Trace(
        heads=5,
        seq_len_q=700,
        seq_len_k=700,
        causal=causal,
        consumers=2,
        stages=2,
        ping_pong=False,
        head_group=2,
    )
    order = [(head, first) for first, _, _, head in trace.published[:-1]]
    rows = range(0, 700, 128)
    if causal:
        groups = ((0, 1), (2, 3, 4))
        expected = [(head, first) for heads in groups for first in reversed(rows) for head in heads]
    else:
        expected = [(head, first) for head in range(5) for first in rows]
    assert order == expected
