"""Speculative decoding: greedy text equals the model's own text, and samples have the model's distribution."""

import functools
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from extending import beside
from generation_reference import KINDS, LITERAL, logits_after, make_model

from eqformer import generation, models
from eqformer.generation import _speculative
from eqformer.generation._speculative import accept_proposals


KEY = jax.random.key(7)
PROMPTS = [[5, 9, 2, 44, 17], [3], [12, 60, 0, 1, 33, 33, 8, 21, 50]]
GREEDY = generation.sampling(temperature=0)
NEW = 24


def write(model, draft=None, **options) -> Any:
    given: dict[str, Any] = dict(max_new_tokens=NEW, transforms=GREEDY, draft_tokens=3, key=KEY) | options
    return generation.generate(model, PROMPTS, draft=draft, **given)


def near(model, amount=0.1, seed=5):
    """A draft that is right now and then: the model with noise in its weights."""
    rng = np.random.default_rng(seed)
    noisy = lambda x: x * jnp.asarray(1 + amount * rng.normal(size=x.shape), x.dtype) if eqx.is_inexact_array(x) else x
    return jax.tree.map(noisy, model)


@pytest.fixture(scope="module")
def model():
    return make_model("sliding window", sharpness=2.0)


@pytest.fixture(scope="module")
def plain(model):
    return write(model, log_probabilities=True)


def test_greedy_text_is_unchanged(model, plain):
    """Rows of unequal lengths, beyond a window; also with ends and limits within a run of proposals that are taken."""
    draft = near(model)
    found = write(model, draft, log_probabilities=True)
    assert found.new_ids() == plain.new_ids()
    np.testing.assert_allclose(found.log_probabilities, plain.log_probabilities, atol=1e-4)
    told = found.draft
    assert 0.1 < told.acceptance < 0.9 and told.acceptance == told.accepted.sum() / told.proposed.sum()
    assert (told.added == NEW - 1).all() and told.tokens_per_step == told.added.sum() / told.steps.sum()
    # Each step adds what is taken and a token of the model's own, but for a limit that cuts the last one.
    assert np.isin(told.steps - (told.added - told.accepted), [0, 1]).all() and len({*told.steps.tolist()}) > 1
    for count in range(NEW - 3, NEW):
        cut = write(model, draft, log_probabilities=True, max_new_tokens=count)
        assert cut.new_ids() == [row[:count] for row in plain.new_ids()]
    for end in plain.new_ids()[0][8:12]:
        wanted = [row[: row.index(end) + 1] if end in row else row for row in plain.new_ids()]
        assert write(model, draft, log_probabilities=True, end_of_text=end).new_ids() == wanted


def test_a_model_that_is_its_own_draft_takes_every_proposal(model, plain):
    found = write(model, model, log_probabilities=True)
    assert found.new_ids() == plain.new_ids() and found.draft.acceptance == 1
    assert found.draft.steps.tolist() == [6] * 3  # 1 + 6 * 4 tokens


@pytest.mark.grid
def test_a_window_without_room_for_what_is_taken_back_is_found_out(model, plain, monkeypatch):
    monkeypatch.setattr("eqformer.nn._stack.with_rollback", lambda cache, tokens: cache)
    assert write(model, near(model)).new_ids() != plain.new_ids()


def delta_net():
    return models.build("qwen3-next-byte-500k", key=jax.random.key(0))


def of_ones_own():
    return beside("fading").hybrid(KEY, vocab=64)


@pytest.mark.grid
@pytest.mark.parametrize("make", [delta_net, of_ones_own])
def test_states_that_cannot_be_taken_back(make, monkeypatch):
    """Of recurrences, whose accepted tokens are read again."""
    model = eqx.filter_jit(make)()
    plain = write(model)
    found = write(model, near(model))
    assert found.new_ids() == plain.new_ids() and 0 < found.draft.acceptance < 1
    monkeypatch.setattr(_speculative, "can_roll_back", lambda cache: True)
    eqx.clear_caches()
    try:
        assert write(model, near(model), draft_tokens=2).new_ids() != plain.new_ids()
    except ValueError as error:
        assert "NaN" in str(error)


@pytest.mark.grid
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sliding window"])
def test_every_attention(kind):
    model = make_model(kind, sharpness=2.0)
    if "scaling" in kind:
        with pytest.raises(ValueError, match="change with each token beyond its original_length"):
            write(model, model)
        return
    found = write(model, near(model))
    assert found.new_ids() == write(model).new_ids() and 0 < found.draft.acceptance < 1


