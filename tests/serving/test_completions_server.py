"""The server's protocol, in process: texts, streams, chats, and an HTTP error for each kind of bad input."""

import asyncio
import json
import re
from typing import Any

import httpx
import numpy as np
import pytest
from text_cases import scripted, small_model

from eqformer import data, generation, serving
from eqformer.text import LLM, TextRequest


SIZES: dict[str, Any] = dict(slots=2, capacity=192, prefill_chunk=64, stride=4)
PROMPT = "def main("
INTERNAL = re.compile(r"Engine|Request\b|LLM|ChatTemplate|Grammar|[a-z_]\(")
"""Names and calls of the library, which mean nothing to a client of the server."""
SCRIPT = "".join(chr(97 + number * number % 23) for number in range(190))


def make_app(llm, api_key=None, **options):
    return serving.make_app(serving.TextService(llm, **SIZES | options), name="tiny", api_key=api_key)


def client_of(app, **options):
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server", **options)


def send(app, *bodies, path="/v1/completions", **options):
    """Send bodies at once; return the responses."""

    async def send_all():
        async with client_of(app) as client:
            return await asyncio.gather(
                *[client.post(path, json={"model": "tiny"} | body, **options) for body in bodies]
            )

    return asyncio.run(send_all())


def generate_texts(llm, prompt, count=1, **options):
    """The texts of an engine without a server, which has compiled the same programs."""
    requests = [TextRequest(prompt, example=number, **options) for number in range(count)]
    return sorted(llm.engine(**SIZES).run(requests), key=lambda result: result.number)


def texts(response):
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def events(response):
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="module")
def llm():
    return scripted(SCRIPT)


@pytest.fixture(scope="module")
def app(llm):
    return make_app(llm)


