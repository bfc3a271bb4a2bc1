"""Invalid pipeline tables are refused, and valid tables are not."""

import dataclasses

import numpy as np
import pytest

from eqformer.parallel import (
    count_link_ticks,
    gpipe,
    IDLE,
    interleaved,
    looping,
    make_schedule,
    one_f_one_b,
    pack_schedule,
    ring_placement,
    SCHEDULES,
    simulate,
    v_placement,
    zero_bubble,
)


# One microbatch on each of three devices, of one chunk and of two.
ONE_BY_ONE = {
    1: [[("forward", 0, 0), ("backward", 0, 0)]] * 3,
    2: [[("forward", 0, 0), ("forward", 0, 1), ("backward", 0, 1), ("backward", 0, 0)]] * 3,
}


def changed(schedule, kind, *cells):
    """A copy of the schedule with some cells of a table set: (tick, stage, entry)."""
    table = getattr(schedule, kind).copy()
    for tick, stage, entry in cells:
        table[tick, stage] = entry
    return dataclasses.replace(schedule, **{kind: table})


def moved(schedule, kind, stage, ticks):
    """All entries of a table's stage so many ticks later."""
    table = getattr(schedule, kind).copy()
    table[:, stage] = np.roll(table[:, stage], ticks)
    return dataclasses.replace(schedule, **{kind: table})


def placed_otherwise(schedule, part_of):
    """A copy of the schedule with another placement, which nobody has looked at."""
    other = dataclasses.replace(schedule)
    object.__setattr__(other, "part_of", part_of)
    return other


# In 1F1B of 3 stages, stage i does the forward of microbatch k at tick k+i and its backward at tick k+4-i.
BROKEN = [
    (
        changed(one_f_one_b(3, 6), "forward", (2, 1, 2), (3, 1, 1)),
        "tick 2, stage 1, microbatch 2, chunk 0: .* later than the forward entry of the previous part, .* in tick 2",
    ),
    (
        changed(one_f_one_b(3, 6), "backward", (5, 2, IDLE)),
        "at stage 2, microbatch 3, chunk 0: .* one backward entry, but there is none",
    ),
    (
        changed(gpipe(3, 6), "forward", (0, 2, 4)),
        "tick 6, stage 2, microbatch 4, chunk 0: .* a single forward entry, but there is one at tick 0",
    ),
    (
        moved(one_f_one_b(3, 6), "forward", 1, -1),
        "tick 0, stage 1, microbatch 0, chunk 0: .* later than the forward entry of the previous .* in tick 0; move",
    ),
    (
        moved(one_f_one_b(3, 6), "backward", 1, -1),
        "tick 2, stage 1, microbatch 0, chunk 0: .* later than the backward entry of the next part, .* in tick 2",
    ),
    (
        moved(one_f_one_b(3, 6), "backward", 2, -1),
        "tick 1, stage 2, microbatch 0, chunk 0: .* no earlier than the forward entry of this last part, .* in tick 2",
    ),
    (
        moved(looping(3, 3, 2), "forward", 2, 1),  # the ring: stage 0 needs what stage 2 had at tick 2
        "tick 3, stage 0, microbatch 0, chunk 1: .* previous part, which is in tick 3; .* tick 4 or later",
    ),
    (
        moved(zero_bubble(2, 3), "weight", 0, -2),
        "stage 0, microbatch 0, chunk 0: .* weight entry no earlier than the backward entry of this part",
    ),
    (
        changed(one_f_one_b(2, 2), "weight", (3, 0, 1)),
        "at stage 0, microbatch 0, chunk 0: .* one weight entry, but there is none .* or for none",
    ),
    (changed(gpipe(2, 2), "forward", (0, 1, 2)), "entry 2 at tick 0, stage 1, but the rule is .* 0 to 1"),
    (
        placed_otherwise(gpipe(2, 2), ring_placement(3)),
        r"'gpipe': the table 'forward' has shape \(6, 2\), .* \(6, 3\)",
    ),
]


