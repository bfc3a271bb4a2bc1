"""`Tokens` and the random keys of tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import normal, random_module

from eqformer import nn


KEY = jax.random.key(0)


token_keys = jax.jit(nn.token_keys)


def data(keys):
    return np.asarray(jax.random.key_data(keys))


def test_positions_count_from_zero_in_every_row():
    tokens = nn.positions_like((2, 3, 4))
    assert np.array_equal(tokens.positions, np.tile(np.arange(4), (2, 3, 1)))
    assert tokens.positions.dtype == jnp.int32 and tokens.segments is None and tokens.keys is None


def test_a_tokens_key_is_a_function_of_example_and_place_alone():
    places = jnp.broadcast_to(jnp.arange(3), (4, 3))
    whole = data(token_keys(KEY, jnp.array([10, 11, 12, 13]), places))
    part = data(token_keys(KEY, jnp.array([13, 11]), places[:2, 1:]))
    assert np.array_equal(part, whole[[3, 1], 1:])
    by_hand = jax.random.fold_in(jax.random.fold_in(KEY, 12), 2)
    assert np.array_equal(whole[2, 2], data(by_hand))
    assert len(np.unique(whole.reshape(12, -1), axis=0)) == 12
    assert not np.array_equal(data(token_keys(jax.random.key(1), jnp.array([10]), places[:1])), whole[:1])


def test_fold_in_changes_keys_and_nothing_else():
    keys = token_keys(KEY, jnp.arange(2), jnp.broadcast_to(jnp.arange(3), (2, 3)))
    tokens = nn.Tokens(jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), jnp.int32), keys)
    folded = tokens.fold_in(5)
    assert np.array_equal(data(folded.keys)[1, 2], data(jax.random.fold_in(keys[1, 2], 5)))
    assert np.array_equal(data(tokens.fold_in(jnp.int32(5)).keys), data(folded.keys))
    assert folded.positions is tokens.positions and folded.segments is tokens.segments
    given = nn.Tokens(tokens.positions, None, keys, jnp.full((2, 3), 7))
    assert given.fold_in(5).lengths is given.lengths and folded.lengths is None
    assert not np.array_equal(data(tokens.fold_in(6).keys), data(folded.keys))
    bare = nn.positions_like((2, 3))
    assert bare.fold_in(5) is bare


def made(kind, given):
    """An attention of random numbers."""
    return (
        random_module(nn.Attention, **given)
        if kind == "grouped"
        else random_module(nn.LatentAttention, latent=5, **given)
    )


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["grouped", "latent"])
def test_a_part_of_a_row_is_rotated_by_the_rows_length(kind):
    rotary = nn.Rotary(4, 100.0, scaling=nn.DynamicScaling(2.0, 3))
    given = {"embed": 6, "heads": 2, "head_dim": 4, "rotary": rotary, "key": KEY}
    module = made(kind, given)
    x, places = np.asarray(normal(1, 2, 8, 6)), np.where(np.arange(8) < [[8], [6]], np.arange(8, dtype=np.int32), -1)
    run = jax.jit(lambda x, tokens, cache: module(x, tokens, cache)[0])
    whole = np.asarray(run(x, nn.Tokens(jnp.asarray(places)), None))[:, :4]
    part = x[:, :4], jnp.asarray(places[:, :4])
    for cache in (None, module.init_cache((2,), 4)):
        lengths = jnp.asarray(np.broadcast_to(np.array([[8], [6]], np.int32), part[1].shape))
        found = run(part[0], nn.Tokens(part[1], lengths=lengths), cache)
        np.testing.assert_allclose(found, whole, atol=1e-6)
        assert np.abs(run(part[0], nn.Tokens(part[1]), cache) - whole).max() > 1e-3


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("grouped", nn.DynamicScaling(4.0, 6)),
        ("latent", nn.LongRopeScaling((1.0, 1.5), (3.0, 8.0), original_length=6, factor=4.0)),
    ],
)
def test_documents_of_a_packed_row_are_rotated_by_their_own_lengths(kind, scaling):
    """Each document is what it would be alone in a row, one longer and one shorter than the original length."""
    given = {"embed": 6, "heads": 2, "head_dim": 4, "rotary": nn.Rotary(4, 100.0, scaling=scaling), "key": KEY}
    module = jax.tree.map(lambda x: 3 * x, made(kind, given))  # so that rotations show
    x = np.asarray(normal(1, 1, 15, 6))
    places, segments = np.r_[0:10, 0:4, -1][None], np.r_[[3] * 10, [1] * 4, 9][None]
    run = jax.jit(lambda x, tokens: module(x, tokens)[0])
    packed = nn.Tokens(jnp.asarray(places), jnp.asarray(segments))
    whole, both = run(x, packed), (slice(0, 10), slice(10, 14))
    alone = [np.asarray(run(x[:, part], nn.positions_like(x[:, part].shape[:2]))) for part in both]
    part_of = lambda y, part: np.asarray(y)[:, part]
    apart = lambda y: max(np.abs(part_of(y, part) - one).max() / np.abs(one).max() for part, one in zip(both, alone))
    assert apart(whole) < 1e-5
    of_row = nn.Tokens(packed.positions, packed.segments, lengths=jnp.full((1, 15), 10))  # as if the row's were meant
    assert apart(run(x, of_row)) > 1e-3


def test_lengths_of_documents_wherever_their_tokens_stand():
    places = jnp.array([[0, 1, 2, 0, 1, -1], [4, 0, 2, 3, 1, 0]])
    segments = jnp.array([[5, 5, 5, 0, 0, 7], [2, 2, 2, 2, 2, 0]])
    tokens = nn.Tokens(places, segments)
    wanted = np.array([[3, 3, 3, 2, 2, 0], [5] * 5 + [1]])
    assert np.array_equal(nn.document_lengths(tokens), wanted)
    order = np.random.default_rng(0).permutation(6)
    assert np.array_equal(nn.document_lengths(jax.tree.map(lambda x: x[:, order], tokens)), wanted[:, order])
    assert nn.document_lengths(nn.Tokens(places)).tolist() == [[3], [5]]
    given = nn.Tokens(places, lengths=jnp.full((2, 6), 9))
    assert nn.document_lengths(given, nn.Tokens(places)).tolist() == [[9], [9]]


def test_whole_rows_are_said_by_what_makes_them_and_not_of_their_parts():
    made = nn.positions_like((2, 6)), nn.right_padded(jnp.array([6, 2]), 6)
    assert made[1].positions.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, -1, -1, -1, -1]]
    assert all(tokens.are_whole_rows and tokens.fold_in(3).are_whole_rows for tokens in made)
    part = jax.tree.map(lambda x: x[:, 2:], made[0])
    assert not part.are_whole_rows and jax.tree.map(lambda x: x[:1], made[0]).are_whole_rows
    segments = jnp.zeros((2, 6), jnp.int32)
    assert not nn.Tokens(made[0].positions).are_whole_rows
    assert not nn.mark_whole_rows(nn.Tokens(made[0].positions, segments), 6).are_whole_rows
    assert not dataclasses.replace(made[0], positions=made[0].positions + 1).are_whole_rows


def test_keys_and_segments_have_the_positions_shape():
    with pytest.raises(ValueError, match=r"Tokens\(lengths of shape \(2,\)\): with positions of shape \(2, 3\)"):
        nn.Tokens(jnp.zeros((2, 3), jnp.int32), lengths=jnp.ones((2,), jnp.int32))
    with pytest.raises(ValueError, match=r"Tokens\(segments of shape \(2, 4\)\): with positions of shape \(2, 3\)"):
        nn.Tokens(jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 4), jnp.int32))


def test_documents_in_order_are_said_by_what_packs_them_and_not_of_their_parts():
    positions, segments = jnp.array([[0, 1, 0, 1, 2, -1]]), jnp.array([[0, 0, 1, 1, 1, -1]])
    packed = nn.packed_in_order(positions, segments, documents=2)
    assert packed.are_packed_in_order and packed.fold_in(3).are_packed_in_order and packed.documents == 2
    assert not packed.are_whole_rows and not jax.tree.map(lambda x: x[:, 2:], packed).are_packed_in_order
    assert not nn.Tokens(positions, segments).are_packed_in_order
    assert not dataclasses.replace(packed, segments=segments + 1).are_packed_in_order
