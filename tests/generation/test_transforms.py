"""Logit transforms against loops over one row in float64."""

from fractions import Fraction
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import LITERAL

from eqformer import generation
from eqformer.generation import _decode as decode
from eqformer.generation._transforms import likeliest_ids


VOCAB, ROWS = 23, 6
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(scale=2.0, size=(ROWS, VOCAB)).astype(np.float32)
IDS = RNG.integers(0, VOCAB, (ROWS, 9)).astype(np.int32)
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
    parts = generation.TopP(0.8), generation.Temperature(0.6)
    late, early = (
        eqx.filter_jit(generation.chain(*order))(jnp.asarray(LOGITS), history()) for order in (parts, parts[::-1])
    )
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
    found = np.asarray(eqx.filter_jit(MAKE[name](value))(jnp.asarray(logits), history()))
    count = {3: 3, 0.5: 3, 0: 1, 7: 7}[value]
    for before, after in zip(logits, found):
        expected = sorted(range(VOCAB), key=lambda token: (-before[token], token))[:count]
        assert sorted(np.flatnonzero(np.isfinite(after))) == sorted(expected)


def test_the_likeliest_id_is_that_of_argmax():
    rows = [[1, 3, 3, 2], [-np.inf] * 4, [np.inf, np.inf, 0, 1], [5, np.nan, 9, np.nan], [-np.inf, -3, -np.inf, -3]]
    logits = np.asarray(rows, np.float32)
    found = np.asarray(likeliest_ids(jnp.asarray(logits)))
    assert np.array_equal(found, np.argmax(logits, axis=1)) and found.dtype == np.int32
    assert not np.array_equal(3 - found, np.argmax(logits[:, ::-1], axis=1))  # of equal logits, the lowest id


def test_a_sum_that_ties_with_its_threshold_reaches_it():
    """Rounding decides nothing where fractions meet a threshold exactly, and a threshold just beyond counts."""
    shares = [[0.5, 0.3, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1], [0.7, 0.1, 0.1, 0.1], *([1 / n] * n for n in (3, 7, 10, 100))]

    apply = eqx.filter_jit(lambda transform, logits: transform(logits, history()))

    def kept(make, at, logits):
        padded = np.pad(logits, (0, 100 - len(logits)), constant_values=-np.inf)  # one program for all rows
        return int(np.isfinite(np.asarray(apply(make(at), padded[None]))).sum())

    for row in shares:
        fractions = [Fraction(share).limit_denominator(1000) for share in row]
        logits = np.log(row).astype(np.float32)
        for dtype in (np.float32, jnp.bfloat16) if len(set(row)) == 1 else (np.float32,):  # equal logits are exact
            for count in range(1, len(row)):
                p = float(sum(fractions[:count]))
                assert kept(generation.TopP, p, logits.astype(dtype)) == count, (row, p, dtype)
                assert kept(generation.TopP, min(p + 1e-4, 1), logits.astype(dtype)) == count + 1, (row, p, dtype)
        for fraction in set(fractions):
            least, wanted = float(fraction / fractions[0]), sum(one >= fraction for one in fractions)
            assert kept(generation.MinP, least, logits) == wanted, (row, least)
            fewer = wanted - sum(one == fraction for one in fractions) if least < 1 else wanted
            assert kept(generation.MinP, min(least + 1e-4, 1), logits) == fewer, (row, least)
    below = np.array([0, -2, -2.25], jnp.bfloat16)
    assert [kept(generation.MinP, float(np.exp(at)), below) for at in (-2.0, -2.25, -1.99)] == [2, 3, 1]


def test_padding_is_not_penalised():
    found = np.asarray(
        eqx.filter_jit(generation.RepetitionPenalty(2.0))(jnp.asarray(LOGITS), history(np.ones(ROWS, np.int32)))
    )
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


EXTREMES: dict[str, Any] = dict(
    repetition_penalty=(5e-324, 1e-38, 1e-3, 1e3, 1e38, 1e300),
    temperature=(0, 5e-324, 1e-46, 1e-38, 1e-30, 1e-3, 1e3, 1e38, 1e300),
    top_k=(1, 2, 10**9),
    top_p=(5e-324, 1e-38, 1e-9, 0.5, 1 - 1e-9, 1),
    min_p=(0, 5e-324, 1e-38, 1e-9, 1 - 1e-9, 1),
)


