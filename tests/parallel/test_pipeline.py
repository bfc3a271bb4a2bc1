"""Every schedule gives one device's loss and gradients, does no work twice, and reduces outside of its loop."""

import dataclasses
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pipeline_model as small
import pytest
from jax.sharding import PartitionSpec as P

from eqformer import nn
from eqformer.parallel import (
    check_depth,
    dualpipe_v,
    filter_shard_map,
    FSDP,
    gpipe,
    IDLE,
    interleaved,
    layer_order,
    looping,
    make_mesh,
    one_f_one_b,
    PIPE,
    pipeline_gradients,
    ring_placement,
    Schedule,
    TENSOR,
    v_placement,
    zero_bubble,
    zero_bubble_v,
)
from eqformer.parallel.pipeline import _pipeline as executor, _pipelined_stack as padding
from eqformer.parallel.pipeline._residuals import ResidualPacker
from eqformer.parallel.pipeline._schedule import route_messages


CLOSE = 50 * float(np.finfo(np.float32).eps)
STAGES, MICROBATCHES = 4, 8
SCHEDULES = {
    "gpipe": lambda: gpipe(STAGES, MICROBATCHES),
    "1f1b": lambda: one_f_one_b(STAGES, MICROBATCHES),
    "1f1b in turns": lambda: one_f_one_b(STAGES, MICROBATCHES, fused=False),
    "interleaved": lambda: interleaved(STAGES, MICROBATCHES, 2),
    "looping": lambda: looping(STAGES, MICROBATCHES, 2),
    "zb-h1": lambda: zero_bubble(STAGES, MICROBATCHES),
    "zb-v": lambda: zero_bubble_v(STAGES, MICROBATCHES),
    "dualpipe-v": lambda: dualpipe_v(STAGES, MICROBATCHES),
}


@pytest.fixture(scope="module")
def example():
    model, data = small.make_model(), small.make_data(2 * MICROBATCHES)
    return model, data, small.one_device(model, data)


def distance(result, expected):
    """How far sum, count and gradients are from those expected, relative, at worst."""
    of_sums = [abs(float(x) - float(y)) / abs(float(y)) for x, y in zip(result[:2], expected[:2])]
    return max(*of_sums, small.worst(result[2], expected[2])[0])


def run(mesh, schedule, model, data, **options):
    program, arrays = small.compiled(small.pipelined(mesh, schedule, **options), model, data)
    return program(arrays)


again = functools.partial(pipeline_gradients, remat=True)  # stages run again in their backward entries


@pytest.mark.grid
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_gives_one_devices_gradients(example, name, remat):
    model, data, expected = example
    made = again if remat else pipeline_gradients
    result = run(make_mesh(pipe=STAGES, fsdp=2), SCHEDULES[name](), model, data, run=made)
    assert distance(result, expected) < CLOSE
    gradients = result[2]
    assert gradients[1].numbers is None  # which is not floating-point
    assert small.worst(gradients, model)[0] > 0.1  # the check can tell


@pytest.mark.grid
@pytest.mark.parametrize("part", [0, -1])
def test_what_is_kept_of_another_pass_is_seen(monkeypatch, part):
    """Whatever is wrong of what a stage's forward entry leaves, gradients tell."""
    model, data, expected, mesh = whole_rows()
    pack = ResidualPacker.pack

    def broken(self, results, inputs):
        residuals = pack(self, results, inputs)
        residuals[part] = residuals[part] * 0.9
        return residuals

    monkeypatch.setattr(ResidualPacker, "pack", broken)
    assert not distance(run(mesh, one_f_one_b(2, 4), model, data), expected) < 100 * CLOSE


@pytest.mark.grid
def test_in_float64_the_distance_is_rounding():
    with jax.enable_x64(True):
        model, data = small.make_model(layers=4, dtype="float64"), small.make_data(8)
        expected = small.one_device(model, data)
        result = run(make_mesh(pipe=2, devices=jax.devices()[:2]), zero_bubble(2, 4), model, data)
        assert result[2][0].head.weight.dtype == jnp.float64
        assert distance(result, expected) < 1e-12


