"""Each text of the engine equals the text of `generate` or `chat` alone with the same settings."""

import asyncio
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from text_cases import scripted, TEMPLATE, USER

from eqformer import data, text
from eqformer.text import Grammar, TextRequest


PROMPTS = ["def ", "a much longer prompt than the others, of more than 64 bytes, so that widths differ: ", "é"]
SIZES: dict[str, Any] = {"slots": 2, "capacity": 192, "prefill_chunk": 64, "stride": 4}


@pytest.fixture(scope="module")
def llm():
    """A model whose text depends on the length of its prompt."""
    return scripted("".join(chr(97 + number * number % 23) for number in range(160)))


@pytest.fixture(scope="module")
def engine(llm):
    return llm.engine(**SIZES)


def run_all(engine, requests):
    """The results of requests in their order."""
    return sorted(engine.run(requests), key=lambda result: result.number)


async def pieces_of(engine, *requests):
    """The pieces of several streams, which run together."""

    async def read(request):
        return [piece async for piece in engine.stream(request)]

    return await asyncio.gather(*map(read, requests))


def test_texts_are_those_of_generate(llm, engine):
    results = run_all(engine, [TextRequest(prompt, max_new_tokens=20) for prompt in PROMPTS])
    alone = llm.generate(PROMPTS, max_new_tokens=20, log_probs=True)
    for result, completion in zip(results, alone):
        assert (result.text, result.ids, result.finish_reason) == (completion.text, completion.ids, "length")
        np.testing.assert_allclose(result.log_probs, completion.log_probs, atol=1e-6)
    requests = [TextRequest(prompt, max_new_tokens=20, temperature=2.0, top_k=9, seed=3) for prompt in PROMPTS]
    sampled = [result.text for result in run_all(engine, requests)]
    assert sampled == llm.generate(PROMPTS, max_new_tokens=20, temperature=2.0, top_k=9, seed=3)
    assert sampled != [result.text for result in results]  # the control: settings reach the samples
    (again,) = engine.run([dataclasses.replace(requests[2], example=2)])
    assert again.text == sampled[2] and results[1].prompt_length == len(PROMPTS[1])


def test_stop_strings_and_characters():
    engine = scripted("one two é🙂 four").engine(**SIZES)
    settings = [{"stop": "é"}, {"stop": ["xyz", "wo"]}, {"max_new_tokens": 6}, {"stop": "four!"}]
    requests = [TextRequest("one", **{"max_new_tokens": 20} | change) for change in settings]
    first, second, cut, whole = run_all(engine, requests)
    assert (first.text, first.finish_reason) == (" two ", "stop") and (second.text, len(second.ids)) == (" t", 4)
    # A character that is cut is marked, and a text that may begin a stop string is not lost.
    assert (cut.text, whole.text) == (" two \ufffd", " two é🙂 four")


