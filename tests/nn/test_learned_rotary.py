"""Rotary positions with learned frequencies, against complex numbers in float64; all layers share one gradient."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, random_module, randomised, rotate, wide
from selection_cases import to_float64

from eqformer import nn


KEY = jax.random.key(0)
PLACES = np.array([[0, 1, 2, 7, 9], [3, 4, 5, 6, -1]])
ALPHA = np.array([0.3, -0.7, 0.2])


def tokens_with(alpha):
    return nn.Tokens(jnp.asarray(PLACES)).replace(rotary_alpha=jnp.asarray(alpha, jnp.float32))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", [None, nn.YarnScaling(4.0, 16)])
def test_frequencies_are_multiplied_by_the_factors(interleaved, scaling):
    x = normal(1, 2, 5, 3, 8)
    rotary = nn.LearnedRotary(6, 100.0, interleaved, scaling)
    frequencies, magnitude = 100.0 ** (-np.arange(0, 6, 2) / 6), 1.0
    if scaling is not None:
        frequencies, magnitude = scaling.frequencies(6, 100.0, jnp.zeros((1, 1), jnp.int32))
    want = lambda factors: rotate(wide(x), PLACES, frequencies * factors, interleaved, magnitude)
    found = rotary.for_tokens(tokens_with(ALPHA))(x, jnp.asarray(PLACES))
    assert close(found, want(np.exp(ALPHA))) and not close(found, want(1 + ALPHA), 1e-2)
    plain = nn.Rotary(6, 100.0, interleaved, scaling)(x, jnp.asarray(PLACES))
    assert np.array_equal(rotary.for_tokens(tokens_with(0 * ALPHA))(x, jnp.asarray(PLACES)), plain)
    assert not jax.tree.leaves(rotary)  # the factors are no parameters of a layer


def model_of(kind):
    """A model of three layers, the last without positions."""
    sizes: dict[str, Any] = dict(embed=6, heads=2, head_dim=6, rotary=nn.LearnedRotary(6, 100.0))
    if kind == "latent":
        indexer = lambda key: nn.Indexer(
            embed=6, q_latent=None, heads=9, dim=8, top_k=4, rotary=nn.LearnedRotary(6, 100.0), key=key
        )
        mixer = lambda key: nn.LatentAttention(**sizes, latent=3, indexer=indexer(key), key=key)
    else:
        mixer = lambda key: nn.Attention(**sizes, key=key)

    def build():
        plain = nn.Attention(**{**sizes, "rotary": None}, key=KEY)
        return nn.Transformer(
            nn.Embedding(vocab=11, embed=6, key=KEY),
            (
                nn.Stack(lambda key: nn.Residual(mixer(key)), 2, key=KEY),
                nn.Stack(lambda _: nn.Residual(plain), 1, key=KEY),
            ),
            nn.RMSNorm("embed", embed=6),
            frequencies=nn.LearnedFrequencies(6),
        )

    return randomised(eqx.filter_eval_shape(build), deviation=0.8)


IDS = np.random.default_rng(0).integers(0, 11, (2, 7))


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["plain", "latent"])
def test_all_layers_add_to_the_gradient_and_decode_alike(kind):
    model = model_of(kind)
    with jax.enable_x64(True):
        model64, ids = dataclasses.replace(to_float64(model), compute_dtype="float64"), jnp.asarray(IDS, jnp.int32)
        at = lambda step: eqx.tree_at(
            lambda m: m.frequencies.alpha, model64, model64.frequencies.alpha + step * jnp.asarray(ALPHA)
        )
        loss = eqx.filter_jit(lambda model: jnp.sum(jnp.sin(model(ids)[0])))
        gradient = eqx.filter_jit(eqx.filter_grad(loss))(model64).frequencies.alpha
        slope = float(loss(at(1e-6)) - loss(at(-1e-6))) / 2e-6
        assert abs(slope) > 0.1 and abs(float(gradient @ ALPHA) - slope) < 1e-6 * abs(slope)
        assert abs(float(gradient[::-1] @ ALPHA) - slope) > 1e-3 * abs(slope)
    want = eqx.filter_jit(lambda model, ids: model(ids)[0])(model, jnp.asarray(IDS, jnp.int32))
    step = eqx.filter_jit(lambda model, ids, tokens, cache: model(ids, tokens, cache))
    cache, found, start = model.init_cache(2, 7), [], 0
    for stop in (4, 5, 6, 7):
        places = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
        logits, cache = step(model, jnp.asarray(IDS[:, start:stop], jnp.int32), nn.Tokens(places), cache)
        found, start = [*found, logits], stop
    assert close(np.concatenate(found, axis=1), want)
    still = eqx.tree_at(lambda m: m.frequencies.alpha, model, 0 * model.frequencies.alpha)
    assert not close(step(still, jnp.asarray(IDS, jnp.int32), nn.positions_like((2, 7)), None)[0], want, 1e-3)


def test_a_layer_without_a_models_factors_is_refused():
    layer = random_module(nn.Attention, embed=6, heads=2, head_dim=6, rotary=nn.LearnedRotary(6, 100.0), key=KEY)
    with pytest.raises(
        ValueError, match=r"LearnedRotary\(dim=6\): Tokens.rotary_alpha must hold .* 3 frequencies.* is None"
    ):
        layer(normal(0, 2, 5, 6))
    with pytest.raises(ValueError, match=r"but it is 2 numbers; build the model with nn.Transformer\(frequencies="):
        layer(normal(0, 2, 5, 6), tokens_with(ALPHA[:2]))
