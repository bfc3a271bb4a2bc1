"""Shared latents and selected keys, factors per head, and indexers that read the layer's input, against loops."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import attend, close, linear, normal, randomised, rms, rotate, wide
from selection_cases import to_float64

from eqformer import nn


KEY, EMBED, SEQ, TOP_K = jax.random.key(0), 6, 7, 3
PLACES = np.tile(np.arange(SEQ, dtype=np.int32), (2, 1))


def make(has_rotary, has_indexer):
    """A layer with factors of heads and, without rotary positions, with more channels in their place."""
    rotary = nn.Rotary(2, 100.0, interleaved=True) if has_rotary else None
    indexer = None
    if has_indexer:
        indexer = nn.Indexer(
            embed=EMBED,
            q_latent=None,
            heads=9,
            dim=8,
            top_k=TOP_K,
            rotary=rotary,
            query_norm=nn.LayerNorm("embed", embed=EMBED),
            temperature=nn.HeadLogTemperature(9, "index_heads"),
            key=KEY,
        )
    return nn.LatentAttention(
        embed=EMBED,
        heads=2,
        head_dim=4 if has_rotary else 6,
        latent=3,
        v_dim=5,
        latent_norm=nn.RMSNorm("latent", latent=3),
        rotary=rotary,
        indexer=indexer,
        scores=nn.Scores(temperature=nn.HeadLogTemperature(2)),
        key=KEY,
    )


def layers():
    """Four layers: both kinds share latents, and the last two read them; the third reads selected keys too."""

    def build():
        return (
            make(True, True).sharing_latents(),
            make(False, True).sharing_latents(),
            make(True, False).reading_latents(),
            make(False, True).reading_latents(),
        )

    return tuple(randomised(layer, seed) for seed, layer in enumerate(eqx.filter_eval_shape(build)))


def factors(temperature, places):
    return wide(temperature.scale) * np.log(places + 1.0)[..., None] + wide(temperature.bias)


def layer_norm(x, norm):
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + norm.eps)
    return y * wide(norm.weight) + wide(norm.bias)


def best_keys(indexer, x):
    """The keys that each query selects: queries come from a norm of the input, and grow by heads."""
    queries, weights = linear(layer_norm(x, indexer.query_norm), indexer.query), linear(x, indexer.weight)
    keys = layer_norm(linear(x, indexer.key), indexer.key_norm)[:, :, None]
    if indexer.rotary is not None:
        queries, keys = (rotate(y, PLACES, np.ones(1), True) for y in (queries, keys))
    queries = queries * factors(indexer.temperature, PLACES)[..., None]
    selected = np.zeros((2, SEQ, SEQ), bool)
    for row, at in np.ndindex(2, SEQ):
        scores = [weights[row, at] @ np.maximum(queries[row, at] @ keys[row, s, 0], 0) for s in range(at + 1)]
        selected[row, at, np.argsort(scores)[::-1][:TOP_K]] = True
    return selected


def latents_of(layer, x):
    """A layer's latents and its rotated key."""
    latents = rms(linear(x, layer.latent_down), layer.latent_norm)
    if layer.rotary is None:
        return latents, np.zeros((2, SEQ, 1, 0))
    return latents, rotate(linear(x, layer.key_rope)[:, :, None], PLACES, np.ones(1), True)


def attended(layer, x, latents, selected):
    """The layer's output, by these latents and selected keys."""
    latents, rope = latents
    query, key, value = linear(x, layer.query), linear(latents, layer.key_up), linear(latents, layer.value_up)
    if layer.rotary is not None:
        query = np.concatenate([query, rotate(linear(x, layer.query_rope), PLACES, np.ones(1), True)], axis=-1)
        key = np.concatenate([key, np.repeat(rope, 2, axis=2)], axis=-1)
    query = query * factors(layer.scores.temperature, PLACES)[..., None]
    return linear(attend(query, key, value, selected, query.shape[-1] ** -0.5), layer.output)


def literal(layers, x, wrong=False):
    """The stream after the four layers, each added to it; `wrong` exchanges the latents that the last two read."""
    first, second, third, fourth = layers
    rotary, chosen = latents_of(first, x), best_keys(first.indexer, x)
    x = x + attended(first, x, rotary, chosen)
    plain, chosen = latents_of(second, x), best_keys(second.indexer, x)
    x = x + attended(second, x, plain, chosen)
    if wrong:
        rotary, plain = (plain[0], rotary[1]), (rotary[0], plain[1])
    x = x + attended(third, x, rotary, chosen)
    return x + attended(fourth, x, plain, best_keys(fourth.indexer, x))