class SplitMLP(eqx.Module):
    """A feed-forward layer of which each device of the axis `tensor` has some hidden features."""

    inner: nn.GatedMLP

    def __call__(self, x):
        return jax.lax.psum(self.inner(x), TENSOR)


@pytest.mark.grid
@pytest.mark.parametrize(
    "schedule", [pytest.param(one_f_one_b(2, 4), marks=pytest.mark.grid), zero_bubble(2, 4)], ids=lambda s: s.name
)
def test_stages_may_use_collectives_over_other_axes(example, schedule):
    (edges, stack), data, expected = example
    split = eqx.tree_at(lambda s: s.blocks.feed_forward.layer, stack, SplitMLP(stack.blocks.feed_forward.layer))
    rows, columns = P(PIPE, TENSOR), P(PIPE, None, TENSOR)
    specs = jax.tree.map(lambda _: P(PIPE), eqx.filter(split, eqx.is_array))
    specs = eqx.tree_at(
        lambda s: [getattr(s.blocks.feed_forward.layer.inner, n).weight for n in ("gate", "up", "down")],
        specs,
        [rows, rows, columns],
    )
    result = run(make_mesh(pipe=2, tensor=2, fsdp=2), schedule, (edges, split), data, specs=specs)
    plain = eqx.tree_at(
        lambda s: s.blocks.feed_forward.layer, result[2][1], result[2][1].blocks.feed_forward.layer.inner
    )
    assert distance((*result[:2], (result[2][0], plain)), expected) < CLOSE


def first_alone(sums):
    return jax.lax.psum(jax.tree.map(lambda x: jnp.where(jax.lax.axis_index(PIPE) == 0, x, 0 * x), sums), PIPE)


def a_tick_late(schedule):
    routes = route_messages(schedule)
    (first, *rest) = routes.actions.arrivals
    late = first._replace(slot=np.roll(first.slot, 1, axis=0))
    return dataclasses.replace(routes, actions=routes.actions._replace(arrivals=(late, *rest)))


@functools.cache
def whole_rows():
    """Two layers over two stages, with what one device makes of them, which the unbroken pipeline does too."""
    model, data = small.make_model(layers=2, block=small.plain_block), small.make_data(4, keys=False)
    expected, mesh = small.one_device(model, data), make_mesh(pipe=2, devices=jax.devices()[:2])
    assert distance(run(mesh, one_f_one_b(2, 4), model, data), expected) < CLOSE
    return model, data, expected, mesh


@pytest.mark.grid
@pytest.mark.parametrize("part,broken", [("_sum_over_stages", first_alone), ("route_messages", a_tick_late)])
def test_a_missing_reduction_or_a_late_message_is_seen(monkeypatch, part, broken):
    model, data, expected, mesh = whole_rows()
    monkeypatch.setattr(executor, part, broken)
    assert not distance(run(mesh, one_f_one_b(2, 4), model, data), expected) < 100 * CLOSE


def the_other_way(schedule):
    """Messages up the ring go down it, and those down it go up."""
    routes = route_messages(schedule)
    links = tuple(link._replace(shift=-link.shift % schedule.stages) for link in routes.links)
    return dataclasses.replace(routes, links=links)


def handed_to_the_next_device(schedule):
    """What a device's next part needs is sent up the ring."""
    routes = route_messages(schedule)
    links = tuple(link._replace(shift=link.shift or 1) for link in routes.links)
    return dataclasses.replace(routes, links=links)


