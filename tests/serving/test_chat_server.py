"""Chats of the server: the template's prompt, streams, calls of tools in the known formats, and JSON by a schema."""

import json
from importlib.util import find_spec

import pytest
from test_completions_server import events, generate_texts, INTERNAL, make_app, SCRIPT, send
from text_cases import scripted, TEMPLATE

from eqformer import data
from eqformer.serving import ToolCallParser
from eqformer.text import LLM


CHAT = "/v1/chat/completions"
TOOLS_TEMPLATE = "{% if tools %}[{% for tool in tools %}{{ tool.function.name }}{% endfor %}]{% endif %}"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "user", "content": "Hi"}]
FORMATS = {
    "tags": 'Wait. <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "two tags": '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>',
    "a list": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]',
    "a name with arguments": '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
    "an object": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "an object after a tag": '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}',
}
PLAIN = {
    "broken JSON": '<tool_call>{"name": "weather", "arguments": {</tool_call>',
    "an unknown tool": '{"name": "clock", "arguments": {}}',
    "other JSON": '{"city": "Rome"}',
    "a beginning of a tag": "a < b and [TOOL",
    "text": "It is 3 <tool> degrees.",
    "nothing": "",
}


def template(tmp_path, source):
    (tmp_path / "chat_template.jinja").write_text(source)
    return data.ChatTemplate(tmp_path)


def writer(source, script=SCRIPT):
    """A model with a chat template that writes a script."""
    return LLM(scripted(script.ljust(190, "\0")).model, data.ByteTokenizer(), source, end_ids=(0,))


def write(source, answer, tools=()):
    """A model that answers a chat by a script."""
    options = {"tools": list(tools)} if tools else {}
    return writer(source, source.render(ASK, **options) + answer)


@pytest.mark.quick
def test_answers_are_those_of_an_engine(tmp_path):
    llm = writer(template(tmp_path, TEMPLATE))
    messages = [{"role": "developer", "content": "Be kind."}, *ASK]
    body = {"messages": messages, "max_completion_tokens": 15, "temperature": 9, "seed": 3, "n": 2}
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    response, streamed = send(make_app(llm), body, body | counted, path=CHAT)
    messages = [{"role": "system", "content": "Be kind."}, *ASK]
    expected = [result.text for result in generate_texts(llm, messages, 2, max_new_tokens=15, temperature=9.0, seed=3)]
    answers = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert answers == expected and len({*answers}) == 2
    pieces = [choice for event in events(streamed) for choice in event["choices"]]
    joined = ["".join(p["delta"].get("content", "") for p in pieces if p["index"] == number) for number in (0, 1)]
    assert joined == answers and pieces[0]["delta"]["role"] == "assistant"
    assert events(streamed)[-1]["usage"] == response.json()["usage"]
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["length"] * 2


def test_log_probabilities_of_an_answer(tmp_path):
    llm = writer(template(tmp_path, TEMPLATE))
    body = {"messages": ASK, "max_tokens": 6, "temperature": 0, "logprobs": True}
    response, streamed, without = send(
        make_app(llm), body, body | {"stream": True}, body | {"logprobs": False}, path=CHAT
    )
    (expected,) = generate_texts(llm, ASK, max_new_tokens=6)
    log_probs = response.json()["choices"][0]["logprobs"]["content"]
    assert [token["logprob"] for token in log_probs] == pytest.approx(list(expected.log_probs), rel=1e-4)
    parts = [choice["logprobs"]["content"] for event in events(streamed) for choice in event["choices"]]
    assert [token for part in parts for token in part] == log_probs and without.json()["choices"][0]["logprobs"] is None
    assert all(token["bytes"] is None or bytes(token["bytes"]).decode() == token["token"] for token in log_probs)