def block_of(layers):
    names: Any = ({"shares": "keys"}, *[{"reads": "keys", "shares": "keys"}] * 2, {"reads": "keys"})
    return nn.Block(*(nn.Residual(layer, **name) for layer, name in zip(layers, names, strict=True)))


run = eqx.filter_jit(lambda block, x, tokens=None, cache=None: block(x, tokens, cache))


@pytest.mark.grid
def test_layers_read_latents_of_their_kind_and_the_last_selection():
    block, x = block_of(layers()), normal(1, 2, SEQ, EMBED)
    found = run(block, x)[0]
    assert close(found, literal(layers(), wide(x))) and not close(found, literal(layers(), wide(x), wrong=True), 1e-2)
    with jax.enable_x64(True):
        block64, x64 = to_float64(block), jnp.asarray(wide(x))
        assert close(run(block64, x64)[0], literal(layers(), wide(x)), 1e-13)
        loss = lambda block, x: jnp.sum(jnp.sin(block(x)[0]))
        gradient = eqx.filter_jit(eqx.filter_grad(loss))(block64, x64)
        for place in (0, 1):
            path = lambda b, place=place: b.sublayers[place].layer.latent_down.weight
            bump = np.random.default_rng(place).normal(size=path(block64).shape)
            at = lambda step, path=path, bump=bump: run(eqx.tree_at(path, block64, path(block64) + step * bump), x64)[0]
            slope = float(jnp.sum(jnp.sin(at(1e-6))) - jnp.sum(jnp.sin(at(-1e-6)))) / 2e-6
            assert abs(float(jnp.sum(path(gradient) * bump)) - slope) < 1e-6 * abs(slope) > 1e-9
        scales = [layer.layer.scores.temperature.scale for layer in gradient.sublayers]
        assert all(np.all(scale) for scale in scales)  # each head learns its growth, the indexer nothing
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient.sublayers[0].layer.indexer))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_layers_that_read_latents_decode_alike_and_cache_their_indexers_keys_alone(dtype):
    block, x = block_of(layers()), normal(1, 2, SEQ, EMBED)
    stack = eqx.filter_jit(lambda block: nn.Stack(lambda _: block, 2, key=KEY))(block)
    want, cache = run(stack, x)[0], stack.init_cache((2,), SEQ + 2)
    widths = [(its.latents.shape[-1], its.rotary_keys.shape[-1]) for its in cache]
    assert widths == [(3, 2 + 8), (3, 8), (0, 0), (0, 8)]
    if dtype == "int8":
        cache = tuple(part.with_scales("int8") for part in cache)
    found, start = [], 0
    for stop in (4, 5, 6, 7):
        y, cache, _ = run(stack, x[:, start:stop], nn.Tokens(jnp.asarray(PLACES[:, start:stop])), cache)
        found, start = [*found, y], stop
    if dtype == "int8":  # rounded keys may be other choices, so that only the first tokens, which see all keys, compare
        assert close(np.concatenate(found, axis=1)[:, :TOP_K], want[:, :TOP_K], 0.1)
    else:
        assert close(np.concatenate(found, axis=1), want)
    other = run(stack, x[:, ::-1])[0][:, ::-1]
    assert not close(other, want, 1e-2)


def test_what_does_not_fit_is_refused():
    first, second, third, fourth = layers()
    x = normal(1, 2, SEQ, EMBED)
    block = nn.Block(nn.Residual(first, shares="keys"), nn.Residual(fourth, reads="keys"))
    with pytest.raises(ValueError, match="this layer without rotary positions reads latents of an earlier layer, but"):
        eqx.filter_eval_shape(block, x)
    with pytest.raises(ValueError, match="this layer with rotary positions reads latents of an earlier layer, but no"):
        third(x)
    with pytest.raises(ValueError, match=r"LatentAttention\(x\): it was given ArrayImpl of an earlier layer"):
        second(x, None, nn.SharedValue(jnp.zeros(3)))
    with pytest.raises(ValueError, match=r"Residual\(shares='keys', reads='source'\): a layer that reads another"):
        nn.Residual(third, shares="keys", reads="source")
