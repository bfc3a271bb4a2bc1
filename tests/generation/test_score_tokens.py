"""Scores of continuations, against log-softmax in float64 over the uncached pass."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import KINDS, make_model, VOCAB

from eqformer import generation


PROMPTS = [[3, 5, 7], [4], [*range(20)]]
NEW = [[1, 2, 3, 4], [9] * 15, [60]]


@pytest.fixture(scope="module")
def model():
    return make_model("learned positions", max_seq=20)


@eqx.filter_jit
def forward(model, ids):
    return model(ids)[0][0]


def reference(model, prompt, new):
    """The log-probability of each new id."""
    ids = prompt + new
    padded = ids + [0] * (20 - len(ids))  # Causal attention: padding changes no logits before it.
    logits = np.asarray(forward(model, jnp.asarray([padded])), np.float64)[len(prompt) - 1 : len(ids) - 1]
    return logits[np.arange(len(new)), new] - np.log(np.exp(logits).sum(-1))


def test_each_id_has_the_log_probability_of_the_uncached_pass(model):
    *few, last = scores = [row.log_probabilities for row in generation.score_tokens(model, PROMPTS, NEW)]
    assert [score.shape for score in scores] == [(4,), (15,), (1,)]
    for score, prompt, new in zip(few, PROMPTS, NEW):
        np.testing.assert_allclose(score, reference(model, prompt, new), rtol=1e-4)
        assert not np.allclose(score, reference(model, prompt, new[::-1][: len(new) - 1] + [0]), rtol=1e-2)
    # The last row has 20 tokens to read, as many as the model has positions: the 21st is only predicted.
    logits = np.asarray(forward(model, jnp.asarray(PROMPTS[2:]))[-1], np.float64)
    np.testing.assert_allclose(last, logits[60] - np.log(np.exp(logits).sum()), rtol=1e-4)
    assert generation.score_tokens(model, [], []) == []


def test_greedy_ids_have_the_largest_logit(model):
    ids = PROMPTS[0] + NEW[0]
    logits = np.asarray(forward(model, jnp.asarray([ids + [0] * (20 - len(ids))])))[len(PROMPTS[0]) - 1 : len(ids) - 1]
    best = logits.argmax(-1).tolist()
    mixed = [best[0], (best[1] + 1) % VOCAB]
    (score,) = generation.score_tokens(model, [PROMPTS[0]], [mixed])
    assert score.is_greedy.tolist()[:2] == [True, False]


SHARED = [[*range(30)]] * 3 + [[7] * 21] + [[*range(30)]] + [[7] * 21] * 4
ANSWERS = [[1], [2, 3, 4], [5, 6], [7], [8] * 5, [1, 1], [2], [3, 4], [5, 9]]


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
def test_shared_prompts_are_read_once_with_the_same_scores(kind, monkeypatch):
    model, read = make_model(kind), []
    encode = type(model).encode

    def encode_and_note(self, ids, *rest):
        read.append(len(ids))
        return encode(self, ids, *rest)

    monkeypatch.setattr(type(model), "encode", encode_and_note)
    together = generation.score_tokens(model, SHARED, ANSWERS)
    # Rows are read one by one if frequencies depend on a row's length.
    assert read == ([9] if "scaling" in kind else [2, 9])
    apart = [generation.score_tokens(model, [prompt], [new])[0] for prompt, new in zip(SHARED, ANSWERS)]
    for shared, alone in zip(together, apart, strict=True):
        np.testing.assert_allclose(shared.log_probabilities, alone.log_probabilities, rtol=1e-4, atol=1e-5)
        assert (shared.is_greedy == alone.is_greedy).all()
    others = generation.score_tokens(model, SHARED[::-1], ANSWERS)
    assert not np.allclose(others[1].log_probabilities, apart[1].log_probabilities, rtol=1e-2)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.grid), 4])
def test_batches_have_the_scores_of_all_rows_at_once(model, size):
    prompts, new = [prompt[:14] for prompt in SHARED], ANSWERS
    whole, done = generation.score_tokens(model, prompts, new), []
    rows = generation.score_tokens(model, prompts, new, batch_size=size, progress=lambda *row: done.append(row))
    for score, expected in zip(rows, whole, strict=True):
        np.testing.assert_allclose(score.log_probabilities, expected.log_probabilities, rtol=1e-4, atol=1e-5)
    assert done[-1] == (9, 9)


def test_prompts_before_single_ids_are_read_alone_and_numbers_are_checked(model):
    prompts, new = [prompt[:14] for prompt in SHARED], ANSWERS
    single = [[1]] * 9  # Nothing is read after the prompts.
    for score, expected in zip(
        generation.score_tokens(model, prompts, single), generation.score_tokens(model, prompts[:1], single[:1]) * 3
    ):
        np.testing.assert_allclose(score.log_probabilities, expected.log_probabilities, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="a batch must have at least 1 row"):
        generation.score_tokens(model, prompts, new, batch_size=0)
    with pytest.raises(ValueError, match=r"alternatives=-1\): at least 0 likely ids"):
        generation.score_tokens(model, prompts, new, alternatives=-1)


@pytest.mark.parametrize(
    "prompts, new, message",
    [
        ([[1]], [], "1 prompts and 0 continuations; give as many of both"),
        ([[1], []], [[1], [1]], "prompt 1 has 0 ids"),
        ([[1]], [[]], "continuation 0 has 0 ids"),
        ([[1]], [[2, VOCAB]], "continuation 0 holds the id 61, but the model's 61 ids are 0 to 60"),
        ([[-1]], [[2]], "prompt 0 holds the id -1"),
        ([[1] * 15], [[2] * 7], "row 0 has 22 ids and the model reads all but the last, but the model has only 20"),
    ],
)
def test_bad_input_is_refused(model, prompts, new, message):
    with pytest.raises(ValueError, match=message):
        generation.score_tokens(model, prompts, new)
