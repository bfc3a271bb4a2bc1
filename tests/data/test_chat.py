"""Chat templates of published tokenizers: rendered conversations and prompts, and errors."""

import datetime
import json
from pathlib import Path

import pytest

from eqformer.data import ChatTemplate, FileTokenizer, has_chat_template


# The template uses what published templates use: blocks on lines of their own, `break`, marks around trained text,
# `raise_exception`, tools as JSON.
MARKED = """{{ bos_token }}
{%- for message in messages %}
    {% if message.role == "system" and not loop.first %}
        {{- raise_exception("a system message comes first") }}
    {% endif %}
    {% if message.role == "assistant" %}
<|assistant|>{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}

    {% else %}
<|{{ message.role }}|>{{ message.content }}
    {% endif %}
    {% if message.content == "stop" %}{% break %}{% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}
{% if add_generation_prompt %}
<|assistant|>{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{% endif %}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hé <b>?"},
    {"role": "assistant", "content": " Yes. "},
    {"role": "user", "content": "Go on"},
]
SETTINGS = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}


def folder_of(path, template, **settings):
    (path / "tokenizer_config.json").write_text(json.dumps(SETTINGS | settings))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def test_a_conversation_is_rendered(tmp_path):
    template = ChatTemplate(folder_of(tmp_path, MARKED))
    said = "<s><|system|>Be brief.\n<|user|>Hé <b>?\n<|assistant|>Yes.</s>\n<|user|>Go on\n"
    assert template.render(TALK, add_generation_prompt=False) == said
    assert template.render(TALK) == said + "<|assistant|>"
    assert template.render(TALK, enable_thinking=False) == said + "<|assistant|><think></think>"
    assert template.render([TALK[1], {"role": "user", "content": "stop"}, TALK[1]]).count("<|user|>") == 2
    assert template.render(TALK[:1], add_generation_prompt=False, tools=["é"]).endswith('[\n "é"\n]')


ASKED = "{% if add_generation_prompt %}<a>{% endif %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}" + ASKED
SPACED = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} </s>{% endfor %}"
UNFINISHED = {
    "trimmed": (MARKED, "Yes, ", "<s><|system|>Be brief.\n<|user|>Hé <b>?\n<|assistant|>Yes,"),
    "as it is": (PLAIN, "Yes, ", "<system>Be brief.<end>\n<user>Hé <b>?<end>\n<assistant>Yes, "),
    "in spaces": (SPACED, "Yes, ", "[system] Be brief. </s>[user] Hé <b>? </s>[assistant] Yes, "),
    "a text of the user": (PLAIN, "Be brief.", "<system>Be brief.<end>\n<user>Hé <b>?<end>\n<assistant>Be brief."),
    "empty": (PLAIN, "", "<system>Be brief.<end>\n<user>Hé <b>?<end>\n<assistant>"),
}


@pytest.mark.parametrize("name", UNFINISHED)
def test_a_final_message_is_continued(tmp_path, name):
    source, content, expected = UNFINISHED[name]
    template = ChatTemplate(folder_of(tmp_path, source))
    messages = [*TALK[:2], {"role": "assistant", "content": content}]
    assert template.render(messages, continue_final_message=True) == expected
    assert template.render(messages, add_generation_prompt=False) != expected  # the control: a finished message


@pytest.mark.parametrize(
    "source,content,words",
    [
        (PLAIN, None, "the content of the final message is continued, but it is None"),
        ("{{ messages[0].content }}", "b", "final message 'b' is continued, but the template in .* another way"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "b", "the final message 'b' is continued"),
        (MARKED.replace("{{ message.content | trim }}", "{{ raise_exception('no') }}"), "b", "refuses .*no"),
    ],
)
def test_final_messages_that_cannot_be_continued(tmp_path, source, content, words):
    template = ChatTemplate(folder_of(tmp_path, source))
    with pytest.raises(ValueError, match=words):
        template.render([TALK[1], {"role": "assistant", "content": content}], continue_final_message=True)


def test_templates_in_the_settings(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    folder = folder_of(tmp_path, None, chat_template=named)
    assert has_chat_template(folder) and ChatTemplate(folder).render(TALK) == "Be brief."
    folder_of(tmp_path, None, chat_template="{{ strftime_now('%d %Y') if strftime_now is defined else 'no clock' }}")
    assert ChatTemplate(folder).render(TALK) == "no clock"
    assert ChatTemplate(folder, now=lambda: datetime.datetime(1999, 12, 31)).render(TALK) == "31 1999"


RENDERED = r"^ChatTemplate.render[(]messages[)]: the template in chat_template.jinja"
FILE = r"^ChatTemplate\('.*'\): the template in chat_template.jinja"
FIX = "; change the messages, correct the template, or give a plain text instead of messages.$"


@pytest.mark.parametrize(
    "template,words",
    [
        (None, "no chat_template.jinja, and its tokenizer_config.json has no chat_template"),
        ("{% for %}", "cannot be read"),
        (
            "{{ messages | bold }}",
            rf"{FILE} cannot be read [(]No filter named 'bold'.[)]; fetch it again, or correct it.$",
        ),
        ("{{ messages[0].content + 1 }}", rf"{RENDERED} refuses .* .can only concatenate str .*{FIX}"),
        ("{{ raise_exception('no images') }}", rf"{RENDERED} refuses messages of user, system .no images.{FIX}"),
        (MARKED, "refuses messages of user, system .a system message comes first"),
        ("{{ messages.append(3) }}", "refuses .*"),  # nothing can be changed
        ("{{ ''.__class__.__mro__ }}", "refuses .*unsafe"),
        ("{{ messages[0].text.strip() }}", "refuses .*has no attribute"),
    ],
)
def test_bad_templates(tmp_path, template, words):
    with pytest.raises(ValueError, match=words):
        ChatTemplate(folder_of(tmp_path, template)).render([TALK[1], TALK[0]])


def test_prompts_have_special_tokens(tokenizer_json, tmp_path):
    tokenizer = FileTokenizer(tokenizer_json)
    text = "one<|endoftext|>two"
    ids = tokenizer.encode_prompt(text, add_special_tokens=False).tolist()
    assert ids.count(tokenizer.end_of_text) == 1
    assert ids == [*tokenizer.encode("one"), tokenizer.end_of_text, *tokenizer.encode("two")]
    assert tokenizer.end_of_text not in tokenizer.encode(text)  # as before: in documents they are only text
    assert FileTokenizer(tokenizer_json, end_of_text=3).end_of_text == 3
    file = json.loads(tokenizer_json.read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    known = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [tokenizer.end_of_text], "tokens": ["<|endoftext|>"]}}
    file["post_processor"] = {"type": "TemplateProcessing", "single": first, "pair": first, "special_tokens": known}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    begun = FileTokenizer(tmp_path / "tokenizer.json")
    assert begun.encode_prompt("one").tolist() == [begun.end_of_text, *tokenizer.encode("one")]
    assert begun.encode_prompt("one", add_special_tokens=False).tolist() == begun.encode("one").tolist()


CHATS = json.loads((Path(__file__).parents[1] / "fixtures" / "chats.json").read_text())


@pytest.mark.parametrize("name", CHATS["cases"])
def test_settings_say_what_they_say_in_transformers(name, tmp_path):
    """A template's text and a prompt's ids equal transformers' results, recorded by `tests/fixtures/make_chats.py`."""
    case = CHATS["cases"][name]
    (tmp_path / "tokenizer.json").write_text(json.dumps(CHATS["tokenizer"] | {"post_processor": case["around"]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(case["config"]))
    if case["older"] is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(case["older"]))
    assert ChatTemplate(tmp_path).render(CHATS["messages"]) == case["text"]
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", end_of_text="</s>")
    assert tokenizer.encode_prompt(CHATS["prompt"]).tolist() == case["ids"]
    plain = [4, 5, 1, 5]
    assert tokenizer.encode_prompt(CHATS["prompt"], add_special_tokens=False).tolist() == plain
    assert tokenizer.encode(CHATS["prompt"]).tolist() == plain


def test_the_settings_make_a_difference():
    """A control of the test above: settings change what templates see, but not the tokens around a prompt."""
    cases = CHATS["cases"]
    assert len({its["text"] for its in cases.values()}) == 5
    assert all((its["ids"][0] == 1) == (its["around"] is not None) for its in cases.values())
    assert {"first, bare", "not first, first", "around, bare"} < set(cases)


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
def test_as_transformers_renders(tmp_path, tokenizer_json):
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_json), bos_token="<s>", eos_token="</s>", chat_template=MARKED
    )
    theirs.save_pretrained(tmp_path)
    ours, tokenizer = ChatTemplate(tmp_path), FileTokenizer(tmp_path / "tokenizer.json", end_of_text="</s>")
    for answer in (True, False):
        expected = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=answer)
        assert ours.render(TALK, add_generation_prompt=answer) == expected
        ids = theirs(expected, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode_prompt(expected, add_special_tokens=False).tolist() == ids


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", UNFINISHED)
def test_a_final_message_is_continued_as_in_transformers(tmp_path, tokenizer_json, name):
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    source, content, expected = UNFINISHED[name]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_json), bos_token="<s>", eos_token="</s>", chat_template=source
    )
    messages = [*TALK[:2], {"role": "assistant", "content": content}]
    assert theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True) == expected
    refused = {"role": "assistant", "content": "b"}
    theirs.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="continue_final_message"):  # as ours refuses it
        theirs.apply_chat_template([TALK[1], refused], tokenize=False, continue_final_message=True)
