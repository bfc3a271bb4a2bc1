"""Checks of attention layers that select keys: their gradients, and decoding rows piece by piece."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import nn
from eqformer.nn._cache import with_rollback


# A packed row whose first document began before it, and which ends with padding.
LENGTHS, START = (7, 1, 9, 2), 5
POSITIONS = np.concatenate([START + np.arange(7), *(np.arange(n) for n in LENGTHS[1:]), [-1, -1]]).astype(np.int32)
SEGMENTS = np.repeat([0, 1, 2, 3, -1], [*LENGTHS, 2]).astype(np.int32)


def packed() -> nn.Tokens:
    """Return the tokens of one packed row: four documents and padding."""
    return nn.Tokens(jnp.asarray(POSITIONS)[None], jnp.asarray(SEGMENTS)[None])


def by_document(
    literal: Callable[[Any, np.ndarray, int], np.ndarray], layer: nn.Mixer, x: np.ndarray, start: int = START
) -> np.ndarray:
    """Return the outputs of a row's documents, each computed alone by `literal(layer, document, first position)`."""
    cuts = np.cumsum([0, *LENGTHS])
    return np.concatenate([literal(layer, x[a:b], start if a == 0 else 0) for a, b in zip(cuts, cuts[1:])])


def to_float64(tree: Any) -> Any:
    """Return the tree with its floating-point arrays in float64."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if eqx.is_inexact_array(x) else x, tree)


def check_gradients(layer: Any, x: jax.Array, tokens: nn.Tokens, real: jax.Array, rng: np.random.Generator) -> None:
    """Assert that the gradients of the `real` tokens' outputs equal finite differences and are 0 for the indexer."""
    loss = lambda parts: jnp.sum(jnp.where(real, jnp.sin(parts[0](parts[1], tokens)[0]), 0))
    gradient = eqx.filter_jit(eqx.filter_grad(loss))((layer, x))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient[0].indexer))
    leaves, structure = jax.tree.flatten((layer, x))
    # The indexer's choice has no derivative, so the finite difference leaves its weights unchanged.
    frozen = {id(leaf) for leaf in jax.tree.leaves(layer.indexer)}
    step = [np.zeros(v.shape) if id(v) in frozen else rng.normal(size=v.shape) for v in leaves]
    run = jax.jit(lambda at: loss(structure.unflatten([v + at * d for v, d in zip(leaves, step)])))
    slope = (float(run(1e-6)) - float(run(-1e-6))) / 2e-6
    product = sum(float(np.sum(g * d)) for g, d in zip(jax.tree.leaves(gradient), step, strict=True))
    assert product == pytest.approx(slope, rel=1e-6) and abs(slope) > 0.1


call_layer: Any = eqx.filter_jit(lambda layer, x, positions, cache: layer(x, nn.Tokens(positions), cache))


def decode(layer: Any, x: Any, cuts: Any, cache: Any, positions: Any = None) -> tuple[np.ndarray, Any]:
    """Call the layer on the rows' pieces, which end at `cuts`; return their outputs joined, and the cache."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]) if positions is None else positions
    outputs, start = [], 0
    for stop in cuts:
        y, cache = call_layer(layer, x[:, start:stop], positions[:, start:stop], cache)
        outputs, start = [*outputs, y], stop
    return np.concatenate(outputs, axis=1), cache


def check_replaced_tokens(layer: Any, x: Any, other: Any, capacity: int) -> None:
    """Assert that wrong tokens, once replaced, leave no trace in a cache; the rows have 17 tokens."""
    expected = eqx.filter_jit(lambda x: layer(x)[0])(x)
    _, cache = decode(layer, x, (9,), with_rollback(layer.init_cache((1,), capacity), 4))
    positions = jnp.arange(17, dtype=jnp.int32)[None]
    for start in (9, 11, 13):  # Read four wrong tokens, then two right ones in the place of the first two.
        _, cache = call_layer(layer, other[:, start : start + 4], positions[:, start : start + 4], cache)
        right, cache = call_layer(layer, x[:, start : start + 2], positions[:, start : start + 2], cache)
        assert np.allclose(right, expected[:, start : start + 2], atol=2e-5)
