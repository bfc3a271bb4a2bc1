"""Deferred weight gradients have the same values, and none of their products runs early, whatever wraps the maps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pipeline_model as small
import pytest
from jax.sharding import PartitionSpec as P

from eqformer import nn
from eqformer.parallel import (
    BATCH_AXES,
    filter_shard_map,
    FSDP,
    Gathered,
    make_mesh,
    PIPE,
    pipeline_gradients,
    zero_bubble,
)
from eqformer.parallel.pipeline._residuals import (
    accumulate,
    defer_maps,
    find_deferrable,
    flag_differentiated,
    record_calls,
    split_gradients,
    weight_gradients,
)


EMBED, LAYERS = 6, 3


class Odd(nn.Layer):
    """A block that uses one map as others do, and four in ways that cannot be deferred."""

    plain: nn.Linear
    twice: nn.Linear
    looped: nn.Linear
    sliced: nn.Linear
    never: nn.Linear

    def __call__(self, x, tokens=None, cache=None):
        x = x + jnp.sin(self.plain(x))
        x = jnp.tanh(self.twice(jnp.tanh(self.twice(x))))
        x = x + jax.lax.map(self.looped, x)
        sliced = eqx.tree_at(lambda m: m.weight, self.sliced, self.sliced.weight[:3])
        x = x + jnp.concatenate([jnp.cos(sliced(x))] * 2, -1)
        return x + jnp.einsum("...i,oi->...o", x, self.never.weight), cache, None

    def init_cache(self, batch, capacity, dtype="float32"):
        return None


def odd_block(key):
    make = lambda key: nn.Linear("embed -> mlp", embed=EMBED, mlp=EMBED, key=key)
    return Odd(*map(make, jax.random.split(key, 5)))


@pytest.mark.grid
def test_maps_that_cannot_be_deferred_are_left_alone(key):
    stack, x = nn.Stack(odd_block, LAYERS, key=key), jax.random.normal(key, (4, 5, EMBED))
    loss = lambda wanted, rest, x: jnp.sum(jnp.square(eqx.combine(wanted, rest)(x)[0]))
    recording, records = record_calls(stack)
    jax.eval_shape(lambda: recording(x))
    found = find_deferrable(stack, records, tokens=20)
    assert list(found) == [0]

    run = defer_maps(stack, found)
    wanted, rest = eqx.partition(run, flag_differentiated(run))
    of_blocks, dx = jax.jit(lambda wanted, x: jax.grad(loss, (0, 2))(wanted, rest, x))(wanted, x)
    early, products = split_gradients(of_blocks, stack)
    assert early.blocks.plain.weight is None
    start = jax.tree.map(jnp.zeros_like, eqx.filter(stack, eqx.is_inexact_array))
    gradients = accumulate(accumulate(start, early), weight_gradients(stack, products))

    parameters, rest = eqx.partition(stack, eqx.is_inexact_array)
    expected = jax.jit(lambda p, x: jax.grad(loss, (0, 2))(p, rest, x))(parameters, x)
    assert small.worst((gradients, dx), expected)[0] < 1e-6
    assert small.worst(accumulate(start, early), expected[0])[0] > 0.5  # without the deferred products


def dots(fn, *args):
    """Shapes of the results of all products in a function's program, loops included."""
    return [line.split("=")[0] for line in str(jax.make_jaxpr(fn)(*args)).splitlines() if "dot_general[" in line]


def test_nothing_is_multiplied_before_its_time(key):
    make = lambda key: small.PlainBlock(nn.Linear("embed -> mlp", embed=EMBED, mlp=EMBED, key=key), False)
    stack, x = nn.Stack(make, LAYERS, key=key), jnp.ones((4, 5, EMBED))
    recording, records = record_calls(stack)
    jax.eval_shape(lambda: recording(x))
    run = defer_maps(stack, find_deferrable(stack, records, tokens=20))
    loss = lambda wanted, rest, x: jnp.sum(eqx.combine(wanted, rest)(x)[0])
    split = lambda x: jax.grad(loss, (0, 2))(*eqx.partition(run, flag_differentiated(run)), x)
    whole = lambda x: jax.grad(loss, (0, 2))(*eqx.partition(stack, eqx.is_inexact_array), x)
    assert (len(dots(split, x)), len(dots(whole, x))) == (2, 3)


@pytest.mark.grid
def test_weights_that_are_gathered_for_their_use_are_put_off_too(monkeypatch):
    (edges, stack), data = small.make_model(layers=2), small.make_data(8)
    expected = small.one_device((edges, stack), data)
    arrays = jax.tree.leaves(eqx.filter(stack.blocks, eqx.is_array))
    dims = tuple(x.ndim - 2 if x.ndim > 2 else None for x in arrays)
    gathered = Gathered(stack.blocks, dims, ("float32",) * len(dims))
    gathered = eqx.tree_at(lambda s: s.blocks, stack, gathered)
    spec = lambda x: P(PIPE, *[None] * (x.ndim - 2), FSDP) if x.ndim > 2 else P(PIPE)
    specs = jax.tree.map(spec, eqx.filter(gathered, eqx.is_array))
    out_specs = jax.tree.map(spec, eqx.filter(gathered, eqx.is_inexact_array))
    found = []
    monkeypatch.setattr(
        "eqformer.parallel.pipeline._residuals.find_deferrable",
        lambda *args: found.append(find_deferrable(*args)) or found[-1],
    )

    def per_device(model, data):
        pieces = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), data)
        total, count, (of_edges, of_stack) = pipeline_gradients(
            zero_bubble(2, 4), small.first, small.stage, small.last, model, pieces
        )
        over = lambda x, spec: jax.lax.psum(x, [axis for axis in BATCH_AXES if axis not in spec])
        return jax.lax.psum((total, count, of_edges), BATCH_AXES), jax.tree.map(over, of_stack, out_specs)

    mesh = make_mesh(pipe=2, fsdp=2, devices=jax.devices()[:4])
    fn = filter_shard_map(per_device, mesh, ((P(), specs), P(BATCH_AXES)), (P(), out_specs))
    program, arrays = small.compiled(fn, (edges, gathered), data)
    (total, count, of_edges), of_stack = program(arrays)
    of_stack = eqx.tree_at(lambda s: s.blocks, of_stack, of_stack.blocks.inner)
    assert list(found[0]) == list(range(7))  # all maps of the block
    assert abs(float(total / expected[0]) - 1) < 1e-6 and count == expected[1]
    assert small.worst((of_edges, of_stack), expected[2])[0] < 6e-6