@pytest.mark.quick
def test_samples_have_the_models_distribution():
    """Of every pair of proposals, exactly: what is taken, what is sampled in its place and what follows, in float64."""
    rng = np.random.default_rng(0)
    some = lambda *shape: rng.dirichlet(np.ones(3), shape)
    wanted, offered, third = (some(), some(3)), (some(), some(3)), some(3, 3)
    wanted[0][1] = 0  # ... a token that the model never samples, and the draft does
    wanted[0][:] /= wanted[0].sum()
    found = np.zeros((3, 3))
    for one, two in itertools.product(range(3), repeat=2):
        p, q = np.stack([wanted[0], wanted[1][one], third[one, two]]), np.stack([offered[0], offered[1][one]])
        ratios = np.minimum(1, p[[0, 1], [one, two]] / q[[0, 1], [one, two]])
        shares = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])  # none, one and both are taken
        of_pattern = [1 - ratios[0], ratios[0] * (1 - ratios[1]), ratios[0] * ratios[1]]
        with jax.enable_x64(True):
            of_each = lambda x: jnp.asarray(np.broadcast_to(x, (3, *x.shape)))
            proposals = of_each(np.array([one, two], np.int32))
            counts, rests = map(np.asarray, accept_proposals(of_each(p), of_each(q), proposals, jnp.asarray(shares)))
        for chance, count, rest in zip(of_pattern, counts, rests / rests.sum(1, keepdims=True)):
            chance = chance * q[0, one] * q[1, two]
            if count == 0:
                found += chance * rest[:, None] * wanted[1]
            elif count == 1:
                found[one] += chance * rest
            else:
                found[one, two] += chance
    np.testing.assert_allclose(found, wanted[0][:, None] * wanted[1], atol=1e-15)


@pytest.mark.grid
def test_many_texts_are_distributed_as_the_models_are():
    """Through filters, which act on both models' logits; and not as the draft's are."""
    model = make_model("grouped-query", sharpness=0.5)
    settings: dict[str, Any] = dict(temperature=1.3, top_k=4, top_p=0.9)
    count, prompt, draft = 6000, [5, 9, 2], near(model, 0.3)
    given: dict[str, Any] = dict(max_new_tokens=3, transforms=generation.sampling(**settings), key=KEY)
    found: Any = generation.generate(model, [prompt] * count, draft=draft, draft_tokens=2, **given)
    assert 0.2 < found.draft.acceptance < 0.9
    pairs = [tuple(row[:2]) for row in found.new_ids()]

    def chances(model):
        """Of each pair of tokens."""
        of_row = lambda row: np.asarray(jax.nn.softmax(changed(logits_after(model, row), row)))
        changed = lambda logits, row: functools.reduce(
            lambda x, one: LITERAL[one](x, row, settings[one]), settings, logits
        )
        first = of_row(prompt)
        return {
            (one, two): first[one] * second[two]
            for one in np.flatnonzero(first)
            for second in [of_row([*prompt, int(one)])]
            for two in np.flatnonzero(second)
        }

    def is_one_of(expected):
        share = {pair: pairs.count(pair) / count for pair in {*expected, *pairs}}
        chance = np.array([expected.get(pair, 0) for pair in share])
        return np.all(np.abs(np.array([*share.values()]) - chance) <= 4 * np.sqrt(chance * (1 - chance) / count))

    assert is_one_of(chances(model)) and not is_one_of(chances(draft))


@pytest.mark.grid
def test_a_stream_is_the_text_of_generate_and_tells_of_its_draft(model):
    transforms = generation.sampling(temperature=0.9)
    given: dict[str, Any] = dict(max_new_tokens=NEW, transforms=transforms, draft=near(model), draft_tokens=3, key=KEY)
    whole: Any = generation.generate(model, [PROMPTS[0]], **given)
    stream: Any = generation.stream(model, PROMPTS[0], stride=5, **given)
    assert list(stream) == whole.new_ids()[0]
    assert stream.draft.accepted == whole.draft.accepted and stream.draft.steps == whole.draft.steps


@pytest.mark.parametrize(
    "change,options,why",
    [
        (
            lambda model: eqx.tree_at(lambda m: m.embedding.weight, model, jnp.ones((60, 32))),
            {},
            "60 ids and the model 61",
        ),
        (lambda model: model, {"draft_tokens": 0}, "at least 1 token at a time"),
        (lambda model: make_model("learned positions", max_seq=20), {}, "exceed the draft's 20 learned positions"),
    ],
)
def test_drafts_that_do_not_fit(model, change, options, why):
    with pytest.raises(ValueError, match=why):
        write(model, change(model), **options)