def test_streams_have_whole_characters_and_the_result_at_the_end():
    llm = scripted("one two é🙂 four")
    engine = llm.engine(**SIZES)
    requests = [
        TextRequest("one", max_new_tokens=None),
        TextRequest("one", stop="four", max_new_tokens=None),
        TextRequest([*b"one two"], max_new_tokens=5),
    ]
    for request, pieces in zip(requests, asyncio.run(pieces_of(engine, *requests))):
        (alone,) = engine.run([request])
        assert "".join(piece.text for piece in pieces) == alone.text
        assert sum((piece.ids for piece in pieces), ()) == alone.ids
        assert sum((piece.log_probs for piece in pieces), ()) == alone.log_probs
        assert [piece.result is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
        assert dataclasses.replace(pieces[-1].result, number=0) == dataclasses.replace(alone, shared_length=0)
        assert not any("f" in piece.text for piece in pieces if request.stop)  # "f" may begin "four"
    assert "\ufffd" not in "".join(piece.text for piece in pieces[:-1])


def test_a_stream_is_decoded_by_another_tokenizer(llm, engine):
    class UpperCase(data.ByteTokenizer):
        def decode(self, ids):
            return super().decode(ids).upper()

    async def read(decoder):
        request = TextRequest("def ", max_new_tokens=8)
        return "".join([piece.text async for piece in engine.stream(request, decoder=decoder)])

    text = llm.generate("def ", max_new_tokens=8)
    assert asyncio.run(read(UpperCase())) == text.upper() != text == asyncio.run(read(None))


def test_a_stream_that_is_closed_is_cancelled(llm, engine):
    async def close_early():
        pieces = engine.stream(TextRequest("def ", max_new_tokens=100))
        first = await anext(pieces)
        await pieces.aclose()
        (other,) = await pieces_of(engine, TextRequest("def ", max_new_tokens=8))
        return first, other

    first, other = asyncio.run(close_early())
    assert first.result is None and other[-1].result.text == llm.generate("def ", max_new_tokens=8)
    assert engine.engine.is_idle


def test_chats_are_those_of_chat(llm, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    llm = dataclasses.replace(llm, chat_template=text.read_chat_template(tmp_path))
    engine = llm.engine(**SIZES)
    (answer,) = engine.run([TextRequest([USER], max_new_tokens=8)])
    assert answer.text == llm.chat([USER], max_new_tokens=8)
    assert answer.prompt_length == len(llm.chat_tokens([USER])) == len("<user>Hi<assistant>")
    (refused,) = engine.run([TextRequest([{"role": "tool", "content": ""}])])
    assert refused.finish_reason == "error" and "no tools here" in refused.error


def test_masks_are_each_requests_own(llm, engine):
    digits = np.isin(np.arange(256), list(b"0123456789"))
    requests = [TextRequest("a", max_new_tokens=6), TextRequest("a", max_new_tokens=6, allowed=lambda ids: digits)]
    free, masked = run_all(engine, requests)
    assert masked.text.isdigit() and len(masked.text) == 6
    assert free.text == llm.generate("a", max_new_tokens=6) and not free.text.isdigit()


@pytest.mark.parametrize(
    "grammar,check",
    [
        (Grammar("json_schema", {"enum": ["left", "right", 7]}), lambda text: json.loads(text) in ("left", "right", 7)),
        (Grammar("regex", "[ab]{3}c"), lambda text: len(text) == 4 and text[3] == "c" and set(text[:3]) <= {*"ab"}),
        (Grammar("lark", 'start: "é" | "ü"'), lambda text: text in ("é", "ü")),
        # The name of a special token, which llguidance tokenizes as that token if it tokenizes text by itself.
        (Grammar("json_schema", {"enum": ["<|endoftext|>"]}), lambda text: text == '"<|endoftext|>"'),
        (
            Grammar("json_schema", r'{"type": "string", "pattern": "^\u003c\\|endoftext\\|>$"}'),
            lambda text: text == '"<|endoftext|>"',
        ),
        (Grammar("regex", r"<\|endoftext\|>/\/"), lambda text: text == "<|endoftext|>//"),
        (Grammar("regex", "<\\|endoftext\\|>\\\n"), lambda text: text == "<|endoftext|>\n"),
        (
            Grammar("lark", 'start: ("x" | "y") "<|endof" T "z"\nT: /t\\x65xt\\|>/'),
            lambda text: text[1:] == "<|endoftext|>z",
        ),
        (
            Grammar("lark", '%llguidance {}\nstart: %json {"const": "<|endoftext|>"}'),
            lambda text: text == '"<|endoftext|>"',
        ),
        # A special token that the grammar names as such, without quotes, stays that token, which ends the text.
        (Grammar("lark", 'start: "x" <|endoftext|>'), lambda text: text == "x"),
    ],
)
def test_a_text_follows_its_grammar(engine, grammar, check):
    pytest.importorskip("llguidance")
    results = run_all(engine, [TextRequest("a", allowed=grammar, temperature=1.0, max_new_tokens=20)] * 2)
    for result in results:
        assert check(result.text) and result.finish_reason == "stop" and result.ids[-1] == 0


@pytest.mark.parametrize(
    "grammar,words",
    [
        (Grammar("regex", "(ab"), "unclosed group"),
        (Grammar("json_schema", "{"), "cannot be read"),
        (Grammar("json_schema", {"type": "nothing"}), "Invalid type: nothing"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_refused(engine, grammar, words):
    pytest.importorskip("llguidance")
    (result,) = engine.run([TextRequest("a", allowed=grammar)])
    assert result.finish_reason == "error" and words in result.error
    with pytest.raises(ValueError, match=r"Grammar\(\.\.\.\): no id ends"):
        scripted_without_end = dataclasses.replace(engine.llm, end_ids=())
        scripted_without_end.engine(**SIZES).encode(TextRequest("a", allowed=Grammar("regex", "a")))


@pytest.mark.parametrize(
    "change,words",
    [
        ({"stop": ["a", ""]}, "a stop string must have at least 1 character"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [USER]}, "no chat template"),
        ({"prompt": [300]}, "300"),
        ({"top_p": 2.0}, r"TopP\(2.0\)"),
        ({"max_new_tokens": 200}, "1 ids and 200 new tokens need a row of 201, but the engine's rows have 192"),
    ],
)
def test_a_request_that_cannot_be_continued_is_refused(engine, change, words):
    with pytest.raises(ValueError, match=words):
        engine.encode(TextRequest(**{"prompt": "a"} | change))
    if "prompt" in change:
        (refused, fine) = run_all(engine, [TextRequest(change["prompt"]), TextRequest("a", max_new_tokens=2)])
        assert refused.finish_reason == "error" and refused.error and fine.finish_reason == "length"


def test_fields_of_json_become_a_request():
    base = TextRequest("a", temperature=1.0)
    fields = {"messages": [USER], "stop": "b", "logit_bias": {"7": -1}, "regex": "x", "max_new_tokens": None}
    read = TextRequest([USER], temperature=1.0, stop="b", logit_bias={7: -1}, max_new_tokens=None)
    assert base.with_fields(fields) == dataclasses.replace(read, allowed=Grammar("regex", "x"))
    for fields, words in [
        ({"temperature": "hot"}, "temperature must be a number, but it is 'hot'"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer or null, but it is True"),
        ({"stop": ["a", 5]}, "a list as stop must hold texts, but one entry is 5"),
        ({"prompt": 5}, "prompt must be a text or a list, but it is 5"),
        ({"logit_bias": {"x": 1}}, "'x' has 1"),
        ({"tempreature": 1}, "no field 'tempreature'; the fields are prompt, messages, max_new_tokens"),
    ]:
        with pytest.raises(ValueError, match=words):
            base.with_fields(fields)


def test_a_text_may_fill_its_row(llm, engine):
    (result,) = engine.run([TextRequest("a" * 150, max_new_tokens=None)])
    assert len(result.ids) <= 42 and result.text == llm.generate("a" * 150, max_new_tokens=42)
    assert engine.cache_bytes == 0  # a scripted model has no caches


@pytest.mark.grid
def test_a_draft_reads_the_same_ids(llm):
    draft = dataclasses.replace(llm, tokenizer=data.ByteTokenizer())
    engine = llm.engine(draft=draft, draft_tokens=2, **SIZES)
    (result,) = engine.run([TextRequest("def ", max_new_tokens=9)])
    assert result.text == llm.generate("def ", max_new_tokens=9)
