"""The protocol by which the partitions of kernels/gluon_hopper.py share buffers, in plain Python.

`partitions` writes down what the producer and the consumers do with barriers and buffers for a few tiles:
one list of operations for each, in the order and with the parities of the kernel, arithmetic left out.
`explore` runs the lists in every possible order, with every copy landing as late as it can or as early,
and returns the first fault it meets: a deadlock, a buffer that does not hold what its reader expects, or
one that is overwritten while somebody reads it.

Operations are tuples:

    ("wait", barrier, parity)           go on once the phase of this parity has completed
    ("arrive", barrier)                 count one arrival
    ("expect", barrier, copies)         count one arrival, and let the phase wait for copies to land too
    ("copy", barrier, buffer, content)  have TMA fill a buffer some time later, and then tell the barrier
    ("write", buffer, content)          fill a buffer now
    ("begin", buffer, content)          start to read asynchronously (wgmma, a TMA store): it must hold this
    ("end", buffer)                     that has been waited for
    ("take", turn)                      go on once the turn has been passed here (a named barrier)
    ("pass", turn)                      pass it on
"""

from __future__ import annotations

Q_SLOTS = 2


def partitions(blocks_of_tiles, consumers=2, stages=2, q_slots=Q_SLOTS, ping_pong=False):
    """The initial count of each barrier, and the operations of each partition.

    blocks_of_tiles holds, for each tile that the program takes, its number of blocks of keys.
    """
    counts = {("q_full", slot): 1 for slot in range(q_slots)}
    counts |= {("q_empty", slot): consumers for slot in range(q_slots)}
    counts |= {("full", stage): 1 for stage in range(stages)}
    counts |= {("empty", stage): consumers for stage in range(stages)}
    roles = {"producer": producer(blocks_of_tiles, consumers, stages, q_slots)}
    for number in range(consumers):
        turns = (("turn", number), ("turn", (number + 1) % consumers)) if ping_pong else None
        roles[f"consumer {number}"] = consumer(number, blocks_of_tiles, stages, q_slots, turns)
    return counts, roles


