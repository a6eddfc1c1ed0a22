"""The protocol by which the partitions of kernels/gluon_hopper.py share buffers, in plain Python.

`partitions` writes down what the producer and the consumers' warps do with barriers and buffers for a few
tiles: one list of operations for each, in the order and with the parities of the kernel, arithmetic left out.
`explore` runs the lists in every possible order, with every copy landing as late as it can or as early,
and returns the first fault it meets: a deadlock, a buffer that does not hold what its reader expects, or
one that is overwritten while somebody reads it. `deal` does the same with the counter by which programs
share out the tiles.

A warp of a consumer waits and arrives by itself. A consumer has 4 of them; fewer show the same and leave
fewer orders to look at. What its warps do together, the compiler's barriers around O's way through shared
memory and the turns at the tensor cores, are barriers here like the others.

Operations are tuples:

    ("wait", barrier, parity)           go on once the phase of this parity has completed
    ("arrive", barrier)                 count one arrival
    ("expect", barrier, copies)         count one arrival, and let the phase wait for copies to land too
    ("copy", barrier, buffer, content)  have TMA fill a buffer some time later, and then tell the barrier
    ("write", buffer, content)          fill a buffer now
    ("begin", buffer, content)          start to read asynchronously (wgmma, a TMA store): it must hold this
    ("end", buffer)                     that has been waited for
"""

from __future__ import annotations

Q_SLOTS = 2
END = "no tile"


def partitions(
    blocks_of_tiles, consumers=2, stages=2, q_slots=Q_SLOTS, ping_pong=False, warps=1, q_in_registers=False
):
    """The initial count of each barrier, and the operations of each partition's warps.

    blocks_of_tiles holds, for each tile that the program takes, its number of blocks of keys.
    """
    counts = {("q_full", slot): 1 for slot in range(q_slots)}
    counts |= {("q_empty", slot): consumers * warps for slot in range(q_slots)}
    counts |= {("full", stage): 1 for stage in range(stages)}
    counts |= {("empty", stage): consumers * warps for stage in range(stages)}
    counts |= {("together", number): warps for number in range(consumers)}
    counts |= {("turn", number): 2 * warps for number in range(consumers)}  # who passes it, and who takes it
    roles = {"producer": producer(blocks_of_tiles, consumers, stages, q_slots)}
    for number in range(consumers):
        for warp in range(warps):
            turns = (number, (number + 1) % consumers) if ping_pong else None
            roles[f"consumer {number}.{warp}"] = consumer(
                number, warp, warps, blocks_of_tiles, stages, q_slots, turns, q_in_registers
            )
    return counts, roles


