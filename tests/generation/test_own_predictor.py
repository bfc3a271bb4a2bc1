"""Drafts by a model's own predictor leave the text unchanged, and equal drafts from the whole text read again."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import EMBED, make_model

from eqformer import generation, nn


KEY, NEW, COUNT, WIDTH = jax.random.key(7), 20, 3, 32
PROMPTS = [[5, 9, 2, 44, 17], [3], [12, 60, 0, 1, 33, 33, 8, 21, 50]]
WHERE = lambda m: (m.stacks[0].blocks.mixer.layer.output.weight, m.stacks[0].blocks.feed_forward.layer.down.weight)


def with_predictor(kind):
    """A model that hangs mostly on its last tokens, so that its predictor is right now and then."""
    weak = lambda model: eqx.tree_at(WHERE, model, replace_fn=lambda w: 0.35 * w)
    model, its = weak(make_model(kind, sharpness=2.0)), weak(make_model(kind, layers=1, seed=3))
    merge = nn.Linear("sides embed -> merged", sides=2, embed=EMBED, merged=EMBED, key=KEY)
    merge = eqx.tree_at(lambda m: m.weight, merge, jnp.stack([jnp.eye(EMBED), 0.4 * jnp.eye(EMBED)], axis=1))
    predictor = nn.Predictor(nn.RMSNorm("embed", embed=EMBED), its.norm, merge, its.stacks, model.norm)
    return dataclasses.replace(model, predictor=predictor)


@eqx.filter_jit
def _read(model, ids, count):
    places = jnp.arange(WIDTH, dtype=jnp.int32)
    return model.encode(ids[None], nn.Tokens(jnp.where(places < count, places, -1)[None]))[0][0]


@eqx.filter_jit
def _predict(model, ids, hidden, count):
    """The last of `count` vectors of the predictor, which reads all from the second token on, and the likeliest id."""
    places = jnp.arange(WIDTH, dtype=jnp.int32)
    tokens = nn.Tokens(jnp.where((places > 0) & (places < count), places, -1)[None])
    last = model.predict(ids[None], hidden[None], tokens, None)[0][0, count - 1]
    return last, jnp.argmax(model.unembed(last))


def proposals(model, row):
    """What follows a row by the predictor, without a cache; each vector stands where the next token's embedding is."""
    ids, count = np.zeros(WIDTH, np.int32), len(row)
    ids[:count] = row
    hidden = np.roll(np.asarray(_read(model, jnp.asarray(ids), jnp.asarray(count))), 1, axis=0)
    for number in range(COUNT):
        count = len(row) + number
        last, chosen = _predict(model, jnp.asarray(ids), jnp.asarray(hidden), jnp.asarray(count))
        ids[count], hidden[count] = chosen, last
    return ids[len(row) : len(row) + COUNT].tolist()


def counted(model, text, length):
    """Steps and accepted tokens of a text whose first token is sampled, where each step's proposals are made afresh."""
    steps = accepted = 0
    length += 1
    while length < len(text):
        agree = [one == other for one, other in zip(proposals(model, text[:length]), text[length:])]
        taken = agree.index(False) if False in agree else len(agree)
        steps, accepted, length = steps + 1, accepted + taken, length + taken + 1
    return steps, accepted


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["grouped-query", "sliding window"])
def test_greedy_text_is_unchanged_and_proposals_are_those_without_a_cache(kind):
    model = with_predictor(kind)
    given: dict[str, Any] = dict(max_new_tokens=NEW, transforms=generation.sampling(temperature=0), key=KEY)
    found: Any = generation.generate(model, PROMPTS, draft="mtp", draft_tokens=COUNT, **given)
    plain = generation.generate(model, PROMPTS, **given)
    assert found.new_ids() == plain.new_ids()
    want = [counted(model, [*row, *new], len(row)) for row, new in zip(PROMPTS, plain.new_ids())]
    assert [*zip(found.draft.steps.tolist(), found.draft.accepted.tolist())] == want
    assert 0.1 < found.draft.acceptance < 0.9


def test_a_model_without_a_predictor_has_no_draft_of_its_own():
    given: dict[str, Any] = dict(max_new_tokens=2, key=KEY)
    for model, draft in ((make_model(), "mtp"), (with_predictor("grouped-query"), "eagle")):
        with pytest.raises(ValueError, match=f'draft={draft!r}.*"mtp" for the predictor of a model.*predictor=True'):
            generation.generate(model, PROMPTS, draft=draft, **given)
