"""Dispatch of tokens to experts: slots of each choice, results, gradients, and memory."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jaxtyping import Array, Float
from moe_cases import EMBED, EXPERTS, experts_of, kept_by, kept_of, KEY, KINDS, mixture, router_of, routing_of, TOP_K
from nn_reference import close, normal, random_module, replaced, wide

from eqformer import nn


SEQ = 6
DISPATCHES = [
    nn.Dropless(),
    nn.Capacity(0.5),  # two slots an expert and row
    nn.Capacity(1.0),
    nn.Capacity(0.5, per="batch"),
    nn.Capacity(1e-4),  # still one
    nn.Capacity(100.0),
]
CHOICES = {
    "ties": [[0, 1]] * SEQ,
    "one expert takes all": [[2, -1]] * SEQ,
    "firsts before seconds": [[1, 0], [2, 0], [0, 1], [0, 3], [3, 0], [0, 2]],
    "the last are too late": [[3, 1], [1, 3], [3, 0], [1, 2], [3, 1], [1, 3]],
    "seconds alone": [[-1, 2]] * SEQ,
    "padding in front": [[-1, -1], [-1, -1], [0, 1], [0, -1], [0, 1], [0, 1]],
    "nobody": [[-1, -1]] * SEQ,
}


class Scale(eqx.Module):
    """An expert that multiplies, by other than one's own number."""

    factor: Float[Array, ""]

    def __call__(self, x):
        return self.factor * x


SCALES = replaced(experts_of(), mlps=Scale(jnp.asarray([1.0, -2, 3, -4])))


@jax.jit
def scaled(chosen, weights, x):
    """Every capacity's output, dropped choices, and the choices that it says it keeps."""
    routing = routing_of(chosen, weights)
    every = [
        (*dispatch(SCALES, x, routing), *dispatch.keep_choices(routing.experts, EXPERTS)) for dispatch in DISPATCHES[1:]
    ]
    return [jnp.stack(part) for part in zip(*every)]


def expected_of(kept, weights, x):
    factors = np.array([1.0, -2, 3, -4, 0])
    return (factors[kept] * wide(weights)).sum(axis=-1)[..., None] * wide(x)


def draws(number):
    """Choices of distinct experts by which some experts are favoured, and -1 at times."""
    draw = np.random.default_rng(0)
    for _ in range(number):
        merit = draw.normal(size=(2, SEQ, EXPERTS)) + draw.normal(size=EXPERTS)
        chosen = np.argsort(-merit, axis=-1)[..., :TOP_K]
        yield np.where(draw.random(chosen.shape) < 0.15, -1, chosen)


def test_slots_go_to_first_choices_and_earlier_tokens():
    weights, x = jnp.abs(normal(1, 2, SEQ, TOP_K)) + 0.1, normal(2, 2, SEQ, EMBED)
    names = list(CHOICES)
    pairs = [np.array([CHOICES[one], CHOICES[other]]) for one, other in zip(names, names[1:] + names[:1])]
    differs, emptied = dict.fromkeys(("tokens", "backwards"), 0), 0
    for chosen in pairs + list(draws(20)):
        outputs, dropped, kept, lost = map(np.asarray, scaled(chosen, weights, x))
        assert np.array_equal(lost, dropped)
        for number, dispatch in enumerate(DISPATCHES[1:]):
            expected = kept_by(dispatch, chosen)
            assert np.array_equal(kept[number], expected)
            assert dropped[number] == np.sum((chosen >= 0) & (expected < 0))
            assert close(outputs[number], expected_of(expected, weights, x), 1e-6)
            is_gone = (expected < 0).all(axis=-1)
            assert not np.any(outputs[number][is_gone])  # exactly: the residual stream is as it was
            emptied += int(np.sum(is_gone & (chosen >= 0).any(axis=-1)))
            for order in differs:
                differs[order] += not np.array_equal(kept_by(dispatch, chosen, order=order), expected)
        assert dropped[-1] == 0
    assert min(differs.values()) > 20 and emptied > 20  # the controls


