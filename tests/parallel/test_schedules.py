"""Tables of pipelines against the published formulas."""

import dataclasses

import numpy as np
import pytest

from eqformer.parallel import (
    dualpipe_v,
    gpipe,
    IDLE,
    interleaved,
    looping,
    make_schedule,
    one_f_one_b,
    pack_schedule,
    Schedule,
    SCHEDULES,
    simulate,
    zero_bubble,
    zero_bubble_v,
)


STAGES = [2, 3, 4, 5]
MICROBATCHES = [1, 2, 3, 5, 8, 12]
COSTS = [(1, 1, 1), (1, 2, 1), (2, 3, 1), (3, 1, 4)]
WIDE = [
    pytest.param(range(2, 9), range(1, 25), [*COSTS, (1, 1, 2), (4, 1, 1), (1, 4, 4)], marks=pytest.mark.grid),
    pytest.param(STAGES, MICROBATCHES, COSTS, id="default"),
]


def times(cost, chunks=1):
    """Arguments of `simulate` whose v-th parts are whole numbers, so that sums are exact."""
    return dict(zip(("forward", "backward", "weight"), (float(chunks * each) for each in cost)))


def same(found, expected):
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("stages,microbatches,costs", WIDE)
def test_gpipe_and_1f1b_have_the_published_bubble_and_peak(stages, microbatches, costs):
    for p in stages:
        i = np.arange(p)
        for m in microbatches:
            classic, fused = one_f_one_b(p, m, fused=False), one_f_one_b(p, m)
            assert (gpipe(p, m).ticks, classic.ticks, fused.ticks) == (
                2 * (m + p - 1),
                2 * (m + p - 1),
                m + 2 * (p - 1),
            )
            for cost in costs:
                whole, bubble = m * sum(cost), (p - 1) * sum(cost)
                forth, turns, both = (simulate(each, **times(cost)) for each in (gpipe(p, m), classic, fused))
                same([forth.asynchronous.idle, forth.lock_step.idle], bubble)
                assert turns.asynchronous.idle == both.lock_step.idle == bubble
                assert both.asynchronous.total <= both.lock_step.total == whole + bubble
                assert forth.asynchronous.bubble == bubble / whole
                same(forth.peak(), np.full(p, m))
                same(turns.peak(), np.minimum(m, p - i))
                same(both.peak(), np.minimum(m, 2 * (p - 1 - i) + 1))


@pytest.mark.by_default("2-default")
@pytest.mark.parametrize("stages,microbatches,costs", WIDE)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_chunks_divide_the_bubble(stages, microbatches, costs, chunks):
    for p in stages:
        max_held = 2 * (p - 1 - np.arange(p)) + (chunks - 1) * p + 1
        for m in [m for m in microbatches if m >= p]:
            tables = [looping(p, m, chunks)]
            if m % p == 0:
                tables += [interleaved(p, m, chunks), interleaved(p, m, chunks, fused=False)]
                assert tables[1].ticks == m * chunks + (chunks + 1) * p - 2
            assert tables[0].ticks == 2 * (m * chunks + p - 1)
            for cost in costs:
                found = [simulate(table, **times(cost, chunks)) for table in tables]
                bubble = (p - 1) * sum(cost)  # of costs that are v times as large
                same([found[0].lock_step.idle, found[0].asynchronous.idle], bubble)
                same(found[0].peak(), np.full(p, m * chunks))
                if m % p == 0:
                    same([found[1].lock_step.idle, found[2].asynchronous.idle], bubble)
                    same(found[1].peak(), np.minimum(m * chunks, max_held))
                    same(found[2].peak(), np.minimum(m * chunks, max_held))


@pytest.mark.parametrize("stages,microbatches,costs", WIDE)
def test_splitting_off_the_weights_fills_the_bubble(stages, microbatches, costs):
    for p in stages:
        i = np.arange(p)
        for m in microbatches:
            table = zero_bubble(p, m)
            for f, b, w in costs:
                found = simulate(table, **times((f, b, w)))
                if m >= p:
                    assert table.ticks == 3 * m + p - 1
                    assert found.asynchronous.idle == (p - 1) * max(f, b, f + b - w)
                    assert w > min(f, b) or found.asynchronous.idle == (p - 1) * (f + b - w)
                    same(found.peak(1.0, 0.0), p - i)
                    same(found.peak(3.0, 2.0), 3 * (p - i) + 2 * i)
                assert found.peak().max() <= p


