"""Experts as one ensemble: indexed, run on slots and on sorted rows, named, built and run in one trace."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from moe_cases import EMBED, EXPERTS, experts_of, HIDDEN, KEY, KINDS, one_expert
from nn_reference import close, normal, random_module, wide

from eqformer import nn


ROWS = 40
SIZES = {"some": [9, 0, 20, 3], "all": [10, 10, 10, 10], "one": [0, 40, 0, 0], "nobody": [0, 0, 0, 0]}


@eqx.filter_jit
def run(experts, x, slots, sizes):
    """Sorted rows, with the gradients of the sum of their squares, and slots."""
    arrays, rest = eqx.partition(experts, eqx.is_array)

    def rows(arrays, x):
        y = eqx.combine(arrays, rest).sorted_rows(x, sizes)
        return jnp.sum(y**2), y

    return jax.grad(rows, (0, 1), has_aux=True)(arrays, x), experts.slots(slots)


def sorted_rows(experts, x, sizes):
    """Each row by its expert, and zeros behind."""
    y, ends = np.zeros(x.shape), np.cumsum(sizes)
    for row in range(ends[-1]):
        y[row] = one_expert(experts, int(np.sum(ends <= row)), x[row])
    return y


@pytest.mark.by_default("gated")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_slots_are_each_expert_s_own(kind):
    experts, x, slots = experts_of(kind), normal(1, ROWS, EMBED), normal(2, EXPERTS, 3, EMBED)
    for sizes in SIZES.values():
        (slopes, y), taken = jax.tree.map(np.asarray, run(experts, x, slots, np.array(sizes, np.int32)))
        expected = sorted_rows(experts, wide(x), sizes)
        assert close(y, expected) and not np.any(y[sum(sizes) :]) and not np.any(slopes[1][sum(sizes) :])
        for leaf in jax.tree.leaves(slopes[0]):  # biases too: rows behind change nobody's
            assert np.array_equal(leaf.reshape(EXPERTS, -1).any(axis=1), np.array(sizes) > 0)
        down = 2 * np.array([part.sum(axis=0) for part in np.split(expected, np.cumsum(sizes))[:-1]])
        assert close(slopes[0].mlps.down.bias, down, 1e-4)
    for place in range(EXPERTS):
        assert close(taken[place], one_expert(experts, place, wide(slots[place])))
        assert close(taken[place], one_expert(experts, (place + 1) % EXPERTS, wide(slots[place])), 1e-2) is False


def test_rows_of_experts_in_other_dtypes():
    experts, x, sizes = experts_of("gated"), normal(1, ROWS, EMBED), jnp.asarray(SIZES["some"])
    call = eqx.filter_jit(lambda experts, x: experts.sorted_rows(x, sizes))
    half = call(experts, x.astype("bfloat16"))
    assert half.dtype == jnp.bfloat16 and close(half, sorted_rows(experts, wide(x), SIZES["some"]), 0.05)
    with jax.enable_x64(True):
        double = call(jax.tree.map(lambda leaf: jnp.asarray(wide(leaf)), experts), jnp.asarray(wide(x)))
        assert double.dtype == jnp.float64 and close(double, sorted_rows(experts, wide(x), SIZES["some"]), 1e-14)


def test_an_expert_is_plain_indexing():
    experts, x = experts_of("gated"), normal(1, 3, EMBED)
    assert len(experts) == EXPERTS == len(list(experts))
    third = experts[2]
    assert isinstance(third, nn.GatedMLP) and third.limit == 0.7
    assert close(eqx.filter_jit(third)(x), one_expert(experts, 2, wide(x)))
    assert np.array_equal(experts[-1].up.bias, experts.mlps.up.bias[EXPERTS - 1])
    for place in (EXPERTS, -EXPERTS - 1):
        with pytest.raises(IndexError, match=rf"experts\[{place}\]: there are {EXPERTS} experts"):
            experts[place]


def test_each_expert_is_what_its_own_key_makes():
    built = eqx.filter_jit(lambda: nn.Experts(KINDS["plain"], 3, key=KEY))()
    alone = eqx.filter_jit(lambda key: KINDS["plain"](key).up.weight)
    weights = [alone(key) for key in jax.random.split(KEY, 3)]
    assert all(np.array_equal(built[place].up.weight, weight) for place, weight in enumerate(weights))
    assert not np.array_equal(weights[0], weights[1])


def test_dims_have_the_experts_in_front():
    names = nn.dims(eqx.filter_eval_shape(lambda: nn.Experts(KINDS["gated"], EXPERTS, key=KEY))).mlps
    assert (names.gate.weight, names.up.weight) == ("experts mlp embed",) * 2
    assert (names.gate.bias, names.up.bias, names.down.bias) == ("experts mlp", "experts mlp", "experts embed")
    assert names.down.weight == "experts embed mlp"


def test_one_trace_builds_and_runs_any_number():
    traces, lines = [], []

    def make(key):
        traces.append(key)
        return KINDS["gated"](key)

    for number in (2, 64):
        traces.clear()
        experts = eqx.filter_eval_shape(nn.Experts, make, number, key=KEY)
        assert len(traces) == 1 and experts.mlps.up.weight.shape == (number, HIDDEN, EMBED)
        arrays, rest = eqx.partition(experts, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        rows = (jnp.zeros((2048, EMBED)), jnp.zeros(number, jnp.int32), jnp.zeros((number, 2, EMBED)))

        def both(arrays, x, sizes, slots, rest=rest):
            experts = eqx.combine(arrays, rest)
            return experts.sorted_rows(x, sizes), experts.slots(slots)

        lines.append(len(jax.jit(both).lower(arrays, *rows).as_text().splitlines()))
    assert lines[0] == lines[1]


class Scale(eqx.Module):
    """An expert that is no map: it multiplies each channel, and works differently for `down` and up."""

    factor: Float[Array, "embed"]
    down: nn.Linear

    def __init__(self, key):
        self.factor = jnp.ones(EMBED)
        self.down = nn.Linear("embed -> mlp", embed=EMBED, mlp=EMBED, key=key)

    def __call__(self, x):
        return self.down(x) * self.factor


def test_any_module_has_slots_and_only_linears_sorted_rows():
    experts, slots = random_module(nn.Experts, Scale, 3, key=KEY), normal(1, 3, 2, EMBED)
    y = eqx.filter_jit(lambda experts, slots: experts.slots(slots))(experts, slots)
    down = wide(experts.mlps.down.weight)
    expected = np.einsum("esi,eoi,eo->eso", wide(slots), down, wide(experts.mlps.factor))
    assert close(y, expected)
    with pytest.raises(ValueError, match=r"Experts.sorted_rows: .* factor belong to no linear map .* Capacity"):
        eqx.filter_eval_shape(experts.sorted_rows, slots[0], jnp.asarray([1, 1, 0]))
    heads = lambda key: nn.Linear("embed -> heads head_dim", embed=EMBED, heads=2, head_dim=2, key=key)
    wider = eqx.filter_eval_shape(nn.Experts, heads, 3, key=KEY)
    arrays, rest = eqx.partition(wider, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    call = lambda arrays, x, sizes: eqx.combine(arrays, rest).sorted_rows(x, sizes)
    with pytest.raises(ValueError, match=r" weight belong to no linear map from one dim to one"):
        jax.eval_shape(call, arrays, slots[0], jnp.asarray([1, 1, 0]))


def test_a_mixture_has_at_least_one_expert():
    with pytest.raises(ValueError, match=r"Experts\(experts=0\): a mixture has at least one expert"):
        nn.Experts(KINDS["plain"], 0, key=KEY)