def unusual_logits():
    """Rows of usual and of huge size, all negative, masked but for one or two tokens, and with equal ones."""
    rng = np.random.default_rng(1)
    rows = [scale * rng.normal(size=VOCAB) for scale in (2, 2, 1e-3, 300, 1e4)]
    rows += [-3 - np.abs(rows[0]), 5 + np.abs(rows[1]), np.where(np.arange(VOCAB) % 7, rows[0], -np.inf)]
    rows += [np.where(np.arange(VOCAB) == 5, row, -np.inf) for row in rows[:2]] + [np.round(rows[1])]
    return np.array(rows)


def probabilities(logits):
    """Of each row, in as wide a range as NumPy has."""
    wide = np.asarray(logits).astype(np.longdouble)
    weights = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float64)


def history_of(rows):
    """Every second row holds all tokens, the others some."""
    ids = np.tile(np.arange(VOCAB, dtype=np.int32), (rows, 1))
    return generation.History(jnp.asarray(ids), jnp.asarray(np.where(np.arange(rows) % 2, VOCAB, 6), jnp.int32))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_settings_have_their_limits(dtype):
    """Alone, and amid usual ones, against the formulas in a range that has no end here."""
    logits = jnp.asarray(unusual_logits(), dtype)
    usual: dict[str, Any] = dict(repetition_penalty=1.3, temperature=0.8, top_k=9, top_p=0.9, min_p=0.02)
    past = history_of(len(logits))
    for name, values in EXTREMES.items():
        for value in values:
            for settings in ({name: value}, usual | {name: value}):
                found = np.asarray(eqx.filter_jit(generation.sampling(**settings))(logits, past))
                wanted = []
                for row, ids, length in zip(np.asarray(logits).astype(np.longdouble), past.ids, past.lengths):
                    for part, transform in LITERAL.items():
                        if part in settings:
                            row = transform(row, np.asarray(ids)[:length].tolist(), settings[part])
                    wanted.append(row)
                assert found.dtype == np.float32 and not np.any(np.isnan(found)) and np.all(found < np.inf), settings
                # What a large penalty or temperature has made equal may stand for each other.
                compared = (lambda x: np.sort(x, axis=-1)) if value > 1e30 else np.asarray
                one, other = compared(probabilities(found)), compared(probabilities(np.array(wanted)))
                np.testing.assert_allclose(one, other, atol=2e-4, err_msg=str(settings))


def test_no_extremes_together_give_nan():
    """Sampled among all settings at once, one after another in any order."""
    rng, logits = np.random.default_rng(2), jnp.asarray(unusual_logits(), jnp.float32)
    past = history_of(len(logits))
    apply = eqx.filter_jit(lambda transform, logits: transform(logits, past))
    for _ in range(40):
        parts = [MAKE[name](values[rng.integers(len(values))]) for name, values in EXTREMES.items()]
        found = logits
        for place in rng.permutation(len(parts)):
            found = apply(parts[place], found)
            found_by_row = np.asarray(found)
            assert not np.any(np.isnan(found_by_row)) and np.all(found_by_row.max(axis=-1) > -np.inf), parts
            assert np.all(np.isfinite(found_by_row.max(axis=-1))), parts


def test_the_coldest_temperature_is_greedy():
    """What is sampled, noise included."""
    samples = lambda temperature: decode.SamplingState(
        generation.sampling(temperature=temperature),
        jnp.broadcast_to(jax.random.key(0), (ROWS,)),
        jnp.arange(ROWS),
        jnp.full((ROWS, 1), -1),
    )

    @eqx.filter_jit
    def sample(logits, history, state):
        return decode.sample_ids(state.transforms(logits, history), history.lengths, state)

    likeliest = np.argmax(LOGITS, axis=-1)
    for temperature in (0, 5e-324, 1e-46, 1e-38, 1e-20):
        assert np.array_equal(sample(jnp.asarray(LOGITS), history(), samples(temperature)), likeliest), temperature
    assert not np.array_equal(sample(jnp.asarray(LOGITS), history(), samples(5.0)), likeliest)
