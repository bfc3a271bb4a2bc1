import importlib
import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eqformer.data import (
    ByteTokenizer,
    ChatTemplate,
    ConversationEncoder,
    conversations,
    detect_form,
    DocumentPacking,
    files,
    FileTokenizer,
    find_replies,
    open_corpus,
    open_store,
    read_example,
    WindowPacking,
)


USER, REPLY = {"role": "user", "content": "Hé?"}, {"role": "assistant", "content": " <b>日 "}
AGAIN, LAST = {"role": "user", "content": "More"}, {"role": "assistant", "content": "ok\n"}
TALK = [USER, REPLY, AGAIN, LAST]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "content": "2"}
TOOLS = [USER, CALL, RESULT, LAST]
HEADER = "<|a|>\n"
ASK = "{% if add_generation_prompt %}<|a|>\n{% endif %}"

CHATML = "{% for m in messages %}<|{{ m.role[0] }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + ASK
# The reasoning of turns before the last user's is dropped, and the prompt may begin it.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role[0] }}|>\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}" + ASK[:-11] + "<think>{% endif %}"
)
# Contents are trimmed, in a macro that the loop over a part of the messages calls.
TRIMMED = (
    "{% macro write(m) %}<|{{ m.role[0] }}|>\n{{ m.content | trim }}<|end|>\n{% endmacro %}"
    "{% set rest = messages[1:] %}{{ write(messages[0]) }}{% for m in rest %}{{ write(m) }}{% endfor %}" + ASK
)
# Results are written by the iteration of the call, and the model goes on without a header.
JOINED = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% else %}"
    "{% if not (loop.index0 and messages[loop.index0 - 1].role == 'tool') %}<|{{ m.role[0] }}|>\n{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}"
    "{% if m.tool_calls %}<|call|>{% if loop.index < messages | length %}{{ messages[loop.index].content }}{% endif %}"
    "{% else %}<|end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|a|>\n{% endif %}"
)
# Both: reasoning of earlier turns is dropped, and results are written by the iteration of the call.
THINKING_JOINED = (
    THINKING[: THINKING.index("{% for m in messages %}<|")]
    + JOINED[: JOINED.index("{{ m.content }}")]
    + "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    + JOINED[JOINED.index("{{ m.content }}") :]
)
# A conversation without a question is refused.
DEMANDING = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('ask') }}{% endif %}"
    + CHATML
)
# The next message's header ends a turn.
HEADED = "{% for m in messages %}<|{{ m.role[0] }}|>\n{{ m.content }}{% endfor %}" + ASK
# The header stands in the user's turn, and a turn begins with a space.
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<|end|>"
    "{% endif %}{% endfor %}"
)
# The prompt is written in the last iteration.
INSIDE = (
    "{% for m in messages %}<|{{ m.role[0] }}|>\n{{ m.content }}<|end|>\n"
    "{% if loop.last and add_generation_prompt %}<|a|>\n{% endif %}{% endfor %}"
)
# No loop has the messages as items.
INDEXED = (
    "{% for i in range(messages | length) %}<|{{ messages[i].role[0] }}|>\n{{ messages[i].content }}<|end|>\n"
    "{% endfor %}" + ASK
)
SYSTEM = {"role": "system", "content": "Be brief."}
REASONED_CALL = [USER, CALL | {"reasoning_content": "hm"}, RESULT, LAST, AGAIN, LAST | {"reasoning_content": "well"}]
REASONED = [USER, REPLY | {"reasoning_content": "hm"}, AGAIN, LAST | {"reasoning_content": "well"}]
# Template, messages, and what the model writes in each reply.
CASES: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "chatml": (CHATML, TALK, [" <b>日 <|end|>", "ok\n<|end|>"]),
    "empty system": (CHATML, [{"role": "system", "content": ""}, *TALK[:2]], [" <b>日 <|end|>"]),
    "thinking": (THINKING, REASONED, [" <b>日 <|end|>", "well</think>ok\n<|end|>"]),
    "trimmed": (TRIMMED, TALK, ["<b>日<|end|>", "ok<|end|>"]),
    "joined": (JOINED, TOOLS, ["[add]<|call|>", "ok\n<|end|>"]),
    "thinking and joined": (
        THINKING_JOINED,
        REASONED_CALL,
        ["[add]<|call|>", "ok\n<|end|>", "<think>well</think>ok\n<|end|>"],
    ),
    "demanding": (DEMANDING, [SYSTEM, REPLY, AGAIN, LAST], [" <b>日 <|end|>", "ok\n<|end|>"]),
    "headed": (HEADED, TALK, [" <b>日 <|u|>", "ok\n<|end|>"]),
    "instruct": (INSTRUCT, TALK, ["  <b>日 <|end|>", " ok\n<|end|>"]),
    "inside": (INSIDE, TALK, [" <b>日 <|end|>", "ok\n<|end|>"]),
    "indexed": (INDEXED, TALK, [" <b>日 <|end|>", "ok\n<|end|>"]),
    "names as text": (CHATML, [USER, REPLY | {"content": "<|a|>\n<think>"}], ["<|a|>\n<think><|end|>"]),
    "first": (CHATML, [REPLY], [" <b>日 <|end|>"]),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> FileTokenizer:
    """A token for each byte, and names for turns."""
    content = json.loads(ByteTokenizer().to_json())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = ["<|end|>", "<|u|>", "<|a|>", "<|s|>", "<|call|>"]
    content["added_tokens"] += [
        {"id": 256 + number, "content": name, "special": True, **flags} for number, name in enumerate(names)
    ]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(content))
    return FileTokenizer(path, end_of_text="<|end|>")


