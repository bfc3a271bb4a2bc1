"""A small network made parallel by hand with `filter_shard_map`: each kind of split by itself, equal to one device.

It is the network of JAX's tutorial on `shard_map`, plain linear maps and relu, and needs no plan and no wrapper.
"""

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from eqformer import nn
from eqformer.parallel import filter_shard_map, gpipe, make_mesh, pipeline_gradients, vary


SIZES, ROWS = (48, 64, 64, 64, 8), 32


class Network(eqx.Module):
    """Linear maps with relu between them; `linear` says how one of them is applied."""

    maps: tuple[nn.Linear, ...]

    def __call__(self, x, linear: Callable[..., Any] = lambda one, x: one(x)):
        """Apply the maps in turn."""
        for one in self.maps[:-1]:
            x = jax.nn.relu(linear(one, x))
        return linear(self.maps[-1], x)


@pytest.fixture(scope="module")
def network():
    draw = np.random.default_rng(0)
    maps = []
    for inputs, outputs in zip(SIZES[:-1], SIZES[1:]):
        one = nn.Linear("embed -> mlp", embed=inputs, mlp=outputs, bias=True, key=jax.random.key(outputs))
        maps.append(eqx.tree_at(lambda m: m.bias, one, jnp.asarray(draw.normal(size=outputs), jnp.float32)))
    return Network(tuple(maps))


@pytest.fixture(scope="module")
def batch():
    draw = np.random.default_rng(1)
    return tuple(jnp.asarray(draw.normal(size=(ROWS, size)), jnp.float32) for size in (SIZES[0], SIZES[-1]))


@pytest.fixture(scope="module")
def reference(network, batch):
    """Loss and gradients in float64 numpy, by hand."""
    weights = [np.asarray(one.weight, np.float64) for one in network.maps]
    inputs = [np.asarray(batch[0], np.float64)]
    for one, weight in zip(network.maps, weights):
        outputs = inputs[-1] @ weight.T + np.asarray(one.bias, np.float64)
        inputs.append(np.maximum(outputs, 0))
    error = outputs - np.asarray(batch[1], np.float64)
    gradient, found = 2 * error / ROWS, []
    for weight, x in zip(weights[::-1], inputs[-2::-1]):
        found.append((gradient.T @ x, gradient.sum(0)))
        gradient = (gradient @ weight) * (x > 0)
    return np.mean(np.sum(error**2, -1)), [leaf for pair in found[::-1] for leaf in pair]


def squared_error(outputs, targets):
    return jnp.sum(jnp.square(outputs - targets), -1)


def gathered(one, axis):
    """A map whose weight and bias are split over an axis, on their first dims, with both whole."""
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, axis, tiled=True), one)


not_gathered = lambda primitive, *_, **__: not primitive.name.startswith("all_gather")


def features_scattered(one, x, axis):
    """A map of this device's inputs whose partial products are reduced and scattered over the outputs."""
    partial = eqx.tree_at(lambda m: m.bias, one, None)(x)
    return jax.lax.psum_scatter(partial, axis, scatter_dimension=1, tiled=True) + one.bias


def data(network, batch):
    """8-way data parallel: rows are split, parameters are whole."""

    def loss(network, batch):
        return jax.lax.pmean(jnp.mean(squared_error(network(batch[0]), batch[1])), "replica")

    return filter_shard_map(loss, make_mesh(replica=8), (P(), P("replica")), P())(network, batch)


def sharded_loss(remat):
    """8-way fully sharded: parameters too are split, gathered before use and, with `remat`, again to differentiate."""

    def predict(network, x):
        return network(x, lambda one, x: gathered(one, "fsdp")(x))

    def loss(network, batch):
        run = jax.checkpoint(predict, policy=not_gathered) if remat else predict
        return jax.lax.pmean(jnp.mean(squared_error(run(network, batch[0]), batch[1])), "fsdp")

    mesh = make_mesh(fsdp=8)
    return lambda network, batch: filter_shard_map(loss, mesh, (P("fsdp"), P("fsdp")), P())(network, batch)


