"""Attention to windows and compressed keys, against loops in float64 for each document, and its caches."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import linear, normal, random_module, rms, wide
from selection_cases import check_gradients, check_replaced_tokens, decode, to_float64

from eqformer import nn
from eqformer.nn._cache import quantize_caches


KEY = jax.random.key(0)
EMBED, DIM, INDEX_DIM, Q_LATENT, GROUPS, GROUP_HEADS, WINDOW = 6, 8, 6, 5, 2, 2, 4
KINDS: dict[str, dict[str, Any]] = {
    "window": {},
    "all blocks": {"block_size": 3},
    "overlapping blocks": {"block_size": 3, "series": 2},
    "selected blocks": {"block_size": 2, "series": 2, "top_k": 2},
    "selected blocks of one token": {"block_size": 1, "series": 2, "top_k": 3},
}
BY_DEFAULT = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "selected blocks" else pytest.mark.grid) for kind in KINDS]
)


def compressed(block_size: int = 0, series: int = 1, top_k: int = 0, **options: Any) -> nn.CompressedAttention:
    """Return a layer with random weights and sinks, whose small heads are too many for equal scores."""
    rotary = nn.Rotary(4, 50.0, interleaved=True)

    def make() -> nn.CompressedAttention:
        compressor = lambda dim: nn.KeyCompressor(
            embed=EMBED, dim=dim, block_size=block_size, series=series, rotary=rotary, norm_eps=1e-3, key=KEY
        )
        indexer = None
        if top_k:
            indexer = nn.EntryIndexer(
                compressor(INDEX_DIM), embed=EMBED, q_latent=Q_LATENT, heads=16, top_k=top_k, key=KEY
            )
        return nn.CompressedAttention(
            embed=EMBED,
            groups=GROUPS,
            group_heads=GROUP_HEADS,
            q_latent=Q_LATENT,
            group_rank=3,
            rotary=rotary,
            compressor=compressor(DIM) if block_size else None,
            norm_eps=1e-3,
            key=KEY,
            **{"head_dim": DIM, "window": WINDOW, "indexer": indexer, **options},
        )

    return random_module(make)


def turn(x: np.ndarray, position: int, rotary: nn.Rotary, sign: int = 1) -> np.ndarray:
    """Return a vector whose last pairs of channels are rotated to a position."""
    y, first = x.copy(), len(x) - rotary.dim
    for pair in range(rotary.dim // 2):
        # Frequencies are rounded to float32, as in published models.
        angle = sign * position * float(np.float32(rotary.theta ** (-2 * pair / rotary.dim)))
        even, odd = first + 2 * pair, first + 2 * pair + 1
        y[even] = x[even] * math.cos(angle) - x[odd] * math.sin(angle)
        y[odd] = x[odd] * math.cos(angle) + x[even] * math.sin(angle)
    return y


def block_keys(compressor: nn.KeyCompressor, x: np.ndarray) -> list[np.ndarray]:
    """Return the keys of the complete blocks of a document, by the equations 9 to 12 and 20 to 23 of DeepSeek-V4."""
    (block_size, series, dim), bias = compressor.bias.shape, wide(compressor.bias)
    values, gates = linear(x, compressor.value), linear(x, compressor.gate)
    keys = []
    for block in range(len(x) // block_size):
        total, weight = np.zeros(dim), np.zeros(dim)
        for number in range(series):
            for place in range(block_size):
                token = (block - series + 1 + number) * block_size + place
                if token >= 0:
                    share = np.exp(gates[token, number] + bias[place, number])
                    total, weight = total + share * values[token, number], weight + share
        key = rms((total / weight)[None], compressor.norm)[0]
        keys.append(turn(key, block * block_size, compressor.rotary))
    return keys


def best_blocks(indexer: nn.EntryIndexer, x: np.ndarray, latent: np.ndarray, position: int, ready: int) -> list[int]:
    """Return the blocks that a query selects of the `ready` first ones, by the equations 13 to 17."""
    keys, weights = block_keys(indexer.compressor, x), linear(x[position], indexer.weight)
    queries = [turn(query, position, indexer.compressor.rotary) for query in linear(latent[position], indexer.query)]
    scores = [sum(w * max(0.0, q @ keys[n]) for w, q in zip(weights, queries)) for n in range(ready)]
    return sorted(range(ready), key=lambda n: -scores[n])[: indexer.top_k]


def literal(layer: Any, x: np.ndarray) -> np.ndarray:
    """Return the output for one document."""
    latent = rms(linear(x, layer.query_down), layer.query_latent_norm)
    queries, keys = rms(linear(latent, layer.query), layer.query_norm), rms(linear(x, layer.key), layer.key_norm)
    keys = [turn(key, position, layer.rotary) for position, key in enumerate(keys)]
    blocks = [] if layer.compressor is None else block_keys(layer.compressor, x)
    down, output, sinks = wide(layer.group_down.weight), wide(layer.output.weight), wide(layer.sinks)
    outputs = []
    for position in range(len(x)):
        chosen = range(0 if layer.compressor is None else (position + 1) // layer.compressor.bias.shape[0])
        if layer.indexer is not None:
            chosen = best_blocks(layer.indexer, x, latent, position, len(chosen))
        seen = keys[max(0, position - layer.window + 1) : position + 1] + [blocks[n] for n in chosen]
        total = np.zeros(EMBED)
        for group, head in np.ndindex(GROUPS, GROUP_HEADS):
            query = turn(queries[position, group, head], position, layer.rotary)
            shares = np.exp([query @ key * DIM**-0.5 for key in seen])
            shares = shares / (shares.sum() + np.exp(sinks[group, head]))
            mean = turn(np.sum([share * key for share, key in zip(shares, seen)], axis=0), position, layer.rotary, -1)
            total += output[:, group] @ (down[group, :, head] @ mean)
        outputs.append(total)
    return np.array(outputs)


LENGTHS = 7, 1, 9, 2
POSITIONS = np.concatenate([*(np.arange(n) for n in LENGTHS), [-1, -1]]).astype(np.int32)
SEGMENTS = np.repeat([0, 1, 2, 3, -1], [*LENGTHS, 2]).astype(np.int32)


def by_document(layer: nn.CompressedAttention, x: np.ndarray, lengths: tuple[int, ...] = LENGTHS) -> np.ndarray:
    """Return the outputs of the documents of a packed row, each by itself."""
    starts = np.cumsum([0, *lengths])
    return np.concatenate([literal(layer, x[start:stop]) for start, stop in zip(starts, starts[1:])])


@BY_DEFAULT
@pytest.mark.parametrize("chunk", [64, pytest.param(5, marks=pytest.mark.grid)])
def test_packed_documents_follow_the_equations(kind, chunk):
    with jax.enable_x64(True):
        layer = to_float64(compressed(**KINDS[kind], chunk=chunk))
        x = np.random.default_rng(1).normal(size=(len(POSITIONS), EMBED))
        tokens = nn.Tokens(jnp.asarray(POSITIONS)[None], jnp.asarray(SEGMENTS)[None])
        y = np.asarray(eqx.filter_jit(layer)(jnp.asarray(x)[None], tokens)[0][0])
        expected = by_document(layer, x)
        assert np.allclose(y[: len(expected)], expected, rtol=0, atol=1e-12)
        # Documents that are read as one differ: from the second on, and the first is the same.
        mixed = by_document(layer, x, (sum(LENGTHS),))
        assert np.allclose(mixed[:7], expected[:7], atol=1e-12) and abs(mixed[8:] - expected[8:]).max() > 1e-2


def test_a_row_that_begins_within_a_block_has_all_blocks_that_it_completes():
    compressor = compressed(block_size=4, series=2).compressor
    assert compressor is not None
    x, positions = normal(3, 1, 8, EMBED), jnp.arange(3, 11, dtype=jnp.int32)[None]
    run = eqx.filter_jit(lambda x, positions: compressor(x, nn.Tokens(positions), None)[0])
    of_eight, of_five = run(x, positions), run(x[:, :5], positions[:, :5])  # positions 3 to 10, and 3 to 7
    assert of_eight.tokens.positions.tolist() == of_five.tokens.positions.tolist() == [[3, 7]]
    assert np.allclose(of_five.vectors, of_eight.vectors, rtol=0, atol=1e-6)
    assert run(x[:, :4], positions[:, :4]).tokens.positions.tolist() == [[3]]


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_slopes(kind):
    with jax.enable_x64(True):
        layer, rng = to_float64(compressed(**KINDS[kind], chunk=8)), np.random.default_rng(2)
        tokens = nn.Tokens(jnp.asarray(POSITIONS)[None], jnp.asarray(SEGMENTS)[None])
        x = jnp.asarray(rng.normal(size=(1, len(POSITIONS), EMBED)))
        real = jnp.asarray(POSITIONS >= 0)[:, None]
        check_gradients(layer, x, tokens, real, rng)


def test_chunks_of_queries_make_no_matrix_of_the_row():
    x = normal(1, 1, 37, EMBED)
    whole, chunked = (compressed(block_size=5, chunk=chunk) for chunk in (64, 8))
    run = eqx.filter_jit(lambda layer: layer(x)[0])
    assert np.allclose(run(whole), run(chunked), atol=1e-5)
    programs = [str(jax.make_jaxpr(lambda x, layer=layer: layer(x)[0])(x)) for layer in (whole, chunked)]
    # 37 queries of 40 recent keys (3 of them padding) and 8 compressed ones (the last is empty in this row).
    assert ["37,48]" in program for program in programs] == [True, False]


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
def test_left_padding_and_pieces_of_any_length_decode_alike(kind):
    layer, x = compressed(**KINDS[kind], chunk=4), normal(3, 2, 19, EMBED)
    # The first row has three tokens of padding on its left.
    shift = np.array([3, 0])
    positions = jnp.asarray(np.maximum(np.arange(19) - shift[:, None], -1).astype(np.int32))
    expected = [literal(layer, wide(x[row, start:])) for row, start in enumerate(shift)]
    y, cache = decode(layer, x, (6, 7, 8, 14, 15, 16, 17, 18, 19), layer.init_cache((2,), 40), positions)
    for row, start in enumerate(shift):
        assert np.allclose(y[row, start:], expected[row], atol=2e-5)
    empty = jax.tree.map(lambda leaf: leaf * 0 if leaf.ndim == 3 else leaf, cache)
    last, _ = decode(layer, x[:, -1:], (1,), empty, positions[:, -1:])
    assert not np.allclose(last[1, 0], expected[1][-1], atol=1e-3)
    assert cache.window.rolling and nn.can_roll_back(cache)


@pytest.mark.grid
def test_tokens_that_are_replaced_leave_nothing_behind():
    layer, x, other = compressed(**KINDS["selected blocks"]), normal(4, 1, 17, EMBED), normal(5, 1, 17, EMBED)
    check_replaced_tokens(layer, x, other, 40)


@pytest.mark.grid
def test_caches_of_8_bits_keep_open_blocks_exact_and_rows_end_at_the_capacity():
    layer, x = compressed(**KINDS["selected blocks"]), normal(6, 1, 17, EMBED)
    expected = np.asarray(eqx.filter_jit(lambda x: layer(x)[0])(x))
    narrow: Any = quantize_caches(layer.init_cache((1,), 18), "int8")
    dtypes = [narrow.window.vectors.dtype, narrow.compressor.entries.vectors.dtype, narrow.index.gathered.vectors.dtype]
    assert dtypes == [jnp.int8, jnp.int8, jnp.float32]
    y, _ = decode(layer, x[:, :6], range(1, 7), narrow)  # So few blocks are all seen.
    assert 1e-6 < abs(y - expected[:, :6]).max() < 0.1
    tight: Any = layer.init_cache((1,), 9)
    assert tight.compressor.entries.longest_row == 10 and tight.window.longest_row is None
    y, _ = decode(layer, x, (8, 9, 10, 11), tight)
    assert np.isfinite(y[:, :10]).all() and np.isnan(y[:, 10]).all()
    with pytest.raises(ValueError, match=r"reach position 10, but kv_seq of the cache is 10"):
        layer(x[:, :11], nn.positions_like((1, 11)), tight)


def test_tokens_beyond_a_capacity_below_the_blocks_have_no_finite_output():
    """Without the values of tokens that are not stored, a later block would have a wrong key."""
    layer, x = compressed(block_size=4, series=2, window=3), normal(7, 1, 8, EMBED)
    expected = np.asarray(eqx.filter_jit(lambda x: layer(x)[0])(x))
    y, _ = decode(layer, x, range(1, 9), layer.init_cache((1,), 5))
    assert np.allclose(y[:, :5], expected[:, :5], atol=2e-5) and np.isnan(y[:, 5:]).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compressed(window=0), r"CompressedAttention\(window=0"),
        (lambda: compressed(chunk=0), r"CompressedAttention\(window=4, chunk=0"),
        (lambda: compressed(block_size=2, head_dim=10), r"head_dim=10, compressor=...\): the compressor's keys have 8"),
        (lambda: compressed(block_size=2, series=0), r"KeyCompressor\(block_size=2, series=0"),
        (lambda: compressed(block_size=2, top_k=-1), r"EntryIndexer\(top_k=-1\)"),
        (
            lambda: compressed(block_size=3, indexer=compressed(**KINDS["selected blocks"]).indexer),
            "with the same block_size",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
