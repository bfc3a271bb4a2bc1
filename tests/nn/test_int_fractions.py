"""Fractions of counts whose products exceed 32 bits (shares, slots, guards), against Python's integers."""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_cases import KEY

from eqformer import nn
from eqformer.nn.experts._grouped_blocks import GroupSlots
from eqformer.nn.experts._routing import check_indices, even_share, INT32_MAX


FACTORS = ("1e-4", "0.01", "0.5", "0.75", "1", "1.1", "1.25", "1.333", "1.5", "2", "3.9", "99.999", "1e6")
PARTS = (1, 2, 3, 7, 8, 60, 64, 256, 512, 1000)


@pytest.mark.grid
def test_a_share_is_exact_for_any_count():
    """The factor as it is written, to the thousandth; numbers from 0 to the last that an index can be."""
    numbers = np.unique(
        np.concatenate([np.arange(130), 2 ** np.arange(31), 2 ** np.arange(32) - 1, [2_000_003, 10**9]])
    )
    numbers = np.unique(np.concatenate([numbers, np.random.default_rng(0).integers(0, INT32_MAX, 200)]))
    on_device, wraps = jnp.asarray(numbers, jnp.int32), 0
    shares = jax.jit(lambda numbers: [even_share(float(f), numbers, parts) for f in FACTORS for parts in PARTS])
    found = iter(shares(on_device))
    for factor in FACTORS:
        for parts in PARTS:
            share = Fraction(factor).limit_denominator(1000) / parts
            expected = [min(int(number), math.ceil(share * int(number))) for number in numbers]
            assert np.asarray(next(found)).tolist() == expected, (factor, parts)
            assert [even_share(float(factor), int(number), parts) for number in numbers] == expected
            in_int32 = -(
                -np.int32(min(share.numerator, INT32_MAX)) * numbers.astype(np.int32) // np.int32(share.denominator)
            )
            wraps += not np.array_equal(np.minimum(in_int32, numbers), expected)
    assert wraps > len(FACTORS)  # the control: the product itself leaves 32 bits


@pytest.mark.grid
def test_two_million_choices_have_their_slots():
    """They had one an expert; from shapes alone but for the choices."""
    chosen = jnp.tile(jnp.arange(8, dtype=jnp.int32), 250_000)[:, None]
    choices, dropped = jax.jit(lambda chosen: nn.Capacity(1.333).keep_choices(chosen, 8))(chosen)
    assert dropped == 0 and np.array_equal(choices, chosen)
    assert nn.dispatch.slots_per_expert(1.333, 2_000_000, 8) == 333_250


def test_more_places_than_indices_are_refused():
    for shape, call in (
        ((2**30, 2), lambda chosen: nn.Capacity(1.0).keep_choices(chosen, 8)),
        ((2**29, 4), lambda chosen: nn.dispatch.sort_by_expert(chosen, 8)),
        ((2**20, 1), lambda chosen: nn.dispatch.slot_of_choice(chosen, 2**12, 2**20)),
    ):
        with pytest.raises(ValueError, match=r"a dispatch of .* indices of 32 bits reach 2,147,483,647; run fewer"):
            jax.eval_shape(call, jax.ShapeDtypeStruct(shape, jnp.int32))
    check_indices("a call", "places", INT32_MAX)


def test_a_balance_counts_the_choices_of_many_devices():
    """A batch of a thousand million tokens that take four experts each: their product leaves 32 bits."""
    router = nn.TopKRouter(embed=4, experts=8, top_k=4, key=KEY)
    x = jax.random.normal(KEY, (1, 8, 4))
    tokens = nn.positions_like((1, 8))
    loss = lambda total: nn.LoadBalance(1.0)(router(x, tokens), tokens, total)
    many = jax.jit(loss, static_argnums=0)(lambda count: count * 2**27)
    assert np.isclose(many, jax.jit(loss, static_argnums=0)(lambda count: count), rtol=1e-6)


def test_slots_are_chosen_for_any_number_of_rows():
    """Of 800 million rows all find a slot; four times their number leaves 32 bits."""
    use = lambda rows: GroupSlots(jnp.full(8, rows // 8, jnp.int32), rows).are_used

    def of(rows):
        program = jax.make_jaxpr(lambda sizes: GroupSlots(sizes, rows).are_used)(jnp.zeros(8, jnp.int32))
        (compared,) = [e for e in program.eqns if e.primitive.name == "ge" and e.outvars[0] is program.jaxpr.outvars[0]]
        literal: Any = compared.invars[1]
        return literal.val

    assert of(800_000_000) == 600_000_000 and bool(use(8_000))