@pytest.mark.grid
def test_a_message_the_wrong_way_is_seen(monkeypatch):
    model, data = small.make_model(layers=6, block=small.plain_block), small.make_data(4, keys=False)
    expected, mesh = small.one_device(model, data), make_mesh(pipe=3, devices=jax.devices()[:3])
    assert distance(run(mesh, zero_bubble_v(3, 4), model, data), expected) < CLOSE
    for broken in (the_other_way, handed_to_the_next_device):
        monkeypatch.setattr(executor, "route_messages", broken)
        assert not distance(run(mesh, zero_bubble_v(3, 4), model, data), expected) < 100 * CLOSE


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.grid)])
@pytest.mark.parametrize(
    "schedule",
    [
        zero_bubble(2, 4),
        *(pytest.param(one, marks=pytest.mark.grid) for one in (gpipe(2, 4), interleaved(2, 4, 2))),
    ],
    ids=lambda s: s.name,
)
def test_only_useful_work_is_done(schedule, remat):
    model, data = small.make_model(block=small.counted_block), small.make_data(8, keys=False)
    small.counts.clear()
    made = again if remat else pipeline_gradients
    result = run(make_mesh(pipe=2, devices=jax.devices()[:2]), schedule, model, data, run=made)
    jax.effects_barrier()
    per_part = small.LAYERS // schedule.parts
    more = (schedule.parts - 1) * per_part * 4 if remat else 0  # the last part runs in its backward alone
    assert len(small.counts) == small.LAYERS * 4 + more
    assert distance(result, small.one_device(model, data)) < CLOSE


@pytest.mark.grid
@pytest.mark.parametrize("schedule", [zero_bubble_v(2, 4), one_f_one_b(2, 4)], ids=lambda s: s.name)
def test_rows_of_padding_are_passed_over(monkeypatch, schedule):
    """Five layers over two stages or four parts: exact, and no more blocks are run than there are layers."""
    model, data = small.make_model(layers=5, block=small.counted_block), small.make_data(8, keys=False)
    mesh = make_mesh(pipe=2, devices=jax.devices()[:2])
    small.counts.clear()
    result = run(mesh, schedule, model, data)
    jax.effects_barrier()
    assert len(small.counts) == 5 * 4
    assert distance(result, small.one_device(model, data)) < CLOSE
    monkeypatch.setattr(padding, "PaddedBlock", lambda inner, is_layer: inner)
    small.counts.clear()
    run(mesh, schedule, model, data)
    jax.effects_barrier()
    assert len(small.counts) > 5 * 4


def lowered(schedule, run=pipeline_gradients):
    """The program of a schedule over pipe=2 and fsdp=2 with gradients of this device alone, and what it allocates."""
    model, data = (
        small.make_model(block=small.plain_block, layers=2),
        small.make_data(schedule.microbatches * 8, keys=False),
    )
    mesh = make_mesh(pipe=2, fsdp=2, devices=jax.devices()[:4])

    def per_device(model, data):
        total, count, gradients = run(schedule, small.first, small.stage, small.last, model, data)
        return jax.tree.map(lambda x: x[None], (total, count, gradients))

    split = lambda x: x.reshape(schedule.microbatches, -1, *x.shape[1:])
    every = P((PIPE, FSDP))
    fn = filter_shard_map(per_device, mesh, ((P(), P(PIPE)), P(None, FSDP)), every)
    return small.compiled(fn, model, jax.tree.map(split, data), level=1)[0]


def looped(text):
    """The names of collectives in all computations but the program's own."""
    computations = re.split(r"\n(?=\S)", text)
    inner = [part for part in computations if not part.startswith("ENTRY")]
    return re.findall(r" (all-reduce|all-gather|reduce-scatter|collective-permute)(?:-start)?\(", "\n".join(inner))