@pytest.mark.parametrize("stages,microbatches,costs", WIDE)
def test_a_v_halves_the_zero_bubble(stages, microbatches, costs):
    for p in stages:
        i = np.arange(p)
        for m in microbatches:
            table = zero_bubble_v(p, m)
            for f, b, w in costs:
                found = simulate(table, **times((f, b, w), chunks=2))
                assert found.peak().max() <= 2 * p  # of halves of a device's microbatches: 1F1B's p
                if m < 2 * p - 1:
                    continue
                assert table.ticks == 6 * m + p - 1
                same(found.peak(), np.full(p, 2 * p))
                same(found.peak(0.0, 1.0), 2 * i + 1)
                if w <= f <= b:
                    assert found.asynchronous.idle == (p - 1) * max(b, 2 * (b - w))
                if f == b == w:
                    assert found.asynchronous.idle == found.lock_step.idle
                    assert (
                        2 * found.asynchronous.idle
                        == simulate(zero_bubble(p, m), **times((f, b, w), 2)).asynchronous.idle
                    )


@pytest.mark.parametrize("stages,microbatches,costs", WIDE)
def test_dualpipe_cut_in_half_waits_no_longer_for_more_microbatches(stages, microbatches, costs):
    """In lock-step, whatever a forward and a backward cost; and within the published bubble without it."""
    for p in stages:
        idle = [simulate(dualpipe_v(p, 2 * p), **times(cost, chunks=2)).lock_step.idle for cost in costs]
        for m in microbatches:
            table = dualpipe_v(p, m)
            for (f, b, w), expected in zip(costs, idle):
                found = simulate(table, **times((f, b, w), chunks=2))
                assert found.peak().max() <= 2 * p + 1  # of halves of a device's microbatches
                if m < 2 * p:
                    continue
                assert table.ticks == 2 * m + 5 * p - 2
                same(found.peak(), np.full(p, 2 * p + 1))
                same(found.peak(0.0, 1.0), np.arange(p) + 1)
                assert found.lock_step.idle == expected
                if w <= f <= b:
                    assert found.asynchronous.idle <= (p - 1) * (f + 2 * b - w)


@pytest.mark.quick
def test_the_published_examples():
    """p=8, m=32, v=4: bubbles 21, 5.25, 5.25 and 7, peak 9.75; p=4, m=8, v=2: 9, 4.5, 4.5 and 3, of F=B=W=1."""
    for p, m, v, bubbles in ((8, 32, 4, (21, 21, 5.25, 5.25, 7)), (4, 8, 2, (9, 9, 4.5, 4.5, 3))):
        tables = [gpipe(p, m), one_f_one_b(p, m), interleaved(p, m, v), looping(p, m, v), zero_bubble(p, m)]
        found = [simulate(table) for table in tables]
        same([each.lock_step.idle for each in found], bubbles)
        assert found[2].peak()[0] / v == p * (1 + (p - 1) / (p * v))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_messages_and_work(stages):
    for name in SCHEDULES:
        chunks = SCHEDULES[name].chunks or 2
        table = make_schedule(name, stages=stages, microbatches=8, chunks=chunks)
        found = simulate(table)
        expected = np.full(stages, 2 * 8 * chunks)
        for part in (0, -1):  # the model's input gets no gradient, its output goes nowhere
            expected[table.stage_of[part]] -= 8
        for turn in np.flatnonzero(np.diff(table.stage_of) == 0):  # one chunk's output is the next one's input
            expected[table.stage_of[turn]] -= 2 * 8
        same(found.messages, expected)
        same(found.executed, np.full(stages, (3 if table.is_split else 2) * 8 * chunks))
        assert found.useful_share == 1.0


def test_a_table_skips_what_a_masked_program_computes():
    """8 blocks, 2 stages, 4 microbatches: a published program runs every block at every of 11 ticks, 88 for 32."""
    for name in SCHEDULES:
        chunks = SCHEDULES[name].chunks or 1
        table = make_schedule(name, stages=2, microbatches=4, chunks=chunks)
        assert (table.forward != IDLE).sum() * 4 == 32 * chunks  # 4 blocks a stage
        assert simulate(table).useful_share == 1.0
    assert simulate(gpipe(8, 4)).masked_share == 32 / 88
    assert simulate(one_f_one_b(4, 8)).masked_share == 8 / 11


