"""Other clients (OpenAI's, lm-evaluation-harness) against a process of `scripts/serve.py`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest
from test_embeddings_server import write_encoder_folder
from test_evaluate_tasks import answers, CHAT, make_tasks, numbers
from test_forced_calls import call_of, follows_schema, TEMPLATES, TOOLS
from text_cases import published_folder, USER

import eqformer
from eqformer import evaluation, text


SCRIPT = Path(__file__).parents[2] / "scripts" / "serve.py"
SIZES = ["--slots", "2", "--capacity", "192", "--prefill-chunk", "64", "--max-texts", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return published_folder(tmp_path_factory.mktemp("served") / "tiny", chat_template__jinja=CHAT)


@contextlib.contextmanager
def serve(folder, *flags):
    """Start a server process of the name `tiny`; yield it and its address."""
    command = [sys.executable, str(SCRIPT), "--model", str(folder), "--name", "tiny", "--port", "0", *flags]
    command += ["--api-key", "secret"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("serving tiny at "):
            break
    else:
        pytest.fail("".join(lines))
    try:
        yield process, lines[-1].split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def server(folder):
    """A server process; yields it and its address."""
    with serve(folder, *SIZES) as started:
        yield started


@pytest.mark.grid
@pytest.mark.skipif(not find_spec("openai"), reason="the package `openai` is not installed")
@pytest.mark.filterwarnings("default")
def test_the_client_of_openai(folder, server):
    import openai  # pyright: ignore[reportMissingImports]

    llm, client = eqformer.load(folder), openai.OpenAI(base_url=f"{server[1]}/v1", api_key="secret", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    chat = client.chat.completions.create(model="tiny", messages=[USER], temperature=0, max_completion_tokens=20)
    assert chat.choices[0].message.content == llm.chat([USER], max_new_tokens=20)
    assert chat.usage is not None and chat.usage.completion_tokens == 20
    options = dict(model="tiny", messages=[USER], seed=4, temperature=1.5, max_tokens=20)
    stream = client.chat.completions.create(stream=True, logprobs=True, top_logprobs=2, **options)
    parts = [part.choices[0] for part in stream]
    text = "".join(part.delta.content or "" for part in parts)
    assert text == llm.chat([USER], max_new_tokens=20, temperature=1.5, seed=4) and parts[-1].finish_reason == "length"
    tokens = [token for part in parts if part.logprobs for token in part.logprobs.content]
    assert len(tokens) == 20 and all(len(token.top_logprobs) == 2 for token in tokens)
    completion = client.completions.create(model="tiny", prompt=["a", "bc"], max_tokens=5, temperature=0, logprobs=1)
    assert [choice.text for choice in completion.choices] == llm.generate(["a", "bc"], max_new_tokens=5)
    for status, call in (
        (openai.BadRequestError, lambda: client.completions.create(model="tiny", prompt="x" * 500)),
        (openai.NotFoundError, lambda: client.completions.create(model="other", prompt="x")),
        (openai.NotFoundError, lambda: client.embeddings.create(model="tiny", input="x")),
        (openai.AuthenticationError, lambda: client.with_options(api_key="wrong").models.list()),
    ):
        with pytest.raises(status) as failure:
            call()
        assert failure.value.body["message"]


@pytest.mark.grid
@pytest.mark.skipif(not find_spec("openai") or not find_spec("llguidance"), reason="a package is not installed")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("form", ["tags after reasoning", "a list"])
def test_the_client_of_openai_forces_calls(tmp_path, form):
    import openai  # pyright: ignore[reportMissingImports]

    folder = published_folder(tmp_path / "tiny", chat_template__jinja=TEMPLATES[form])
    ask = {"model": "tiny", "messages": [USER], "tools": TOOLS, "temperature": 1.5, "max_tokens": 130}
    with serve(folder, *SIZES) as (_, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = client.chat.completions.create(tool_choice=choice, n=3, seed=2, **ask)
            assert all(follows_schema(call_of(item.message.model_dump(exclude_none=True))) for item in answer.choices)
            assert answer.choices[0].finish_reason == "tool_calls"
            parts = [*client.chat.completions.create(tool_choice=choice, stream=True, seed=2, **ask)]
            (call,) = [call for part in parts for call in part.choices[0].delta.tool_calls or []]
            expected = answer.choices[0].message.tool_calls[0].function
            assert (call.function.name, call.function.arguments) == (expected.name, expected.arguments)
        free = client.chat.completions.create(n=3, seed=2, **ask)
        assert not any(item.message.tool_calls for item in free.choices)
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.chat.completions.create(tool_choice={"type": "function", "function": {"name": "clock"}}, **ask)


@pytest.mark.grid
@pytest.mark.skipif(not find_spec("openai"), reason="the package `openai` is not installed")
@pytest.mark.filterwarnings("default")
def test_the_client_of_openai_embeds_texts(tmp_path):
    import openai  # pyright: ignore[reportMissingImports]

    encoder_folder = write_encoder_folder(tmp_path / "encoder")
    encoder = eqformer.load(encoder_folder)
    assert isinstance(encoder, text.TextEncoder)
    expected = encoder.embed(["a cat", "a dog"])
    with serve(encoder_folder, "--batch-size", "4") as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        request = {"model": "tiny", "input": ["a cat", "a dog"]}
        for options in ({}, {"encoding_format": "float"}):  # The client asks for base64 by default, and decodes it.
            response = client.embeddings.create(**request, **options)
            vectors = np.array([item.embedding for item in response.data])
            assert np.allclose(vectors, expected, atol=1e-5) and not np.allclose(vectors, expected[::-1], atol=1e-5)
            assert response.usage.prompt_tokens == 10
        (short,) = client.embeddings.create(model="tiny", input="a cat", dimensions=7).data
        assert np.allclose(short.embedding, encoder.embed("a cat", truncate_dim=7, normalize=True), atol=1e-5)
        for status, call in (
            (openai.BadRequestError, lambda: client.embeddings.create(model="tiny", input=[1, 2])),
            (openai.NotFoundError, lambda: client.completions.create(model="tiny", prompt="x")),
            (openai.NotFoundError, lambda: client.chat.completions.create(model="tiny", messages=[USER])),
        ):
            with pytest.raises(status) as failure:
                call()
            assert failure.value.body["message"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.grid
@pytest.mark.skipif(not find_spec("lm_eval") or not find_spec("tenacity"), reason="`lm_eval[api]` is not installed")
@pytest.mark.filterwarnings("default")
def test_the_harness_has_the_same_numbers_through_the_server(folder, server, tmp_path, monkeypatch):
    import lm_eval  # type: ignore[import-not-found]

    tasks = make_tasks(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    arguments = {"model": "tiny", "base_url": f"{server[1]}/v1/completions", "tokenizer": str(folder)}
    # The harness scores 64 tokens at a time if `max_length` is 66: it subtracts one for the token that each request
    # samples, and one for the token before the window, on which the first score depends.
    arguments |= {"tokenizer_backend": "huggingface", "max_length": 66, "batch_size": 4}
    served = lm_eval.simple_evaluate(
        model="local-completions", model_args=arguments, tasks=[dict(task) for task in tasks], bootstrap_iters=10
    )
    llm = eqformer.load(folder)
    ours = answers(evaluation.evaluate_tasks(llm, tasks, max_length=64).samples)
    theirs = answers(served["samples"])
    assert theirs.keys() == ours.keys() and len(theirs) > 20
    for key, response in ours.items():
        assert numbers(theirs[key]) == pytest.approx(numbers(response), rel=1e-5, abs=1e-3), key
        assert key[0] != "write" or theirs[key] == response
    other = answers(evaluation.evaluate_tasks(llm, tasks[:1], apply_chat_template=True).samples)
    assert numbers(other["choose", 0]) != pytest.approx(numbers(theirs["choose", 0]), abs=1e-2)  # it can fail


@pytest.mark.grid
def test_a_server_over_two_devices_answers_as_over_one(folder, server):
    bodies = [
        {"model": "tiny", "prompt": ["ab", "def main("], "max_tokens": 20, "temperature": 0, "logprobs": 1},
        {"model": "tiny", "prompt": "ab", "n": 2, "max_tokens": 20, "seed": 3, "frequency_penalty": 1.5},
        {"model": "tiny", "prompt": "ab", "n": 2, "max_tokens": 20, "seed": 4, "frequency_penalty": 1.5},
    ]
    headers = {"authorization": "Bearer secret"}

    def ask(url):
        responses = [httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60) for body in bodies]
        return [[choice["text"] for choice in response.raise_for_status().json()["choices"]] for response in responses]

    alone = ask(server[1])
    with serve(folder, *SIZES, "--mesh.tensor", "2", "--simulate", "2") as (_, url):
        over_two = ask(url)
    assert over_two == alone and alone[1] != alone[2]


@pytest.mark.grid
def test_a_signal_ends_the_process_when_its_texts_have_ended(folder, server):
    process, url = server
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 150, "temperature": 0, "stream": True}
    headers = {"authorization": "Bearer secret"}
    pieces = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as response:
        for line in response.iter_lines():
            if not pieces:
                process.send_signal(signal.SIGTERM)
            if line.startswith("data: {"):
                pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == eqformer.load(folder).generate("ab", max_new_tokens=150)
    assert process.wait(30) == 0
