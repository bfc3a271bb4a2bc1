"""Routers with noise against their papers' formulas, token by token, with each token's own random numbers."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, random_module, wide
from router_cases import BATCH, best, each, EMBED, KEY, NOISY, normals, run, SCORES, SEQ, softplus, tokens_of, X

from eqformer import nn


def test_jitter_multiplies_the_input():
    router, tokens = NOISY["jitter"], tokens_of(keys=True)
    routing, weight = run(router, X, tokens), wide(router.linear.weight)
    all_factors = wide(each(lambda key: jax.random.uniform(key, (EMBED,), jnp.float32, 0.7, 1.3), tokens.keys))
    rows = wide(X)
    for place in np.ndindex(BATCH, SEQ):
        factors = all_factors[place]
        assert factors.min() >= 0.7 and factors.max() <= 1.3 and len(set(factors)) == EMBED
        assert close(routing.logits[place], weight @ (rows[place] * factors))
        assert not close(routing.logits[place], weight @ rows[place], 1e-3)
        experts = best(routing.scores[place], 2)
        assert list(routing.experts[place]) == experts
        assert np.array_equal(routing.weights[place], routing.scores[place][experts])


def noisy_reference(router, x, noise, without=""):
    """Shazeer's equations 3-5 and 8-9 for one token: experts, weights, and the chance of each expert."""
    clean, deviation = wide(router.linear.weight) @ x, softplus(wide(router.noise.weight) @ x)
    h, k = clean + noise * deviation, router.top_k
    experts = best(h, k)
    load = []
    for i in range(len(h)):
        others = np.sort(np.delete(h, i))[::-1] if without != "excluding" else np.sort(h)[::-1]
        z = (clean[i] - others[k - 1]) / deviation[i]
        load.append((1 + math.erf(z / math.sqrt(2))) / 2)
    return experts, SCORES["softmax"](h[experts]), load


@pytest.mark.parametrize("keys", [False, True])
def test_noisy_top_k_is_its_paper(keys):
    router, tokens = NOISY["noisy"], tokens_of(keys=keys)
    routing, noises = run(router, X, tokens), normals(tokens.keys) if keys else np.zeros((BATCH, SEQ, 6))
    rows, others = wide(X), []
    for place in np.ndindex(BATCH, SEQ):
        experts, weights, load = noisy_reference(router, rows[place], noises[place])
        assert list(routing.experts[place]) == experts and close(routing.weights[place], weights)
        assert close(routing.load[place], load)
        others.append(noisy_reference(router, rows[place], noises[place], "excluding")[2])
    assert not close(routing.load, np.reshape(others, (BATCH, SEQ, 6)), 1e-2)


def test_the_load_is_the_chance_of_being_chosen_when_ones_noise_is_sampled_again():
    router, tokens = NOISY["noisy"], tokens_of(keys=True)
    load, draw, times = wide(run(router, X, tokens).load), np.random.default_rng(0), 20_000
    rows, noises = wide(X), normals(tokens.keys)
    for place in [(0, 0), (1, 7), (3, 15)]:
        given = rows[place]
        clean, deviation = wide(router.linear.weight) @ given, softplus(wide(router.noise.weight) @ given)
        h = clean + noises[place] * deviation
        for i in range(6):
            again = clean[i] + deviation[i] * draw.normal(size=times)
            chosen = np.mean((np.delete(h, i)[:, None] > again).sum(0) < router.top_k)
            assert abs(chosen - load[place][i]) < 4 * 0.5 / math.sqrt(times)


def test_the_load_of_dense_and_of_noiseless_routers():
    x, tokens = normal(1, 1, 3, EMBED), tokens_of(1, 3, keys=True)
    dense = random_module(nn.NoisyTopKRouter, embed=EMBED, experts=3, top_k=3, key=KEY)
    assert np.all(run(dense, x, tokens).load == 1)
    silent = eqx.tree_at(lambda r: r.noise.weight, NOISY["noisy"], jnp.full((6, EMBED), -1e4))
    value, slope = jax.jit(jax.value_and_grad(lambda x: jnp.sum(silent(x, tokens).load)))(abs(x))
    assert close(value, 3 * 2, 1e-3) and np.isfinite(slope).all()


