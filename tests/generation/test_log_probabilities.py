"""Log-probabilities of continuations, against log-softmax in float64 over the uncached pass."""

import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import make_model, VOCAB

from eqformer import generation


PROMPTS = [[3, 5, 7], [4], [*range(20)]]
NEW = [[1, 2, 3, 4], [9] * 15, [60]]


@pytest.fixture(scope="module")
def model():
    return make_model("learned positions", max_seq=20)


def reference(model, prompt, new):
    """The log-probability of each new id."""
    logits = np.asarray(model(jnp.asarray([prompt + new]))[0][0], np.float64)[len(prompt) - 1 : -1]
    return logits[np.arange(len(new)), new] - np.log(np.exp(logits).sum(-1))


def test_each_id_has_the_log_probability_of_the_uncached_pass(model):
    *few, last = scores = generation.log_probabilities(model, PROMPTS, NEW)
    assert [score.shape for score in scores] == [(4,), (15,), (1,)]
    for score, prompt, new in zip(few, PROMPTS, NEW):
        np.testing.assert_allclose(score, reference(model, prompt, new), rtol=1e-4)
        assert not np.allclose(score, reference(model, prompt, new[::-1][: len(new) - 1] + [0]), rtol=1e-2)
    # The last row has 20 tokens to read, as many as the model has positions: the 21st is only predicted.
    logits = np.asarray(model(jnp.asarray(PROMPTS[2:]))[0][0, -1], np.float64)
    np.testing.assert_allclose(last, logits[60] - np.log(np.exp(logits).sum()), rtol=1e-4)
    assert generation.log_probabilities(model, [], []) == []


@pytest.mark.parametrize(
    "prompts, new, message",
    [
        ([[1]], [], "1 prompts and 0 continuations; give as many of both"),
        ([[1], []], [[1], [1]], "prompt 1 has 0 ids"),
        ([[1]], [[]], "continuation 0 has 0 ids"),
        ([[1]], [[2, VOCAB]], "continuation 0 holds the id 61, but the model's 61 ids are 0 to 60"),
        ([[-1]], [[2]], "prompt 0 holds the id -1"),
        ([[1] * 15], [[2] * 7], "row 0 has 22 ids, of which the model reads 21, but it has 20 learned positions"),
    ],
)
def test_bad_input_is_refused(model, prompts, new, message):
    with pytest.raises(ValueError, match=message):
        generation.log_probabilities(model, prompts, new)