def template_of(folder: Path, source: str) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(source)
    return ChatTemplate(folder)


def trained_parts(tokenizer: FileTokenizer, ids: np.ndarray, weights: np.ndarray) -> list[str]:
    """The text of each run of tokens with a weight, with names of special tokens."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], weights > 0, [0]]).astype(int)))
    return [tokenizer.decode_prompt(ids[start:stop]) for start, stop in borders.reshape(-1, 2)]


def row_of(messages, **fields) -> Mapping[str, object]:
    return {"messages": messages, **fields}


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_what_the_model_writes(case, tokenizer, tmp_path):
    source, messages, expected = CASES[case]
    template = template_of(tmp_path, source)
    encoder = ConversationEncoder(tokenizer, template, end_ids=(256, 257))
    encoded = encoder.encode(read_example(row_of(messages), location="row 1")[1])
    assert trained_parts(tokenizer, encoded.ids, encoded.weights) == expected
    # The ids are those that the model reads when it chats, but for an end that no turn has.
    text = template.render(messages, add_generation_prompt=False)
    ids = tokenizer.encode_prompt(text, add_special_tokens=False)
    appended = [256] if case == "headed" else []
    assert encoded.ids.tolist() == [*ids.tolist(), *appended]
    assert encoded.reply_ends.tolist() == [stop for _, stop in runs(encoded.weights)]


def runs(weights: np.ndarray) -> list[list[int]]:
    borders = np.flatnonzero(np.diff(np.concatenate([[0], weights > 0, [0]]).astype(int)))
    return borders.reshape(-1, 2).tolist()


# Templates that do not append each message to a prompt, and conversations of which a beginning is no prompt.
NOT_APPENDING = ("thinking", "joined", "thinking and joined", "demanding", "headed", "first")


@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_APPENDING])
def test_replies_follow_the_prompts_that_the_model_reads(case, tmp_path):
    # A reply begins where the prompt of the messages before it ends, if the template only appends.
    source, messages, _ = CASES[case]
    template = template_of(tmp_path, source)
    text, replies = find_replies(template, messages)
    assert [reply is not None for reply in replies] == [message["role"] == "assistant" for message in messages]
    for number, reply in enumerate(replies):
        if reply is not None:
            assert text[: reply[1][0]] == template.render(messages[:number])
            assert text[: reply[0][1]] == template.render(messages[: number + 1], add_generation_prompt=False)


def test_what_the_loss_is_on(tokenizer, tmp_path):
    template = template_of(tmp_path, CHATML)

    def parts(loss_on, row):
        encoded = ConversationEncoder(tokenizer, template, loss_on=loss_on).encode(read_example(row, location="row")[1])
        return trained_parts(tokenizer, encoded.ids, encoded.weights)

    both = [" <b>日 <|end|>", "ok\n<|end|>"]
    assert parts("assistant", row_of(TALK)) == both
    assert parts("completion", row_of(TALK)) == both[1:]
    assert parts("all", row_of(TALK)) == [template.render(TALK, add_generation_prompt=False)]
    split = {"prompt": TALK[:1], "completion": TALK[1:]}
    assert parts("completion", split) == both
    assert parts("assistant", {"prompt": TALK[:3], "completion": TALK[3:]}) == both[1:]
    assert parts("completion", {"prompt": TALK[:3], "completion": TALK[3:]}) == both[1:]
    plain = {"prompt": "<|u|> 1 + 1", "completion": " = 2"}
    assert parts("assistant", plain) == parts("completion", plain) == [" = 2<|end|>"]
    assert parts("all", plain) == ["<|u|> 1 + 1 = 2<|end|>"]
    assert parts("assistant", {"text": "once"}) == ["once<|end|>"]


def test_spans_tell_which_tokens_are_learned(tokenizer, tmp_path):
    encoder = ConversationEncoder(tokenizer, template_of(tmp_path, CHATML))
    (document,) = conversations(write_rows(tmp_path / "chats.jsonl", [row_of(TALK)]))
    spans, (example,) = encoder.mark_learned(document), encoder.encode_documents([document])
    assert [span.text for span in spans if span.is_learned] == [" <b>日 <|end|>", "ok\n<|end|>"]
    assert "".join(span.text for span in spans) == tokenizer.decode_prompt(example.ids)
    assert sum(span.tokens for span in spans if span.is_learned) == np.count_nonzero(example.weights)


def test_turns_have_weights_of_their_own(tokenizer, tmp_path):
    encoder = ConversationEncoder(tokenizer, template_of(tmp_path, CHATML.replace("<|end|>", "{{ m.weight }}<|end|>")))
    plain, weighted = (
        encoder.encode(read_example(row_of([USER, REPLY | weight, AGAIN, LAST]), location="row")[1])
        for weight in ({}, {"weight": 0.25})
    )
    start, stop = runs(plain.weights)[0]
    expected = plain.weights.copy()
    expected[start:stop] = 0.25
    assert (weighted.weights == expected).all() and (weighted.ids == plain.ids).all()
    zero = encoder.encode(read_example(row_of([USER, REPLY | {"weight": 0}, AGAIN, LAST]), location="row")[1])
    assert trained_parts(tokenizer, zero.ids, zero.weights) == ["ok\n<|end|>"]


def test_rows_that_cannot_be_trained_on(tokenizer, tmp_path):
    encoder = ConversationEncoder(tokenizer, template_of(tmp_path, CHATML))

    def refused(row, encoder=encoder) -> str:
        with pytest.raises(ValueError) as error:
            encoder.encode(read_example(row, location="chats.jsonl#7")[1], "chats.jsonl#7")
        assert "chats.jsonl#7" in str(error.value)
        return str(error.value)

    assert "no token is trained on" in refused(row_of([USER]))
    assert "no token is trained on" in refused(row_of([USER, REPLY | {"weight": 0}]))
    assert "of at least 0 and below 1e6, but is -1" in refused(row_of([USER, REPLY | {"weight": -1}]))
    assert "must be an object with a `role`" in refused(row_of([USER, {"content": "x"}]))
    assert "fields are conversations (list); rename them" in refused({"conversations": []})
    assert "must be an object with fields" in refused([USER])
    assert "`chat_template_kwargs` must be an object" in refused(row_of(TALK, chat_template_kwargs=[1]))
    bare = ConversationEncoder(tokenizer, template_of(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}"))
    assert "every token is trained on" in refused(row_of([REPLY]), bare)
    strict = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    assert "no tools" in refused(row_of(TOOLS), ConversationEncoder(tokenizer, template_of(tmp_path, strict)))
    assert "need a chat template" in refused(row_of(TALK), ConversationEncoder(tokenizer, None))
    human = [USER | {"role": "human"}, REPLY]
    assert "message 0 has the role 'human', which the chat template does not name" in refused(row_of(human))
    assert "write user." in refused(row_of(human))
    assert "write one of them." in refused(row_of([USER, REPLY | {"role": "asst"}]))
    names = template_of(tmp_path, CHATML + "{% if messages[0].role == 'human' %}{% endif %}")
    encoded = ConversationEncoder(tokenizer, names).encode(read_example(row_of(human), location="")[1])
    assert encoded.weights.any()  # the control: the template names the role
    assert "`tools` is a text, which must be JSON" in refused(row_of(TALK, tools="[{"))
    assert "`tools` must be a list, but is dict" in refused(row_of(TALK, tools='{"name": "add"}'))
    # The text of a longer conversation is another one: there is no place that is the reply's.
    count = template_of(tmp_path, "{{ messages | length }}{{ messages | map(attribute='content') | join }}")
    assert "no loop over the messages" in refused(row_of(TALK), ConversationEncoder(tokenizer, count))


def test_tools_may_be_a_text_of_json_and_tables_fill_rows_with_nulls(tmp_path):
    tools = [{"name": name, "parameters": {parameter: "int"}} for name, parameter in (("add", "x"), ("draw", "size"))]
    read = lambda row: read_example(row, location="row")[1]
    assert read(row_of(TALK, tools=json.dumps(tools))) == read(row_of(TALK, tools=tools)) != read(row_of(TALK))
    assert read(row_of(TALK, tools="")) == read(row_of(TALK, tools=" \n")) == read(row_of(TALK))
    parquet = pytest.importorskip("pyarrow.parquet")
    table = importlib.import_module("pyarrow").Table.from_pylist
    rows = [{"messages": TALK, "tools": tools}, {"messages": [USER, REPLY | {"content": None, "name": "x"}]}]
    parquet.write_table(table(rows), tmp_path / "rows.parquet")
    # Each object of a table has the fields of all: here `size` of the first tool and `name` of the first messages.
    assert [json.loads(document.text) for document in conversations(tmp_path / "rows.parquet")] == rows


def write_rows(path: Path, rows) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_files_of_one_form(tmp_path):
    chats = write_rows(tmp_path / "chats.jsonl", [row_of(TALK)] * 3)
    assert detect_form(chats) == "messages"
    conversations(chats).check()
    assert detect_form(write_rows(tmp_path / "text.jsonl", [{"text": "a"}])) == "text"
    assert detect_form(write_rows(tmp_path / "other.jsonl", [{"body": "a"}])) == "text"
    separate = write_rows(tmp_path / "separate.jsonl", [{"prompt": TALK[:1], "completion": TALK[1:]}])
    assert detect_form(separate) == "prompt and completion of messages"
    for row, words in (
        ({"messages": [{"content": "x"}]}, "message 0 must be an object with a `role`"),
        ({"messages": "Hi"}, r"its fields are messages \(str\); rename them"),
        ({"prompt": "a", "completion": None}, "its fields are prompt"),
    ):
        with pytest.raises(ValueError, match=rf"wrong.jsonl#0.*{words}"):
            detect_form(write_rows(tmp_path / "wrong.jsonl", [row]))
    (tmp_path / "plain.txt").write_text("a")
    assert detect_form(tmp_path / "plain.txt") == "text"
    with pytest.raises(ValueError, match="plain.txt is plain text"):
        conversations(tmp_path / "plain.txt")
    mixed = write_rows(tmp_path / "mixed.jsonl", [row_of(TALK), {"prompt": "a", "completion": "b"}])
    with pytest.raises(ValueError, match=r"mixed.jsonl#1 has prompt and completion, but mixed.jsonl#0 has messages"):
        conversations(mixed).check()


def test_conversations_are_packed_and_cut_at_turns(tokenizer, tmp_path):
    encoder = ConversationEncoder(tokenizer, template_of(tmp_path, CHATML))
    talks = [[USER, REPLY], TALK, [USER | {"content": "?" * 50}, REPLY], [*TALK, *TALK]]
    source = conversations(write_rows(tmp_path / "chats.jsonl", map(row_of, talks)))
    store = open_store(source, encoder, tmp_path / "cache", validation=0.0)
    again = open_store(source, encoder, tmp_path / "cache", validation=0.0)
    assert store.weights is not None and again.weights is not None and (store.weights == again.weights).all()
    examples = [encoder.encode(read_example(row_of(talk), location="")[1]) for talk in talks]
    assert store.tokens.tolist() == np.concatenate([example.ids for example in examples]).tolist()

    seq = len(examples[1].ids) + 4
    packing = DocumentPacking(store, seq=seq)
    assert (packing.cut, packing.skipped) == (1, 1)
    batch = packing(np.arange(packing.rows))
    assert batch.positions is not None and batch.segments is not None
    # Each target's weight is that of its own token, and each row's segments are whole replies.
    found = []
    for row in range(packing.rows):
        for segment in range(batch.segments[row].max() + 1):
            mask = batch.segments[row] == segment
            weights, targets = batch.weights[row][mask][:-1], batch.targets[row][mask][:-1]
            assert batch.weights[row][mask][-1] == 0
            found.append((targets.tolist(), weights.tolist()))
    cut = int(examples[3].reply_ends[examples[3].reply_ends <= seq][-1])
    expected = [(examples[0], None), (examples[1], None), (examples[3], cut)]
    assert sorted(found) == sorted((e.ids[1:stop].tolist(), e.weights[1:stop].tolist()) for e, stop in expected)
    # The control: the weights of the tokens one place earlier are others.
    earlier = [(e.ids[1:stop].tolist(), np.roll(e.weights, 1)[1:stop].tolist()) for e, stop in expected]
    assert sorted(found) != sorted(earlier)

    with pytest.raises(ValueError, match="pass a longer seq"):
        DocumentPacking(store, seq=8)
    with pytest.raises(ValueError, match="use packing='documents'"):
        WindowPacking(store, seq=8)


def test_a_corpus_of_conversations(tokenizer, tmp_path):
    encoder = ConversationEncoder(tokenizer, template_of(tmp_path, CHATML))
    source = conversations(write_rows(tmp_path / "chats.jsonl", [row_of(TALK)] * 40))
    corpus = open_corpus({"chats": source}, encoder, tmp_path / "c", seq=64, batch=2, seed=0, packing="documents")
    train, held_out = corpus.tokens
    assert corpus.describe_cuts() == []
    short = open_corpus({"chats": source}, encoder, tmp_path / "c", seq=24, batch=2, seed=0, packing="documents")
    (line,) = short.describe_cuts()
    assert line.startswith("of chats, ") and line.endswith("because none of their replies ends within a row")
    assert train + held_out == 40 * len(encoder.encode(read_example(row_of(TALK), location="")[1]).ids) and held_out
    few = conversations(write_rows(tmp_path / "few.jsonl", [row_of(TALK)]))
    with pytest.raises(ValueError, match="split must have a document"):
        open_corpus({"few": few}, encoder, tmp_path / "c", seq=64, batch=2, seed=0, packing="documents")
    assert files(tmp_path / "few.jsonl", field=None).size == few.size
    bad = conversations(write_rows(tmp_path / "bad.jsonl", [*[row_of(TALK)] * 40, row_of([USER])]))
    with pytest.raises(ValueError, match=r"^bad.jsonl#40: no token is trained on; give a message of the assistant"):
        open_corpus({"bad": bad}, encoder, tmp_path / "c", seq=64, batch=2, seed=0, packing="documents")


SHOWN = [
    TALK,
    [{"role": "system", "content": ""}, *TALK],
    REASONED,
    [USER, CALL | {"tool_calls": [CALL["tool_calls"][0] | {"id": "a12345678", "type": "function"}]}, RESULT, LAST],
]


@pytest.mark.hf
def test_the_masks_are_those_of_templates_with_marks():
    """TRL ships published templates of many families, and for each one with marks around what is trained on."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the package trl is not installed")
    utilities = importlib.import_module("transformers.utils.chat_template_utils")
    compared = {}
    for marked in sorted(Path(spec.origin).parent.glob("chat_templates/*_training.jinja")):
        compared[marked.name] = compare_marks(marked, utilities.render_jinja_template)
    assert sum(count > 0 for count in compared.values()) >= 25


