"""Masks against a literal triple loop."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import nn


PACKED = (
    np.array([[0, 1, 2, 3, 0, 1, 2, -1], [0, 1, 2, 3, 4, 5, 6, 7]]),
    np.array([[4, 4, 4, 4, 7, 7, 7, -1], [0, 0, 0, 0, 0, 0, 0, 0]]),
)
SLOTS = (np.array([[8, 9, 6, 7, -1], [-1, 0, 3, 2, 1]]), None)  # a rolling cache
KINDS = {
    "causal": nn.causal(),
    "full": nn.full(),
    "window": nn.sliding_window(3),
    "window of one": nn.sliding_window(1),
    "chunk": nn.chunked(3),
    "window both ways": nn.Mask(is_causal=False, window=2),
    "even window both ways": nn.window_both_ways(2),
    "chunk both ways": nn.Mask(is_causal=False, chunk=3),
    "window and chunk": nn.Mask(window=2, chunk=4),
    "block": nn.block_causal(3),
    "window and block": nn.Mask(is_causal=False, window=2, block=3),
}


def literal(mask, queries, keys):
    """The docstring's sentence, cell by cell."""
    (q_places, q_segments), (k_places, k_segments) = queries, keys
    visible = np.zeros((*q_places.shape, k_places.shape[1]), bool)
    for b, i, j in np.ndindex(visible.shape):
        query, key = int(q_places[b, i]), int(k_places[b, j])
        see = key != -1
        if q_segments is not None and k_segments is not None:
            see = see and q_segments[b, i] == k_segments[b, j]
        if mask.is_causal:
            see = see and key <= query
        if mask.window is not None:
            see = see and -(mask.ahead or mask.window) < query - key < mask.window
        if mask.chunk is not None:
            see = see and np.floor(query / mask.chunk) == np.floor(key / mask.chunk)
        if mask.block is not None:
            see = see and np.floor(key / mask.block) <= np.floor(query / mask.block)
        visible[b, i, j] = see
    return visible


def tokens(places, segments):
    return nn.Tokens(jnp.asarray(places), None if segments is None else jnp.asarray(segments))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_its_sentence(kind):
    mask = KINDS[kind]
    unpacked = (PACKED[0], None)
    decoding = (np.array([[9], [3]]), None)
    for queries, keys in ((PACKED, PACKED), (unpacked, unpacked), (decoding, SLOTS), (PACKED, SLOTS)):
        assert np.array_equal(mask(tokens(*queries), tokens(*keys)), literal(mask, queries, keys))


def test_the_kinds_differ_on_these_tokens():
    found = [np.asarray(mask(tokens(*PACKED), tokens(*PACKED))) for mask in KINDS.values()]
    assert all(not np.array_equal(one, other) for one, other in itertools.combinations(found, 2))
    joined = nn.causal()(tokens(PACKED[0], None), tokens(PACKED[0], None))
    assert not np.array_equal(joined, found[0])


@pytest.mark.parametrize("window", [1, 2, 5, 6])
def test_a_window_both_ways_is_of_so_many_tokens(window):
    """Those that transformers' T5Gemma 2 lets a token see, of an even number one more behind it than before it."""
    places = nn.positions_like((1, 12))
    left, right = (window + 1) // 2, window // 2 + 1
    see = lambda i, j: (0 <= i - j < left) or (0 < j - i < right)
    found = np.asarray(nn.window_both_ways(window)(places, places))[0]
    assert found.tolist() == [[see(i, j) for j in range(12)] for i in range(12)] and found[6].sum() == window


def test_the_other_side_of_a_window_needs_one():
    for is_causal, window in ((False, None), (True, 2)):
        with pytest.raises(ValueError, match=r"Mask\(is_causal=.*ahead=2\): ahead limits the later tokens of a window"):
            nn.Mask(is_causal, window, ahead=2)


@pytest.mark.parametrize("block", [1, 3, 4])
def test_noisy_copies_see_their_block_and_the_clean_blocks_before_it(block):
    """The three parts of BD3-LM's mask (arXiv:2503.09573, section 3.3), for a row of noisy copies and clean tokens."""
    seq = 8
    positions, segments = np.tile(np.arange(seq), 2)[None], np.repeat([-1, 0], seq)[None]
    is_clean, block_number = np.arange(2 * seq) >= seq, positions[0] // block
    query, key = (block_number[:, None], is_clean[:, None]), (block_number[None], is_clean[None])
    within = (query[0] == key[0]) & ~query[1] & ~key[1]
    before = (query[0] > key[0]) & ~query[1] & key[1]
    clean = (query[0] >= key[0]) & query[1] & key[1]
    expected = within | before | clean
    row = tokens(positions, segments)
    assert np.array_equal(nn.block_causal(block)(row, row)[0], expected)
    assert not np.array_equal(nn.full()(row, row)[0], expected)
    # Two packed documents see nothing of each other, whatever the order of the tokens.
    starts = np.array([0, 3])
    document = np.searchsorted(starts, np.arange(seq), side="right") - 1
    positions = np.tile(np.arange(seq) - starts[document], 2)[None]
    packed = tokens(positions, np.r_[~document, document][None])
    visible = np.asarray(nn.block_causal(block)(packed, packed)[0])
    parts = [np.tile(document, 2) == number for number in (0, 1)]
    assert not visible[parts[0]][:, parts[1]].any() and not visible[parts[1]][:, parts[0]].any()
    for part in parts:
        alone = tokens(positions[:, part], np.repeat([-1, 0], part.sum() // 2)[None])
        assert np.array_equal(visible[part][:, part], nn.block_causal(block)(alone, alone)[0])


def test_blocks_are_neither_causal_nor_in_chunks_and_are_not_cached():
    for options in ({}, {"is_causal": False, "chunk": 4}, {"is_causal": False, "source": True}):
        with pytest.raises(ValueError, match="tokens of a block see one another and all earlier blocks"):
            nn.Mask(block=2, **options)
    with pytest.raises(ValueError, match=r"Attention.init_cache: .* tokens cannot be sampled one by one"):
        nn.block_causal(2).check_cached("Attention")


@pytest.mark.parametrize("name", ["window", "chunk", "block"])
def test_lengths_are_at_least_one(name):
    with pytest.raises(ValueError, match=rf"Mask\({name}=0\): {name} counts tokens and must be at least 1"):
        nn.Mask(False, 0) if name == "window" else nn.Mask(False, chunk=0 if name == "chunk" else None, block=0)


def test_masks_hold_no_arrays_and_compare_by_their_rules():
    assert jax.tree.leaves(nn.sliding_window(3)) == []
    assert nn.sliding_window(3) == nn.Mask(window=3) != nn.causal()


def test_positions_are_integers():
    with pytest.raises(ValueError, match=r"Tokens\(positions of float32 .* must hold integers"):
        nn.Tokens(jnp.ones((1, 2)))
