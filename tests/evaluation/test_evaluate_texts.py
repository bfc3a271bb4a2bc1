"""Perplexity by a sliding window, against a plain loop over windows in float64."""

import dataclasses
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from text_cases import scripted, small_model

from eqformer import data, evaluation
from eqformer.text import LLM


TEXTS = ["the quick brown fox jumps over the lazy dog, " * 2, "né 日本", "x"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(small_model(), data.ByteTokenizer(), end_ids=(0,), max_length=64)


@eqx.filter_jit
def forward(model, ids):
    return model(ids)[0][0]


def sliding_loop(llm: LLM, text: str, window: int, stride: int) -> tuple[list[float], list[bool]]:
    """The nats of each token, and whether its logit is the largest, as transformers' documentation has the loop."""
    ids, nats, greedy, previous = llm.tokens(text), [], [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        padded = ids[begin:end] + [0] * (96 - (end - begin))  # What follows changes no logits before it.
        logits = np.asarray(forward(llm.model, jnp.asarray([padded])), np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for index in range(max(previous, begin + 1), end):
            row = log_probs[index - 1 - begin]
            nats.append(-row[ids[index]])
            greedy.append(row.argmax() == ids[index])
        previous = end
        if end == len(ids):
            break
    return nats, greedy


@pytest.mark.parametrize("window, stride", [pytest.param(32, 31, marks=pytest.mark.grid), (20, 7), (200, 100)])
def test_each_token_is_scored_once_in_its_window(llm, window, stride):
    done = []
    scores = evaluation.evaluate_texts(
        llm, TEXTS, window=window, stride=stride, batch_size=4, progress=lambda *row: done.append(row)
    )
    loops = [sliding_loop(llm, text, window, stride) for text in TEXTS]
    nats = [value for values, _ in loops for value in values]
    assert scores.tokens == len(nats) == sum(len(llm.tokens(text)) - 1 for text in TEXTS)
    assert scores.nats == pytest.approx(sum(nats), rel=1e-5)
    assert scores.correct == sum(value for _, values in loops for value in values)
    assert scores.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)
    bits = sum(nats) / math.log(2)
    # A token is a byte, so the bytes are the scored tokens: not "x", and no first byte.
    assert scores.text_bytes == scores.tokens and scores.bits_per_byte == pytest.approx(bits / scores.tokens, rel=1e-5)
    assert scores.accuracy == scores.correct / scores.tokens
    assert done[-1][0] == done[-1][1]
    # The control: with another stride, tokens have another context.
    other = sum(value for text in TEXTS for value in sliding_loop(llm, text, window, max(1, stride // 2))[0])
    assert window > 100 or other != pytest.approx(scores.nats, rel=1e-4)


def test_the_bytes_are_those_of_the_scored_tokens(llm):
    def count(*texts: str) -> int:
        return evaluation.evaluate_texts(llm, texts).text_bytes

    assert count("日本") == 5 and count("éa") == 2 and count("ab", "x", "") == 1
    # All of a text is scored after a beginning of text, which has no bytes.
    begun = dataclasses.replace(llm, tokenizer=Begun())
    scores = evaluation.evaluate_texts(begun, ["日本"])
    assert (scores.text_bytes, scores.tokens) == (6, 6)


class Begun(data.ByteTokenizer):
    """Bytes after a beginning of text."""

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        return np.concatenate([[0], self.encode(text)]).astype(np.uint8)


def test_accuracy_of_a_model_that_knows_the_text():
    text = "one two three"
    scores = evaluation.evaluate_texts(scripted(text), [text])
    assert (scores.correct, scores.tokens) == (12, 12) and scores.accuracy == 1
    assert evaluation.evaluate_texts(scripted(text), ["one two trees"]).correct < 12


def test_texts_of_block_diffusion_have_the_nats_of_each_block():
    """The scripted model gives its byte a logit of 4 and each of the other 255 bytes 0, whatever is masked."""
    text, log_sum = "one two three", math.log(math.exp(4) + 255)
    scores = evaluation.evaluate_texts(scripted(text, block=4), [text])
    assert scores.nats == pytest.approx(12 * (log_sum - 4), rel=1e-5) and scores.accuracy == 1
    other = evaluation.evaluate_texts(scripted(text, block=4), ["one two trees"])
    assert other.nats == pytest.approx(12 * log_sum - 9 * 4, rel=1e-5) and other.correct == 9


def test_bad_input(llm):
    def refused(texts, **options) -> str:
        with pytest.raises(ValueError) as error:
            evaluation.evaluate_texts(llm, texts, **options)
        return str(error.value)

    assert "no token to score" in refused(["x", ""])
    assert "a window must have at least 2 tokens" in refused(TEXTS, window=1)
    assert "the stride must be from 1 to 7" in refused(TEXTS, window=8, stride=8)
    limited = dataclasses.replace(llm, model=dataclasses.replace(scripted("a").model, max_seq=16))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="2 to 16 tokens"):
        evaluation.evaluate_texts(limited, TEXTS, window=32)