def test_the_reference_itself_by_hand():
    chosen = np.array(CHOICES["firsts before seconds"])
    assert kept_of(chosen, EXPERTS, 2).tolist() == [[1, -1], [2, -1], [0, 1], [0, 3], [3, -1], [-1, 2]]
    assert kept_of(chosen, EXPERTS, 1).tolist() == [[1, -1], [2, -1], [0, -1], [-1, -1], [3, -1], [-1, -1]]
    assert kept_of(np.array(CHOICES["ties"]), EXPERTS, 2).tolist() == [[0, 1]] * 2 + [[-1, -1]] * 4
    assert kept_by(nn.Capacity(0.5, per="batch"), [CHOICES["ties"]] * 2).tolist() == [
        [[0, 1]] * 3 + [[-1, -1]] * 3,
        [[-1, -1]] * 6,
    ]


def test_slots_are_counted_in_whole_numbers():
    """A factor of 1.1 for 100 choices of 10 experts makes 11 slots, where 1.1 * 100 / 10 is more than 11."""
    chosen = jnp.zeros((100, 1), jnp.int32)
    assert jax.jit(lambda chosen: nn.Capacity(1.1).keep_choices(chosen, 10))(chosen)[1] == 89


@pytest.mark.by_default("gated")
@pytest.mark.parametrize("kind", KINDS)
def test_dropless_is_the_sum_over_all_experts(kind):
    experts, x = experts_of(kind), normal(1, 2, SEQ, EMBED)
    weights = normal(2, 2, SEQ, TOP_K)
    call = jax.jit(lambda chosen: nn.Dropless()(experts, x, routing_of(chosen, weights)))
    for chosen in [np.array([one] * 2) for one in CHOICES.values()] + list(draws(3)):
        y, dropped = map(np.asarray, call(chosen))
        assert close(y, mixture(experts, x, chosen, weights)) and dropped == 0
        assert not np.any(y[(chosen < 0).all(axis=-1)])
        if np.any(chosen >= 0):
            wrong = np.where(chosen < 0, -1, (chosen + 1) % EXPERTS)
            assert not close(y, mixture(experts, x, wrong, weights), 1e-2)
    assert np.array_equal(nn.Dropless().keep_choices(jnp.asarray(chosen), EXPERTS)[0], chosen)


def dense(experts, x, chosen, weights):
    """All experts on all tokens, weighted: what routing must equal, in one product and a lot of memory."""
    gates = jnp.sum(jax.nn.one_hot(chosen, len(experts), dtype=weights.dtype) * weights[..., None], axis=-2)
    every = eqx.filter_vmap(lambda mlp: mlp(x))(experts.mlps)
    return jnp.einsum("...e,e...d->...d", gates, every)


def with_gradients(function, experts, x, weights, direction):
    """`function(experts, x, weights)` and the gradients of its sum weighted by `direction`."""
    arrays, rest = eqx.partition(experts, eqx.is_array)
    y, pull = jax.vjp(lambda arrays, *given: function(eqx.combine(arrays, rest), *given), arrays, x, weights)
    return jax.tree.leaves((y, pull(direction)))


def test_gradients_are_those_of_the_dense_sum():
    """In float64: of the tokens, the weights, and each parameter of experts that are made of maps, and of others."""
    chosen = next(iter(draws(1)))
    with jax.enable_x64(True):
        double = lambda seed, *shape: jnp.asarray(wide(normal(seed, *shape)))
        maps, others = (jax.tree.map(lambda leaf: jnp.asarray(wide(leaf)), one) for one in (experts_of(), SCALES))
        given = (double(1, 2, SEQ, EMBED), double(2, 2, SEQ, TOP_K), double(3, 2, SEQ, EMBED))
        pairs = [(maps, DISPATCHES[0]), (maps, DISPATCHES[1]), (others, DISPATCHES[1])]
        kept = [kept_by(dispatch, chosen) for _, dispatch in pairs]
        assert sum(np.array_equal(one, chosen) for one in kept) == 1

        routed = lambda dispatch: lambda experts, x, w: dispatch(experts, x, routing_of(chosen, w))[0]
        found = jax.jit(lambda *given: [with_gradients(routed(one), experts, *given) for experts, one in pairs])(*given)
        summed = lambda kept: lambda experts, x, w: dense(experts, x, kept, w)
        of_all = lambda *given: [
            with_gradients(summed(one), experts, *given) for (experts, _), one in zip(pairs, kept, strict=True)
        ]
        expected = jax.jit(of_all)(*given)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for place, pair in enumerate(zip(one, other, strict=True)):
            assert pair[0].dtype == np.float64 and close(*pair, 1e-12), (number, place)
        assert number == 0 or not close(one[-2], expected[0][-2], 1e-3)  # other choices have other gradients


