"""Embeddings by the server's protocol, in process: the encoder's vectors, shared batches, limits and errors."""

import asyncio
import base64
import json
import threading
import time

import equinox as eqx
import jax
import numpy as np
import pytest
from test_completions_server import client_of, send

import eqformer
from eqformer import data, models, serving
from eqformer.serving._protocol import EmbeddingRequest


TEXTS = ["a cat", "the quick brown fox jumps over the lazy dog", "Hi", "x" * 50, "é"]
PATH = "/v1/embeddings"


def write_encoder_folder(folder):
    """Write a text encoder with random weights as sentence-transformers publishes it: 64 tokens, 64 channels."""
    config = models.preset("bert-byte-200k")
    files = data.tokenizer_files(data.ByteTokenizer(), max_length=64)
    models.save(eqx.filter_jit(models.build)(config, key=jax.random.key(0)), folder, config=config, files=files)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    modules = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))
    return folder


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory):
    return write_encoder_folder(tmp_path_factory.mktemp("served") / "encoder")


@pytest.fixture(scope="module")
def encoder(encoder_folder):
    return eqformer.load(encoder_folder)


@pytest.fixture(scope="module")
def service(encoder):
    return serving.EmbeddingService(encoder, batch_size=4)


@pytest.fixture(scope="module")
def app(service):
    return serving.make_app(service, name="tiny")


def vectors(response):
    assert response.status_code == 200, response.text
    items = response.json()["data"]
    assert [item["index"] for item in items] == list(range(len(items)))
    return np.array([item["embedding"] for item in items])


def refusal(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


def close(first, second):
    return first.shape == second.shape and np.allclose(first, second, rtol=1e-5, atol=1e-5)


def record_batches(encoder, monkeypatch, *, seconds=0.0):
    """Return a list that gets the texts of each later call of `embed_tokens`, which first waits `seconds`."""
    embed, batches = encoder.embed_tokens, []

    def recorded(rows, **options):
        batches.append([bytes(row.ids.tolist()).decode() for row in rows])
        time.sleep(seconds)
        return embed(rows, **options)

    monkeypatch.setattr(type(encoder), "embed_tokens", lambda self, rows, **options: recorded(rows, **options))
    return batches


def test_vectors_are_those_of_the_encoder(encoder, app):
    options = [{}, {"encoding_format": "base64"}, {"dimensions": 5, "user": "me"}, {"prompt_name": "query"}]
    whole, coded, short, query, one = send(
        app, *[{"input": TEXTS} | option for option in options], {"input": TEXTS[0]}, path=PATH
    )
    expected = encoder.embed(TEXTS)
    assert close(vectors(whole), expected) and not close(vectors(whole), expected[::-1])
    assert vectors(whole).shape == (5, 64) and close(vectors(one), expected[:1])
    assert close(vectors(short), encoder.embed(TEXTS, truncate_dim=5, normalize=True))
    asked = encoder.embed(TEXTS, prompt_name="query")
    assert close(vectors(query), asked) and not close(asked, expected)
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in coded.json()["data"]]
    assert close(np.stack(decoded), expected)
    tokens = sum(len(text.encode()) for text in TEXTS)
    assert whole.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert query.json()["usage"]["total_tokens"] == tokens + 7 * len(TEXTS)
    assert whole.json()["object"] == "list" and whole.json()["model"] == "tiny"


@pytest.mark.grid
def test_requests_that_wait_share_batches_in_turn(encoder, service, monkeypatch):
    batches = record_batches(encoder, monkeypatch)
    many = [f"{'many' * (1 + number % 7)} {number}" for number in range(40)]
    requests = [many, *([f"alone {number}"] for number in range(6))]

    async def embed_all():
        bodies = [EmbeddingRequest("tiny", texts, None, False, None) for texts in requests]
        return await asyncio.gather(*(service.embed(body, encoder.tokenize(body.texts)) for body in bodies))

    results = asyncio.run(embed_all())
    monkeypatch.undo()
    assert all(close(result, encoder.embed(texts)) for result, texts in zip(results, requests))
    assert [len(batch) for batch in batches] == [16, 16, 14] and service.slots == 16
    assert {line for texts in requests[1:] for line in texts} < {
        *batches[0]
    }  # The long request is read in turn with them.
    assert min(map(len, batches[1])) >= max(map(len, batches[2]))  # Its longest texts are read first.


def test_the_event_loop_runs_while_texts_are_embedded(encoder, app, monkeypatch):
    embed, answered = encoder.embed_tokens, threading.Event()

    def embed_after_health(self, rows, **options):
        assert answered.wait(30)
        return embed(rows, **options)

    monkeypatch.setattr(type(encoder), "embed_tokens", embed_after_health)

    async def ask():
        async with client_of(app) as client:
            embedding = asyncio.ensure_future(client.post(PATH, json={"model": "tiny", "input": "a"}))
            while (health := await client.get("/health")).json()["active"] == 0:
                await asyncio.sleep(0.01)
            answered.set()
            return health, await embedding

    health, embedding = asyncio.run(ask())
    assert health.json() == {"status": "ok", "active": 1, "waiting": 0} and embedding.status_code == 200


def test_a_client_that_hangs_up_ends_its_texts(encoder, monkeypatch):
    service = serving.EmbeddingService(encoder, batch_size=1)
    app = serving.make_app(service, name="tiny")
    batches = record_batches(encoder, monkeypatch, seconds=0.05)

    async def hang_up():
        async with client_of(app) as client:
            request = asyncio.ensure_future(client.post(PATH, json={"model": "tiny", "input": ["a"] * 100}))
            while not batches:
                await asyncio.sleep(0.01)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            return await client.post(PATH, json={"model": "tiny", "input": "b"})

    assert asyncio.run(hang_up()).status_code == 200 and service.active == 0
    assert sum(map(len, batches)) < 20
    assert "eqformer_cancelled_requests_total 1\n" in service.metrics.render({})


