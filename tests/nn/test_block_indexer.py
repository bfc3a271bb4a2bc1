"""Attention to selected blocks of keys, against loops in float64 for each document, and its caches."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import linear, normal, random_module, rms, rotate, wide
from selection_cases import (
    by_document,
    check_gradients,
    check_replaced_tokens,
    decode,
    packed,
    POSITIONS,
    START,
    to_float64,
)

from eqformer import nn
from eqformer.nn._cache import quantize_caches


KEY = jax.random.key(0)
EMBED, HEADS, KV_HEADS, DIM, INDEX_DIM = 6, 4, 2, 8, 6
KINDS: dict[str, dict[str, Any]] = {
    "the last block always": {"block": 3, "top_k": 2},
    "the best blocks": {"block": 2, "top_k": 1, "local": 0},
    "the last blocks alone": {"block": 2, "top_k": 2, "local": 2},
    "single keys": {"block": 1, "top_k": 3},
}
BY_DEFAULT = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "the last block always" else pytest.mark.grid) for kind in KINDS]
)


def index_norm() -> nn.RMSNorm:
    return nn.RMSNorm("index_dim", index_dim=INDEX_DIM, eps=1e-3, offset=1.0)


def make_indexer(block: int = 3, top_k: int = 2, **options: Any) -> nn.BlockIndexer:
    sizes = {"embed": EMBED, "kv_heads": KV_HEADS, "dim": INDEX_DIM, "rotary": nn.Rotary(4, 50.0), **options}
    return nn.BlockIndexer(block=block, top_k=top_k, query_norm=index_norm(), key_norm=index_norm(), key=KEY, **sizes)


def blocked(attention: dict[str, Any] | None = None, **options: Any) -> nn.BlockIndexedAttention:
    """Return a layer with random weights."""
    sizes = {"embed": EMBED, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, **(attention or {})}
    rotary = nn.Rotary(4, 50.0)
    return random_module(
        lambda: nn.BlockIndexedAttention(make_indexer(**options), **sizes, rotary=rotary, core=None, key=KEY)
    )


def turned(x: np.ndarray, rotary: nn.Rotary, start: int) -> np.ndarray:
    """Return the heads of a document, from position `start` on, with their first channels rotated."""
    # Frequencies are rounded to float32, as in published models.
    frequencies = wide(np.float32(rotary.theta ** (-np.arange(0, rotary.dim, 2) / rotary.dim)))
    positions = start + np.arange(len(x))
    first = rotate(x[None, ..., : rotary.dim], positions[None], frequencies)[0]
    return np.concatenate([first, x[..., rotary.dim :]], axis=-1)


def literal(layer: Any, x: np.ndarray, start: int = 0) -> np.ndarray:
    """Return the output for one document, whose first token is at position `start`."""
    indexer = layer.indexer
    queries, keys = (turned(linear(x, part), layer.rotary, start) for part in (layer.query, layer.key))
    values, output = linear(x, layer.value), wide(layer.output.weight)
    small_queries = turned(rms(linear(x, indexer.query), indexer.query_norm), indexer.rotary, start)
    small_keys = turned(rms(linear(x, indexer.key), indexer.key_norm)[:, None], indexer.rotary, start)[:, 0]
    block_of = lambda token: (start + token) // indexer.block
    outputs = []
    for token in range(len(x)):
        total = np.zeros(EMBED)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            best: dict[int, float] = {}
            for key in range(token + 1):
                score = small_queries[token, kv_head] @ small_keys[key]
                best[block_of(key)] = max(best.get(block_of(key), -np.inf), score)
            is_local = lambda block, at=block_of(token): at - indexer.local < block
            ranked = sorted(best, key=lambda block: (not is_local(block), -best[block]))
            seen = [key for key in range(token + 1) if block_of(key) in ranked[: indexer.top_k]]
            shares = np.exp([queries[token, head] @ keys[key, kv_head] * DIM**-0.5 for key in seen])
            total += output[:, head] @ (shares @ values[seen, kv_head] / shares.sum())
        outputs.append(total)
    return np.array(outputs)


@BY_DEFAULT
@pytest.mark.parametrize("chunk", [64, pytest.param(5, marks=pytest.mark.grid)])
def test_packed_documents_follow_the_formula(kind, chunk):
    with jax.enable_x64(True):
        layer = to_float64(blocked(**KINDS[kind], chunk=chunk))
        x = np.random.default_rng(1).normal(size=(len(POSITIONS), EMBED))
        y = np.asarray(eqx.filter_jit(layer)(jnp.asarray(x)[None], packed())[0][0])
        expected = by_document(literal, layer, x)
        assert np.allclose(y[: len(expected)], expected, rtol=0, atol=1e-12)
        if layer.indexer.block > 1:  # The blocks of the first document depend on the position at which it begins.
            other = by_document(literal, layer, x, START + 1)
            assert np.allclose(other[7:], expected[7:], atol=1e-12) and abs(other - expected).max() > 1e-2


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_slopes_and_none_passes_through_the_indexer(kind):
    with jax.enable_x64(True):
        layer, rng = to_float64(blocked(**KINDS[kind], chunk=8)), np.random.default_rng(2)
        tokens = packed()
        x = jnp.asarray(rng.normal(size=(1, len(POSITIONS), EMBED)))
        real = jnp.asarray(POSITIONS >= 0)[:, None]
        check_gradients(layer, x, tokens, real, rng)


@pytest.mark.grid
def test_few_blocks_are_all_seen_and_chunks_give_the_same():
    x = normal(1, 1, 37, EMBED)
    attend = eqx.filter_jit(lambda layer: nn.Attention.__call__(layer, x)[0])
    run = eqx.filter_jit(lambda layer: layer(x)[0])
    expected, dense = run(blocked()), attend(blocked())
    assert np.allclose(run(blocked(top_k=14)), dense, atol=1e-6)
    assert np.allclose(run(blocked(chunk=8)), expected, atol=1e-5) and not np.allclose(expected, dense, atol=1e-2)


@pytest.mark.grid
def test_keys_and_values_are_shared_on_request():
    layer: Any = blocked()
    x = normal(1, 1, 17, EMBED)
    plain, (attended, answer) = layer(x), layer(x, None, nn.ShareRequest(None))
    assert np.array_equal(attended, plain[0]) and answer.wrapped is None and plain[1] is None
    attend: Any = nn.Attention.__call__
    dense, expected = attend(layer, x, nn.positions_like((1, 17)), nn.ShareRequest(None))
    assert jax.tree.all(jax.tree.map(np.array_equal, answer.value, expected.value))
    assert not np.allclose(dense, attended, atol=1e-2)


def test_chunks_of_queries_make_no_matrix_of_the_row():
    x = normal(1, 1, 37, EMBED)
    layers = blocked(), blocked(chunk=8)
    programs = [str(jax.make_jaxpr(lambda x, layer=layer: layer(x)[0])(x)) for layer in layers]
    assert ["37,37]" in program for program in programs] == [True, False]


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
def test_left_padding_and_pieces_of_any_length_decode_alike(kind):
    layer, x = blocked(**KINDS[kind], chunk=4), normal(3, 2, 17, EMBED)
    # The first row has two tokens of padding on its left.
    shift = np.array([2, 0])
    positions = jnp.asarray(np.maximum(np.arange(17) - shift[:, None], -1).astype(np.int32))
    expected = [literal(layer, wide(x[row, start:])) for row, start in enumerate(shift)]
    y, cache = decode(layer, x, (9, 16, 17), layer.init_cache((2,), 24), positions)
    for row, start in enumerate(shift):
        assert np.allclose(y[row, start:], expected[row], atol=2e-5)
    # Without the small keys of earlier tokens, other blocks are selected, unless these are the last ones.
    empty = eqx.tree_at(lambda cache: cache.index.vectors, cache, jnp.zeros_like(cache.index.vectors))
    last, _ = decode(layer, x[:, -1:], (1,), empty, positions[:, -1:])
    assert np.allclose(last[1, 0], expected[1][-1], atol=1e-3) == (layer.indexer.local == layer.indexer.top_k)
    assert nn.can_roll_back(cache)


@pytest.mark.grid
def test_tokens_that_are_replaced_leave_nothing_behind():
    layer, x, other = blocked(), normal(4, 1, 17, EMBED), normal(5, 1, 17, EMBED)
    check_replaced_tokens(layer, x, other, 24)


@pytest.mark.grid
def test_caches_of_8_bits_and_rows_that_end_at_the_capacity():
    layer, x = blocked(**KINDS["the last blocks alone"]), normal(6, 1, 17, EMBED)
    expected = np.asarray(eqx.filter_jit(lambda x: layer(x)[0])(x))
    narrow: Any = quantize_caches(layer.init_cache((1,), 18), "int8")
    assert [narrow.attention.keys.dtype, narrow.index.vectors.dtype] == [jnp.int8, jnp.int8]
    y, _ = decode(layer, x, range(1, 18), narrow)
    assert 1e-6 < abs(y - expected).max() < 0.1
    y, _ = decode(layer, x, (8, 9, 10, 11), layer.init_cache((1,), 10))
    assert np.isfinite(y[:, :10]).all() and np.isnan(y[:, 10]).all()
    with pytest.raises(ValueError, match=r"reach position 10, but kv_seq of the cache is 10"):
        layer(x[:, :11], nn.positions_like((1, 11)), layer.init_cache((1,), 10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_indexer(block=0), r"BlockIndexer\(block=0"),
        (lambda: make_indexer(top_k=1, local=2), r"BlockIndexer\(.*top_k=1, local=2"),
        (lambda: make_indexer(rotary=nn.Rotary(8, 50.0)), r"BlockIndexer\(dim=6, rotary=.*at most dim channels"),
        (
            lambda: make_indexer(rotary=nn.Rotary(4, 50.0, scaling=nn.DynamicScaling(2.0, 8))),
            "does not depend on the length",
        ),
        (lambda: blocked({"kv_heads": 4}), r"BlockIndexedAttention\(kv_heads=4.* for 2 key heads"),
        (lambda: blocked({"scores": nn.Scores(bias=True)}), "no sinks and no bias"),
        (lambda: blocked({"mask": nn.sliding_window(3)}), "mask"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