@pytest.mark.quick
def test_completions_are_the_texts_of_an_engine(llm, app):
    bodies = [
        {"prompt": PROMPT, "max_tokens": 12, "temperature": 0},
        {
            "prompt": [list(b"import "), list(b"x")],
            "max_tokens": 7,
            "temperature": 9,
            "top_p": 0.9,
            "seed": 3,
            "n": 2,
        },
        {"prompt": "é", "max_tokens": 9, "temperature": 0, "echo": True},
    ]
    greedy, sampled, echo = send(app, *bodies)
    assert texts(greedy) == [generate_texts(llm, PROMPT, max_new_tokens=12)[0].text]
    assert texts(echo) == ["é" + generate_texts(llm, "é", max_new_tokens=9)[0].text]
    penalties, long = {"presence_penalty": -2.0, "frequency_penalty": -1.5}, {"prompt": "x", "n": 1, "max_tokens": 90}
    (penalized,) = send(app, bodies[1] | penalties | long)
    options = dict(max_new_tokens=7, temperature=9.0, top_p=0.9, seed=3)
    without_frequency = {"presence_penalty": -2.0}
    cases = (penalties, without_frequency, {})
    others = [generate_texts(llm, "x", 1, **options | tune | {"max_new_tokens": 90})[0].text for tune in cases]
    assert texts(penalized) == others[:1]
    assert [others[0] == other for other in others] == [True, False, False]
    alone = [result.text for prompt in ("import ", "x") for result in generate_texts(llm, prompt, 2, **options)]
    assert texts(sampled) == alone and len(set(alone)) > 2
    assert greedy.json()["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 12,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert greedy.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.grid
def test_completions_are_the_texts_of_generate():
    llm = LLM(small_model(), data.ByteTokenizer(), end_ids=(0,))
    bodies = [{"prompt": PROMPT, "max_tokens": 12, "temperature": t, "seed": 3, "n": 2} for t in (0, 9)]
    for body, response in zip(bodies, send(make_app(llm), *bodies)):
        expected = llm.generate([PROMPT] * 2, max_new_tokens=12, temperature=body["temperature"], seed=3)
        assert texts(response) == expected


def test_streams_are_the_texts_in_pieces(llm, app):
    body = {"prompt": [PROMPT, "x"], "max_tokens": 20, "temperature": 0.9, "seed": 1, "n": 2}
    response, streamed, counted = send(
        app, body, body | {"stream": True}, body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    pieces = [choice for event in events(streamed) for choice in event["choices"]]
    joined = ["".join(piece["text"] for piece in pieces if piece["index"] == number) for number in range(4)]
    assert joined == texts(response) and len(pieces) > 8
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["length"] * 4
    assert events(counted)[-1]["usage"] == response.json()["usage"] and events(counted)[-1]["choices"] == []
    assert all("usage" not in event for event in events(streamed))


def test_stop_strings_end_texts(llm, app):
    text = generate_texts(llm, PROMPT, max_new_tokens=30)[0].text
    stop = text[10:13]
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stop": [stop, "never in it"]}
    response, streamed = send(app, body, body | {"stream": True})
    assert texts(response) == [text[: text.index(stop)]] and response.json()["choices"][0]["finish_reason"] == "stop"
    assert "".join(choice["text"] for event in events(streamed) for choice in event["choices"]) == texts(response)[0]


def test_log_probabilities_of_texts_and_prompts(llm, app):
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 3}
    without, echo = send(app, body, body | {"echo": True})
    (alone,) = generate_texts(llm, PROMPT, max_new_tokens=5)
    log_probs = without.json()["choices"][0]["logprobs"]
    np.testing.assert_allclose(log_probs["token_logprobs"], alone.log_probs, rtol=1e-4)
    assert len(log_probs["tokens"]) == 5 and log_probs["text_offset"][0] == 0
    assert [len(likely) for likely in log_probs["top_logprobs"]] == [3] * 5
    pairs = zip(log_probs["top_logprobs"], log_probs["token_logprobs"])
    assert all(max(likely.values()) == log_prob for likely, log_prob in pairs)
    ids = [*PROMPT.encode(), *alone.ids]
    (scores,) = generation.score_tokens(llm.model, [ids[:1]], [ids[1:]], alternatives=3)
    log_probs = echo.json()["choices"][0]["logprobs"]
    assert log_probs["tokens"][:9] == list(PROMPT) and log_probs["token_logprobs"][0] is None
    np.testing.assert_allclose(log_probs["token_logprobs"][1:], scores.log_probabilities, rtol=1e-4)
    expected_rows = scores.alternative_log_probabilities.tolist()
    for likely, expected in zip(log_probs["top_logprobs"][1:], expected_rows, strict=True):
        # A sampled token that is not among the likeliest is listed, too.
        np.testing.assert_allclose(sorted(likely.values(), reverse=True)[:3], expected, rtol=1e-4)
    nothing, only_prompt = send(app, {"prompt": PROMPT}, {"prompt": PROMPT, "max_tokens": 0, "echo": True})
    assert texts(only_prompt) == [PROMPT] and nothing.json()["choices"][0]["logprobs"] is None


def test_offsets_of_tokens_count_characters_of_several_bytes(app):
    prompt = "a😀é b"
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 2, "seed": 6, "logprobs": 0}
    body |= {"logit_bias": {"195": 40, "169": 40, "97": 40}}  # the two bytes of é, and a
    whole, echo, streamed = send(app, body, body | {"echo": True}, body | {"stream": True})
    (choice,) = echo.json()["choices"]
    raw = prompt.encode()
    expected = [len(raw[:end].decode(errors="ignore")) for end in range(len(raw) + 1)]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[: len(expected)] == expected
    # Control: texts of tokens that are decoded alone leave out both characters.
    assert expected[-1] != sum(byte < 128 for byte in raw)
    (alone,) = whole.json()["choices"]
    generated = alone["logprobs"]["text_offset"]
    assert [offset - len(prompt) for offset in offsets[len(raw) :]] == generated
    pieces = [choice["logprobs"]["text_offset"] for event in events(streamed) for choice in event["choices"]]
    assert [offset for piece in pieces for offset in piece] == generated


def test_the_best_of_several_texts_is_the_likeliest(llm, app):
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 5, "logprobs": 0}
    all_texts, best = send(app, body | {"n": 4}, body | {"best_of": 4, "n": 1})
    means = [np.mean(choice["logprobs"]["token_logprobs"]) for choice in all_texts.json()["choices"]]
    assert texts(best) == [texts(all_texts)[int(np.argmax(means))]] and len(set(means)) > 1
    assert best.json()["usage"]["completion_tokens"] == 80  # of all that were sampled


def test_requests_without_a_seed_differ(app):
    first, second = send(app, *[{"prompt": PROMPT, "max_tokens": 30, "temperature": 2}] * 2)
    assert texts(first) != texts(second)
    first, second = send(app, *[{"prompt": PROMPT, "max_tokens": 30, "temperature": 2, "seed": 2}] * 2)
    assert texts(first) == texts(second)


def post_raw(app, content, path="/v1/completions", headers=()):
    async def post():
        async with client_of(app) as client:
            types = {"content-type": "application/json"} | dict(headers)
            return await client.post(path, content=content, headers=types)

    return asyncio.run(post())


RAW = {
    "no JSON": (b"{", "JSON"),
    "no object": (b"[1]", "JSON object"),
    "nothing": (b"", "JSON"),
    "bytes that are no UTF-8": (b'{"model": "\xff"}', "UTF-8"),
    "a name twice": (b'{"model": "tiny", "model": "tiny"}', "twice"),
    "deep nesting": (b"[" * 100_000, "deeper"),
    "a huge integer": (b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "integer"),
    "NaN": (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "temperature"),
    "a lone surrogate": (b'{"model": "tiny", "prompt": "\\ud800"}', "prompt"),
    "a lone surrogate as a name": (b'{"model": "tiny", "prompt": "x", "\\ud800": 1}', "unknown fields"),
}


