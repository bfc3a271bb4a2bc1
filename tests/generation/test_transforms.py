"""Logit transforms against loops over one row in float64."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import LITERAL

from eqformer import generation


VOCAB, ROWS = 23, 6
DRAW = np.random.default_rng(0)
LOGITS = DRAW.normal(scale=2.0, size=(ROWS, VOCAB)).astype(np.float32)
IDS = DRAW.integers(0, VOCAB, (ROWS, 9)).astype(np.int32)
LENGTHS = np.array([9, 5, 1, 7, 2, 4], np.int32)
MAKE = dict(
    repetition_penalty=generation.RepetitionPenalty,
    temperature=generation.Temperature,
    top_k=generation.TopK,
    top_p=generation.TopP,
    min_p=generation.MinP,
)


def history(lengths=LENGTHS):
    return generation.History(jnp.asarray(IDS), jnp.asarray(lengths))


def by_hand(settings, logits=LOGITS, lengths=LENGTHS):
    rows = []
    for row, ids, length in zip(logits.astype(np.float64), IDS, lengths):
        for name, transform in LITERAL.items():
            if name in settings:
                row = transform(row, ids[:length].tolist(), settings[name])
        rows.append(row)
    return np.stack(rows)


OTHER = dict(temperature=0.8, top_k=6, top_p=0.7, min_p=0.2, repetition_penalty=1.6)  # of none of the cases
CASES = [
    ("temperature", 0.7),
    ("temperature", 0),
    ("temperature", 3),
    ("top_k", 1),
    ("top_k", 5),
    ("top_k", 100),
    ("top_p", 0.01),
    ("top_p", 0.6),
    ("top_p", 0.95),
    ("top_p", 1),
    ("min_p", 0),
    ("min_p", 0.1),
    ("min_p", 1),
    ("repetition_penalty", 1.7),
    ("repetition_penalty", 0.5),
]


@pytest.mark.parametrize("name, value", CASES)
def test_transform_is_its_formula(name, value):
    found = eqx.filter_jit(MAKE[name](value))(jnp.asarray(LOGITS), history())
    wanted = by_hand({name: value})
    np.testing.assert_array_equal(np.isinf(found), np.isinf(wanted))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert not np.allclose(found, by_hand({name: OTHER[name]}), rtol=1e-6)


def test_all_together_in_the_usual_order():
    settings: dict[str, Any] = dict(temperature=0.6, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.4)
    found = np.asarray(eqx.filter_jit(generation.sampling(**settings))(jnp.asarray(LOGITS), history()))
    wanted = by_hand(settings)
    np.testing.assert_array_equal(np.isinf(found), np.isinf(wanted))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    # Truncation before the temperature would keep other tokens.
    late = generation.chain(generation.TopP(0.8), generation.Temperature(0.6))(jnp.asarray(LOGITS), history())
    early = generation.chain(generation.Temperature(0.6), generation.TopP(0.8))(jnp.asarray(LOGITS), history())
    assert not np.array_equal(np.isinf(late), np.isinf(early))


@pytest.mark.parametrize("name, value", [("top_k", 3), ("top_p", 0.5), ("temperature", 0), ("top_k", 7)])
def test_of_equal_tokens_the_lowest_ids_stay(name, value):
    """Powers of two as probabilities, so that their sums are exact: one token of 1/4, six of 1/8."""
    logits = np.full((ROWS, VOCAB), -np.inf, np.float32)
    for row in range(ROWS):
        places = np.random.default_rng(row).permutation(VOCAB)[:7]
        logits[row, places] = np.log(0.125)
        if name != "temperature":
            logits[row, places[0]] = np.log(0.25)
    found = np.asarray(MAKE[name](value)(jnp.asarray(logits), history()))
    count = {3: 3, 0.5: 3, 0: 1, 7: 7}[value]
    for before, after in zip(logits, found):
        expected = sorted(range(VOCAB), key=lambda token: (-before[token], token))[:count]
        assert sorted(np.flatnonzero(np.isfinite(after))) == sorted(expected)


def test_padding_is_not_penalised():
    found = np.asarray(generation.RepetitionPenalty(2.0)(jnp.asarray(LOGITS), history(np.ones(ROWS, np.int32))))
    changed = found != LOGITS
    assert [np.flatnonzero(row).tolist() for row in changed] == [[first] for first in IDS[:, 0]]


def test_another_value_needs_no_other_program():
    traces = []

    @jax.jit
    def apply(transform, logits):
        traces.append(1)
        return transform(logits, history())

    for value in (0.5, 0.9):
        settings: dict[str, Any] = dict(temperature=value, top_p=value, min_p=value / 10, repetition_penalty=1 + value)
        apply(generation.sampling(**settings), jnp.asarray(LOGITS))
    assert len(traces) == 1
    apply(generation.sampling(temperature=0), jnp.asarray(LOGITS))
    assert len(traces) == 2


def test_chains_of_chains_are_flat_and_closures_are_transforms():
    def forbid(logits, history):
        return logits.at[:, 3].set(-jnp.inf)

    whole = generation.chain(generation.chain(generation.TopK(5)), forbid)
    assert whole.transforms == (generation.TopK(5), forbid)
    assert np.isinf(np.asarray(whole(jnp.asarray(LOGITS), history()))[:, 3]).all()
    assert generation.sampling().transforms == ()


@pytest.mark.parametrize(
    "name, value, rule",
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", float("nan"), "finite"),
        ("top_k", 0, "at least 1"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.1, "at most 1"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("repetition_penalty", 0, "above 0"),
    ],
)
def test_nonsense_is_refused(name, value, rule):
    with pytest.raises(ValueError, match=rule):
        MAKE[name](value)
    with pytest.raises(ValueError, match=rule):
        generation.sampling(**{name: value})
