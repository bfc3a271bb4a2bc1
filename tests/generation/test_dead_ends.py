"""Errors for users' logit transforms that allow no token, or that return something else than logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import make_model

from eqformer import generation
from eqformer.generation import _generate


KEY = jax.random.key(7)
GREEDY = generation.sampling(temperature=0)


@pytest.fixture(scope="module")
def model():
    return make_model(sharpness=2.0)


def until_six(logits, history):
    """Nothing may follow six tokens, as where a grammar has no rule left."""
    return jnp.where((history.lengths < 6)[:, None], logits, -jnp.inf)


def with_nan(logits, history):
    """Something went wrong in the second row alone."""
    return logits.at[1, 3].set(jnp.nan)


@pytest.mark.grid
@pytest.mark.parametrize("transforms", [(until_six,), (GREEDY, until_six), (with_nan,)])
def test_a_row_without_a_token_is_an_error(model, transforms, monkeypatch):
    given = {"max_new_tokens": 5, "transforms": transforms, "key": KEY}
    with pytest.raises(ValueError, match="transforms left a row no token to sample"):
        generation.generate(model, [[5, 9], [3, 4]], **given)
    monkeypatch.setattr(_generate, "check_logits", lambda are_numbers, have_candidates: None)
    assert generation.generate(model, [[5, 9], [3, 4]], **given).ids.min() == 0  # an id that nothing allowed


@pytest.mark.grid
def test_rows_that_end_before_have_no_dead_end(model):
    text = generation.generate(model, [[5, 9], [3, 4]], max_new_tokens=4, transforms=until_six, key=KEY)
    assert list(map(len, text.new_ids())) == [4, 4]


@pytest.mark.grid
def test_a_stream_ends_in_the_error_behind_its_ids(model):
    text = generation.generate(model, [[5, 9]], max_new_tokens=4, transforms=until_six, key=KEY)
    found = []
    with pytest.raises(ValueError, match="transforms left a row no token to sample"):
        for token in generation.stream(model, [5, 9], max_new_tokens=9, transforms=until_six, key=KEY, stride=4):
            found.append(token)
    assert found == text.new_ids()[0]


@pytest.mark.grid
def test_a_dead_end_behind_a_draft_is_an_error(model):
    given = {"transforms": (GREEDY, until_six), "key": KEY, "draft": model, "draft_tokens": 3}
    assert generation.generate(model, [[5, 9]], max_new_tokens=4, **given).lengths.tolist() == [6]
    with pytest.raises(ValueError, match="transforms left a row no token to sample"):
        generation.generate(model, [[5, 9]], max_new_tokens=5, **given)


@pytest.mark.parametrize("change, made", [(lambda x: x[:, :10], "float32.1, 10."), (jnp.argsort, "int32.1, 61.")])
def test_what_are_no_logits_is_named(model, change, made):
    def changed(logits, history):
        return change(logits)

    with pytest.raises(ValueError, match=rf"changed\(logits, history\): .* from float32.1, 61. it made {made}"):
        generation.generate(model, [[5, 9]], max_new_tokens=2, transforms=changed, key=KEY)
    chain, history = generation.chain(lambda logits, history: logits), generation.History
    logits = jnp.ones((1, 61))
    assert np.array_equal(chain(logits, history(jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32))), logits)


def test_no_rows_have_no_logits(model):
    logits, _ = model(jnp.zeros((0, 5), jnp.int32))
    assert logits.shape == (0, 5, 61)
    assert model(jnp.zeros((2, 5), jnp.int32))[0].shape == (2, 5, 61)
