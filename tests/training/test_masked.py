"""Masked-token batches: the chosen tokens, their replacements, and the loss against float64."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import Batch, training


ROWS, SEQ, VOCAB, MASK, SPARED = 32, 256, 50, 49, (0, 1)
KEY = jax.random.key(7)
IDS = np.random.default_rng(0).integers(0, VOCAB - 1, (ROWS, SEQ)).astype(np.int32)
PLACES = np.where(np.arange(SEQ) < SEQ - 16, np.arange(SEQ), -1) + np.zeros((ROWS, 1), np.int32)
masked = eqx.filter_jit(
    lambda batch, key: training.mask_tokens(batch, key, mask_id=MASK, vocab=VOCAB, special_ids=SPARED)
)


def batch_of(rows):
    ones = np.ones((len(rows), SEQ), np.float32)
    places = PLACES[rows].astype(np.int32)
    return Batch(IDS[rows], np.roll(IDS[rows], -1, 1), ones, rows.astype(np.int32), places)


@pytest.fixture(scope="module")
def found():
    return masked(batch_of(np.arange(ROWS)), KEY)


def test_three_tenths_are_chosen_of_which_eight_in_ten_are_hidden(found):
    chosen, told = np.asarray(found.weights) == 1, np.asarray(found.ids)
    free = (PLACES >= 0) & ~np.isin(IDS, SPARED)
    assert not chosen[~free].any() and np.array_equal(told[~chosen], IDS[~chosen])
    assert np.array_equal(found.targets, IDS) and set(np.unique(found.weights)) == {0, 1}
    count = chosen.sum()
    assert abs(count / free.sum() - 0.3) < 0.02  # four deviations
    hidden, same = (told == MASK) & chosen, (told == IDS) & chosen
    other = chosen & ~hidden & ~same
    parts = [part.sum() / count for part in (hidden, other, same)]
    assert np.allclose(parts, [0.8 + 0.1 / VOCAB, 0.1 * (1 - 2 / VOCAB), 0.1 + 0.1 / VOCAB], atol=0.035)
    assert len(np.unique(told[other])) == VOCAB - 1  # any id but the mask


def test_a_token_is_drawn_by_its_example_and_its_place(found):
    rows = np.array([5, 2, 30] + [0] * (ROWS - 3))
    again, other = masked(batch_of(rows), KEY), masked(batch_of(rows), jax.random.key(8))
    assert np.array_equal(again.ids[:3], found.ids[rows[:3]]) and np.array_equal(again.weights[0], found.weights[5])
    assert not np.array_equal(other.weights, again.weights)
    assert not np.array_equal(found.weights[0], found.weights[1])


class Table(eqx.Module):
    """A model that knows a token's own id alone."""

    table: jax.Array

    def encode(self, ids, tokens):
        return self.table[ids], None, ()

    def unembed(self, hidden):
        return hidden @ self.table.T


def test_its_loss_is_that_of_the_chosen_in_float64(found):
    table = np.random.default_rng(1).normal(size=(VOCAB, 8))
    loss = eqx.filter_jit(lambda batch: training.next_token_loss(Table(jnp.asarray(table, jnp.float32)), batch))
    total, count = loss(found)
    logits = table[np.asarray(found.ids)] @ table.T
    nats = np.log(np.exp(logits).sum(axis=-1)) - np.take_along_axis(logits, IDS[..., None], axis=-1)[..., 0]
    chosen = np.asarray(found.weights) == 1
    assert (
        abs(total - nats[chosen].sum()) < 1e-5 * nats[chosen].sum()
        and float(training.loss_count(count)) == chosen.sum()
    )
    of_next = dataclasses.replace(found, targets=np.roll(IDS, -1, 1))
    assert abs(loss(of_next)[0] - nats[chosen].sum()) > 1


def test_bad_numbers_are_refused():
    batch = batch_of(np.arange(2))
    shares = {"mask_replace_prob": 0.8, "random_replace_prob": 0.3}
    wrong: list[dict[str, Any]] = [
        {"mlm_probability": 0.0},
        {"mlm_probability": 1.5},
        shares,
        {"random_replace_prob": -0.1},
    ]
    for numbers in wrong:
        with pytest.raises(ValueError, match=r"mask_tokens\(mlm_probability=.*add up to at most 1"):
            training.mask_tokens(batch, KEY, mask_id=MASK, vocab=VOCAB, **numbers)
    with pytest.raises(ValueError, match=r"mask_tokens\(mask_id=50, vocab=50\): ids are from 0 to 49"):
        training.mask_tokens(batch, KEY, mask_id=50, vocab=VOCAB)
