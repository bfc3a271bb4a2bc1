"""Experts, routers and mixtures for the tests of mixtures of experts, and their expected outputs in float64."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from nn_reference import random_module, wide

from eqformer import nn


KEY = jax.random.key(0)
EMBED, HIDDEN, EXPERTS, TOP_K = 4, 6, 4, 2
KINDS = {
    "plain": lambda key: nn.MLP(embed=EMBED, mlp=HIDDEN, bias=True, key=key),
    "gated": lambda key: nn.GatedMLP(embed=EMBED, mlp=HIDDEN, bias=True, limit=0.7, key=key),
}


def experts_of(kind="gated", number=EXPERTS):
    """Return experts with random weights and biases."""
    return random_module(nn.Experts, KINDS[kind], number, key=KEY)


def router_of(**options):
    """Return a router with random weights."""
    return random_module(nn.TopKRouter, **dict(embed=EMBED, experts=EXPERTS, top_k=TOP_K, key=KEY) | options)


def one_expert(experts, place, x):
    """Return the expected outputs of expert number `place` for the rows of `x`."""
    mlps = experts.mlps
    silu = lambda x: x / (1 + np.exp(-x))
    gelu = lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def linear(part, x):
        return x @ wide(part.weight)[place].T + wide(part.bias)[place]

    if isinstance(mlps, nn.MLP):
        return linear(mlps.down, gelu(linear(mlps.up, x)))
    limit = np.inf if mlps.limit is None else mlps.limit
    gate, up = np.minimum(linear(mlps.gate, x), limit), np.clip(linear(mlps.up, x), -limit, limit)
    return linear(mlps.down, silu(gate) * up)


def gates_of(chosen, weights, number):
    """Return each token's weight for each expert: 0 for an expert that the token has not chosen."""
    gates = np.zeros((*chosen.shape[:-1], number))
    for place in np.ndindex(chosen.shape):
        if chosen[place] >= 0:
            gates[(*place[:-1], chosen[place])] += weights[place]
    return gates


def mixture(experts, x, chosen, weights):
    """Return the expected output of a mixture, `sum_e G_te E_e(x_t)` over all experts `e`, for each token `t`."""
    gates = gates_of(np.asarray(chosen), wide(weights), len(experts))
    return sum(gates[..., [place]] * one_expert(experts, place, wide(x)) for place in range(len(experts)))


def kept_of(chosen, number, count, order="choices"):
    """Return the choices of one group that find one of `count` slots of their expert, and -1 for the others.

    Slots are given out as in GShard's algorithm 1: all first choices come before all second choices. Every other
    `order` gives wrong results, for tests that must tell them apart.
    """
    tokens, top_k = chosen.shape
    places = [(token, choice) for choice in range(top_k) for token in range(tokens)]
    if order == "tokens":
        places = list(np.ndindex(tokens, top_k))
    if order == "backwards":
        places = [(tokens - 1 - token, choice) for token, choice in places]
    kept, taken = np.full(chosen.shape, -1), [0] * number
    for place in places:
        if chosen[place] >= 0 and taken[chosen[place]] < count:
            kept[place] = chosen[place]
            taken[chosen[place]] += 1
    return kept


def kept_by(dispatch, chosen, number=EXPERTS, order="choices"):
    """Return the choices `batch seq top_k` that a dispatch keeps, and -1 for the others."""
    chosen = np.asarray(chosen)
    if isinstance(dispatch, nn.Dropless):
        return chosen
    groups = chosen if dispatch.per == "sequence" else chosen.reshape(1, -1, chosen.shape[-1])
    share = Fraction(str(dispatch.factor)) * chosen.shape[-1] / number
    counts = [max(1, math.ceil(share * int((group >= 0).any(axis=-1).sum()))) for group in groups]  # no padding
    kept = [kept_of(group, number, count, order) for group, count in zip(groups, counts)]
    return np.array(kept).reshape(chosen.shape)


def routing_of(chosen, weights):
    """Return a routing with these choices and weights; its other arrays are 0."""
    zeros = jnp.zeros((*chosen.shape[:-1], EXPERTS))
    return nn.Routing(jnp.asarray(chosen, jnp.int32), jnp.asarray(weights), zeros, zeros)
