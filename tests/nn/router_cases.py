"""Routers with noise, their tokens, and a token's scores in float64, for the tests of routers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from nn_reference import normal, random_module, wide

from eqformer import nn


KEY = jax.random.key(0)
EMBED, BATCH, SEQ = 5, 4, 16
softplus = lambda x: np.log1p(np.exp(x))
SCORES = {
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrt_softplus": lambda x: np.sqrt(softplus(x)),
}
NOISY = {
    "jitter": random_module(nn.TopKRouter, embed=EMBED, experts=6, top_k=2, jitter=0.3, key=KEY),
    "noisy": random_module(nn.NoisyTopKRouter, embed=EMBED, experts=6, top_k=2, key=KEY),
    "second": random_module(nn.RandomSecondRouter, embed=EMBED, experts=6, key=KEY),
}
call = eqx.filter_jit(lambda router, x, tokens: router(x, tokens))
run: Any = lambda router, x, tokens: jax.tree.map(np.asarray, call(router, x, tokens))


X = normal(1, BATCH, SEQ, EMBED)


def each(draw, keys):
    """Return `draw(key)` for every key of `keys`, which has two axes."""
    return jax.jit(jax.vmap(jax.vmap(draw)))(keys)


def normals(keys):
    """Return six normal numbers drawn from each key."""
    return wide(each(lambda key: jax.random.normal(key, (6,)), keys))


def tokens_of(batch=BATCH, seq=SEQ, keys=False, padding=0, key=KEY):
    """Return the tokens of rows with positions from 0; the last row ends in `padding` tokens of padding."""
    positions = np.broadcast_to(np.arange(seq, dtype=np.int32), (batch, seq)).copy()
    token_keys = jax.jit(nn.token_keys)(key, np.arange(batch), positions) if keys else None
    positions[-1, seq - padding :] = -1
    return nn.Tokens(jnp.asarray(positions), keys=token_keys)


def best(values, count, among=None):
    """Return the places of the highest values, the highest value first; of equal values the lower place comes first."""
    return sorted(range(len(values)) if among is None else among, key=lambda place: -values[place])[:count]
