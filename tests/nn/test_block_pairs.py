"""Which pairs of blocks are computed: no visible pair is left out, and few others are kept."""

import jax.numpy as jnp
import numpy as np
import pytest

from eqformer.nn._tokens import Tokens
from eqformer.nn.attention._mask import causal, chunked, full, Mask, sliding_window
from eqformer.nn.cores._block_pairs import possible_pairs


def blocked(positions, segments=None, block: int = 4) -> Tokens:
    """Rows of tokens as the core cuts them: blocks, rows, tokens."""
    cut = lambda x: jnp.moveaxis(jnp.asarray(x).reshape(len(x), -1, block), 1, 0)
    return Tokens(cut(positions), None if segments is None else cut(segments))


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (full(), 64),
        (causal(), 8 * 9 // 2),
        (sliding_window(5), 8 + 7),
        (sliding_window(6), 8 + 7 + 6),
        (chunked(8), 4 * 3),
        (Mask(is_causal=False, window=2), 8 + 7 + 7),
    ],
)
def test_pairs_of_blocks_counted_by_hand(mask, pairs):
    tokens = blocked(np.arange(32)[None])
    assert int(possible_pairs(mask, tokens, tokens).sum()) == pairs


def test_documents_and_padding_leave_out_blocks():
    positions, segments = np.r_[0:8, 0:4, -np.ones(4)].astype(int)[None], np.r_[[0] * 8, [1] * 8][None]
    tokens = blocked(positions, segments)
    assert possible_pairs(causal(), tokens, tokens).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 0],
    ]


@pytest.mark.parametrize("mask", [causal(), sliding_window(3), chunked(5), full(), Mask(is_causal=False, window=3)])
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
            rows, columns = (jnp.asarray(np.stack([positions, segments])[:, part]) for part in (slice(None), keys))
            visible = np.asarray(mask(Tokens(rows[0], rows[1]), Tokens(columns[0], columns[1])))
            needed = (visible & (positions >= 0)[None, :, None]).reshape(6, 4, 6, 4).any((1, 3))
            assert not np.any(needed & ~possible_pairs(mask, here, there))


def test_packed_rows_leave_out_what_comes_later_and_what_lies_beyond_the_window():
    """Documents of 6 tokens in blocks of 4: positions start anew in the middle of blocks."""
    positions, segments = np.tile(np.arange(6), 4)[None], np.repeat(np.arange(4), 6)[None]
    tokens = blocked(positions, segments)
    within = possible_pairs(causal(), tokens, tokens)
    assert within.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    # With no segments of keys to go by, positions alone decide, and more pairs are computed.
    assert possible_pairs(causal(), tokens, blocked(positions)).sum() > within.sum()
    long = blocked(np.r_[0:18, 0:6][None], np.r_[[0] * 18, [1] * 6][None])
    assert possible_pairs(sliding_window(3), long, long).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
