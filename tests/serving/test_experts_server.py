"""The experts of new tokens at the end of a stream equal those of one pass over prompt and answer."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_chat_server import ASK, CHAT, template
from test_completions_server import events, make_app, SCRIPT, send
from text_cases import scripted, TEMPLATE

from eqformer import data, models, nn
from eqformer.text import LLM


CONFIG = dataclasses.replace(models.preset("glm4-moe-byte-500k"), layers=3)

TOP_K = 4


@functools.cache
def mixture_model():
    """A dense layer and two mixtures, whose texts differ from prompt to prompt."""
    model = eqx.filter_jit(lambda: models.build(CONFIG, key=jax.random.key(0)))()
    return eqx.tree_at(lambda m: m.embedding.weight, model, replace_fn=lambda weight: 20 * weight)


def mixture_llm(tmp_path):
    return LLM(mixture_model(), data.ByteTokenizer(), template(tmp_path, TEMPLATE), end_ids=(0,))


def first_experts(llm, prompt, ids):
    """The first expert of each new id in the mixtures, layers 1 and 2."""
    chosen = eqx.filter_jit(nn.first_experts)(llm.model, jnp.asarray([*prompt, *ids], jnp.int32))
    return {layer: row[len(prompt) :].tolist() for layer, row in enumerate(np.asarray(chosen), 1)}


@pytest.mark.grid
def test_streams_end_with_the_experts_of_each_token(tmp_path):
    llm = mixture_llm(tmp_path)
    app, options = make_app(llm), {"temperature": 0, "max_tokens": 12, "stream": True, "experts": True}
    (chat,) = send(app, options | {"messages": ASK, "stream_options": {"include_usage": True}}, path=CHAT)
    texts, plain = send(app, options | {"prompt": ["ab", "xyz"], "n": 2}, options | {"prompt": "ab", "experts": False})
    answer = llm.chat(ASK, max_new_tokens=12, log_probs=True)
    *_, counted, first, second = events(chat)
    assert counted["usage"]["completion_tokens"] == len(answer.ids)
    expected = first_experts(llm, llm.chat_tokens(ASK), answer.ids)
    for event, layer in zip((first, second), (1, 2), strict=True):
        experts = event["experts"]
        assert (event["choices"], experts["index"], experts["layer"]) == ([], 0, layer)
        assert [row[0] for row in experts["experts"]] == expected[layer]
        assert all(row == sorted(row, reverse=True) and len(row) == TOP_K for row in experts["weights"])
    assert expected[1] != expected[2] != first_experts(llm, llm.chat_tokens(ASK)[1:], answer.ids)[2]
    tables = [event["experts"] for event in events(texts) if "experts" in event]
    assert [(table["index"], table["layer"]) for table in tables] == [(n, layer) for n in range(4) for layer in (1, 2)]
    for number, prompt in enumerate(("ab", "ab", "xyz", "xyz")):
        ids = llm.generate(prompt, max_new_tokens=12, log_probs=True).ids
        assert [row[0] for row in tables[2 * number]["experts"]] == first_experts(llm, llm.tokens(prompt), ids)[1]
    assert not any("experts" in event for event in events(plain))


def test_experts_are_refused_where_there_are_none():
    app = make_app(scripted(SCRIPT))
    body = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "experts": True}
    without_stream, dense, wrong = send(app, body, body | {"stream": True}, body | {"experts": "all"})
    for response, reason in ((without_stream, "stream: true"), (dense, "choose no experts"), (wrong, "true or false")):
        assert response.status_code == 400 and response.json()["error"]["param"] == "experts"
        assert reason in response.json()["error"]["message"]


@pytest.mark.grid
def test_a_pass_that_fails_ends_the_stream_with_an_error(tmp_path, monkeypatch):
    def fail(*arguments):
        raise MemoryError("no memory is left")

    monkeypatch.setattr("eqformer.interpretability.trace_experts", fail)
    body = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "stream": True, "experts": True}
    (response,) = send(make_app(mixture_llm(tmp_path)), body)
    assert "MemoryError" in response.text and "[DONE]" not in response.text