@pytest.mark.parametrize("table,words", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_table_is_refused(table, words):
    with pytest.raises(ValueError, match=f"Schedule .*{words}"):
        simulate(table)


def runs(table):
    """Whether a table can be run and does all work once, by running it with messages that arrive after each tick."""
    last, inbox, mine, everything = table.parts - 1, set(), set(), []
    for rows in zip(table.forward, table.backward, table.weight):
        sent = set()
        for kind, row in zip("FBW", rows):
            for stage in np.flatnonzero(row != IDLE):
                chunk, k = divmod(int(row[stage]), table.microbatches)
                part = int(table.part_of[stage, chunk])
                everything.append((kind, part, k))
                if kind == "F" and part and ("F", part, k) not in inbox:
                    return False
                if kind == "B" and (("B", part, k) not in inbox if part < last else ("F", part, k) not in mine):
                    return False
                if kind == "W" and ("B", part, k) not in mine:
                    return False
                mine.add((kind, part, k))
                sent |= {("F", part + 1, k)} if kind == "F" else {("B", part - 1, k)} if kind == "B" else set()
        inbox |= sent
    kinds = 3 if table.is_split else 2
    return len(everything) == len(set(everything)) == kinds * (last + 1) * table.microbatches


@pytest.mark.parametrize("name", SCHEDULES)
def test_changed_tables_are_refused_exactly_where_they_cannot_be_run(name):
    """Random swaps, moves and repeats, judged by running the table: both verdicts must occur and agree."""
    table = make_schedule(name, stages=3, microbatches=6, chunks=SCHEDULES[name].chunks or 2)
    random, verdicts = np.random.default_rng(0), []
    for _ in range(300):
        kind = random.choice(["forward", "backward", "weight"][: 2 + table.is_split])
        entries, stage = getattr(table, kind), int(random.integers(3))
        a = int(random.choice(np.flatnonzero(entries[:, stage] != IDLE)))
        b = int(np.clip(a + random.integers(-3, 4), 0, table.ticks - 1))
        swapped = [(a, stage, entries[b, stage]), (b, stage, entries[a, stage])]
        broken = changed(table, kind, *(swapped if random.random() < 0.8 else swapped[1:]))
        verdicts.append(runs(broken))
        if verdicts[-1]:
            simulate(broken)
        else:
            with pytest.raises(ValueError, match="Schedule .*the rule is"):
                simulate(broken)
    assert runs(table) and 20 < sum(verdicts) < 280


def test_no_stage_of_a_fused_table_can_be_a_tick_earlier():
    for table in (one_f_one_b(4, 6), interleaved(3, 6, 2)):
        for stage in range(1, table.stages):
            with pytest.raises(ValueError, match="entry of the previous part"):
                simulate(moved(table, "forward", stage, -1))
        for stage in range(table.stages):
            with pytest.raises(ValueError, match="entry of the next part|last part"):
                simulate(moved(table, "backward", stage, -1))


def test_a_placement_visits_each_device_once_a_chunk():
    for part_of in ([[0, 1], [2, 3]], [[0], [0]], [[1], [2]]):
        with pytest.raises(ValueError, match=r"'mine': chunk c of all 2 devices .* but part_of is \[\["):
            dataclasses.replace(gpipe(2, 1), name="mine", part_of=np.array(part_of))


def test_messages_follow_from_the_placement():
    """Down the devices and back, and devices in another order: who is first and last, and how far the next part is."""
    back = pack_schedule("v", ONE_BY_ONE[2], microbatches=1, part_of=v_placement(3))
    assert (back.stage_of[0], back.chunk_of[0], back.stage_of[-1], back.chunk_of[-1]) == (0, 0, 0, 1)
    assert back.shifts.tolist() == [1, 1, 0, 2, 2]
    assert simulate(back).messages.tolist() == [2, 4, 2]
    assert count_link_ticks(back) == {(True, 1): 2, (False, 2): 2, (True, 2): 2, (False, 1): 2}
    mixed = pack_schedule("mixed", ONE_BY_ONE[1], microbatches=1, part_of=np.array([[1], [2], [0]]))
    assert mixed.stage_of.tolist() == [2, 0, 1] and mixed.shifts.tolist() == [1, 1]
    assert count_link_ticks(mixed) == {(True, 1): 2, (False, 2): 2}
    alone = pack_schedule("alone", ONE_BY_ONE[2][:1], microbatches=1, part_of=v_placement(1))
    assert simulate(alone).messages.tolist() == [0] and count_link_ticks(alone) == {}
