"""A server of a model of block diffusion: texts, streams that grow by blocks, and refused options."""

import dataclasses

import pytest
from test_completions_server import events, make_app, send, texts
from text_cases import scripted, TEMPLATE

from eqformer import data


SCRIPT = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A model that writes the script in blocks of 8 tokens."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return dataclasses.replace(scripted(SCRIPT, block=8), chat_template=data.ChatTemplate(folder))


@pytest.fixture(scope="module")
def app(llm):
    return make_app(llm)


@pytest.mark.grid
def test_completions_are_the_texts_of_the_model_alone(llm, app):
    prompts = [SCRIPT[:length] for length in (3, 8, 17)]
    bodies = [{"prompt": prompt, "max_tokens": 11, "temperature": 0} for prompt in prompts]
    expected = [llm.generate(prompt, max_new_tokens=11) for prompt in prompts]
    assert [texts(response) for response in send(app, *bodies)] == [[text] for text in expected]
    (response,) = send(app, {"prompt": "012", "max_tokens": 100, "temperature": 0, "n": 2, "stop": "GH"})
    assert texts(response) == ["3456789ABCDEF"] * 2
    assert response.json()["usage"]["completion_tokens"] == 2 * len("3456789ABCDEFGH")


@pytest.mark.grid
def test_streams_grow_by_blocks(app):
    body = {"max_tokens": 14, "temperature": 0, "stream": True}
    (response,) = send(app, body | {"prompt": "012"})
    assert [event["choices"][0]["text"] for event in events(response)] == ["34567", "89ABCDEF", "G"]
    (response,) = send(app, body | {"messages": [{"role": "user", "content": "Hi"}]}, path=CHAT)
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events(response)]
    start = len("<user>Hi<assistant>")
    # The prompt of 19 tokens ends three tokens after the beginning of a block.
    assert [piece for piece in pieces if piece] == [SCRIPT[start:24], SCRIPT[24:32], SCRIPT[32 : start + 14]]


def test_options_that_need_one_token_after_another_are_refused(app):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    wrong = [
        ("/v1/completions", {"prompt": "012", "logprobs": 0}, "logprobs"),
        ("/v1/completions", {"prompt": "012", "best_of": 2}, "best_of"),
        (CHAT, chat | {"logprobs": True}, "logprobs"),
        (CHAT, chat | {"response_format": schema}, "response_format"),
    ]
    for path, body, field in wrong:
        (response,) = send(app, body, path=path)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == field
        assert error["message"].startswith(f"{field}: a model of block diffusion fills the tokens of a block in any")
        assert error["message"].endswith(f"; leave {field} out.")