fully_sharded = sharded_loss(remat=True)


def features(network):
    """Specs of a network whose inputs are split on features: weights on inputs, biases on outputs."""
    leaf = lambda x: P(None, "tensor") if x.ndim == 2 else P("tensor")
    return jax.tree.map(leaf, network)


def tensor(network, batch):
    """8-way tensor parallel: features are split, every map reduces and scatters."""

    def loss(network, batch):
        outputs = network(batch[0], lambda one, x: features_scattered(one, x, "tensor"))
        return jnp.mean(jax.lax.psum(squared_error(outputs, batch[1]), "tensor"))

    mesh, rows = make_mesh(tensor=8), P(None, "tensor")
    return filter_shard_map(loss, mesh, (features(network), rows), P())(network, batch)


def fully_sharded_tensor(network, batch):
    """Both: rows and parameters over `fsdp`, features over `tensor`."""

    def whole_map(one):
        bias = jax.lax.all_gather(one.bias, "fsdp", tiled=True)
        weight = jax.lax.all_gather(one.weight, "fsdp", axis=0, tiled=True)
        return eqx.tree_at(lambda m: (m.weight, m.bias), one, (weight, bias))

    def predict(network, x):
        return network(x, lambda one, x: features_scattered(whole_map(one), x, "tensor"))

    def loss(network, batch):
        outputs = jax.checkpoint(predict, policy=not_gathered)(network, batch[0])
        return jax.lax.pmean(jnp.mean(jax.lax.psum(squared_error(outputs, batch[1]), "tensor")), "fsdp")

    specs = jax.tree.map(lambda x: P("fsdp", "tensor") if x.ndim == 2 else P(("tensor", "fsdp")), network)
    return filter_shard_map(loss, make_mesh(fsdp=4, tensor=2), (specs, P("fsdp", "tensor")), P())(network, batch)


def pipelined(network, batch, order=(1, 2)):
    """Two stages of one inner map each, four microbatches; the outer maps at the ends: loss and gradients."""
    inner = [network.maps[place] for place in order]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *inner)
    edges = (network.maps[0], network.maps[-1])
    pieces = jax.tree.map(lambda x: x.reshape(4, -1, x.shape[-1]), batch)

    def stage(maps, x, _):
        return jax.lax.scan(lambda x, one: (jax.nn.relu(one(x)), None), x, maps)[0]

    def last(edges, x, piece):
        errors = squared_error(edges[1](x), piece[1])
        return jnp.sum(errors), jnp.asarray(errors.size, errors.dtype)

    def per_device(edges, maps, pieces):
        first = lambda edges, piece: jax.nn.relu(edges[0](piece[0]))
        total, count, gradients = pipeline_gradients(gpipe(2, 4), first, stage, last, (edges, maps), pieces)
        return total / count, jax.tree.map(lambda x: x / count, gradients)

    mesh = make_mesh(pipe=2, devices=jax.devices()[:2])
    run = filter_shard_map(per_device, mesh, (P(), P("pipe"), P()), (P(), (P(), P("pipe"))))
    loss, ((into, out), maps) = run(edges, stacked, pieces)
    of_inner = [jax.tree.map(lambda x, place=place: x[place], maps) for place in range(len(order))]
    return loss, Network((into, *of_inner, out))


def worst(found, reference):
    """The largest relative error of the loss and of any gradient."""
    loss, gradients = found
    errors = [abs(float(loss) - reference[0]) / reference[0]]
    for got, want in zip(jax.tree.leaves(gradients), reference[1], strict=True):
        errors.append(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))
    return max(errors)


LOSSES = {"data": data, "fully sharded": fully_sharded, "tensor": tensor, "both": fully_sharded_tensor}


