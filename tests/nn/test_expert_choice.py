"""Expert-choice routing against the paper's formula, group by group in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, random_module, wide
from router_cases import best, EMBED, KEY, run, SCORES, tokens_of

from eqformer import nn


def choice_reference(router, x, real, without=""):
    """Zhou's equations for one group: the tokens and weights of each expert, as many as the real tokens allow."""
    weight = wide(router.linear.weight)
    scores = np.array([SCORES["softmax"](weight @ token) for token in x])
    experts = scores.shape[1]
    places = [place for place in range(len(x)) if real[place] or without == "padding"]
    capacity = math.ceil(router.factor * len(places) / experts)
    taken = [best(scores[:, expert], capacity, places) for expert in range(experts)]
    return taken, [[scores[token, expert] for token in tokens] for expert, tokens in enumerate(taken)]


@pytest.mark.parametrize("per,factor", [("sequence", 1.0), ("sequence", 2.0), ("batch", 1.25)])
def test_expert_choice_is_its_paper(per, factor):
    router = random_module(nn.ExpertChoiceRouter, embed=EMBED, experts=4, factor=factor, per=per, key=KEY)
    x, tokens = normal(1, 3, 10, EMBED), tokens_of(3, 10, padding=6)
    slots = run(router, x, tokens)
    groups = (3, 10) if per == "sequence" else (1, 30)
    rows, real = wide(x).reshape(*groups, EMBED), np.asarray(tokens.positions >= 0).reshape(groups)
    assert slots.token.shape == (groups[0], 4, math.ceil(factor * groups[1] / 4))
    differs = False
    for group in range(groups[0]):
        taken, weights = choice_reference(router, rows[group], real[group])
        for expert in range(4):
            empty = slots.token.shape[2] - len(taken[expert])
            assert list(slots.token[group, expert]) == taken[expert] + [-1] * empty
            assert close(slots.weight[group, expert], weights[expert] + [0.0] * empty)
        differs |= choice_reference(router, rows[group], real[group], "padding")[0] != taken
    assert differs
    other = run(router, x.at[2, 4:].set(5.0), tokens)
    assert np.array_equal(other.token, slots.token) and np.array_equal(other.weight, slots.weight)


def test_expert_choice_of_equals_takes_the_earliest_and_counts_in_whole_numbers():
    router = random_module(nn.ExpertChoiceRouter, embed=EMBED, experts=10, factor=1.1, key=KEY)
    slots = run(router, jnp.ones((100, EMBED)), nn.positions_like((100,)))
    assert math.ceil(1.1 * 100 / 10) == 12
    assert np.array_equal(slots.token, np.broadcast_to(np.arange(11), (1, 10, 11)))
    all_tokens = random_module(nn.ExpertChoiceRouter, embed=EMBED, experts=4, factor=4.0, key=KEY)
    slots = run(all_tokens, normal(1, 6, EMBED), nn.positions_like((6,)))
    assert np.array_equal(np.sort(slots.token[0]), np.broadcast_to(np.arange(6), (4, 6)))