@pytest.mark.parametrize("name", RAW)
def test_bodies_that_cannot_be_read_are_refused(app, name):
    content, word = RAW[name]
    response = post_raw(app, content)
    assert response.status_code == 400 and word in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "invalid_request_error"


BAD_COMPLETIONS = {
    "prompt": (None, "", [], [[]], {}, 3, [1, "a"], [-1], [True], [["a"]], [2**40], [1, 256], [[1], [300]]),
    "max_tokens": (-1, 0, 1.5, "3", 10**30, True),
    "temperature": (-0.1, "1", [], 1e300),
    "top_p": (0, -1, 1.1),
    "top_k": (-2, 1.5),
    "min_p": (-1, 2),
    "repetition_penalty": (0, -3),
    "n": (0, -1, 17, 10**9, "2"),
    "best_of": (0, 100),
    "seed": (1.5, "a", 2**70),
    "stop": ("", [""], [3], ["a"] * 17, {}),
    "logprobs": (-1, 21, True, "5"),
    "logit_bias": ([], {"a": 1}, {"1": "x"}, {"-1": 1}, {"1": 1000}, {"300": 1}),
    "stream": (1, "true"),
    "echo": ("no",),
    "stream_options": ([], {"unknown": 1}),
    "suffix": ("x",),
    "presence_penalty": (2.1, "1", True),
    "frequency_penalty": (-3, []),
    "unknown": (1,),
    "model": (None, 3, "", [], "a" * 100_000),
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_bad_settings_of_completions_are_refused(app, name):
    bodies = [{"prompt": "x", "max_tokens": 2} | {name: value} for value in BAD_COMPLETIONS[name]]
    for body, response in zip(bodies, send(app, *bodies)):
        expected = (400, 404) if name == "model" else (400,)
        assert response.status_code in expected, (body, response.text)
        error = response.json()["error"]
        assert len(error["message"]) < 300 and (error["param"] or "") in (name, "unknown"), error
        assert error["param"] in error["message"] and not INTERNAL.search(error["message"]), error
    (after,) = send(app, {"prompt": "x", "max_tokens": 2})
    assert after.status_code == 200


def test_texts_that_do_not_fit_are_refused(app):
    long, both, most, unknown_model = send(
        app,
        {"prompt": "x" * 500},
        {"prompt": "x" * 100, "max_tokens": 120},
        {"prompt": "x", "max_tokens": 2000},
        {"prompt": "x", "model": "another"},
    )
    assert long.status_code == both.status_code == most.status_code == 400 and unknown_model.status_code == 404
    assert "500" in long.json()["error"]["message"] and long.json()["error"]["code"] == "context_length_exceeded"
    assert long.json()["error"]["param"] == "prompt"
    assert "'tiny'" in unknown_model.json()["error"]["message"]


def test_paths_keys_and_methods(llm):
    app = make_app(llm, api_key="secret")

    async def ask():
        async with client_of(app) as client:
            keys = [{}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer sécret".encode()}]
            refused = [await client.get("/v1/models", headers=headers) for headers in keys]
            key = {"authorization": "Bearer secret"}
            gets = ["/v1/models", "/v1/models/tiny", "/v1/models/other", "/nowhere", "/v1/completions", "/health", "/"]
            served = [await client.get(path, headers=key) for path in gets]
            embedded = await client.post("/v1/embeddings", json={}, headers=key)
            text = await client.post("/v1/completions", content=b"{}", headers=key | {"content-type": "text/plain"})
            return refused, served, embedded, text, await client.get("/metrics")

    refused, served, embedded, text, metrics = asyncio.run(ask())
    assert [response.status_code for response in refused] == [401] * 3
    assert refused[0].json()["error"]["type"] == "authentication_error"
    assert [response.status_code for response in served] == [200, 200, 404, 404, 405, 200, 200]
    assert served[0].json()["data"][0]["id"] == "tiny" and served[5].json() == {
        "status": "ok",
        "active": 0,
        "waiting": 0,
    }
    assert embedded.status_code == 404 and "embeddings" in embedded.json()["error"]["message"]
    assert text.status_code == 400 and "Content-Type" in text.json()["error"]["message"]
    assert 'eqformer_http_responses_total{path="/v1/models",status="401"} 3' in metrics.text
    assert "eqformer_slots 2" in metrics.text and "eqformer_first_token_seconds_count 0" in metrics.text


def test_other_apps_can_mount_the_server(app):
    from starlette.applications import Starlette
    from starlette.routing import Mount

    (response,) = send(Starlette(routes=[Mount("/llm", app)]), {"prompt": "x"}, path="/llm/v1/completions")
    assert response.status_code == 200