def compare_marks(marked: Path, render) -> int:
    """Compare replies with a template's marks; returns of how many conversations the two texts were the same."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    original = marked.with_name(marked.name.replace("_training", ""))
    if not original.exists():
        return 0
    count = 0
    for messages in SHOWN:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "tokenizer_config.json").write_text(json.dumps(names))
            template = template_of(Path(folder), original.read_text())
        try:
            text, replies = find_replies(template, messages)
            (marked_text,), (marks,) = render(
                [messages], chat_template=marked.read_text(), return_assistant_tokens_mask=True, **names
            )
        except Exception:  # Templates refuse roles that they do not know, by errors of any kind.
            continue
        if text != marked_text:  # Some marked templates keep earlier reasoning.
            continue
        ours, theirs, headers = (np.zeros(len(text), bool) for _ in range(3))
        for start, stop in marks:
            theirs[start:stop] = True
        for reply in filter(None, replies):
            (begin, _), (start, stop) = reply
            ours[start:stop], headers[begin:start] = True, True
        # Some mark headers too, which a prompt already has, or what ends the whole text.
        headers[replies[-1][0][1] :] = True  # type: ignore[index]
        assert not (theirs & ~ours & ~headers).any(), (marked.name, text)
        # One leaves out the name by which a call hands over.
        more = "".join(np.array([*text])[ours & ~theirs])
        assert not more.replace("<|tool_response>", "").strip(), (marked.name, more)
        count += 1
    return count
