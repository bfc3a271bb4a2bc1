"""Forced tool calls (`tool_choice`): a grammar in the format of the chat template constrains the answer."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import pytest
from test_completions_server import events, make_app, send
from text_cases import CONFIG, small_model

import eqformer
from eqformer import data, models
from eqformer.serving._tool_calls import find_call_format, ToolCallParser
from eqformer.text import LLM


CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Hi"}]
CITY = {"$ref": "#/$defs/city"}
FORECAST = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", '<tool_call>[TOOL_CALLS]"</tool_call>']}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": FORECAST}}
CLOCK = {"type": "function", "function": {"name": "weather_clock"}}
TOOLS = [WEATHER, CLOCK]
BEGINNING = "{% for t in tools or [] %}{{ t.function.name }},{% endfor %}{% for m in messages %}<{{ m.role }}>\n"
CALL = "{% for c in m.tool_calls or [] %}{% set f = c.function %}{% set a = f.arguments | tojson %}"
END = "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
TAGS = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ a }}}\n</tool_call>'
TEMPLATES = {
    "tags": BEGINNING + "{{ m.content }}" + CALL + TAGS + END,
    "tags after reasoning": BEGINNING
    + "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    + CALL
    + TAGS
    + END,
    "an object": BEGINNING + "{{ m.content }}" + CALL + '{"name": "{{ f.name }}", "parameters": {{ a }}}' + END,
    "an object after a tag": BEGINNING
    + "{{ m.content }}"
    + CALL
    + '<|python_tag|>{"name": "{{ f.name }}", "parameters": {{ a }}}'
    + END,
    "a list": BEGINNING
    + "{{ m.content }}"
    + CALL
    + '[TOOL_CALLS] [{"name": "{{ f.name }}", "arguments": {{ a }}, "id": "{{ c.id }}"}]'
    + END,
    "a name with arguments": BEGINNING
    + "{{ m.content }}"
    + CALL
    + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ a }}"
    + END,
}
UNKNOWN = {
    "no calls": BEGINNING + "{{ m.content }}" + CALL + END,
    "XML": BEGINNING + "{{ m.content }}" + CALL + "<function={{ f.name }}>{{ a }}</function>" + END,
    "refused": BEGINNING + "{{ m.content }}" + CALL + "{{ raise_exception('no calls') }}" + END,
}
needs_grammar = pytest.mark.skipif(
    not importlib.util.find_spec("llguidance"), reason="the extra `grammar` is not installed"
)


def template(tmp_path, source):
    (tmp_path / "chat_template.jinja").write_text(source)
    return data.ChatTemplate(tmp_path)


def make_chat(tmp_path, source, **options):
    """An app of a random model, which samples bytes; with many slots, since a grammar masks one token a step."""
    llm = LLM(small_model(), data.ByteTokenizer(), template(tmp_path, source), end_ids=(0,))
    return make_app(llm, **{"slots": 8} | options)


def call_of(message):
    """The name and the arguments of the only call of a message; None for text."""
    if "tool_calls" not in message:
        return None
    (call,) = message["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def follows_schema(call):
    if call is None or call[0] not in ("weather", "weather_clock"):
        return False
    name, arguments = call
    if name == "weather_clock":
        return arguments == {}
    is_forecast = {*arguments} == {"city", "days"} and type(arguments["days"]) is int
    return is_forecast and arguments["city"] in FORECAST["$defs"]["city"]["enum"] and 1 <= arguments["days"] <= 9


@pytest.mark.grid
@needs_grammar
@pytest.mark.parametrize("form", TEMPLATES)
def test_a_random_model_writes_valid_calls(tmp_path, form):
    app = make_chat(tmp_path, TEMPLATES[form])
    body = {"messages": ASK, "tools": TOOLS, "temperature": 1.5, "seed": 5, "n": 4, "max_tokens": 130}
    named = {"type": "function", "function": {"name": "weather"}}
    required, only_weather, streamed, free = send(
        app,
        body | {"tool_choice": "required"},
        body | {"tool_choice": named},
        body | {"tool_choice": "required", "stream": True},
        body,
        path=CHAT,
    )
    assert required.status_code == 200, required.text
    choices = required.json()["choices"]
    calls = [call_of(choice["message"]) for choice in choices]
    assert all(map(follows_schema, calls)), choices
    assert {choice["finish_reason"] for choice in choices} == {"tool_calls"}
    assert {choice["message"]["content"] for choice in choices} == {None}
    weather = [call_of(choice["message"]) for choice in only_weather.json()["choices"]]
    assert all(map(follows_schema, weather)) and {call[0] for call in weather if call} == {"weather"}
    pieces = [choice for event in events(streamed) for choice in event["choices"]]
    ends = sorted([piece for piece in pieces if piece["finish_reason"]], key=lambda piece: piece["index"])
    assert [call_of(piece["delta"]) for piece in ends] == calls
    assert not any(piece["delta"].get("content") for piece in pieces)
    assert not any(follows_schema(call_of(choice["message"])) for choice in free.json()["choices"])  # without a grammar


@needs_grammar
@pytest.mark.quick
def test_the_prompt_has_the_text_before_a_call(tmp_path):
    """Empty reasoning, which a template writes before a call, is no part of the answer."""
    app = make_chat(tmp_path, TEMPLATES["tags after reasoning"])
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 1}
    free, forced = send(app, body, body | {"tool_choice": "required"}, path=CHAT)
    lengths = [response.json()["usage"]["prompt_tokens"] for response in (free, forced)]
    assert lengths[1] - lengths[0] == len("<think>\n\n</think>\n\n")
    message = forced.json()["choices"][0]
    assert (message["message"]["content"], message["finish_reason"]) == (
        "<",
        "length",
    )  # A call that is cut off is text.


@pytest.mark.grid
def test_no_tool_is_shown_for_the_choice_none(tmp_path):
    app = make_chat(tmp_path, TEMPLATES["tags"])
    body = {"messages": ASK, "max_tokens": 3, "temperature": 0}
    without, hidden, shown = send(
        app, body, body | {"tools": TOOLS, "tool_choice": "none"}, body | {"tools": TOOLS}, path=CHAT
    )
    counts = [response.json()["usage"]["prompt_tokens"] for response in (without, hidden, shown)]
    assert counts[0] == counts[1] < counts[2]
    assert without.json()["choices"] == hidden.json()["choices"]


@pytest.mark.grid
@pytest.mark.parametrize("form", UNKNOWN)
def test_templates_of_other_formats_are_refused(tmp_path, form):
    app = make_chat(tmp_path, UNKNOWN[form])
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 3}
    forced, free = send(app, body | {"tool_choice": "required"}, body, path=CHAT)
    assert forced.status_code == 400 and "format that is not known" in forced.json()["error"]["message"]
    assert free.status_code == 200


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    app = make_chat(tmp_path, TEMPLATES["tags"])
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required"}
    for response in send(app, body, body | {"stream": True}, path=CHAT):
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "tool_choice"
        assert error["message"].startswith("tool_choice: needs the package llguidance")


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
BAD = {
    "no tools": {"tools": [], "tool_choice": "required"},
    "another name": {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
    "another kind": {"tool_choice": {"type": "custom", "custom": {"name": "weather"}}},
    "no choice": {"tool_choice": "weather"},
    "two grammars": {"tool_choice": "required", "response_format": SCHEMA},
    "a list as parameters": {"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]},
    "parameters of a list": {
        "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]
    },
    "a broken schema": {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"properties": 3}}}]},
    "a name with spaces": {"tools": [{"type": "function", "function": {"name": "x y"}}]},
}


@needs_grammar
@pytest.mark.parametrize("name", BAD)
def test_bad_choices_are_refused(tmp_path, name):
    app = make_chat(tmp_path, TEMPLATES["tags"])
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required"} | BAD[name]
    (response,) = send(app, body, path=CHAT)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] in ("tool_choice", "tools") and error["message"].startswith(("the body", error["param"]))


ADDED = ["[TOOL_CALLS]", "<|end|>", "<tool_call>", "</tool_call>"]
WITH_END = {name: TEMPLATES[name].replace("{% endfor %}\n", "{% endfor %}<|end|>\n") for name in ("tags", "a list")}


@needs_grammar
@pytest.mark.grid
@pytest.mark.parametrize("form", WITH_END)
def test_calls_have_the_tokens_of_a_published_tokenizer(tmp_path, form):
    """Published tokenizers have tokens for markers, some of them special, and a token that ends a turn."""
    tokenizer = json.loads(data.ByteTokenizer().to_json())
    for number, name in enumerate(ADDED, 256):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": name, "special": number < 258, **flags})
    config = dataclasses.replace(CONFIG, vocab=260)
    model = models.build(config, key=jax.random.key(0))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": WITH_END[form]}
    files = {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(settings)}
    models.save(model, tmp_path / "tiny", config=config, attributes={"eos_token_id": 257}, files=files)
    body = {"messages": ASK, "tools": TOOLS, "seed": 5, "n": 4, "max_tokens": 130, "logprobs": True}
    app = make_app(eqformer.load(tmp_path / "tiny"))
    forced, free = send(app, body | {"tool_choice": "required"}, body, path=CHAT)
    assert forced.status_code == 200, forced.text
    for choice in forced.json()["choices"]:
        assert follows_schema(call_of(choice["message"])) and choice["message"]["content"] is None
        written = [token["token"] for token in choice["logprobs"]["content"]]
        assert written[-1] == "<|end|>"
        assert written[0] == ("[TOOL_CALLS]" if form == "a list" else "<tool_call>")
        assert form == "a list" or written[-2] == "</tool_call>"
    assert not any(follows_schema(call_of(choice["message"])) for choice in free.json()["choices"])


KNOWN = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "llama3_1", "llama3_2")


@pytest.mark.hf
@pytest.mark.parametrize("name", [*KNOWN, "qwen3_5_think", "gptoss", "gemma3"])
def test_formats_of_published_templates(tmp_path, name):
    """TRL ships published templates of many families."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the package trl is not installed")
    source = (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    ends = ["<|im_end|>", "<|eot_id|>"]
    call_format = find_call_format(template(tmp_path, source), ASK, {"tools": TOOLS}, ends)
    assert (call_format is not None) == (name in KNOWN)
    if call_format is not None:
        text = (
            call_format.before_name
            + "weather"
            + call_format.before_arguments
            + '{"a": 1}'
            + call_format.after_arguments
        )
        parser = ToolCallParser(["weather"])
        assert (parser.push(text), len(parser.finish()[1])) == ("", 1) and text.endswith(("}", "</tool_call>"))
        assert call_format.lead in ("", "<think>\n\n</think>\n\n")