def sizes_of(function, *given):
    """The sizes of all arrays of a program, as it is traced and as it is compiled."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for part in jaxprs_in_params(equation.params):
                yield from walk(part)

    traced = jax.jit(function).trace(*given)
    yield from walk(traced.jaxpr.jaxpr)
    for shape in re.findall(r"\w+\[([\d,]+)\]", str(traced.lower().compile().as_text())):
        yield int(np.prod([int(size) for size in shape.split(",")]))


def test_no_array_is_of_tokens_times_experts_times_anything():
    """Gradients included. Of tokens times experts there are scores and counts; rows are as many as choices or slots."""
    tokens, number, embed, slots = 64, 16, 8, 5
    experts = random_module(nn.Experts, lambda key: nn.GatedMLP(embed=embed, mlp=embed, key=key), number, key=KEY)
    chosen = jnp.asarray(np.random.default_rng(0).integers(0, number, (2, tokens // 2, TOP_K)))
    x, weights = normal(1, 2, tokens // 2, embed), normal(2, *chosen.shape)
    for dispatch in (nn.Dropless(), nn.Capacity(1.25)):
        routed = lambda experts, x, weights, d=dispatch: d(experts, x, routing_of(chosen, weights))[0]
        sizes = list(sizes_of(lambda *given, f=routed: with_gradients(f, *given), experts, x, weights, x))
        assert max(sizes) >= tokens * TOP_K * embed
        assert max(sizes) < 0.5 * tokens * number * min(slots, embed), dispatch
    summed = lambda experts, x, weights: dense(experts, x, chosen, weights)
    sizes = sizes_of(summed, experts, x, weights)
    assert any(size == tokens * number * embed for size in sizes)  # the control


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_capacity_is_positive(factor):
    with pytest.raises(ValueError, match=rf"Capacity\(factor={factor}\): .*give a positive and finite number"):
        nn.Capacity(factor)


def test_slots_are_counted_per_sequence_or_batch():
    with pytest.raises(ValueError, match=r"Capacity\(per='row'\): slots are counted per 'sequence' or per 'batch'"):
        nn.Capacity(1.0, per="row")


def test_padding_takes_no_slots_and_changes_nobodys():
    (chosen,), x = draws(1), normal(1, 2, SEQ, EMBED)
    weights, experts = jnp.abs(normal(2, *chosen.shape)), experts_of()

    def run(more):
        pad = lambda a, value: jnp.pad(a, ((0, 0), (0, more), (0, 0)), constant_values=value)
        routing = routing_of(pad(chosen, -1), pad(weights, 0))
        y, dropped = eqx.filter_jit(nn.Capacity(0.5))(experts, pad(x, 0), routing)
        return y[:, :SEQ], dropped

    (y, dropped), (padded, of_padded) = run(0), run(3 * SEQ)
    assert dropped == of_padded > 0 and close(y, padded)


@pytest.mark.by_default("shape0")
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_tokens(shape):
    for dispatch in DISPATCHES:
        moe = nn.MoE(router_of(), experts_of(), dispatch=dispatch)
        y, aux = eqx.filter_eval_shape(moe, jnp.zeros((*shape, EMBED)))
        assert y.shape == (*shape, EMBED) and aux.load.shape == (EXPERTS,)
