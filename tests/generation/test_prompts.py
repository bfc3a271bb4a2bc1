"""Bad prompts and settings raise one error each, with the rule and both values, before anything is compiled."""

import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_reference import make_model

from eqformer import generation
from eqformer.generation import _prompts


KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def model():
    return make_model("learned positions", max_seq=20)


@pytest.mark.parametrize(
    "prompts, given, message",
    [
        ([], {}, "at least one prompt; 0 were given"),
        ([[1], []], {}, "prompt 1 has 0 ids"),
        ([1, 2, 3], {}, "list of prompts; put a single prompt in a list"),
        ([[1, 2], [3, 61]], {}, "prompt 1 holds the id 61, but the model's 61 ids are 0 to 60"),
        ([[-1]], {}, "prompt 0 holds the id -1"),
        ([[0.5]], {}, "prompt 0 holds float64; ids must be integers"),
        ([[1]], dict(lengths=[1]), "give lengths with arrays only"),
        (np.ones((2, 3), int), dict(lengths=[3]), "one length for each row"),
        (np.ones((2, 3), int), dict(lengths=[4, 1]), "of at most 3"),
        (np.ones((2, 3), int), dict(lengths=[0, 1]), "prompt 0 has 0 ids"),
        ([[1]], dict(max_new_tokens=0), r"max_new_tokens=0\): max_new_tokens must be at least 1"),
        ([[1]], dict(prefill_chunk=0), "prefill_chunk must be at least 1"),
        ([[1]], dict(end_of_text=61), "the model's 61 ids are 0 to 60"),
        ([[1]], dict(examples=[0, 1]), "1 prompts need 1 numbers"),
        ([[1] * 5], dict(max_new_tokens=17), r"5 \+ 17 - 1 exceeds .* 20 learned positions; ask for at most 16"),
    ],
)
def test_bad_input_is_refused(model, prompts, given, message):
    given = dict(max_new_tokens=4) | given
    with pytest.raises(ValueError, match=message):
        generation.generate(model, prompts, **given, key=KEY)


def test_other_log_probabilities_are_refused(model):
    """A misspelled value would otherwise mean the numbers before the transforms."""
    generate = inspect.unwrap(generation.generate)  # Where no annotations are checked, as they are in tests.
    with pytest.raises(ValueError, match=r"log_probabilities='transform'\): .* must be False, True or 'transformed'"):
        generate(model, [[1]], max_new_tokens=4, log_probabilities="transform", key=KEY)


def test_new_tokens_are_counted_from_the_start_id_if_an_encoder_reads_the_prompt():
    model = SimpleNamespace(vocab=61, start=0, max_seq=20)
    message = r"begins with the start id, and 1 \+ 21 - 1 exceeds .* ask for at most 20 new tokens\.$"
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(_prompts.pad_prompts)(model, [[1] * 5], None, 21, None)


@pytest.mark.parametrize("length, read, written", [(16, 16, 5), (30, 20, 1), (1, 1, 20)])
def test_samples_stay_within_learned_positions(model, length, read, written):
    prompt = list(range(length))
    kept, max_new = generation.fit_to_positions(model, prompt, 160)
    assert kept == prompt[-read:] and max_new == written
    _prompts.pad_prompts(model, [kept], None, max_new, None)
    with pytest.raises(ValueError, match="20 learned positions"):
        _prompts.pad_prompts(model, [kept], None, max_new + 1, None)
    assert generation.fit_to_positions(make_model("sliding window"), prompt, 160) == (prompt, 160)


def test_an_array_of_one_prompt_is_refused():
    """Where no shapes are checked, as they are in tests."""
    rows = inspect.unwrap(_prompts._split_rows)
    assert len(rows(np.ones((1, 3), int), None)) == 1
    with pytest.raises(ValueError, match=r"prompts of shape \(3,\)\): .* pass prompts\[None\] for a single prompt"):
        rows(np.ones(3, int), None)


def test_a_stream_refuses_when_it_is_called(model):
    with pytest.raises(ValueError, match="prompt 0 has 0 ids"):
        generation.stream(model, [], max_new_tokens=4, key=KEY)
    with pytest.raises(ValueError, match="stride=0"):
        generation.stream(model, [1], max_new_tokens=4, stride=0, key=KEY)


def test_learned_positions_are_used_to_the_last(model):
    """The last token is sampled at position 20 and never read; the prompt's padding reaches beyond every position."""
    found = generation.generate(model, [[1, 2, 3, 4, 5]], max_new_tokens=16, prefill_chunk=3, key=KEY)
    assert found.lengths.tolist() == [21]


def test_logits_that_are_nan_are_an_error(model):
    broken = jax.tree.map(lambda x: x * jnp.nan if x.shape[:1] == (61,) else x, model)
    with pytest.raises(ValueError, match="NaN logits"):
        generation.generate(broken, [[1]], max_new_tokens=4, key=KEY)