def producer(blocks_of_tiles, consumers, stages, q_slots):
    operations = []
    unit, before = 0, None
    for taken, blocks in enumerate(blocks_of_tiles):
        slot = taken % q_slots
        operations.append(("wait", ("q_empty", slot), (taken // q_slots & 1) ^ 1))
        operations.append(("write", ("number", slot), taken))
        operations.append(("expect", ("q_full", slot), consumers))
        operations += [
            ("copy", ("q_full", slot), ("q", slot, number), ("Q", taken)) for number in range(consumers)
        ]
        for block in reversed(range(blocks)):
            stage = unit % stages
            operations.append(("wait", ("empty", stage), (unit // stages & 1) ^ 1))
            operations.append(("expect", ("full", stage), 1 if before is None else 2))
            operations.append(("copy", ("full", stage), ("k", stage), (taken, block)))
            if before is not None:
                operations.append(("copy", ("full", stage), ("v", stage), before))
            before = (taken, block)
            unit += 1
    slot = len(blocks_of_tiles) % q_slots
    operations.append(("wait", ("q_empty", slot), (len(blocks_of_tiles) // q_slots & 1) ^ 1))
    operations.append(("write", ("number", slot), len(blocks_of_tiles)))
    operations.append(("arrive", ("q_full", slot)))
    stage = unit % stages
    operations.append(("wait", ("empty", stage), (unit // stages & 1) ^ 1))
    operations.append(("expect", ("full", stage), 1))
    operations.append(("copy", ("full", stage), ("v", stage), before))
    return operations


def consumer(number, blocks_of_tiles, stages, q_slots, turns):
    operations = []

    def wait_full(unit):
        operations.append(("wait", ("full", unit % stages), unit // stages & 1))

    def read_number(taken):
        operations.append(("begin", ("number", taken % q_slots), taken))
        operations.append(("end", ("number", taken % q_slots)))

    def begin_scores(taken, block, unit):
        operations.append(("begin", ("q", taken % q_slots, number), ("Q", taken)))
        operations.append(("begin", ("k", unit % stages), (taken, block)))

    def end_scores(taken, unit):
        operations.append(("end", ("q", taken % q_slots, number)))
        operations.append(("end", ("k", unit % stages)))

    operations.append(("wait", ("q_full", 0), 0))
    read_number(0)
    wait_full(0)
    begin_scores(0, blocks_of_tiles[0] - 1, 0)
    end_scores(0, 0)
    operations.append(("arrive", ("empty", 0)))
    wait_full(1)
    if turns and turns[1] == ("turn", 0):
        operations.append(("pass", turns[1]))
    unit = 1
    for taken, blocks in enumerate(blocks_of_tiles):
        for block in reversed(range(blocks - 1)):
            if turns:
                operations.append(("take", turns[0]))
            begin_scores(taken, block, unit)
            operations.append(("begin", ("v", unit % stages), (taken, block + 1)))
            if turns:
                operations.append(("pass", turns[1]))
            end_scores(taken, unit)
            wait_full(unit + 1)
            operations.append(("end", ("v", unit % stages)))
            operations.append(("arrive", ("empty", unit % stages)))
            unit += 1
        # The border: the last V of this tile, the first K of the next.
        following = taken + 1
        last = following == len(blocks_of_tiles)
        operations.append(("begin", ("v", unit % stages), (taken, 0)))
        operations.append(("wait", ("q_full", following % q_slots), following // q_slots & 1))
        read_number(following)
        if not last:  # after the last tile the scores are of whatever lies there, and unused
            begin_scores(following, blocks_of_tiles[following] - 1, unit)
        operations.append(("end", ("v", unit % stages)))
        buffer = ("q", taken % q_slots, number)
        operations.append(("write", buffer, ("O", taken)))
        operations.append(("begin", buffer, ("O", taken)))
        if not last:
            end_scores(following, unit)
        operations.append(("arrive", ("empty", unit % stages)))
        unit += 1
        operations.append(("end", buffer))
        operations.append(("arrive", ("q_empty", taken % q_slots)))
        if not last:
            wait_full(unit)
    return operations


def explore(counts, roles):
    """Run the partitions in every order; the first fault in words, or None.

    A state is where each partition stands, the barriers (parity of the current phase, arrivals and copies
    still missing), the copies under way, what the buffers hold and how many read each.
    """
    names = list(roles)
    start = (
        tuple(0 for _ in names),
        tuple(sorted((barrier, (0, count, 0)) for barrier, count in counts.items())),
        (),
        (),
        (),
    )
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        following = []
        for successor in _successors(state, names, roles, counts):
            if isinstance(successor, str):
                return successor
            following.append(successor)
        positions, _, copies, _, readers = state
        if not following:
            stuck = [
                f"{name} at {roles[name][position]}"
                for name, position in zip(names, positions, strict=True)
                if position < len(roles[name])
            ]
            if stuck:
                return "deadlock: " + "; ".join(stuck)
            if copies or readers:
                return f"left over at the end: copies {copies}, readers {readers}"
        for successor in following:
            if successor not in seen:
                seen.add(successor)
                waiting.append(successor)
    return None


def _successors(state, names, roles, counts):
    positions, barriers, copies, contents, readers = state
    for index, name in enumerate(names):
        if positions[index] < len(roles[name]):
            after = _perform(roles[name][positions[index]], state, counts)
            if isinstance(after, str):
                yield f"{name} at {roles[name][positions[index]]}: {after}"
            elif after is not None:
                moved = (*positions[:index], positions[index] + 1, *positions[index + 1 :])
                yield (moved, *after)
    for copy in copies:
        barrier, buffer, content = copy
        rest = tuple(other for other in copies if other != copy)
        landed = _with(contents, buffer, content)
        yield (positions, _count(barriers, counts, barrier, copies=1), rest, landed, readers)


def _perform(operation, state, counts):
    """What an operation makes of barriers, copies, contents and readers; None while it must wait."""
    _, barriers, copies, contents, readers = state
    kind, subject = operation[0], operation[1]
    if kind == "wait":
        parity = dict(barriers)[subject][0]
        return None if parity == operation[2] else (barriers, copies, contents, readers)
    if kind == "arrive":
        return _count(barriers, counts, subject, arrivals=1), copies, contents, readers
    if kind == "expect":
        expected = _count(barriers, counts, subject, arrivals=1, copies=-operation[2])
        return expected, copies, contents, readers
    if kind == "copy":
        buffer = operation[2]
        if dict(readers).get(buffer) or any(other[1] == buffer for other in copies):
            return f"{buffer} is overwritten while it is in use"
        under_way = tuple(sorted((*copies, (subject, buffer, operation[3])), key=repr))
        # From now until the copy lands, the buffer holds nothing that can be relied on.
        return barriers, under_way, _with(contents, buffer, None), readers
    if kind == "take":
        passed = dict(contents).get(subject)
        return (barriers, copies, _with(contents, subject, None), readers) if passed else None
    if kind == "pass":
        if dict(contents).get(subject):
            return f"{subject} is passed twice"
        return barriers, copies, _with(contents, subject, True), readers
    if kind == "write":
        if dict(readers).get(subject) or any(other[1] == subject for other in copies):
            return f"{subject} is overwritten while it is in use"
        return barriers, copies, _with(contents, subject, operation[2]), readers
    if kind == "begin":
        if dict(contents).get(subject) != operation[2]:
            return f"{subject} holds {dict(contents).get(subject)}"
        return barriers, copies, contents, _with(readers, subject, dict(readers).get(subject, 0) + 1)
    assert kind == "end", kind
    return barriers, copies, contents, _with(readers, subject, dict(readers)[subject] - 1 or None)


def _count(barriers, counts, barrier, arrivals=0, copies=0):
    parity, arrivals_missing, copies_missing = dict(barriers)[barrier]
    arrivals_missing -= arrivals
    copies_missing -= copies
    if arrivals_missing == 0 and copies_missing == 0:
        parity, arrivals_missing = parity ^ 1, counts[barrier]
    return _with(barriers, barrier, (parity, arrivals_missing, copies_missing))


def _with(pairs, key, value):
    """The sorted pairs with one value replaced; without the key where the value is None."""
    changed = {**dict(pairs), key: value}
    return tuple(sorted((pair for pair in changed.items() if pair[1] is not None), key=lambda pair: pair[0]))
