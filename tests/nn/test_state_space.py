"""Mamba-2's recurrence in chunks against the same recurrence token by token, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close

from eqformer.nn.recurrent._mamba import scan_chunk_states, state_space
from eqformer.nn.recurrent._recurrence import States


BATCH, GROUPS, HEADS, HEAD_DIM, V_DIM = 2, 2, 6, 4, 5


def given(seq, dtype):
    """Queries, keys, values, decays, and a state to begin with."""
    draw = np.random.default_rng(seq)
    query, key = (draw.normal(size=(BATCH, seq, GROUPS, HEAD_DIM)) for _ in range(2))
    value, decay = draw.normal(size=(BATCH, seq, HEADS, V_DIM)), -draw.exponential(1.0, (BATCH, seq, HEADS))
    state = draw.normal(size=(BATCH, HEADS, HEAD_DIM, V_DIM))
    return [jnp.asarray(x, dtype) for x in (query, key, value, decay, state)]


def documents(seq):
    """The first row goes on from what was and has further documents; the second begins with one."""
    rows = [np.cumsum(np.arange(seq) % 5 == 3), 1 + np.cumsum(np.arange(seq) == 7)]
    return jnp.asarray(np.stack(rows), jnp.int32)


def literal(arrays, owners):
    """One token after another: fade, or forget at another document; take up the token; answer."""

    def token(memory, now):
        query, key, value, decay, forgets = now
        memory = jnp.where(forgets[:, None, None, None], 0, memory * jnp.exp(decay)[..., None, None])
        memory = memory + key[..., :, None] * value[..., None, :]
        return memory, jnp.sum(query[..., :, None] * memory, axis=-2)

    query, key, value, decay, state = arrays
    query, key = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (query, key))
    forgets = jnp.diff(owners, axis=1, prepend=0) > 0
    last, answers = jax.lax.scan(token, state, [jnp.swapaxes(x, 0, 1) for x in (query, key, value, decay, forgets)])
    return jnp.swapaxes(answers, 0, 1), last


def chunked(arrays, owners, chunk):
    query, key, value, decay, state = arrays
    return state_space(query, key, value, decay, owners, States(state, owners[:, 0] > 0), chunk=chunk)


def outcome(rule):
    """A function to answers, the last state, and gradients of a function of both."""

    def total(arrays, owners):
        output, state = rule(arrays, owners)
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(state)), [output, state]

    def both(arrays, owners):
        gradients, found = jax.grad(total, has_aux=True)(arrays, owners)
        return found + gradients

    return jax.jit(both)


@pytest.mark.by_default("13-4")
@pytest.mark.parametrize(("seq", "chunk"), [(1, 4), (3, 64), (13, 4), (8, 4)])
def test_chunks_are_the_recurrence(seq, chunk):
    with jax.enable_x64(True):
        arrays, owners = given(seq, jnp.float64), documents(seq)
        expected, found = outcome(literal)(arrays, owners), outcome(functools.partial(chunked, chunk=chunk))
        pairs = list(zip(found(arrays, owners), expected, strict=True))
        assert all(close(*pair, 1e-12) for pair in pairs)
        crossed = found(arrays, jnp.zeros_like(owners))  # the control: documents that see each other
        assert not any(close(one, other, 1e-2) for one, (_, other) in zip(crossed, pairs, strict=True))


@pytest.mark.grid
def test_decays_without_bound_have_finite_gradients():
    """A token that forgets all: what lies behind it is multiplied by 0, and never divided by it."""
    arrays = given(6, jnp.float32)
    arrays[3] = arrays[3].at[:, 2].set(-1e4)
    found = outcome(functools.partial(chunked, chunk=4))(arrays, jnp.zeros((BATCH, 6), jnp.int32))
    assert all(bool(jnp.isfinite(x).all()) for x in found)


def test_states_and_their_gradients_are_in_the_place_of_what_is_added():
    """The control is a scan, which needs one array more for them."""

    def scanned(start, kept, added):
        step = lambda state, given: (state * given[0][..., None, None] + given[1], state)
        last, before = jax.lax.scan(step, start, (kept, added))
        return before, last

    def found(rule):
        def total(start, kept, x):
            before, last = rule(start, kept, jnp.sin(x))
            return jnp.sum(jnp.sin(before)) + jnp.sum(last)

        gradient = jax.jit(jax.grad(total, (0, 1, 2)), donate_argnums=2)
        given = [jnp.zeros(shape) for shape in ((2, 1, 4, 8, 8), (32, 2, 1, 4), (32, 2, 1, 4, 8, 8))]
        memory = gradient.lower(*given).compile().memory_analysis()
        return 0 if memory is None else memory.temp_size_in_bytes / given[2].nbytes

    assert found(scan_chunk_states) < found(scanned) - 0.9
