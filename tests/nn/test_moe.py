"""Mixtures of experts: weighted sums, statistics, any order of tokens and experts, shared experts, expert choice."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_cases import EMBED, EXPERTS, experts_of, kept_by, KEY, KINDS, mixture, one_expert, router_of, TOP_K
from nn_reference import close, linear, normal, random_module, replaced, rms, wide

from eqformer import nn


BATCH, SEQ, PADDING = 3, 8, 5
LOSSES = (nn.LoadBalance(0.5), nn.RouterZ(0.25))
DISPATCHES = (nn.Dropless(), nn.Capacity(100.0), nn.Capacity(0.5), nn.Capacity(0.75, per="batch"))
FEW = DISPATCHES[2:3]
ROUTERS = {
    "softmax": (router_of(normalize=True), DISPATCHES),
    "sigmoid": (router_of(score="sigmoid", scale=2.5, balanced=True), FEW),
    "random second": (random_module(nn.RandomSecondRouter, embed=EMBED, experts=EXPERTS, key=KEY), FEW),
}
SOFTMAX = ROUTERS["softmax"][0]
X = normal(1, BATCH, SEQ, EMBED)
PLACES = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (BATCH, SEQ)).copy()
PLACES[-1, SEQ - PADDING :] = -1
REAL = PLACES >= 0
KEYS = jax.jit(nn.token_keys)(KEY, np.arange(BATCH), np.maximum(PLACES, 0))
as_numpy: Any = lambda tree: jax.tree.map(np.asarray, tree)


def tokens_of(keys=KEYS, places=PLACES):
    """Tokens in training, since elsewhere nothing is dropped; of these routers one alone draws noise."""
    return nn.Tokens(jnp.asarray(places), keys=keys)


@eqx.filter_jit
def _every(router, experts, x, tokens, dispatches):
    routing = router(x, tokens.fold_in(2))
    mixtures = [nn.MoE(router, experts, dispatch=dispatch, losses=LOSSES) for dispatch in dispatches]
    losses = [loss(routing, tokens) for loss in LOSSES]
    return routing, routing.counts(), losses, [mixture(x, tokens) for mixture in mixtures]


def every(router, experts, x, tokens, dispatches=DISPATCHES):
    """What the router says, its counts, the losses of that, and the mixture by each dispatch."""
    return as_numpy(_every(router, experts, x, tokens, dispatches))


def all_close(one, other):
    """Whether two trees are the same but for rounding."""
    return all(close(*pair, 1e-6) for pair in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.by_default("softmax", "random second")
@pytest.mark.parametrize("name", ROUTERS)
def test_the_mixture_is_its_sum_and_tells_what_it_did(name):
    (router, dispatches), experts = ROUTERS[name], experts_of("gated")
    tokens = tokens_of()
    routing, counts, losses, found = every(router, experts, X, tokens, dispatches)
    chosen, share = routing.experts, wide(routing.scores)
    share = share / share.sum(axis=-1, keepdims=True)
    entropy = -(share * np.log(share)).sum(axis=-1)[REAL].sum()
    for dispatch, (y, aux) in zip(dispatches, found, strict=True):
        kept = kept_by(dispatch, chosen)
        assert close(y, mixture(experts, X, kept, routing.weights), 1e-5)
        assert not np.any(y[~REAL]) and not np.any(y[(kept < 0).all(axis=-1)])
        assert np.array_equal(aux.load, [np.sum(chosen == expert) for expert in range(EXPERTS)])
        assert np.array_equal(aux.load, counts.sum(axis=0)) and aux.tokens == REAL.sum()
        assert aux.dropped == np.sum((chosen >= 0) & (kept < 0))
        assert close(aux.entropy, entropy, 1e-5) and close(aux.loss, sum(map(wide, losses)), 1e-6)
        assert (aux.dropped == 0) == (dispatch in DISPATCHES[:2])
    # Padding is counted nowhere and changes nobody.
    other = every(router, experts, np.where(REAL[..., None], X, np.float32(9)), tokens, dispatches)[-1]
    assert all_close(found, other)
    assert (np.sum(chosen < 0) > PADDING * router.facts().choices) == (name == "random second")
    if name == "softmax":
        assert all_close(found[0], found[1]) and not all_close(found[0][0], found[2][0])


def test_the_noise_is_not_a_dropout_s():
    """A block folds 0 and 1 into its dropouts' keys, and the mixture 2 into its router's."""
    router, experts = (
        random_module(nn.NoisyTopKRouter, embed=EMBED, experts=EXPERTS, top_k=1, key=KEY),
        experts_of("plain"),
    )

    @jax.jit
    def loads(tokens):
        places = [jnp.sum(router(X, tokens.fold_in(place)).counts(), axis=0) for place in range(4)]
        return [nn.MoE(router, experts, dispatch=nn.Capacity(1.0))(X, tokens)[1].load, *places]

    load, *others = as_numpy(loads(tokens_of()))
    assert [np.array_equal(load, other) for other in others] == [False, False, True, False]


def test_one_row_and_no_tokens_given():
    experts = experts_of("gated")
    moe = nn.MoE(SOFTMAX, experts, dispatch=DISPATCHES[2], losses=LOSSES)
    y, aux = as_numpy(jax.jit(lambda x: moe(x))(np.asarray(X[0])))
    *_, found = every(SOFTMAX, experts, X, tokens_of())
    assert close(y, found[0][0][0], 1e-6) and aux.tokens == SEQ and aux.load.sum() == SEQ * TOP_K
    assert aux.dropped == 0 and not close(y, found[2][0][0], 1e-2)  # no tokens, no keys: inference


def test_bfloat16_routes_and_counts_in_float32():
    router, experts, half = nn.cast(SOFTMAX, "bfloat16"), nn.cast(experts_of("gated"), "bfloat16"), X.astype("bfloat16")
    *_, ((y, aux),) = every(router, experts, half, tokens_of(), FEW)
    back = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf).astype(np.float32)), tree)
    *_, found = every(back(router), back(experts), back(half), tokens_of())
    assert y.dtype == jnp.bfloat16 and aux.loss.dtype == aux.entropy.dtype == np.float32
    assert close(y, found[2][0], 0.05) and all_close(aux, found[2][1])


@pytest.mark.by_default("sigmoid")
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_the_order_of_experts_does_not_matter(name):
    """Not to the choice, the weights, the dropping or the losses; a router's rows and biases are its experts'."""
    (router, dispatches), experts, order = ROUTERS[name], experts_of("gated"), np.array([2, 0, 3, 1])
    moved = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[order]), tree)
    *_, found = every(router, experts, X, tokens_of(), dispatches)
    *_, other = every(moved(router), moved(experts), X, tokens_of(), dispatches)
    *_, wrong = every(router, moved(experts), X, tokens_of(), dispatches)
    for (y, aux), (same, its), (not_same, _) in zip(found, other, wrong, strict=True):
        assert close(y, same, 1e-6) and not close(y, not_same, 1e-2)
        assert np.array_equal(its.load, aux.load[order]) and np.array_equal(its.dropped, aux.dropped)
        assert close(aux.loss, its.loss, 1e-6) and close(aux.entropy, its.entropy, 1e-6)


def test_the_order_of_tokens_does_not_matter_where_none_is_dropped():
    order, experts = np.random.default_rng(0).permutation(BATCH * SEQ), experts_of("gated")
    mixed = lambda x: np.asarray(x).reshape(BATCH * SEQ, *x.shape[2:])[order].reshape(x.shape)
    *_, found = every(SOFTMAX, experts, X, tokens_of())
    *_, other = every(SOFTMAX, experts, jnp.asarray(mixed(X)), tokens_of(places=mixed(PLACES)))
    for dispatch, (y, aux), (same, its) in zip(DISPATCHES, found, other, strict=True):
        assert np.array_equal(aux.load, its.load)
        assert close(mixed(y), same, 1e-6) == (dispatch in DISPATCHES[:2])
    assert np.array_equal(mixed(found[0][0]), other[0][0])  # dropless: bit for bit


def test_shared_experts_see_every_token():
    experts, shared = experts_of("plain"), random_module(nn.GatedMLP, embed=EMBED, mlp=3, bias=True, key=KEY)
    gated = random_module(lambda: nn.GatedShared(KINDS["plain"](KEY), embed=EMBED, key=KEY))
    mixtures = lambda x, tokens: [nn.MoE(SOFTMAX, experts, shared=one)(x, tokens) for one in (None, shared, gated)]
    (bare, its), *found = as_numpy(jax.jit(mixtures)(X, tokens_of()))
    as_experts = lambda layer: replaced(experts, mlps=jax.tree.map(lambda leaf: np.asarray(leaf)[None], layer))
    of_shared = one_expert(as_experts(shared), 0, wide(X))
    of_gated = one_expert(as_experts(gated.layer), 0, wide(X)) / (1 + np.exp(-linear(wide(X), gated.gate)))
    for (y, aux), expected in zip(found, (of_shared, of_gated), strict=True):
        assert close(y, wide(bare) + expected, 1e-5) and not close(y, bare, 1e-2)
        assert all_close(aux, its)
    assert nn.dims(gated).gate.weight == "gate embed" and gated.gate.weight.shape == (1, EMBED)


@pytest.mark.parametrize("per,factor", [("sequence", 2.0), ("batch", 1.25)])
def test_experts_that_choose(per, factor):
    router = random_module(nn.ExpertChoiceRouter, embed=EMBED, experts=EXPERTS, factor=factor, per=per, key=KEY)
    experts, tokens = experts_of("gated"), tokens_of()

    @eqx.filter_jit
    @eqx.filter_grad(has_aux=True)
    def run(moe, x):
        y, aux = moe(x, tokens)
        return jnp.sum(y**2), (y, aux)

    slope, (y, aux) = as_numpy(run(nn.MoE(router, experts), X))
    scores = np.exp(wide(X) @ wide(router.linear.weight).T)
    scores = scores / scores.sum(axis=-1, keepdims=True)
    places = list(map(tuple, np.argwhere(REAL)))
    groups = [places] if per == "batch" else [[place for place in places if place[0] == row] for row in range(BATCH)]
    expected, load = np.zeros(X.shape), np.zeros(EXPERTS, int)
    for group in groups:
        for expert in range(EXPERTS):
            capacity = int(np.ceil(factor * len(group) / EXPERTS))
            for place in sorted(group, key=lambda place: -scores[(*place, expert)])[:capacity]:
                expected[place] += scores[(*place, expert)] * one_expert(experts, expert, wide(X)[place])
                load[expert] += 1
    assert close(y, expected, 1e-5) and not np.any(y[~REAL])
    assert np.array_equal(aux.load, load) and aux.tokens == REAL.sum()
    assert not np.any([aux.loss, aux.dropped, aux.entropy])
    assert np.any(slope.router.linear.weight) and np.any(slope.experts.mlps.down.bias)


def test_parts_that_do_not_fit():
    router, experts = SOFTMAX, experts_of()
    choice = random_module(nn.ExpertChoiceRouter, embed=EMBED, experts=EXPERTS, factor=1.0, key=KEY)
    for bad, number in ((router, EXPERTS + 1), (choice, EXPERTS - 1)):
        words = (
            rf"MoE\(router, experts\): the router chooses among {EXPERTS} experts and there are {number}; build both"
        )
        with pytest.raises(ValueError, match=words):
            nn.MoE(bad, experts_of(number=number))
    with pytest.raises(ValueError, match=r"MoE\(ExpertChoiceRouter, losses=.*LoadBalance.*pass no losses"):
        nn.MoE(choice, experts, losses=LOSSES)
    with pytest.raises(ValueError, match=r"TopKRouter\(top_k=5, experts=4\).*1 <= top_k <= experts"):
        nn.TopKRouter(embed=EMBED, experts=EXPERTS, top_k=5, key=KEY)
    with pytest.raises(ValueError, match=r"TopKRouter\(experts=4, .*count=3, .*divides 4 experts"):
        nn.TopKRouter(embed=EMBED, experts=EXPERTS, top_k=TOP_K, groups=nn.ExpertGroups(3), key=KEY)
    with pytest.raises(TypeError, match="abstract"):
        nn.Routed()  # pyright: ignore[reportAbstractUsage]


class Hashed(nn.Router):
    """Chooses by position, with no map."""

    def __call__(self, x, tokens):
        chosen = (tokens.positions % EXPERTS)[..., None]
        scores = jnp.zeros((*chosen.shape[:-1], EXPERTS))
        return nn.Routing(chosen, jnp.ones(chosen.shape), scores, scores)

    def facts(self):
        return nn.RouterFacts(EXPERTS, 1, "token")


@pytest.mark.quick
def test_a_router_of_ones_own():
    x = normal(1, 1, EXPERTS, EMBED)
    y, aux = eqx.filter_jit(nn.MoE(Hashed(), experts_of()))(x)
    assert close(y[0], [one_expert(experts_of(), place, wide(x[0, place])) for place in range(EXPERTS)])
    assert aux.load.tolist() == [1] * EXPERTS


@eqx.filter_jit
def _weighing_inputs(router, experts, x, tokens):
    def total(experts, x, dispatch, weighs):
        y, aux = nn.MoE(router, experts, dispatch=dispatch, weighs_inputs=weighs)(x, tokens)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))), (y, aux)

    both = eqx.filter_value_and_grad(lambda given, *rest: total(*given, *rest), has_aux=True)
    found = [both((experts, x), dispatch, True) for dispatch in DISPATCHES]
    return router(x, tokens), found, total(experts, x, DISPATCHES[0], False)[1][0]


@pytest.mark.grid
def test_weights_can_multiply_what_experts_are_given():
    router, experts = router_of(score="sigmoid"), experts_of("gated")
    routing, found, outside = as_numpy(_weighing_inputs(router, experts, X, tokens_of()))
    for dispatch, ((_, (y, aux)), _) in zip(DISPATCHES, found, strict=True):
        kept, expected = kept_by(dispatch, routing.experts), np.zeros(X.shape)
        for place in np.argwhere(kept >= 0):
            row, choice = tuple(place[:2]), tuple(place)
            expected[row] += one_expert(experts, kept[choice], routing.weights[choice] * wide(X[row]))
        assert close(y, expected, 1e-5) and not close(y, outside, 1e-2)
        assert aux.dropped == np.sum((routing.experts >= 0) & (kept < 0))
    # Both that drop nothing have one gradient, though one sorts choices and the other has slots.
    assert all_close(found[0][1], found[1][1]) and not all_close(found[0][1], found[2][1])


def test_experts_of_a_latent_have_a_map_to_it_and_one_back():
    to_latent = random_module(nn.Linear, "embed -> latent", embed=EMBED, latent=3, key=KEY)
    with pytest.raises(
        ValueError, match=r"MoE\(from_latent=None\): experts that read a latent need to_latent and from_latent"
    ):
        nn.MoE(SOFTMAX, experts_of(), to_latent=to_latent)
    norm = nn.RMSNorm("expert_latent", expert_latent=3)
    with pytest.raises(ValueError, match=r"MoE\(latent_norm=..., from_latent=None\)"):
        nn.MoE(SOFTMAX, experts_of(), latent_norm=norm)


@pytest.mark.grid
def test_the_sum_of_latent_experts_is_normalized_once():
    maps: dict[str, Any] = {"to_latent": nn.Linear("embed -> latent", embed=EMBED, latent=EMBED, key=KEY)}
    maps["from_latent"] = nn.Linear("latent -> embed", embed=EMBED, latent=EMBED, key=jax.random.key(1))
    norm = random_module(nn.RMSNorm, "expert_latent", expert_latent=EMBED)
    x = normal(1, 2, 3, EMBED)
    plain = nn.MoE(SOFTMAX, experts_of(), **maps)
    identity = eqx.tree_at(lambda m: m.weight, maps["from_latent"], jnp.eye(EMBED))
    latent, _ = replaced(plain, from_latent=identity)(x)
    y, _ = nn.MoE(SOFTMAX, experts_of(), latent_norm=norm, **maps)(x)
    assert close(y, linear(rms(wide(latent), norm), maps["from_latent"]), 1e-5)
    assert not close(y, plain(x)[0], 1e-2)


def test_experts_that_choose_their_tokens_weigh_no_inputs():
    router = random_module(nn.ExpertChoiceRouter, embed=EMBED, experts=EXPERTS, factor=1.0, key=KEY)
    with pytest.raises(ValueError, match="experts that choose their tokens weigh their outputs"):
        nn.MoE(router, experts_of(), weighs_inputs=True)
