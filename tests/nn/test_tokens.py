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
    told = nn.Tokens(tokens.positions, None, keys, jnp.array([7, 9]))
    assert told.fold_in(5).lengths is told.lengths and folded.lengths is None
    assert not np.array_equal(data(tokens.fold_in(6).keys), data(folded.keys))
    bare = nn.positions_like((2, 3))
    assert bare.fold_in(5) is bare


@pytest.mark.parametrize("kind", ["grouped", "latent"])
def test_a_part_of_a_row_is_rotated_by_the_rows_length(kind):
    rotary = nn.Rotary(4, 100.0, scaling=nn.DynamicScaling(2.0, 3))
    given = {"embed": 6, "heads": 2, "head_dim": 4, "rotary": rotary, "key": KEY}
    module = nn.Attention(**given) if kind == "grouped" else nn.LatentAttention(latent=5, **given)
    x, places = jax.random.normal(KEY, (2, 8, 6)), jnp.stack([jnp.arange(8), jnp.minimum(jnp.arange(8), 5)])
    places = jnp.where(jnp.arange(8) > places, -1, places)
    run = jax.jit(lambda x, tokens, cache: module(x, tokens, cache)[0])
    whole, part = run(x, nn.Tokens(places), None)[:, :4], (x[:, :4], places[:, :4])
    for cache in (None, module.init_cache((2,), 4)):
        told = run(part[0], nn.Tokens(part[1], lengths=jnp.array([8, 6])), cache)
        np.testing.assert_allclose(told, whole, atol=1e-6)
        assert np.abs(run(part[0], nn.Tokens(part[1]), cache) - whole).max() > 1e-3


def test_keys_and_segments_have_the_positions_shape():
    with pytest.raises(TypeCheckError):
        nn.Tokens(jnp.zeros((2, 3), jnp.int32), lengths=jnp.ones((3,), jnp.int32))
    with pytest.raises(TypeCheckError):
        nn.Tokens(jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 4), jnp.int32))
