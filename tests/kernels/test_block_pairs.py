"""Block pairs of masks: every pair with a visible key is computed, and few other pairs are."""

import jax
import numpy as np
import pytest
from haste import put

from eqformer.kernels import TokenPositions
from eqformer.kernels.attention._call import possible_pairs
from eqformer.nn import block_causal, causal, chunked, full, Mask, sliding_window, window_both_ways


pairs_of = jax.jit(possible_pairs, static_argnums=0)
visible_to = jax.jit(lambda mask, *tokens: mask(*tokens), static_argnums=0)


def blocked(positions, segments=None, block: int = 4) -> TokenPositions:
    """Rows of tokens as the core cuts them: blocks, rows, tokens."""
    cut = lambda x: put(np.moveaxis(np.asarray(x).reshape(len(x), -1, block), 1, 0), np.int32)
    return TokenPositions(cut(positions), None if segments is None else cut(segments))


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (full(), 64),
        (causal(), 8 * 9 // 2),
        (sliding_window(5), 8 + 7),
        (sliding_window(6), 8 + 7 + 6),
        (chunked(8), 4 * 3),
        (block_causal(4), 8 * 9 // 2),
        (block_causal(8), 4 * (2 + 4 + 6 + 8) // 2),
        (Mask(is_causal=False, window=2), 8 + 7 + 7),
        (Mask(is_causal=False, window=1, ahead=2), 8 + 7),
    ],
)
def test_pairs_of_blocks_counted_by_hand(mask, pairs):
    tokens = blocked(np.arange(32)[None])
    assert int(pairs_of(mask, tokens, tokens).sum()) == pairs


def test_documents_and_padding_leave_out_blocks():
    positions, segments = np.r_[0:8, 0:4, -np.ones(4)].astype(int)[None], np.r_[[0] * 8, [1] * 8][None]
    tokens = blocked(positions, segments)
    assert pairs_of(causal(), tokens, tokens).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 0],
    ]


@pytest.mark.parametrize(
    "mask", [causal(), sliding_window(3), chunked(5), full(), window_both_ways(6), block_causal(3)]
)
def test_no_visible_pair_is_ever_left_out(mask):
    rng = np.random.default_rng(0)
    for _ in range(20):
        cuts = np.sort(rng.choice(np.arange(1, 24), 3, replace=False))
        segments = np.searchsorted(cuts, np.arange(24), side="right")
        positions = np.arange(24) - np.r_[0, cuts][segments]
        positions[24 - rng.integers(0, 6) :] = -1
        order = rng.permutation(24)
        for keys in (slice(None), order):
            here = blocked(positions[None], segments[None])
            there = blocked(positions[None, keys], segments[None, keys])
            rows, columns = (np.stack([positions, segments])[:, part].astype(np.int32) for part in (slice(None), keys))
            visible = np.asarray(visible_to(mask, TokenPositions(*map(put, rows)), TokenPositions(*map(put, columns))))
            needed = (visible & (positions >= 0)[None, :, None]).reshape(6, 4, 6, 4).any((1, 3))
            assert not np.any(needed & ~np.asarray(pairs_of(mask, here, there)))


def test_a_row_of_noisy_copies_and_clean_tokens_computes_half_of_two_quarters():
    """Tiles of 4 in blocks of 4: noisy tiles see themselves and earlier clean tiles, clean ones see clean ones."""
    positions, segments = np.tile(np.arange(16), 2)[None], np.repeat([-1, 0], 16)[None]
    tokens, below = blocked(positions, segments), np.tril(np.ones((4, 4), int))
    expected = np.block([[np.eye(4, dtype=int), below], [np.zeros((4, 4), int), below]])
    # The clean tiles at the place of a noisy tile are computed too, because ends of tiles alone do not rule them out.
    assert pairs_of(block_causal(4), tokens, tokens).astype(int).tolist() == expected.tolist()


def test_no_visible_pair_of_noisy_copies_is_ever_left_out():
    rng = np.random.default_rng(1)
    for block, window in ((3, None), (4, 5)):
        mask = Mask(is_causal=False, block=block, window=window)
        for _ in range(10):
            cut, order = rng.integers(1, 11), rng.permutation(24)
            document = np.tile(np.arange(12) >= cut, 2).astype(np.int32)
            positions = np.tile(np.arange(12), 2) - cut * document
            segments = np.where(np.arange(24) < 12, ~document, document)
            positions[[11, 23]] = -1
            for part in (slice(None), order):
                rows = positions[None, part].astype(np.int32), segments[None, part].astype(np.int32)
                tiles = blocked(*rows)
                visible = np.asarray(visible_to(mask, *[TokenPositions(*map(put, rows))] * 2))[0]
                needed = (visible & (rows[0][0] >= 0)[:, None]).reshape(6, 4, 6, 4).any((1, 3))
                assert not np.any(needed & ~np.asarray(pairs_of(mask, tiles, tiles)))


def test_packed_rows_leave_out_what_comes_later_and_what_lies_beyond_the_window():
    """Documents of 6 tokens in blocks of 4: positions start anew in the middle of blocks."""
    positions, segments = np.tile(np.arange(6), 4)[None], np.repeat(np.arange(4), 6)[None]
    tokens = blocked(positions, segments)
    within = pairs_of(causal(), tokens, tokens)
    assert within.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    # With no segments of keys to go by, positions alone decide, and more pairs are computed.
    assert pairs_of(causal(), tokens, blocked(positions)).sum() > within.sum()
    long = blocked(np.r_[0:18, 0:6][None], np.r_[[0] * 18, [1] * 6][None])
    assert pairs_of(sliding_window(3), long, long).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
