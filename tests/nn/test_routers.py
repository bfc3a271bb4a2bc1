"""Routers against their papers' formulas, token by token in float64."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, random_module, wide
from router_cases import BATCH, best, EMBED, KEY, NOISY, run, SCORES, SEQ, tokens_of, X

from eqformer import nn


CASES = {
    "dense": dict(experts=4, top_k=4),
    "switch": dict(experts=6, top_k=1),
    "mixtral": dict(experts=8, top_k=2, normalize=True),
    "gpt-oss": dict(experts=8, top_k=3, normalize=True, bias=True),
    "deepseek-v2": dict(experts=12, top_k=3, groups=nn.ExpertGroups(4, 2), scale=16.0),
    "deepseek-v3": dict(
        experts=12,
        top_k=3,
        score="sigmoid",
        normalize=True,
        balanced=True,
        groups=nn.ExpertGroups(4, 2, "top2"),
        scale=2.5,
    ),
    "deepseek-v4": dict(experts=8, top_k=3, score="sqrt_softplus", normalize=True, balanced=True, scale=1.5),
    "llama4": dict(experts=4, top_k=1, score="sigmoid"),
    "lfm2": dict(experts=8, top_k=2, score="sigmoid", normalize=True, normalize_eps=0.3, balanced=True),
}


def reference(router, x, without=""):
    """What `TopKRouter` must say of one token: experts, weights, scores; one step may be left out."""
    logits = wide(router.linear.weight) @ x
    if router.linear.bias is not None and without != "bias":
        logits = logits + wide(router.linear.bias)
    scores = SCORES[router.score](logits)
    merit = scores.copy()
    if router.selection_bias is not None and without != "balance":
        merit = merit + wide(router.selection_bias)
    groups, candidates = router.groups, list(range(len(scores)))
    if groups is not None and without != "groups":
        size = len(scores) // groups.count
        counted = 2 if groups.score == "top2" and without != "top2" else 1
        worth = [sum(sorted(merit[g * size : (g + 1) * size])[-counted:]) for g in range(groups.count)]
        chosen_groups = best(worth, groups.top_k)
        candidates = [expert_number for expert_number in candidates if expert_number // size in chosen_groups]
    experts = best(merit, router.top_k, candidates)
    weights = np.array([(merit if without == "merit" else scores)[expert] for expert in experts])
    if router.normalize and without != "normalize":
        weights = weights / (weights.sum() + (0 if without == "normalize_eps" else router.normalize_eps))
    return experts, weights * (1 if without == "scale" else router.scale), scores


def all_tokens(one, router, x, **options):
    """The reference over every token of `x`, as three arrays."""
    rows = wide(x)
    found = [one(router, rows[place], **options) for place in np.ndindex(*x.shape[:-1])]
    return [np.array(part).reshape(*x.shape[:-1], -1) for part in zip(*found)]


@pytest.mark.parametrize("name", CASES)
def test_top_k_is_its_paper(name):
    router, x = random_module(nn.TopKRouter, embed=EMBED, key=KEY, **CASES[name]), X
    routing = run(router, x, tokens_of())
    experts, weights, scores = all_tokens(reference, router, x)
    assert np.array_equal(routing.experts, experts) and close(routing.weights, weights)
    assert close(routing.scores, scores) and routing.load is None
    case = CASES[name]
    steps = {"normalize", "normalize_eps", "scale", "groups", "bias"} & case.keys()
    steps |= {"balance", "merit"} if "balanced" in case else set()
    for step in steps | ({"top2"} if "groups" in case and case["groups"].score == "top2" else set()):
        experts, weights, _ = all_tokens(reference, router, x, without=step)
        assert not np.array_equal(routing.experts, experts) or not close(routing.weights, weights, 1e-3), step


def sparse_mixer(router, x, without=""):
    """What `SparseMixerRouter` says of one token, by the quotients of its paper; one step may be left out."""
    logits = wide(router.linear.weight) @ x
    experts, weights = best(logits, 2), []
    for number, expert in enumerate(experts):
        others = [other for other in range(len(logits)) if without == "exclusion" or other not in experts[:number]]
        highest = logits[expert]
        distance = [(highest - logits[other]) / max(abs(logits[other]), highest) for other in others]
        near = [
            other
            for other, far in zip(others, distance)
            if without == "tolerance" or far <= 2 * router.tolerance or other == expert
        ]
        shared = np.exp(logits[near] - highest)
        weights.append(np.exp(0) / shared.sum())
    return experts, np.array(weights), SCORES["softmax"](logits)


def test_the_sparse_mixer_weighs_each_choice_against_those_near_it():
    router = random_module(nn.SparseMixerRouter, embed=EMBED, experts=6, tolerance=0.3, key=KEY)
    routing = run(router, X, tokens_of())
    experts, weights, scores = all_tokens(sparse_mixer, router, X)
    assert np.array_equal(routing.experts, experts) and close(routing.weights, weights)
    assert close(routing.scores, scores) and router.facts().choices == 2
    is_alone = weights == 1
    assert np.any(is_alone) and not np.all(is_alone)
    for step in ("tolerance", "exclusion"):
        assert not close(routing.weights, all_tokens(sparse_mixer, router, X, without=step)[1], 1e-3), step
    assert np.array_equal(run(router, X, tokens_of(keys=True)).experts, routing.experts)  # nothing is drawn
    assert np.all(run(router, X, tokens_of(padding=4)).experts[-1, -4:] == -1)


def test_the_sparse_mixer_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"SparseMixerRouter\(tolerance=-0.1\): .*at least 0"):
        nn.SparseMixerRouter(embed=EMBED, experts=6, tolerance=-0.1, key=KEY)
    with pytest.raises(ValueError, match=r"SparseMixerRouter\(top_k=2, experts=1\)"):
        nn.SparseMixerRouter(embed=EMBED, experts=1, key=KEY)


def test_the_logits_are_the_linear_map():
    router, x = random_module(nn.TopKRouter, embed=EMBED, experts=8, top_k=3, bias=True, key=KEY), normal(1, 3, EMBED)
    routing = run(router, x, nn.positions_like((3,)))
    assert close(routing.logits, wide(x) @ wide(router.linear.weight).T + wide(router.linear.bias))


def test_softmax_of_the_chosen_survives_where_the_scores_underflow():
    router = random_module(
        nn.TopKRouter, embed=4, experts=4, top_k=2, groups=nn.ExpertGroups(2), normalize=True, key=KEY
    )
    router = eqx.tree_at(lambda r: r.linear.weight, router, jnp.eye(4))
    merit = eqx.tree_at(
        lambda r: r.selection_bias, router, jnp.asarray([0.0, 0, 9, 9]), is_leaf=lambda leaf: leaf is None
    )
    routing = run(merit, jnp.asarray([[200.0, 0, 1, 2]]), nn.positions_like((1,)))
    assert routing.scores[0, 2] == routing.scores[0, 3] == 0
    assert close(routing.weights, np.array([[1, np.e]]) / (1 + np.e))


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_scores_and_their_slopes_stay_finite_far_out(score):
    router = random_module(nn.TopKRouter, embed=4, experts=4, top_k=2, score=score, normalize=True, key=KEY)
    router = eqx.tree_at(lambda r: r.linear.weight, router, jnp.eye(4))
    x = jnp.asarray([[-200.0, -300, -250, -400], [300, 200, -200, 90]])
    route = lambda x: router(x, nn.positions_like((1,)))
    weights, slope = jax.jit(jax.vmap(jax.value_and_grad(lambda x: jnp.sum(route(x).weights ** 2))))(x[:, None])
    assert np.isfinite(slope).all() and np.isfinite(weights).all()


def test_equal_scores_take_the_lowest_number():
    x, tokens, sizes = normal(1, 2, EMBED), nn.positions_like((2,)), dict(embed=EMBED, experts=12, key=KEY)
    flat = lambda make, **options: jax.tree.map(jnp.zeros_like, random_module(make, **sizes, **options))
    grouped = dict(score="sigmoid", balanced=True, groups=nn.ExpertGroups(4, 2, "top2"))
    biased = eqx.tree_at(
        lambda r: r.selection_bias, flat(nn.TopKRouter, top_k=3, balanced=True), jnp.asarray([0.0, 1] * 6)
    )
    for router, experts in (
        (flat(nn.TopKRouter, top_k=3), [0, 1, 2]),
        (flat(nn.TopKRouter, top_k=4, **grouped), [0, 1, 2, 3]),
        (flat(nn.NoisyTopKRouter, top_k=3), [0, 1, 2]),
        (flat(nn.RandomSecondRouter), [0, 1]),
        (biased, [1, 3, 5]),
    ):
        assert np.array_equal(run(router, x, tokens).experts, [experts] * 2)


def test_counts_and_gates():
    routing = run(NOISY["second"], X, tokens_of(keys=True, padding=4))
    for choices in (None, 1):
        counts, first = np.zeros((BATCH, 6), int), np.zeros((BATCH, SEQ, 6))
        for row, token, choice in np.ndindex(BATCH, SEQ, 2):
            expert = int(routing.experts[row, token, choice])
            if expert >= 0:
                counts[row, expert] += choice < (choices or 2)
                first[row, token, expert] = routing.weights[row, token, choice]
        found = jax.jit(lambda routing, choices=choices: (routing.counts(choices), routing.gates()))
        for one, other in zip(found(routing), (counts, first)):
            assert np.array_equal(one, other)
        for one, other in zip(found(jax.tree.map(lambda leaf: leaf[1], routing)), (counts[1], first[1])):
            assert np.array_equal(one, other)
    assert np.any(routing.experts[:2] == -1)


def test_scores_are_float32_at_least():
    tokens, half, full, double, whole = tokens_of(keys=True), "bfloat16", "float32", "float64", "int32"
    for router in NOISY.values():
        small = eqx.filter_eval_shape(nn.cast(router, half), X.astype(half), tokens)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(small)} == {full, whole}
        with jax.enable_x64(True):
            widest = eqx.filter_eval_shape(router, jnp.asarray(wide(X)), tokens)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(widest)} == {double, whole}
    coarse = nn.cast(NOISY["jitter"], half)
    routing, exact = (
        run(coarse, X.astype(half), tokens),
        run(nn.cast(coarse, full), X.astype(half).astype(full), tokens),
    )
    assert np.array_equal(routing.experts, exact.experts) and np.array_equal(routing.weights, exact.weights)


def test_the_selection_bias_has_no_gradient_and_the_map_has():
    router, x = random_module(nn.TopKRouter, embed=EMBED, key=KEY, **CASES["deepseek-v3"]), normal(1, 6, EMBED)
    cost = eqx.filter_grad(lambda router: jnp.sum(router(x, nn.positions_like((6,))).weights ** 2))
    pull: Any = eqx.filter_jit(cost)(router)
    assert not np.any(pull.selection_bias) and np.any(pull.linear.weight)


def test_the_choice_has_slopes_of_its_weights():
    router, x = random_module(nn.TopKRouter, embed=EMBED, key=KEY, **CASES["deepseek-v2"]), normal(1, 4, EMBED)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(router(x, nn.positions_like((4,))).weights[:, 0])))(x)
    for place in np.ndindex(4, EMBED):
        step = np.zeros((4, EMBED))
        step[place] = 1e-5
        ahead, behind = (all_tokens(reference, router, wide(x) + side * step)[1][:, 0].sum() for side in (1, -1))
        assert abs((ahead - behind) / 2e-5 - slope[place]) < 1e-3


def test_dims_and_public_shape():
    names = nn.dims(eqx.filter_eval_shape(lambda: nn.TopKRouter(embed=EMBED, key=KEY, **CASES["deepseek-v3"])))
    assert names.linear.weight == "candidates embed" and names.selection_bias == "candidates"
    with pytest.raises(TypeError, match="abstract"):
        nn.Router()  # pyright: ignore[reportAbstractUsage]
    assert all(isinstance(router, nn.Router) and router.facts().choices == 2 for router in NOISY.values())


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(top_k=9), r"top_k=9, experts=8\).*1 <= top_k <= experts"),
        (dict(top_k=0), r"top_k=0, experts=8\).*1 <= top_k <= experts"),
        (dict(groups=nn.ExpertGroups(3)), r"count=3, .*divides 8 experts"),
        (dict(groups=nn.ExpertGroups(0)), r"count=0, .*divides 8 experts"),
        (dict(groups=nn.ExpertGroups(4, 5)), r"top_k=5, score='max'\).*of 4 groups"),
        (dict(groups=nn.ExpertGroups(4, 0)), r"top_k=0, score='max'\).*of 4 groups"),
        (dict(groups=nn.ExpertGroups(1, 2)), r"top_k=2, score='max'\).*of 1 groups"),
        (dict(groups=nn.ExpertGroups(4), top_k=3), r"1 groups of 2 experts have 2 experts to choose 3 from"),
        (dict(groups=nn.ExpertGroups(8, 4, "top2")), r"'top2'.*a group has 1"),
        (dict(groups=nn.ExpertGroups(1, score="mean")), r"score='mean'\).*max, top2"),
        (dict(score="tanh"), r"score='tanh'\).*softmax, sigmoid, sqrt_softplus"),
        (dict(jitter=-0.1), r"jitter=-0.1\).*\[0, 1\)"),
        (dict(jitter=1.0), r"jitter=1.0\).*\[0, 1\)"),
    ],
)
def test_bad_choices_of_a_top_k_router(options, words):
    with pytest.raises(ValueError, match=rf"TopKRouter\(.*{words}"):
        nn.TopKRouter(**(dict(embed=EMBED, experts=8, top_k=2, key=KEY) | options))


def test_bad_choices_of_the_others():
    with pytest.raises(ValueError, match=r"NoisyTopKRouter\(top_k=3, experts=2\)"):
        nn.NoisyTopKRouter(embed=EMBED, experts=2, top_k=3, key=KEY)
    with pytest.raises(ValueError, match=r"RandomSecondRouter\(top_k=2, experts=1\)"):
        nn.RandomSecondRouter(embed=EMBED, experts=1, key=KEY)
    for factor in (0.0, -1.0, 4.5, float("nan")):
        with pytest.raises(ValueError, match=rf"ExpertChoiceRouter\(factor={factor}, experts=4\)"):
            nn.ExpertChoiceRouter(embed=EMBED, experts=4, factor=factor, key=KEY)
    with pytest.raises(ValueError, match=r"per='row'\).*'sequence' or the 'batch'"):
        nn.ExpertChoiceRouter(embed=EMBED, experts=4, factor=1.0, per="row", key=KEY)


HASHED: dict[str, Any] = dict(experts=6, top_k=2, vocab=9, score="sqrt_softplus", normalize=True, scale=1.5)


def test_a_table_names_the_experts_of_an_id():
    router: Any = nn.HashRouter(embed=EMBED, **HASHED, key=KEY)
    assert router.table.shape == (9, 2) and len({tuple(row) for row in router.table.tolist()}) > 3
    assert all(len({*row}) == 2 and max(row) < 6 for row in router.table.tolist())
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 9, (BATCH, SEQ)), jnp.int32)
    tokens = nn.Tokens(jnp.where(ids > 0, 3, -1), ids=ids)
    routing = eqx.filter_jit(router)(X, tokens)
    for row, token in np.ndindex(BATCH, SEQ):
        scores = np.sqrt(np.log1p(np.exp(wide(router.linear.weight) @ wide(X)[row, token])))
        experts = np.asarray(router.table)[int(ids[row, token])]
        real = int(ids[row, token]) > 0
        assert np.array_equal(routing.experts[row, token], experts if real else [-1, -1])
        weights = 1.5 * scores[experts] / scores[experts].sum()
        assert close(routing.weights[row, token], weights if real else 0 * weights, 1e-5)
    other = eqx.filter_jit(router)(X, tokens.replace(ids=(ids + 1) % 9))
    assert not np.array_equal(other.experts, routing.experts)
    with pytest.raises(ValueError, match=r"HashRouter\(x\): the router reads the ids"):
        router(X, nn.Tokens(tokens.positions))
    with pytest.raises(ValueError, match=r"HashRouter\(score='relu'\)"):
        nn.HashRouter(embed=EMBED, experts=6, top_k=2, vocab=9, score="relu", key=KEY)