def test_the_two_clocks_differ_where_ticks_are_uneven():
    """One entry a tick in lock-step costs the longer of a forward and a backward, which 1F1B has side by side."""
    found = simulate(one_f_one_b(4, 16, fused=False))
    assert found.asynchronous.idle == 9 < found.lock_step.idle


@pytest.mark.parametrize(
    "arguments,words",
    [
        (dict(name="2f2b", stages=2, microbatches=2), "no schedule '2f2b'; choose one of gpipe, 1f1b, interleaved,"),
        (dict(name="interleaved", stages=4, microbatches=6, chunks=2), "microbatches=6 .* stages=4; take 4 or 8 "),
        (dict(name="interleaved", stages=4, microbatches=3, chunks=2), "microbatches=3 .* stages=4; take 4 "),
        (dict(name="looping", stages=4, microbatches=3, chunks=2), "microbatches=3 and stages=4; take at least 4"),
        (dict(name="zb-h1", stages=2, microbatches=4, chunks=2), "zb-h1 has one chunk per device, but chunks=2"),
        (
            dict(name="zb-v", stages=2, microbatches=4),
            "zb-v has 2 chunks per device, but chunks=1; give chunks=2, or",
        ),
        (dict(name="zb-v", stages=2, microbatches=0, chunks=2), "zero_bubble_v: .* microbatches=0; give 1 or more"),
        (dict(name="1f1b", stages=2, microbatches=0), "one_f_one_b: .* microbatches=0; give 1 or more"),
        (dict(name="looping", stages=2, microbatches=2, chunks=0), "looping: .* chunks=0; give 1 or more"),
        (dict(name="gpipe", stages=0, microbatches=2), "gpipe: .* stages=0"),
    ],
)
def test_counts_that_a_schedule_does_not_allow(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_schedule(**arguments)


def test_costs_are_times():
    with pytest.raises(ValueError, match="none below 0 and not all 0, .* weight=-1.0"):
        simulate(gpipe(2, 2), weight=-1.0)
    with pytest.raises(ValueError, match="none below 0 and not all 0"):
        simulate(gpipe(2, 2), forward=0.0, backward=0.0, weight=0.0)


def test_a_schedule_of_ones_own():
    """Orders are packed as early as inputs allow; GPipe's give GPipe's table, and impossible ones are refused."""
    order = [("forward", k, 0) for k in range(5)] + [("backward", k, 0) for k in range(5)]
    packed = pack_schedule("mine", [order] * 3, microbatches=5)
    assert isinstance(packed, Schedule) and not packed.is_split
    for kind in ("forward", "backward", "weight"):
        same(getattr(packed, kind), getattr(gpipe(3, 5), kind))
    with pytest.raises(ValueError, match="microbatch 4, chunk 0: .* one backward entry, but there is none"):
        simulate(pack_schedule("short", [order[:-1]] * 3, microbatches=5))
    with pytest.raises(ValueError, match="forward, backward, weight, but the orders of 'wrong' have 'back'"):
        pack_schedule("wrong", [[("back", 0, 0)]], microbatches=1)
    with pytest.raises(ValueError, match="stage 0 at the backward of microbatch 0, chunk 0; stage 1 at the forward"):
        pack_schedule("stuck", [[("backward", 0, 0), ("forward", 0, 0)], order[:1]], microbatches=1)


def test_a_plan_takes_a_name_a_function_or_a_table():
    table = one_f_one_b(2, 4)
    assert make_schedule(table, stages=2, microbatches=4) is table
    assert make_schedule(gpipe, stages=2, microbatches=3).name == "gpipe"
    with pytest.raises(ValueError, match="'1f1b' is for stages=2 and microbatches=4, but stages=2 and microbatches=8"):
        make_schedule(table, stages=2, microbatches=8)
    with pytest.raises(ValueError, match="custom schedule sets .* but chunks=2; give chunks=1"):
        make_schedule(table, stages=2, microbatches=4, chunks=2)
    with pytest.raises(ValueError, match="one backward entry, but there is none"):
        make_schedule(dataclasses.replace(table, backward=np.full_like(table.backward, IDLE)), stages=2, microbatches=4)