@pytest.mark.parametrize(
    "name, value",
    [
        *(("input", value) for value in (None, "", 7, [], [1, 2], [[1], [2]], ["a", 1], {"a": 1})),
        *(("dimensions", value) for value in (0, -1, 65, 2.5, "5", True)),
        *(("encoding_format", value) for value in ("int8", 1)),
        ("prompt_name", "answer"),
        ("prompt_name", 1),
        ("model", ""),
        ("unknown", 1),
    ],
)
def test_bad_bodies_are_refused(app, name, value):
    (response,) = send(app, {"input": "a", name: value}, path=PATH)
    error = refusal(response, 400)
    assert error["param"] == name and error["type"] == "invalid_request_error" and len(error["message"]) < 300
    assert value != [1, 2] or "token ids" in error["message"]


def test_limits_are_those_of_the_server(encoder):
    limits = serving.Limits(texts=3, waiting=0, prompt_tokens=20, body_bytes=200)
    service = serving.EmbeddingService(encoder, limits=limits, batch_size=4)
    app = serving.make_app(service, name="tiny")
    many, long, large, other, fits = send(
        app,
        {"input": ["a"] * 4},
        {"input": ["a", "b" * 21]},
        {"input": "c" * 300},
        {"input": "a", "model": "other"},
        {"input": "b" * 20},
        path=PATH,
    )
    assert "4 texts" in refusal(many, 400)["message"] and refusal(many, 400)["param"] == "input"
    assert "input[1] has 21 tokens" in refusal(long, 400)["message"]
    assert refusal(long, 400)["code"] == "context_length_exceeded" and vectors(fits).shape == (1, 64)
    assert large.status_code == 413 and refusal(other, 404)["code"] == "model_not_found"
    with service.admit(14):
        full, last = send(app, {"input": ["a"] * 3}, {"input": ["a"] * 2}, path=PATH)
    assert refusal(full, 429)["code"] == "queue_full" and last.status_code == 200
    service.drain()
    (ended,) = send(app, {"input": "a"}, path=PATH)
    assert refusal(ended, 503)["code"] == "unavailable"


def test_texts_that_the_encoder_would_cut_are_refused(encoder, app, monkeypatch):
    """The error names both lengths; a text of the longest length is tokenized once."""
    calls, encode_texts = [], encoder.tokenizer.encode_texts
    record = lambda self, texts, **options: (calls.append(len(texts)), encode_texts(texts, **options))[1]
    monkeypatch.setattr(type(encoder.tokenizer), "encode_texts", record)
    long, prompted, fits = send(
        app, {"input": ["a", "x" * 65]}, {"input": "x" * 60, "prompt_name": "query"}, {"input": "x" * 64}, path=PATH
    )
    assert "input[1] has 65 tokens, but at most 64 are read" in refusal(long, 400)["message"]
    assert refusal(long, 400)["code"] == "context_length_exceeded" and "67 tokens" in refusal(prompted, 400)["message"]
    assert vectors(fits).shape == (1, 64) and calls == [2, 1, 1]


def test_an_encoder_that_fails_answers_the_next_request(encoder, app, service, monkeypatch):
    def fail(self, rows, **options):
        raise MemoryError("no memory is left")

    monkeypatch.setattr(type(encoder), "embed_tokens", fail)
    (failed,) = send(app, {"input": ["a", "b"]}, path=PATH)
    assert "MemoryError" in refusal(failed, 500)["message"]
    monkeypatch.setattr(type(encoder), "embed_tokens", lambda self, rows, **options: np.full((len(rows), 64), np.nan))
    assert "NaN" in refusal(send(app, {"input": "a"}, path=PATH)[0], 500)["message"]
    monkeypatch.undo()
    assert send(app, {"input": "a"}, path=PATH)[0].status_code == 200 and service.active == 0


def test_other_routes(app, service):
    async def ask():
        async with client_of(app) as client:
            texts = [await client.post(f"/v1/{path}", json={}) for path in ("completions", "chat/completions")]
            return texts, [await client.get(path) for path in ("/v1/models", "/health", "/metrics", "/")]

    texts, (listed, health, metrics, page) = asyncio.run(ask())
    assert all("/v1/embeddings" in refusal(response, 404)["message"] for response in texts)
    assert listed.json()["data"][0].items() >= {"id": "tiny", "max_model_len": 64}.items()
    assert health.status_code == 200 and page.status_code == 404
    assert "eqformer_slots 16\n" in metrics.text and "eqformer_embedded_texts_total" in metrics.text
    assert "eqformer_cache_bytes" not in metrics.text


def test_programs_are_compiled_before_the_first_request(encoder, monkeypatch):
    service, lines, widths = serving.EmbeddingService(encoder, batch_size=4), [], []
    monkeypatch.setattr(type(encoder), "embed", lambda self, line, **options: widths.append(len(line)))
    service.compile(lines.append)
    assert [line.split(",")[0] for line in lines] == [f"compiled for texts of {n} tokens" for n in (16, 24, 32, 48, 64)]
    assert widths == [2 * n - 1 for n in (16, 24, 32, 48, 64)]  # words and the spaces between them


def test_the_command_names_flags_of_the_other_kind(encoder_folder):
    from serve import Command, make_service

    with pytest.raises(ValueError, match="--capacity 512: .* holds a text encoder"):
        make_service(Command(model=encoder_folder, capacity=512))
    service = make_service(Command(model=encoder_folder, batch_size=4, max_texts=5))
    assert isinstance(service, serving.EmbeddingService) and service.slots == 16
    assert (service.limits.texts, service.limits.waiting) == (5, 4096)
