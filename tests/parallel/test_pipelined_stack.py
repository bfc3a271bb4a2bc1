"""A stack over several devices gives one device's outputs, gradients and decoded tokens, without idle work."""

import functools
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pipeline_model as small
import pytest
from jax.sharding import PartitionSpec as P

from eqformer import nn
from eqformer.parallel import BATCH_AXES, filter_shard_map, make_mesh, PIPE, PipelinedStack, vary
from eqformer.parallel.pipeline import _pipelined_stack as module


CLOSE = 50 * float(np.finfo(np.float32).eps)


def loss_and_gradients(mesh, microbatches, splits_rows):
    """`(model, data) -> (sum, count), gradients`: what is before and after the stack is done where its rows are."""
    rows = (*BATCH_AXES, PIPE) if splits_rows else BATCH_AXES

    def per_device(model, data):
        def loss(model):
            edges, stack = model
            stack = PipelinedStack(stack, microbatches, splits_rows)
            return small.last(edges, stack(small.first(edges, data), data["tokens"])[0], data)

        (edges, stack) = vary(model, rows)
        (total, count), (of_edges, of_stack) = eqx.filter_value_and_grad(loss, has_aux=True)((edges, stack))
        return jax.lax.psum((total, count, of_edges), rows), jax.lax.psum(of_stack, BATCH_AXES)

    return filter_shard_map(per_device, mesh, ((P(), P(PIPE)), P(rows)), (P(), P(PIPE)))


def distance(mesh, microbatches, splits_rows, model, data, expected):
    program, arrays = small.compiled(loss_and_gradients(mesh, microbatches, splits_rows), model, data)
    (total, count, of_edges), of_stack = program(arrays)
    assert count == expected[1]
    return max(abs(float(total / expected[0]) - 1), small.worst((of_edges, of_stack), expected[2])[0])


@pytest.mark.grid
@pytest.mark.parametrize("splits_rows", [False, True])
def test_loss_and_gradients_are_one_devices(splits_rows):
    model, data = small.make_model(remat="full"), small.make_data(16)
    expected = small.one_device(model, data)
    assert distance(make_mesh(pipe=4, fsdp=2), 8, splits_rows, model, data, expected) < CLOSE


@functools.cache
def plain_layers():
    """Four of them, eight rows, and what one device makes of these."""
    model, data = small.make_model(layers=4, block=small.plain_block), small.make_data(8, keys=False)
    return model, data, small.one_device(model, data)


@pytest.mark.grid
@pytest.mark.parametrize(
    "pipe,microbatches,splits_rows",
    [
        (1, 4, False),
        (4, 4, False),
        (2, 8, True),
        *((4, 4, True), (1, 4, True), (2, 2, False), (2, 2, True), (2, 8, False)),
    ],
)
def test_any_number_of_microbatches_will_do(monkeypatch, pipe, microbatches, splits_rows):
    given = plain_layers()
    mesh = make_mesh(pipe=pipe, devices=jax.devices()[:pipe])
    assert distance(mesh, microbatches, splits_rows, *given) < CLOSE
    if (pipe, microbatches) == (4, 4):  # messages the wrong way round the ring
        right = module._receive
        monkeypatch.setattr(module, "_receive", lambda x, step, stages: right(x, -step, stages))
        assert not distance(mesh, microbatches, splits_rows, *given) < 100 * CLOSE


@pytest.mark.by_default("True")
@pytest.mark.parametrize("splits_rows", [False, True])
def test_each_block_runs_once_a_microbatch_and_once_more_backward(splits_rows):
    (_, stack) = small.make_model(block=small.counted_block)
    mesh = make_mesh(pipe=2, devices=jax.devices()[:2])
    rows = P(PIPE) if splits_rows else P()
    apply = lambda stack, x: PipelinedStack(stack, 4, splits_rows)(x)[0]
    forward = filter_shard_map(apply, mesh, (P(PIPE), rows), rows)
    for fn, runs in ((forward, 32), (jax.grad(lambda s, x: jnp.sum(forward(s, x)), 1), 64)):
        small.counts.clear()
        arrays, rest = eqx.partition(stack, eqx.is_array)
        jax.block_until_ready(
            jax.jit(lambda a, x, fn=fn, rest=rest: fn(eqx.combine(a, rest), x))(
                arrays, jnp.ones((8, small.SEQ, small.EMBED))
            )
        )
        jax.effects_barrier()
        assert len(small.counts) == runs