def test_noisy_top_k_starts_from_zero():
    router: Any = eqx.filter_jit(lambda: nn.NoisyTopKRouter(embed=EMBED, experts=6, top_k=2, key=KEY))()
    assert not bool(jnp.any(router.linear.weight)) and not bool(jnp.any(router.noise.weight))
    found, number = run(router, X, tokens_of(keys=True)).experts, 2 * BATCH * SEQ
    assert np.abs(np.bincount(found.reshape(-1)) / number - 1 / 6).max() < 4 * math.sqrt(1 / 6 * 5 / 6 / number)


def test_the_random_second_is_its_paper():
    router, tokens = NOISY["second"], tokens_of(keys=True)
    logits = wide(X) @ wide(router.linear.weight).T
    for given in (tokens, tokens_of()):
        routing, seconds = run(router, X, given), 0
        draws = None if given.keys is None else np.asarray(each(lambda key: jax.random.uniform(key, (1,)), given.keys))
        for place in np.ndindex(BATCH, SEQ):
            gates = SCORES["softmax"](logits[place])
            e1, e2 = best(gates, 2)
            g1, g2 = gates[e1] / (gates[e1] + gates[e2]), gates[e2] / (gates[e1] + gates[e2])
            taken = draws is None or 2 * g2 > draws[place][0]
            seconds += taken
            assert list(routing.experts[place]) == [e1, e2 if taken else -1]
            assert close(routing.weights[place], [g1, g2 if taken else 0]) and close(routing.scores[place], gates)
        assert (seconds == BATCH * SEQ) == (given.keys is None) and seconds > 16


def test_the_second_comes_as_often_as_it_should():
    router, x = NOISY["second"], jnp.broadcast_to(normal(4, EMBED), (64, 64, EMBED))
    share = np.mean(run(router, x, tokens_of(64, 64, keys=True)).experts[..., 1] >= 0)
    gates = np.sort(SCORES["softmax"](wide(router.linear.weight) @ wide(x[0, 0])))[::-1]
    chance = 2 * gates[1] / (gates[0] + gates[1])
    assert 0.1 < chance < 0.9 and abs(share - chance) < 4 * 0.5 / 64


@pytest.mark.parametrize("name", NOISY)
def test_padding_goes_nowhere_and_changes_nothing(name):
    router, tokens = NOISY[name], tokens_of(keys=True, padding=4)
    whole, routing = run(router, X, tokens_of(keys=True)), run(router, X, tokens)
    real = np.asarray(tokens.positions >= 0)
    assert real.sum() == BATCH * SEQ - 4
    assert np.all(routing.experts[~real] == -1) and np.all(routing.weights[~real] == 0)
    assert np.array_equal(routing.experts[real], whole.experts[real])
    assert np.array_equal(routing.weights[real], whole.weights[real])
    assert routing.load is None or np.all(routing.load[~real] == 0)
    other = run(router, X.at[-1, -4:].set(7.0), tokens)
    assert np.array_equal(other.weights, routing.weights)
    slope = np.asarray(jax.jit(jax.grad(lambda x: jnp.sum(router(x, tokens).weights ** 2)))(X))
    assert np.all(slope[~real] == 0) and np.any(slope[real] != 0)


@pytest.mark.by_default("noisy")
@pytest.mark.parametrize("name", NOISY)
def test_a_tokens_noise_is_the_same_in_any_batch(name):
    router, x, tokens = NOISY[name], X, tokens_of(keys=True)
    whole = run(router, x, tokens)
    places = [np.s_[np.array([3, 1]), 2:], np.s_[1, 3:4]]
    route = lambda x, positions, keys: router(x, nn.Tokens(positions, keys=keys))
    given = (x, tokens.positions, tokens.keys)
    parts, mapped = jax.jit(lambda *a: ([route(*(one[w] for one in a)) for w in places], jax.vmap(route)(*a)))(*given)
    for part, where in zip([*parts, mapped], [*places, np.s_[:]], strict=True):
        for one, other in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
            assert close(one, other[where], 1e-6) and np.array_equal(np.asarray(one) >= 0, other[where] >= 0)
    other = run(router, x, tokens_of(keys=True, key=jax.random.key(1)))
    without = run(router, x, tokens_of())
    for routing in (other, without):
        assert not np.array_equal(routing.experts, whole.experts) or not close(routing.weights, whole.weights, 1e-3)
    assert close(without.logits, wide(x) @ wide(router.linear.weight).T)
