"""Cached calls against the uncached pass, row by row and position by position, for every kind of attention."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, random_module, replaced

from eqformer import kernels, nn
from eqformer.kernels import _decode_attention_tpu as tpu, _op


KEY = jax.random.key(0)
EMBED, TOTAL = 6, 9
# For each call: the length of its rows, and the number of tokens in each of the two rows; the rest is padding.
CALLS = [(4, (4, 2)), (1, (1, 1)), (4, (3, 0)), (1, (0, 1)), (1, (1, 1))]
DYNAMIC = nn.DynamicScaling(4.0, 3)
LONG = nn.LongRopeScaling((1.0, 1.2), (2.0, 5.0), 5, 4.0)


def attention(**options):
    sizes = dict(embed=EMBED, heads=4, kv_heads=2, head_dim=4)
    return random_module(nn.Attention, **sizes, **{"rotary": nn.Rotary(4, 100.0), **options}, key=KEY)


def latent(**options):
    options = {"rotary": nn.Rotary(4, 100.0), "latent_norm": nn.RMSNorm("latent", latent=3), **options}
    return random_module(nn.LatentAttention, embed=EMBED, heads=2, head_dim=4, latent=3, v_dim=5, **options, key=KEY)


def compressed(block_size, top_k=0):
    """Return attention to compressed blocks of `block_size` tokens; with `top_k`, blocks overlap and are indexed."""
    rotary = nn.Rotary(4, 100.0, interleaved=True)

    def make():
        compressor = nn.KeyCompressor(
            embed=EMBED, dim=6, block_size=block_size, series=2 if top_k else 1, rotary=rotary, key=KEY
        )
        sizes: Any = dict(embed=EMBED, groups=2, group_heads=2, head_dim=6, q_latent=5, group_rank=3, window=3)
        indexer = (
            nn.EntryIndexer(compressor, embed=EMBED, q_latent=5, heads=16, top_k=top_k, key=KEY) if top_k else None
        )
        options: Any = {"compressor": compressor, "indexer": indexer, "rotary": rotary, "key": KEY}
        return nn.CompressedAttention(**sizes, **options)

    return random_module(make)


def blocked():
    """Return attention in which a query sees two blocks of two tokens for each key head: the blocks that score best."""
    norms = {f"{name}_norm": nn.RMSNorm("index_dim", index_dim=6) for name in ("query", "key")}
    sizes: Any = {"embed": EMBED, "kv_heads": 2, "rotary": nn.Rotary(4, 100.0), "key": KEY}

    def make():
        indexer = nn.BlockIndexer(dim=6, block=2, top_k=2, **norms, **sizes)
        return nn.BlockIndexedAttention(indexer, heads=4, head_dim=4, **sizes)

    return random_module(make)


LATE_SHARPER = nn.Scores(temperature=nn.LogTemperature(3, 0.5))


def head_norm():
    return nn.RMSNorm("head_dim", head_dim=4)


class AddedPositions(nn.PositionEncoding):
    """Sines of positions, added to queries and keys; stretched to the length of the document if `stretched`."""

    stretched: bool = eqx.field(static=True, default=False)

    @property
    def depends_on_length(self):
        return self.stretched

    def encode(self, query, key, positions, kv_positions, lengths):
        stretch = 0.3
        if self.stretched and lengths is not None:
            stretch = 1.0 / jnp.maximum(lengths, 1).astype(jnp.float32)
        sines = lambda x: jnp.sin(x.astype(jnp.float32) * stretch)[..., None, None]
        return query + sines(positions), key + sines(kv_positions)


KINDS = {
    "an encoding of one's own": lambda: attention(rotary=AddedPositions()),
    "an encoding of one's own, by lengths": lambda: attention(rotary=AddedPositions(stretched=True)),
    "grouped": lambda: attention(query_norm=nn.RMSNorm("head_dim", head_dim=4), bias=True, gate=True),
    "sinks": lambda: attention(
        scores=nn.Scores(softcap=3.0, sinks=jnp.zeros(4)), core=kernels.ReferenceAttention(), mask=nn.sliding_window(4)
    ),
    "alibi": lambda: attention(rotary=None, scores=nn.Scores(alibi=nn.ALiBi(heads=4))),
    "alibi in a window": lambda: attention(
        rotary=None, scores=nn.Scores(softcap=3.0, alibi=nn.ALiBi(heads=4)), mask=nn.sliding_window(3)
    ),
    "window": lambda: attention(mask=nn.sliding_window(3)),
    "window of one": lambda: attention(mask=nn.sliding_window(1)),
    "window beyond capacity": lambda: attention(mask=nn.sliding_window(100)),
    "temperature": lambda: attention(rotary=None, scores=LATE_SHARPER),
    "chunks": lambda: attention(mask=nn.chunked(4)),
    "dynamic rotary": lambda: attention(
        rotary=nn.RotaryThenNorm(head_norm(), head_norm(), nn.Rotary(4, 100.0, scaling=DYNAMIC))
    ),
    "longrope in a window": lambda: attention(rotary=nn.Rotary(4, 100.0, scaling=LONG), mask=nn.sliding_window(3)),
    "delta net": lambda: random_module(
        nn.GatedDeltaNet, embed=EMBED, heads=4, kv_heads=2, head_dim=3, v_dim=5, chunk=3, key=KEY
    ),
    "channel delta net": lambda: random_module(
        nn.ChannelDeltaNet, embed=EMBED, heads=3, head_dim=4, v_dim=5, rank=2, chunk=8, key=KEY
    ),
    "mamba2": lambda: random_module(
        nn.Mamba2Mixer, embed=EMBED, heads=4, kv_heads=2, head_dim=3, v_dim=5, chunk=3, key=KEY
    ),
    "blocked": blocked,
    "compressed": lambda: compressed(3),
    "compressed and selected": lambda: compressed(2, top_k=2),
    "short convolution": lambda: random_module(nn.GatedShortConv, embed=EMBED, taps=4, bias=True, key=KEY),
    "latent": lambda: latent(q_latent=5, query_latent_norm=nn.RMSNorm("q_latent", q_latent=5)),
    "latent with biases": lambda: latent(bias=True),
    "latent in a window": lambda: latent(mask=nn.sliding_window(3), scores=LATE_SHARPER),
    "latent without rotary": lambda: latent(rotary=None),
    "latent with dynamic rotary": lambda: latent(rotary=nn.Rotary(4, 100.0, scaling=DYNAMIC)),
}


def agree(module, spoil=lambda cache: cache, capacity=10):
    """Return whether each token of each call equals the uncached pass over its row, padded after the last token."""
    x = normal(1, 2, TOTAL, EMBED)
    step = eqx.filter_jit(lambda x, places, cache: module(x, nn.Tokens(places), cache))
    whole = eqx.filter_jit(lambda places: module(x, nn.Tokens(places))[0])
    cache, done, equal = module.init_cache((2,), capacity), np.zeros(2, int), True
    for width, counts in CALLS:
        given, places = np.zeros((2, width, EMBED), np.float32), np.full((2, width), -1)
        for row, count in enumerate(counts):
            places[row, :count] = done[row] + np.arange(count)
            given[row, :count] = x[row, done[row] : done[row] + count]
        y, cache = step(jnp.asarray(given), jnp.asarray(places), spoil(cache))
        done = done + np.array(counts)
        expected = whole(jnp.asarray(np.where(np.arange(TOTAL) < done[:, None], np.arange(TOTAL), -1)))
        for row, count in enumerate(counts):
            if count:
                equal = equal and close(y[row, :count], expected[row, done[row] - count : done[row]])
    assert done.tolist() == [9, 5]
    return equal


# The rules of the grid's cases are rules of these cases, of the layer's own tests or of models in `tests/generation`.
BY_DEFAULT = {"alibi", "an encoding of one's own, by lengths", "delta net"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in BY_DEFAULT else pytest.mark.grid) for kind in KINDS]
)
def test_cached_calls_equal_the_uncached_pass(kind):
    assert agree(KINDS[kind]())


@pytest.mark.grid
def test_a_cache_that_forgets_or_rolls_too_soon_is_noticed():
    module = KINDS["window"]()
    assert not agree(module, spoil=lambda cache: replaced(cache, positions=jnp.full_like(cache.positions, -1)))
    assert not agree(replaced(module, mask=nn.sliding_window(3)), spoil=lambda c: replaced(c, keys=c.keys * 0.9))

    class Short(eqx.Module):
        inner: nn.Attention

        def __call__(self, x, tokens, cache=None):
            return self.inner(x, tokens, cache)

        def init_cache(self, batch, capacity):
            return replaced(self.inner, mask=nn.sliding_window(2)).init_cache(batch, capacity)

    assert not agree(Short(module))


@pytest.mark.parametrize("cache_dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.grid)])
def test_attention_reads_its_cache_where_it_lies_unless_its_core_is_named(cache_dtype, monkeypatch):
    """On TPUs a kernel reads the cache; if the reference core is named, plain JAX reads all but 8-bit caches."""
    make = lambda core: nn.Attention(embed=32, heads=16, kv_heads=8, head_dim=16, core=core, key=jax.random.key(0))
    narrow = lambda module: jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, module)
    layer, named = (narrow(make(core)) for core in (None, kernels.ReferenceAttention()))
    x = jax.random.normal(jax.random.key(1), (2, 40, 32), jnp.bfloat16)
    empty = nn.KVCache.empty((2,), 256, (8, 16), (8, 16), "bfloat16")
    empty = empty.with_scales(cache_dtype) if cache_dtype == "int8" else empty
    _, cache = eqx.filter_jit(layer)(x, nn.positions_like(x.shape[:2]), empty)
    step = lambda layer, place=40: layer(x[:, :1], nn.Tokens(jnp.full((2, 1), place, jnp.int32)), cache)[0]
    run = lambda layer, place=40: np.asarray(jax.jit(lambda: step(layer, place))(), np.float32)
    right = run(named)
    monkeypatch.setattr(tpu, "_LEAST_BYTES", 0)
    monkeypatch.setattr(_op, "compilers", lambda: ("tpu",))
    monkeypatch.setattr(kernels.TileWrite, "supports", lambda *_: "only attention runs by a kernel here")
    program = lambda layer: jax.jit(lambda: step(layer)).trace().lower(lowering_platforms=("tpu",)).as_text()
    assert "cached_attention" in program(layer)
    assert ("cached_attention" in program(named)) == (cache_dtype == "int8")  # the kernel always reads 8-bit caches
    interpreted = lambda rules, *given: attend(rules._replace(interpret=True), *given)
    attend = tpu._attend
    monkeypatch.setattr(tpu, "_attend", interpreted)
    # Kernels for TPUs run, interpreted on this CPU; whatever has none runs as on CPUs.
    choose = lambda *arguments, **branches: next(branches[name] for name in ("tpu", "cpu") if name in branches)(
        *arguments
    )
    monkeypatch.setattr(jax.lax, "platform_dependent", choose)
    assert np.abs(run(layer) - right).max() < 0.01 * np.abs(right).max()
    assert np.abs(run(layer, 20) - right).max() > 0.02 * np.abs(right).max()  # fewer keys are seen