@pytest.mark.by_default("fully sharded")
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_tutorials_network_equals_the_reference(loss, network, batch, reference):
    assert worst(eqx.filter_jit(eqx.filter_value_and_grad(loss))(network, batch), reference) < 1e-5


def test_the_pipelined_network_equals_the_reference(network, batch, reference):
    assert worst(eqx.filter_jit(pipelined)(network, batch), reference) < 1e-5
    assert worst(eqx.filter_jit(pipelined)(network, batch, (2, 1)), reference) > 0.1


def test_without_a_reduction_the_comparison_fails(network, batch, reference):
    def loss(network, batch):  # each device's own gradient instead of the mean
        own = lambda network: jnp.mean(squared_error(network(batch[0]), batch[1]))
        value, gradients = eqx.filter_value_and_grad(own)(vary(network, ["replica"]))
        return jax.tree.map(lambda x: x[None], (value, gradients))

    run = filter_shard_map(loss, make_mesh(replica=8), (P(), P("replica")), P("replica"))
    value, gradients = eqx.filter_jit(run)(network, batch)
    of_all = lambda function: jax.tree.map(function, (value, gradients))
    assert worst(of_all(lambda x: x.mean(0)), reference) < 1e-5
    assert worst(of_all(lambda x: x[0]), reference) > 0.1


def test_gathered_parameters_are_gathered_again_and_not_kept(network, batch):
    place = lambda tree, spec: jax.device_put(tree, NamedSharding(make_mesh(fsdp=8), spec))
    network, batch = place(network, P("fsdp")), place(batch, P("fsdp"))
    gathers, kept = {}, {}
    for remat in (True, False):
        loss = sharded_loss(remat)
        gathers[remat] = str(jax.make_jaxpr(jax.grad(loss))(network, batch)).count("all_gather[")
        backward = jax.eval_shape(lambda n, loss=loss: jax.vjp(lambda n: loss(n, batch), n)[1], network)
        saved = jax.tree.leaves(backward)
        kept[remat] = max(leaf.size for leaf in saved if leaf.ndim == 2 and leaf.shape[0] != ROWS)
    parameters, maps = len(jax.tree.leaves(network)), len(network.maps)
    # All are gathered forwards. Backwards only what the gradients to the inputs need: the weights but the first.
    assert gathers == {True: parameters + maps - 1, False: parameters}
    # A function of 8 devices keeps a piece on each, or the whole weight on each.
    assert kept[True] <= 64 * 64 and kept[False] == 8 * 64 * 64


def test_the_compiled_program_gathers_again_and_holds_less():
    # In a loop: outside of one, XLA's CPU compiler merges equal gathers of the two passes.
    layers, width = 16, 64
    make = lambda key: nn.Linear("embed -> mlp", embed=width, mlp=width, key=key)
    maps = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), layers))
    gathers, bytes_held = {}, {}
    for remat in (True, False):

        def layer(x, one):
            return jax.nn.relu(gathered(one, "fsdp")(x)), None

        run = jax.checkpoint(layer, policy=not_gathered, prevent_cse=False) if remat else layer
        loss = lambda maps, x, run=run: jax.lax.pmean(jnp.mean(jnp.square(jax.lax.scan(run, x, maps)[0])), "fsdp")
        mapped = filter_shard_map(loss, make_mesh(fsdp=8), (P(None, "fsdp"), P("fsdp")), P())
        program: Any = jax.jit(jax.grad(mapped)).lower(maps, jnp.ones((ROWS, width))).compile()
        gathers[remat] = len(re.findall(r"= \S+ all-gather(?:-start)?\(", program.as_text()))
        bytes_held[remat] = program.memory_analysis().temp_size_in_bytes
    whole = 4 * layers * width * width
    assert gathers == {True: 2, False: 1}  # one in the loop of each pass
    assert bytes_held[True] < whole / 2 and bytes_held[False] > whole