def producer(blocks_of_tiles, consumers, stages, q_slots):
    operations = []
    unit, before = 0, None

    def publish(taken, description, copies):
        """Describe a tile, and tell q_full so, with so many copies of Q to come; no Q with the last one."""
        slot = taken % q_slots
        operations.append(("wait", ("q_empty", slot), (taken // q_slots & 1) ^ 1))
        operations.append(("write", ("tile", slot), description))
        operations.append(("expect", ("q_full", slot), copies))

    for taken, blocks in enumerate(blocks_of_tiles):
        publish(taken, taken, consumers)
        slot = taken % q_slots
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
    publish(len(blocks_of_tiles), END, 0)
    stage = unit % stages
    operations.append(("wait", ("empty", stage), (unit // stages & 1) ^ 1))
    operations.append(("expect", ("full", stage), 1))
    operations.append(("copy", ("full", stage), ("v", stage), before))
    return operations


def consumer(number, warp, warps, blocks_of_tiles, stages, q_slots, turns, q_in_registers):
    operations = []
    met = {}  # how often this warp has met others at a barrier

    def wait_full(unit):
        operations.append(("wait", ("full", unit % stages), unit // stages & 1))

    def meet(barrier):
        """Wait for all who come here."""
        operations.append(("arrive", barrier))
        operations.append(("wait", barrier, met.get(barrier, 0) & 1))
        met[barrier] = met.get(barrier, 0) + 1

    def read_tile(taken, description):
        operations.append(("begin", ("tile", taken % q_slots), description))
        operations.append(("end", ("tile", taken % q_slots)))

    def begin_scores(taken, block, unit, q_in_registers=False):
        if not q_in_registers:
            operations.append(("begin", ("q", taken % q_slots, number), ("Q", taken)))
        operations.append(("begin", ("k", unit % stages), (taken, block)))

    def end_scores(taken, unit, q_in_registers=False):
        if not q_in_registers:
            operations.append(("end", ("q", taken % q_slots, number)))
        operations.append(("end", ("k", unit % stages)))

    operations.append(("wait", ("q_full", 0), 0))
    read_tile(0, 0)
    wait_full(0)
    begin_scores(0, blocks_of_tiles[0] - 1, 0)
    end_scores(0, 0)
    operations.append(("arrive", ("empty", 0)))
    wait_full(1)
    if turns and turns[1] == 0:
        operations.append(("arrive", ("turn", 0)))
    unit = 1
    for taken, blocks in enumerate(blocks_of_tiles):
        if q_in_registers:
            operations.append(("begin", ("q", taken % q_slots, number), ("Q", taken)))
            operations.append(("end", ("q", taken % q_slots, number)))
        for block in reversed(range(blocks - 1)):
            if turns:
                meet(("turn", turns[0]))
            begin_scores(taken, block, unit, q_in_registers)
            operations.append(("begin", ("v", unit % stages), (taken, block + 1)))
            if turns:
                operations.append(("arrive", ("turn", turns[1])))
            end_scores(taken, unit, q_in_registers)
            wait_full(unit + 1)
            operations.append(("end", ("v", unit % stages)))
            operations.append(("arrive", ("empty", unit % stages)))
            unit += 1
        # The border: the last V of this tile, the first K of the next.
        following = taken + 1
        last = following == len(blocks_of_tiles)
        operations.append(("begin", ("v", unit % stages), (taken, 0)))
        operations.append(("wait", ("q_full", following % q_slots), following // q_slots & 1))
        read_tile(following, END if last else following)
        if not last:  # after the last tile the scores are of whatever lies there, and unused
            begin_scores(following, blocks_of_tiles[following] - 1, unit)
        operations.append(("end", ("v", unit % stages)))
        # All warps are done with Q before one of them writes O there, and have written it before one of them
        # has TMA store it.
        buffer = ("q", taken % q_slots, number)
        meet(("together", number))
        operations.append(("write", buffer, ("O", taken)))
        meet(("together", number))
        if warp == 0:
            operations.append(("begin", buffer, ("O", taken)))
        if not last:
            end_scores(following, unit)
        operations.append(("arrive", ("empty", unit % stages)))
        unit += 1
        if warp == 0:
            operations.append(("end", buffer))
        operations.append(("arrive", ("q_empty", taken % q_slots)))
        if not last:
            wait_full(unit)
    return operations


def deal(programs, tiles, draws=lambda program: True, resets=lambda ticket, tiles: ticket == tiles - 1):
    """Let programs share out tiles by a counter, in every order of their draws; the first fault, or None.

    Each begins with the tile of its own number, and draws a ticket for each tile that it takes. `resets` says
    which ticket puts the counter back to 0; `draws` whether a program draws at its last tile too.
    """
    seen, waiting = set(), [(0, tuple(range(programs)), frozenset(range(programs)))]
    while waiting:
        state = waiting.pop()
        if state in seen:
            continue
        seen.add(state)
        counter, current, taken = state  # current: the tile of each program, None once there is none
        busy = [program for program in range(programs) if current[program] is not None]
        if not busy and (counter != 0 or taken != frozenset(range(tiles))):
            return f"the counter is left at {counter}, and {len(taken)} tiles of {tiles} are done"
        for program in busy:
            ticket = counter
            left = 0 if resets(ticket, tiles) else counter + 1
            tile = ticket + programs
            if tile in taken:
                return f"tile {tile} is done twice"
            if tile >= tiles:
                tile = None
                left = left if draws(program) else counter
            then = (*current[:program], tile, *current[program + 1 :])
            waiting.append((left, then, taken if tile is None else taken | {tile}))
    return None


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