def test_memory_holds_inputs_of_stages_and_no_copy_of_weights():
    (_, stack) = small.make_model(layers=8, block=small.plain_block)
    mesh = make_mesh(pipe=2, devices=jax.devices()[:2])

    def temp(microbatches):
        fn = filter_shard_map(lambda stack, x: PipelinedStack(stack, microbatches)(x)[0], mesh, (P(PIPE), P()), P())
        of_stack = jax.grad(lambda s, rest, x: jnp.sum(jnp.square(fn(eqx.combine(s, rest), x))))
        wanted, rest = eqx.partition(stack, eqx.is_inexact_array)
        x = jnp.ones((microbatches, 1, small.EMBED))
        memory: Any = jax.jit(lambda s, x: of_stack(s, rest, x)).lower(wanted, x).compile().memory_analysis()
        return memory.temp_size_in_bytes

    activation, weights = small.EMBED * 4, 4 * small.EMBED**2 * 4
    grown = (temp(24) - temp(8)) / 16
    assert grown <= 6 * activation < weights / 4  # the weights, were they kept each tick, would be among it


@pytest.mark.grid
def test_decoding_through_stages_is_decoding():
    (_, stack) = small.make_model(layers=4)
    rows, length, capacity = 8, 5, 8
    x = jax.random.normal(jax.random.key(3), (rows, length, small.EMBED))
    tokens = nn.Tokens(jnp.broadcast_to(jnp.arange(length), (rows, length)))
    cache = stack.init_cache((rows,), capacity)
    mesh = make_mesh(pipe=2, fsdp=2, devices=jax.devices()[:4])
    rows_of_cache = P(PIPE, BATCH_AXES)
    expected, theirs = eqx.filter_jit(lambda stack, *given: stack(*given)[:2])(stack, x, tokens, cache)
    for splits_rows, cuts in ((False, (0, 3, 4, 5)), (True, (0, 1, 2, 3, 4, 5))):
        specs = P((*BATCH_AXES, PIPE)) if splits_rows else P(BATCH_AXES)
        run = filter_shard_map(
            lambda stack, x, tokens, cache, split=splits_rows: PipelinedStack(stack, 2, split)(x, tokens, cache)[:2],
            mesh,
            (P(PIPE), specs, specs, rows_of_cache),
            (specs, rows_of_cache),
        )
        ours, run = cache, eqx.filter_jit(run)
        for begin, end in itertools.pairwise(cuts):
            piece = jax.tree.map(lambda t, begin=begin, end=end: t[:, begin:end], tokens)
            got, ours = run(stack, x[:, begin:end], piece, ours)
            np.testing.assert_allclose(got, expected[:, begin:end], rtol=0, atol=2e-5)
        for got, whole in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(got, whole, rtol=0, atol=2e-5)


@pytest.mark.quick
def test_rows_and_microbatches_that_do_not_divide_are_refused():
    (_, stack) = small.make_model(layers=4, block=small.plain_block)
    mesh = make_mesh(pipe=2, devices=jax.devices()[:2])
    call = lambda microbatches, split, rows=8: jax.eval_shape(
        lambda: filter_shard_map(
            lambda s, x: PipelinedStack(s, microbatches, split)(x)[0], mesh, (P(PIPE), P()), P(PIPE) if split else P()
        )(stack, jnp.ones((rows, 2, small.EMBED)))
    )
    with pytest.raises(ValueError, match="8 rows of a device must divide evenly into 3"):
        call(3, False)
    with pytest.raises(ValueError, match="take a multiple of 2, such as 4"):
        call(3, True)
    with pytest.raises(ValueError, match="at least 1"):
        PipelinedStack(stack, 0)
    with pytest.raises(ValueError, match="tokens=None"):
        jax.eval_shape(
            lambda: filter_shard_map(lambda s, x: PipelinedStack(s, 2)(x, None, x)[0], mesh, (P(PIPE), P()), P())(
                stack, jnp.ones((8, 2, small.EMBED))
            )
        )
