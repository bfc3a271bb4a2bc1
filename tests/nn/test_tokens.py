"""Tokens and their keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from eqformer import nn


KEY = jax.random.key(0)


def data(keys):
    return np.asarray(jax.random.key_data(keys))


def test_positions_count_from_zero_in_every_row():
    tokens = nn.positions_like((2, 3, 4))
    assert np.array_equal(tokens.positions, np.tile(np.arange(4), (2, 3, 1)))
    assert tokens.positions.dtype == jnp.int32 and tokens.segments is None and tokens.keys is None


def test_a_tokens_key_is_a_function_of_example_and_place_alone():
    places = jnp.broadcast_to(jnp.arange(3), (4, 3))
    whole = data(nn.token_keys(KEY, jnp.array([10, 11, 12, 13]), places))
    part = data(nn.token_keys(KEY, jnp.array([13, 11]), places[:2, 1:]))
    assert np.array_equal(part, whole[[3, 1], 1:])
    by_hand = jax.random.fold_in(jax.random.fold_in(KEY, 12), 2)
    assert np.array_equal(whole[2, 2], data(by_hand))
    assert len(np.unique(whole.reshape(12, -1), axis=0)) == 12
    assert not np.array_equal(data(nn.token_keys(jax.random.key(1), jnp.array([10]), places[:1])), whole[:1])


def test_fold_in_changes_keys_and_nothing_else():
    keys = nn.token_keys(KEY, jnp.arange(2), jnp.broadcast_to(jnp.arange(3), (2, 3)))
    tokens = nn.Tokens(jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), jnp.int32), keys)
    folded = tokens.fold_in(5)
    assert np.array_equal(data(folded.keys)[1, 2], data(jax.random.fold_in(keys[1, 2], 5)))
    assert np.array_equal(data(tokens.fold_in(jnp.int32(5)).keys), data(folded.keys))
    assert folded.positions is tokens.positions and folded.segments is tokens.segments
    assert not np.array_equal(data(tokens.fold_in(6).keys), data(folded.keys))
    bare = nn.positions_like((2, 3))
    assert bare.fold_in(5) is bare


def test_keys_and_segments_have_the_positions_shape():
    with pytest.raises(TypeCheckError):
        nn.Tokens(jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 4), jnp.int32))