@pytest.mark.parametrize("form", FORMATS)
def test_calls_of_tools_are_parsed(tmp_path, form):
    source = template(tmp_path, TOOLS_TEMPLATE + TEMPLATE)
    llm = write(source, FORMATS[form], [WEATHER])
    body = {"messages": ASK, "temperature": 0, "tools": [WEATHER]}
    response, streamed = send(make_app(llm), body, body | {"stream": True}, path=CHAT)
    choice = response.json()["choices"][0]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"]["tool_calls"]
    ]
    assert calls == [("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})][: 1 + (form == "two tags")]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ("Wait. " if form == "tags" else None)
    pieces = [choice["delta"] for event in events(streamed) for choice in event["choices"]]
    assert "".join(piece.get("content", "") for piece in pieces) == (choice["message"]["content"] or "")
    (last,) = [piece["tool_calls"] for piece in pieces if "tool_calls" in piece]
    assert [call["index"] for call in last] == [*range(len(calls))]
    assert [call["function"] for call in last] == [call["function"] for call in choice["message"]["tool_calls"]]


@pytest.mark.parametrize("tools", [[], [WEATHER]], ids=["no tools", "tools"])
def test_a_chat_is_rendered_once_for_all_of_its_texts(tmp_path, monkeypatch, tools):
    """With tools it is rendered a second time without them, since a template that leaves them out is refused."""
    source = template(tmp_path, TOOLS_TEMPLATE + TEMPLATE)
    app, render, rendered = make_app(writer(source)), data.ChatTemplate.render, []

    def count(self, *arguments, **options):
        rendered.append(arguments)
        return render(self, *arguments, **options)

    monkeypatch.setattr(data.ChatTemplate, "render", count)
    (response,) = send(app, {"messages": ASK, "max_tokens": 2, "n": 3, "tools": tools}, path=CHAT)
    assert response.status_code == 200 and len(rendered) == (2 if tools else 1)


def test_a_chat_that_does_not_fit_is_refused(tmp_path):
    (response,) = send(
        make_app(writer(template(tmp_path, TEMPLATE))), {"messages": [ASK[0] | {"content": "x" * 500}]}, path=CHAT
    )
    error = response.json()["error"]
    assert response.status_code == 400 and (error["param"], error["code"]) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("form", [*PLAIN, *FORMATS])
def test_calls_do_not_depend_on_pieces(form, size):
    text = (PLAIN | FORMATS)[form]
    parser = ToolCallParser(["weather"])
    content = "".join(parser.push(text[start : start + size]) for start in range(0, len(text), size))
    ending, calls = parser.finish()
    assert bool(calls) == (form in FORMATS)
    assert content + ending == (text if form in PLAIN else text[: text.index("<tool_call>")] if form == "tags" else "")
    assert form != "text" or size > 1 or len(content) > 10  # text is not held back until the end


@pytest.mark.parametrize("name", ["broken JSON", "an unknown tool"])
def test_text_before_the_first_call_of_a_known_tool_is_kept(name):
    """Calls that are none do not take the text after them along."""
    unknown = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    text = f"Well. {unknown if name == 'an unknown tool' else PLAIN[name]} Then this: "
    for size in (1, 100):
        parser, answer = ToolCallParser(["weather"]), text + FORMATS["two tags"]
        content = "".join(parser.push(answer[start : start + size]) for start in range(0, len(answer), size))
        ending, calls = parser.finish()
        assert content + ending == text and [call.arguments["city"] for call in calls] == ["Rome", "Oslo"]


def test_results_of_tools_are_rendered(tmp_path):
    source = template(
        tmp_path,
        TOOLS_TEMPLATE + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}{% endfor %}<assistant>",
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "cold"}]}
    messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    prompt = "[weather]<user>Hi<assistant>weatherRome<tool>cold<assistant>"
    llm = writer(source, prompt + "Wear a coat.")
    (response,) = send(make_app(llm), {"messages": messages, "temperature": 0, "tools": [WEATHER]}, path=CHAT)
    assert response.json()["choices"][0]["message"] == {"role": "assistant", "content": "Wear a coat."}
    assert response.json()["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.grid
@pytest.mark.skipif(not find_spec("llguidance"), reason="the extra `grammar` is not installed")
def test_answers_follow_a_schema(tmp_path):
    llm = writer(template(tmp_path, TEMPLATE))
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    forms = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, {"type": "text"}]
    follows, plain, broken = send(
        make_app(llm),
        *[{"messages": ASK, "max_tokens": 40, "temperature": 1, "seed": 1, "response_format": form} for form in forms],
        {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        path=CHAT,
    )
    assert follows.status_code == 200, follows.text
    assert json.loads(follows.json()["choices"][0]["message"]["content"])["a"] in (1, 2)
    with pytest.raises(ValueError):
        json.loads(plain.json()["choices"][0]["message"]["content"])
    assert broken.status_code == 400 and broken.json()["error"]["param"] == "response_format"
    assert broken.json()["error"]["message"].startswith("response_format: the grammar cannot be read")


@pytest.mark.skipif(not find_spec("llguidance"), reason="the extra `grammar` is not installed")
def test_answers_with_tools_follow_a_schema(tmp_path):
    llm = writer(template(tmp_path, TOOLS_TEMPLATE + TEMPLATE))
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": ASK, "max_tokens": 40, "temperature": 1, "seed": 1, "tools": [WEATHER]}
    follows, streamed, plain = send(
        make_app(llm),
        body | {"response_format": form},
        body | {"response_format": form, "stream": True},
        body,
        path=CHAT,
    )
    assert follows.status_code == 200, follows.text
    answer = follows.json()["choices"][0]["message"]["content"]
    assert json.loads(answer)["a"] in (1, 2)
    pieces = [choice["delta"].get("content", "") for event in events(streamed) for choice in event["choices"]]
    assert "".join(pieces) == answer != plain.json()["choices"][0]["message"]["content"]


BAD_CHATS = {
    "messages": (None, [], "Hi", {}, [3], [{"role": "king", "content": "x"}], [{"role": "user"}], [ASK]),
    "content": [
        [{"role": "user", "content": content}] for content in ([{"type": "image_url"}], [{"type": "text"}], [], 3)
    ],
    "tool_calls": ([{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}],),
    "refused by the template": ([{"role": "tool", "content": "x"}],),
    "tools": ([3], {}, [{"type": "function"}], [{"type": "function", "function": {"name": ""}}]),
    "tool_choice": ("required", {"type": "function", "function": {"name": "x"}}),
    "response_format": ("text", {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": 1}),
    "chat_template_kwargs": ([], {"messages": []}),
    "top_logprobs": (3, -1, 21),
    "logprobs": (1, "yes"),
    "max_tokens": (0, -5, "1"),
    "modalities": (["audio"],),
    "continue_final_message": (1, "yes"),
    "add_generation_prompt": (0, []),
    "logit_bias": ({"256": 1},),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_bad_settings_of_chats_are_refused(tmp_path, name):
    llm = writer(template(tmp_path, TEMPLATE))
    app, values = make_app(llm), BAD_CHATS[name]
    are_messages = name in ("content", "tool_calls", "refused by the template")
    field = "messages" if are_messages else name
    for value, response in zip(values, send(app, *[{"messages": ASK, field: value} for value in values], path=CHAT)):
        assert response.status_code == 400 and len(response.json()["error"]["message"]) < 500, (value, response.text)
        assert not INTERNAL.search(response.json()["error"]["message"]), response.text


def test_models_without_a_template_or_tools_say_so(tmp_path):
    silent = writer(None)
    (response,) = send(make_app(silent), {"messages": ASK}, path=CHAT)
    assert response.status_code == 400 and response.json()["error"]["message"].startswith("messages: the model has no")
    llm = writer(template(tmp_path, TEMPLATE))
    (response,) = send(make_app(llm), {"messages": ASK, "tools": [WEATHER]}, path=CHAT)
    assert response.status_code == 400 and response.json()["error"]["message"].startswith("tools: ")


TOOL_MESSAGE = {"role": "tool", "content": "x"}
FORM = {"type": "json_object"}
ERRORS = {
    "template": ({"messages": [TOOL_MESSAGE]}, "messages", "messages: the template in chat_template.jinja refuses"),
    "unfinished": (
        {"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": True, "max_tokens": 200},
        "max_tokens",
        "the prompt has 12 tokens and 200 are asked for",
    ),
    "both": (
        {"messages": ASK, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "continue_final_message continues the last message, add_generation_prompt begins another",
    ),
    "forced": (
        {"messages": ASK, "continue_final_message": True, "tools": [WEATHER], "tool_choice": "required"},
        "tool_choice",
        "tool_choice forces an answer that begins with a call",
    ),
    "draft": ({"messages": ASK, "response_format": FORM}, "response_format", "response_format: a draft proposes"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_fields_of_the_body(tmp_path, name):
    body, parameter, words = ERRORS[name]
    llm = writer(template(tmp_path, TOOLS_TEMPLATE + TEMPLATE))
    app = make_app(llm, draft=llm) if name == "draft" else make_app(llm)
    (response,) = send(app, {"max_tokens": 4} | body, path=CHAT)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == parameter, error
    assert error["message"].startswith(words) and not INTERNAL.search(error["message"]), error


def test_an_error_of_the_library_names_a_call():
    """A control of the tests above: without the server the call is named."""
    with pytest.raises(ValueError) as raised:
        scripted(SCRIPT).chat(ASK)
    assert INTERNAL.search(str(raised.value))


def test_the_beginning_of_an_answer_is_continued(tmp_path):
    llm = writer(template(tmp_path, TEMPLATE.replace("content }}", "content }}$")))
    messages = [*ASK, {"role": "assistant", "content": "Well, "}]
    plain = {"messages": messages, "max_tokens": 9, "temperature": 0}
    body = plain | {"continue_final_message": True}
    bodies = (body, body | {"add_generation_prompt": False}, body | {"stream": True})
    continued, explicit, streamed = send(make_app(llm), *bodies, path=CHAT)
    (expected,) = generate_texts(llm, "<user>Hi$<assistant>Well, ", max_new_tokens=9)
    (answer,) = generate_texts(llm, "<user>Hi$<assistant>Well, $<assistant>", max_new_tokens=9)
    (bare,) = generate_texts(llm, "<user>Hi$<assistant>Well, $", max_new_tokens=9)
    content = lambda response: response.json()["choices"][0]["message"]["content"]
    assert content(continued) == content(explicit) == expected.text
    pieces = [choice["delta"].get("content", "") for event in events(streamed) for choice in event["choices"]]
    assert "".join(pieces) == expected.text
    answered, headless = send(make_app(llm), plain, plain | {"add_generation_prompt": False}, path=CHAT)
    assert [content(answered), content(headless)] == [answer.text, bare.text]
    assert len({expected.text, answer.text, bare.text}) == 3  # the control: the three prompts differ