@pytest.mark.grid
def test_memory_and_program_do_not_grow_with_microbatches():
    few, many, kept, all_kept = map(lowered, (one_f_one_b(2, 4), one_f_one_b(2, 16), gpipe(2, 4), gpipe(2, 16)))
    inputs, all_inputs = (lowered(gpipe(2, number), again) for number in (4, 16))
    temp = lambda program: program.memory_analysis().temp_size_in_bytes
    activation = 4 * small.SEQ * small.EMBED * 4
    assert temp(many) - temp(few) < activation
    # Of each microbatch, a stage's input and, where the stage is not run again, also its output and the layer's tanh.
    of_inputs, of_all = temp(all_inputs) - temp(inputs), temp(all_kept) - temp(kept)
    assert of_inputs >= 12 * activation and of_all - of_inputs >= 24 * activation
    assert len(str(few.as_text()).splitlines()) == len(str(many.as_text()).splitlines())
    assert looped(few.as_text()) == ["collective-permute"] * 2


def test_without_the_typing_of_parameters_gradients_would_be_reduced_in_the_loop(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(executor, "vary_like", lambda tree, *_: executor.vary(tree, [PIPE]))
        assert "all-reduce" in looped(lowered(one_f_one_b(2, 4)).as_text())


def test_slots_are_as_many_as_ever_live_at_once():
    for stages, microbatches in ((1, 3), (2, 4), (4, 8), (4, 2)):
        in_turns, fused = (route_messages(one_f_one_b(stages, microbatches, fused=fused)) for fused in (False, True))
        assert in_turns.input_slots == in_turns.residual_slots == min(stages, microbatches)
        assert fused.input_slots == fused.residual_slots == min(2 * stages - 1, microbatches)
        assert route_messages(gpipe(stages, microbatches)).input_slots == microbatches
        assert route_messages(zero_bubble(stages, microbatches)).operand_slots == min(stages, microbatches)


def test_tables_that_cannot_run_are_refused():
    good = gpipe(2, 2)

    def table(**changed):
        tables = {"forward": good.forward, "backward": good.backward, "weight": good.weight} | changed
        return Schedule("mine", ring_placement(2), 2, **tables)

    late = np.roll(good.forward[:, 0], 2)
    with pytest.raises(ValueError, match="stage 1, microbatch 0, .* later than the forward entry of the previous part"):
        route_messages(table(forward=np.stack([late, good.forward[:, 1]], 1)))
    with pytest.raises(ValueError, match="stage 0, microbatch 0, .* later than the backward entry of the next part"):
        route_messages(table(backward=good.backward[:, ::-1]))
    with pytest.raises(ValueError, match="microbatch 0, .* one forward entry, but there is none"):
        route_messages(table(forward=np.where(good.forward == 0, IDLE, good.forward)))
    with pytest.raises(ValueError, match="a single backward entry, but there is one"):
        route_messages(table(backward=np.where(good.backward == 1, 0, good.backward)))


def test_calls_that_do_not_fit_are_refused():
    model, data = small.make_model(block=small.plain_block), small.make_data(4, keys=False)
    mesh = make_mesh(pipe=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="for 4 stages, but the axis 'pipe' has 2"):
        jax.eval_shape(lambda: small.pipelined(mesh, gpipe(4, 4))(model, data))
    widen = lambda stack, x, piece: jnp.concatenate([x, x], 0)
    with pytest.raises(ValueError, match="shapes and dtypes"):
        jax.eval_shape(lambda: small.pipelined(mesh, gpipe(2, 4), (small.first, widen, small.last))(model, data))
    another_number = lambda schedule, *rest: pipeline_gradients(gpipe(2, 2), *rest)
    with pytest.raises(ValueError, match=r"number of microbatches, 2, but the shape of an array is \(4, "):
        jax.eval_shape(lambda: small.pipelined(mesh, gpipe(2, 4), run=another_number)(model, data))


@pytest.mark.quick
def test_each_part_has_a_layer():
    check_depth(9, 4, 2)
    with pytest.raises(ValueError, match=r"layers=7, stages=4, chunks=2.*take 8 layers or more"):
        check_depth(7, 4, 2)
    assert layer_order(8, ring_placement(2, 2)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert layer_order(8, v_placement(2)).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
