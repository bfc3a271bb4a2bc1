"""The gated delta rule by chunks against its recurrence, token by token, in float64; gradients too."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from jax.sharding import PartitionSpec
from nn_reference import close

from eqformer.nn.recurrent._delta_rule import delta_rule, scan_chunks
from eqformer.nn.recurrent._recurrence import States
from eqformer.parallel import make_mesh


BATCH, HEADS, HEAD_DIM, V_DIM = 2, 3, 4, 5


def given(seq, dtype, by_channel=False) -> Any:
    """Queries, keys of length 1, values, rates, decays of heads or of channels, and a state to begin with."""
    draw = np.random.default_rng(seq)
    query, key, value = (draw.normal(size=(BATCH, seq, HEADS, dim)) for dim in (HEAD_DIM, HEAD_DIM, V_DIM))
    sizes = (HEAD_DIM,) * by_channel
    rate, decay = draw.uniform(0, 1, (BATCH, seq, HEADS)), -draw.exponential(1.0, (BATCH, seq, HEADS, *sizes))
    state = draw.normal(size=(BATCH, HEADS, HEAD_DIM, V_DIM))
    key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    return [put(x, dtype) for x in (query, key, value, rate, decay, state)]


def documents(seq):
    """The first row goes on from what was and has further documents; the second begins with one."""
    rows = [np.cumsum(np.arange(seq) % 5 == 3), 1 + np.cumsum(np.arange(seq) == 7)]
    return put(np.stack(rows), np.int32)


def literal(arrays, owners):
    """One token after another, one row and head after another."""
    query, key, value, rate, decay, state = arrays
    xp = np if isinstance(query, np.ndarray) else jnp
    outputs, states = [], []
    heads = query.shape[2]
    for row, head in itertools.product(range(BATCH), range(heads)):
        memory, answers, owner = state[row, head], [], 0
        for place in range(query.shape[1]):
            at = (row, place, head)
            memory = memory * 0 if owners[row, place] != owner else memory
            owner = owners[row, place]
            memory = memory * xp.exp(decay[at]).reshape(-1, 1)
            memory = memory + rate[at] * xp.outer(key[at], value[at] - memory.T @ key[at])
            answers.append(memory.T @ query[at])
        outputs.append(xp.stack(answers))
        states.append(memory)
    output = xp.stack(outputs).reshape(BATCH, heads, -1, V_DIM)
    return xp.swapaxes(output, 1, 2), xp.stack(states).reshape(state.shape)


def of_each_head(arrays, owners):
    """The same, traced for one head."""
    axes = (2, 2, 2, 2, 2, 1)
    one = lambda *arrays: literal([jnp.expand_dims(x, axis) for x, axis in zip(arrays, axes)], owners)
    output, state = jax.vmap(one, axes, axes[-2:])(*arrays)
    return jnp.squeeze(output, 3), jnp.squeeze(state, 2)


def ruled(arrays, owners, chunk):
    query, key, value, rate, decay, state = arrays
    return delta_rule(query, key, value, rate, decay, owners, States(state, owners[:, 0] > 0), chunk=chunk)


@pytest.mark.parametrize(
    ("seq", "chunk", "by_channel"),
    [
        *((1, 4, False), (3, 64, False), pytest.param(8, 4, False, marks=pytest.mark.grid), (13, 4, False)),
        # By blocks of eight tokens, and of one where a chunk has an odd number.
        *((1, 4, True), (37, 32, True), pytest.param(13, 5, True, marks=pytest.mark.grid)),
    ],
)
def test_chunks_are_the_recurrence(seq, chunk, by_channel):
    arrays, owners = given(seq, jnp.float32, by_channel), documents(seq)
    expected = literal([np.asarray(x, np.float64) for x in arrays], np.asarray(owners))
    found = jax.jit(functools.partial(ruled, chunk=chunk))(arrays, owners)
    assert all(close(*pair, 1e-5) for pair in zip(found, expected, strict=True))
    others = literal([np.asarray(x, np.float64) for x in arrays], np.asarray(owners) + 1)
    assert not close(found[0], others[0], 1e-2)


@pytest.mark.by_default("7-3-False")
@pytest.mark.parametrize(("seq", "chunk", "by_channel"), [(1, 4, False), (7, 3, False), (11, 16, True)])
def test_so_are_their_gradients(seq, chunk, by_channel):
    with jax.enable_x64(True):
        arrays, owners = given(seq, jnp.float64, by_channel), np.asarray(documents(seq))

        def total(rule, arrays):
            output, state = rule(arrays, owners)
            return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(state))

        chunks = lambda arrays, owners: ruled(arrays, jnp.asarray(owners), chunk)
        grads = [jax.jit(jax.grad(functools.partial(total, rule)))(arrays) for rule in (of_each_head, chunks)]
        for want, got in zip(*grads, strict=True):
            assert close(got, np.asarray(want), 1e-11)
        assert not close(grads[1][0] * 1.001, np.asarray(grads[0][0]), 1e-5)


def test_keys_alike_are_solved_as_exactly():
    """All keys of a chunk the same: powers of what binds them would grow to 1e18."""
    seq, chunk = 64, 64
    arrays, owners = given(seq, jnp.float32), jnp.zeros((BATCH, seq), jnp.int32)
    arrays[1] = jnp.broadcast_to(arrays[1][:, :1], arrays[1].shape)
    arrays[3], arrays[4] = jnp.full_like(arrays[3], 0.99), jnp.full_like(arrays[4], -1e-3)
    expected = literal([np.asarray(x, np.float64) for x in arrays], np.asarray(owners))
    found = jax.jit(functools.partial(ruled, chunk=chunk))(arrays, owners)
    assert all(close(*pair, 1e-5) for pair in zip(found, expected, strict=True))


@pytest.mark.grid
def test_eight_devices_compute_at_once():
    """No call of LAPACK, for whose threads they would wait, each holding one."""
    arrays, owners = given(13, jnp.float32), documents(13)
    every = [put(np.tile(x, (8 // BATCH, *[1] * (x.ndim - 1)))) for x in (*arrays, owners)]
    split, rule = PartitionSpec("fsdp"), lambda rows: ruled(rows[:-1], rows[-1], 4)
    each = jax.shard_map(rule, mesh=make_mesh(fsdp=8), in_specs=split, out_specs=split)
    calls_lapack = lambda function, given: "lapack" in jax.jit(function).lower(given).as_text()
    gradient = jax.grad(lambda arrays: jnp.sum(rule((*arrays, owners))[0]))
    assert not calls_lapack(each, every) and not calls_lapack(gradient, arrays)
    assert calls_lapack(jnp.linalg.cholesky, np.eye(3, dtype=np.float32))  # the control
    for found, expected in zip(jax.jit(each)(every), jax.jit(rule)((*arrays, owners)), strict=True):
        assert close(found[-BATCH:], np.asarray(expected), 1e-5)


@pytest.mark.by_default("True")
@pytest.mark.parametrize("by_channel", [False, True])
def test_decays_without_bound_have_finite_gradients(by_channel):
    """A token that forgets all: what lies behind it is multiplied by 0, and never divided by it."""
    arrays = given(6, jnp.float32, by_channel)
    arrays[4] = arrays[4].at[:, 2].set(-1e4)
    total = lambda arrays: jnp.sum(ruled(arrays, jnp.zeros((BATCH, 6), jnp.int32), 4)[0])
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(jax.jit(jax.grad(total))(arrays)))


def one_after_another(start, kept, *chunks):
    """The same as `scan_chunks`, by a scan whose gradient JAX makes."""

    def step(state, given):
        kept, added, corrected, scores, asked, stored = given
        news = added - corrected @ state
        return state * kept[..., None] + stored.mT @ news, asked @ state + scores @ news

    last, answers = jax.lax.scan(step, start, (kept, *chunks))
    return answers, last


def of_chunks(channels, number=32):
    """What `scan_chunks` is given: of so many chunks of 8 tokens, decays of heads or of channels."""
    shapes = (
        (2, 3, 16, 16),
        *((number, 2, 3, *rest) for rest in ((channels,), (8, 16), (8, 16), (8, 8), (8, 16), (8, 16))),
    )
    draw = np.random.default_rng(channels)
    return [put(draw.uniform(-0.3, 0.3, shape)) for shape in shapes]


def total(rule, *arrays):
    answers, last = rule(*arrays[:2], *map(jnp.sin, arrays[2:]))
    return jnp.sum(jnp.sin(answers)) + jnp.sum(jnp.cos(last))


@pytest.mark.by_default("16")
@pytest.mark.parametrize("channels", [1, 16])
def test_gradients_of_chunks_are_those_of_a_scan(channels):
    arrays = of_chunks(channels, 4)
    grads = lambda rule: jax.jit(jax.grad(functools.partial(total, rule), tuple(range(7))))(*arrays)
    expected, found = grads(one_after_another), grads(scan_chunks)
    assert all(close(got, np.asarray(want), 1e-5) for got, want in zip(found, expected, strict=True))
    assert not close(found[1] * 1.01, np.asarray(expected[1]), 1e-5)


def test_no_zeros_are_made_for_gradients_of_chunks():
    """The control is a scan, whose transpose makes zeros for each and writes into them."""
    arrays = of_chunks(1)

    def found(rule):
        gradient = jax.jit(jax.grad(functools.partial(total, rule), tuple(range(7))))
        memory = gradient.lower(*arrays).compile().memory_analysis()
        return 0 if memory is None else memory.temp_size_in_bytes / sum(x.nbytes for x in arrays)

    assert found(scan_chunks) < 1.8 < found(one_after_another)
