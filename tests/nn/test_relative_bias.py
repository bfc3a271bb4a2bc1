"""Relative position biases: ranges of distances by their formula, and attention against loops in float64."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import attend, close, linear, normal, random_module, wide

from eqformer import kernels, nn
from eqformer.nn.attention._scores import distance_ranges


KEY = jax.random.key(0)
PLACES = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 0, 1, -1]])
SEGMENTS = np.array([[0] * 8, [0] * 5 + [1] * 3])


def range_of(distance, ranges, farthest, both_ways):
    """The number of a range as the paper's code has it, with a logarithm in float64; `distance` is to keys before."""
    first = 0
    if both_ways:
        ranges //= 2
        first = ranges * (distance < 0)
    distance = abs(distance) if both_ways else max(distance, 0)
    exact = ranges // 2
    if distance < exact:
        return first + distance
    grown = math.log(distance / exact) / math.log(farthest / exact) * (ranges - exact)
    return first + min(exact + math.floor(grown + 1e-9), ranges - 1)


@pytest.mark.parametrize(
    "ranges, farthest, both_ways", [(32, 128, True), (32, 128, False), (7, 9, True), (8, 5, False)]
)
def test_distances_fall_into_the_papers_ranges(ranges, farthest, both_ways):
    module = random_module(nn.RelativeBias, ranges=ranges, heads=3, farthest=farthest, both_ways=both_ways, key=KEY)
    last = np.arange(-150, 151)
    found = module(nn.Tokens(jnp.asarray([0])), nn.Tokens(jnp.asarray(last)))[:, 0]
    table = np.asarray(module.weight)
    want = [int(range_of(-place, ranges, farthest, both_ways)) for place in last]
    assert np.array_equal(found, table[np.array(want)].T)
    other = [int(range_of(-place, ranges, farthest + 1, both_ways)) for place in last]
    assert other == want or not np.array_equal(found, table[np.array(other)].T)


def test_a_boundary_is_where_whole_numbers_say():
    """Of the published tables: 8 ranges of one distance each, then each twice as far every two."""
    starts = [int(np.argmax(distance_ranges(16, 128) == number)) for number in range(16)]
    assert starts == [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]


@pytest.mark.parametrize("both_ways", [False, True])
def test_attention_adds_it_to_its_scores(both_ways):
    bias = random_module(nn.RelativeBias, ranges=6, heads=4, farthest=5, both_ways=both_ways, key=KEY)
    mask = nn.full() if both_ways else nn.causal()
    options = {"embed": 6, "heads": 4, "kv_heads": 2, "head_dim": 3, "mask": mask, "scores": nn.Scores(1.0, bias=True)}
    module, x = random_module(nn.Attention, **options, key=KEY), normal(1, 2, 8, 6)
    tokens = nn.Tokens(jnp.asarray(PLACES), jnp.asarray(SEGMENTS))
    visible = np.asarray(mask(tokens, tokens))

    def call(bias):
        return module(x, eqx.tree_at(lambda t: t.score_bias, tokens, bias, is_leaf=lambda x: x is None))[0]

    ranges = np.vectorize(lambda d: range_of(d, 6, 5, both_ways))(PLACES[:, :, None] - PLACES[:, None, :])
    is_there = PLACES >= 0

    def by_loops(table):
        query, key, value = (linear(wide(x), part) for part in (module.query, module.key, module.value))
        return linear(attend(query, key, value, visible, 1.0, bias=np.moveaxis(table[ranges], -1, 1)), module.output)

    want = by_loops(wide(bias.weight))
    weights = wide(normal(4, 2, 8, 6)) * is_there[..., None]

    @eqx.filter_jit
    def found_and_gradient(bias):
        y, back = eqx.filter_vjp(call, bias)
        return y, back(jnp.asarray(weights, jnp.float32))[0].weight

    found, gradient = map(np.asarray, found_and_gradient(bias))
    assert close(found[is_there], want[is_there]) and not close(
        found[is_there], by_loops(0 * wide(bias.weight))[is_there]
    )
    # The table's gradient is the slope along a random direction.
    toward = np.random.default_rng(3).normal(size=bias.weight.shape)
    slope = lambda step: np.sum((by_loops(wide(bias.weight) + step * toward) - want) * weights) / step
    assert close(np.sum(wide(gradient) * toward), (slope(1e-5) + slope(-1e-5)) / 2)
    assert not close(np.sum(wide(gradient)[::-1] * toward), slope(1e-5), 1e-2)


def test_rows_known_to_be_whole_are_as_others():
    bias = random_module(nn.RelativeBias, ranges=6, heads=2, farthest=9, key=KEY)
    known = nn.positions_like((2, 12))
    other = nn.Tokens(known.positions)
    assert bias(known, known).shape == (2, 12, 12)  # one for all rows
    assert np.array_equal(np.broadcast_to(bias(known, known), (2, 2, 12, 12)), bias(other, other))


def test_what_has_no_place_for_a_bias_is_refused():
    module = random_module(nn.Attention, embed=6, heads=2, head_dim=3, scores=nn.Scores(bias=True), key=KEY)
    with pytest.raises(ValueError, match=r"Scores\(bias=True\): the tokens have no score_bias; build"):
        module(normal(0, 2, 4, 6))
    with pytest.raises(ValueError, match=r"model has bias, which this core does not compute; pass kernels.ATTENTION"):
        nn.with_execution(module, core=kernels.BlockwiseAttention())
    nn.with_execution(module, core=kernels.ReferenceAttention())
    with pytest.raises(ValueError, match=r"RelativeBias\(ranges=4, farthest=1, both_ways=True\).*farthest above 1"):
        random_module(nn.RelativeBias, ranges=4, heads=2, farthest=1, both_ways=True, key=KEY)
