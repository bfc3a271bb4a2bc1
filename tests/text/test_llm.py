"""`LLM`: texts equal decoded ids of `generate`, as a whole, in streams, in lists, with stop strings, and scored."""

import dataclasses
import inspect
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from text_cases import scripted, small_model, TEMPLATE, USER

from eqformer import data, generation
from eqformer.generation._prompts import explain_full_memory, pad_prompts
from eqformer.text import Completion, LLM, TextRequest
from eqformer.text._generate_texts import Settings


GREEDY = generation.sampling(temperature=0)
PROMPTS = ["def ", "a much longer prompt than the others, of more than 64 bytes, so that widths differ: ", "é"]


@pytest.fixture(scope="module")
def llm():
    """A model whose text depends on the length of its prompt."""
    return scripted("".join(chr(97 + number * number % 23) for number in range(160)))


def by_ids(llm, prompts, count, **changes):
    """The texts that `generation.generate` samples, with their log-probabilities."""
    rows = [list(prompt.encode()) for prompt in prompts]
    options: dict[str, Any] = dict(transforms=GREEDY, end_of_text=0, key=jax.random.key(0)) | changes
    return generation.generate(llm.model, rows, max_new_tokens=count, log_probabilities=True, **options)


def texts_of(result):
    return [bytes(ids).rstrip(b"\0").decode(errors="replace") for ids in result.new_ids()]


def test_texts_are_those_that_ids_give(llm):
    result = by_ids(llm, PROMPTS, 20)
    assert llm.generate(PROMPTS, max_new_tokens=20) == texts_of(result)
    sampled = by_ids(llm, PROMPTS, 20, transforms=generation.sampling(temperature=2.0, top_k=9), key=jax.random.key(3))
    assert llm.generate(PROMPTS, max_new_tokens=20, temperature=2.0, top_k=9, seed=3) == texts_of(sampled)
    assert texts_of(sampled) != texts_of(result)  # the control: settings reach the samples


def test_lists_are_as_single_texts_and_pieces_as_whole_texts(llm):
    together = llm.generate(PROMPTS, max_new_tokens=20)
    assert [llm.generate(prompt, max_new_tokens=20) for prompt in PROMPTS] == together
    assert len(set(together)) == 3 and llm.generate([]) == [] == llm.log_likelihood([], [])
    sampled = llm.generate(PROMPTS, max_new_tokens=20, temperature=2.0)
    assert llm.generate(PROMPTS, max_new_tokens=20, temperature=2.0, batch_size=2) == sampled
    assert llm.generate(PROMPTS[2], max_new_tokens=20, temperature=2.0) != sampled[2]  # the control: another number
    scores = llm.log_likelihood(PROMPTS, ["a", "b", "c"])
    np.testing.assert_allclose(llm.log_likelihood(PROMPTS, ["a", "b", "c"], batch_size=2), scores, rtol=1e-6)
    for prompt, text in zip(PROMPTS, together):
        stream = llm.generate(prompt, max_new_tokens=20, stream=True)
        assert "".join(stream) == text and len(stream.ids) == 20 and stream.draft is None
    assert llm.tokens(PROMPTS) == [llm.tokens(prompt) for prompt in PROMPTS] == [[*p.encode()] for p in PROMPTS]


def test_characters_come_whole():
    """Each byte is a token, so that é has two and the last character four."""
    llm = scripted("aé🙂")
    pieces = list(llm.generate("a", stream=True))
    assert pieces == ["", "é", "", "", "", "🙂", ""] and llm.generate("a") == "é🙂"
    assert llm.generate("a", max_new_tokens=4) == "é\ufffd"  # a character that is cut is marked


def test_stop_strings_cut_across_tokens_and_end_the_drawing():
    llm = scripted("one two three four")
    assert llm.generate("one", stop="three") == " two "
    assert llm.generate(["one", "one two"], stop=["two", "four"]) == [" ", " three "]
    sampled = llm.generate(["one", "one two"], stop=["two", "four"], log_probs=True)
    assert [completion.text for completion in sampled] == [" ", " three "]
    stream = llm.generate("one", stop=["ee f"], stream=True)
    assert "".join(stream) == " two thr" and len(stream.ids) == len(" two three f")
    assert llm.generate("one", stop="five") == " two three four" and llm.generate("one", max_new_tokens=2) == " t"


def test_completions_say_why_they_end():
    llm, nats = scripted("one two"), float(jax.nn.log_softmax(4.0 * jax.nn.one_hot(0, 256))[0])
    one = lambda text, number, reason: Completion(text, tuple(text.encode()[:number]), (nats,) * number, reason)
    close = lambda first, second: (
        dataclasses.replace(first, log_probs=()) == dataclasses.replace(second, log_probs=())
        and np.allclose(first.log_probs, second.log_probs)
    )
    assert close(llm.generate("one", max_new_tokens=3, log_probs=True), one(" tw", 3, "length"))
    whole, cut = llm.generate(["one", "on"], stop="e", log_probs=True)
    assert close(whole, dataclasses.replace(one(" two", 4, "stop"), ids=(*b" two", 0), log_probs=(nats,) * 5))
    assert close(cut, Completion("", (*b"e",), (nats,), "stop"))


def test_log_probabilities_are_those_of_the_model(llm):
    result = by_ids(llm, PROMPTS, 12)
    for number, completion in enumerate(llm.generate(PROMPTS, max_new_tokens=12, log_probs=True)):
        assert result.log_probabilities is not None
        start = result.prompt_lengths[number]
        assert completion.log_probs == tuple(result.log_probabilities[number, start : start + 12].tolist())


@eqx.filter_jit
def forward(model, ids):
    return model(ids)[0][0]


def reference(llm, context, continuation):
    """The sum of log-softmax in float64, over logits of the uncached pass."""
    ids = [*(context + continuation).encode()]
    padded = ids + [0] * (128 - len(ids))  # Causal attention: padding changes no logits before it.
    logits = np.asarray(forward(llm.model, jnp.asarray([padded])), np.float64)
    log_probs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_probs -= logits.max(-1, keepdims=True)
    first = len(context.encode())
    return sum(log_probs[number - 1, ids[number]] for number in range(first, len(ids)))


def test_log_likelihoods_are_sums_of_log_softmax():
    llm = LLM(small_model(), data.ByteTokenizer())
    pairs = [("def ", "main"), (PROMPTS[1], "x"), ("é", " = a longer continuation, which is of more than 64 bytes: é")]
    expected = [reference(llm, *pair) for pair in pairs]
    np.testing.assert_allclose(llm.log_likelihood(*map(list, zip(*pairs))), expected, rtol=1e-5)
    assert llm.log_likelihood(*pairs[0]) == pytest.approx(expected[0], rel=1e-5)
    assert llm.log_likelihood("def ", ["main", "mai"])[0] < llm.log_likelihood("def ", "mai")
    assert llm.log_likelihood("def", " main") != pytest.approx(expected[0], rel=1e-3)  # the control


class Shouting(data.ByteTokenizer):
    """A tokenizer that reads other ids."""

    def encode(self, text):
        return super().encode(text.upper())


def with_template(llm):
    """The model with a chat template that brackets contents."""
    with tempfile.TemporaryDirectory() as folder:
        template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mark }}"
        (Path(folder) / "chat_template.jinja").write_text(template)
        return dataclasses.replace(llm, chat_template=data.ChatTemplate(folder))


def unchecked(kind, *args, **kwargs):
    """Make a dataclass without the checks of types, which only tests switch on."""
    made = object.__new__(kind)
    inspect.unwrap(kind.__init__)(made, *args, **kwargs)
    return made


def test_chats_are_answered_in_the_template(llm):
    chatty = with_template(llm)
    answer, other = llm.generate("[Hi]", max_new_tokens=8), llm.generate("[Hi]!", max_new_tokens=8)
    assert chatty.chat([USER], max_new_tokens=8) == answer != other
    assert chatty.chat([[USER], [USER]], max_new_tokens=8) == [answer, answer]
    assert chatty.chat([USER], max_new_tokens=8, template_options={"mark": "!"}) == other
    assert "".join(chatty.chat([USER], max_new_tokens=8, stream=True)) == answer
    assert chatty.chat([USER], max_new_tokens=8, log_probs=True).text == answer
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert chatty.chat([USER | {"content": parts}], max_new_tokens=8) == answer
    for part, kind in (({"type": "image", "text": "i"}, "'image'"), ({"type": "text"}, "'text'"), ("i", "str")):
        with pytest.raises(ValueError, match=rf"message 1 has a part of the type {kind}, but the models read text"):
            chatty.chat([USER, USER | {"content": [*parts, part]}])


class Trimming(data.ByteTokenizer):
    """A tokenizer that leaves out a space at the beginning of a text, as those of SentencePiece do."""

    def decode(self, ids):
        return super().decode(ids).removeprefix(" ")


def test_a_continued_answer_keeps_its_first_space(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    chatty = scripted("<user>Hi<assistant>Well, then.<assistant> not")
    chatty = dataclasses.replace(chatty, tokenizer=Trimming(), chat_template=data.ChatTemplate(tmp_path))
    messages = [USER, {"role": "assistant", "content": "Well,"}]
    request = TextRequest(messages, max_new_tokens=6, continue_final_message=True)
    by_engine = [result.text for result in chatty.engine(slots=2, capacity=64).run([request])]
    assert [chatty.chat(messages, max_new_tokens=6, continue_final_message=True)] == by_engine == [" then."]
    (tmp_path / "chat_template.jinja").write_text("<user>Hi<assistant>Well,")
    finished = dataclasses.replace(chatty, chat_template=data.ChatTemplate(tmp_path))
    assert finished.chat(messages, max_new_tokens=6) == "then."  # the control: the same ids as an answer of its own


def test_the_beginning_of_an_answer_is_continued(llm, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("content }}", "content }}$"))
    chatty = dataclasses.replace(llm, chat_template=data.ChatTemplate(tmp_path))
    messages = [USER, {"role": "assistant", "content": "Well, "}]
    expected = llm.generate("<user>Hi$<assistant>Well, ", max_new_tokens=8)
    continued = chatty.chat(messages, max_new_tokens=8, continue_final_message=True)
    assert continued == expected != chatty.chat(messages, max_new_tokens=8)
    streamed = chatty.chat(messages, max_new_tokens=8, continue_final_message=True, stream=True)
    request = TextRequest(messages, max_new_tokens=8)
    rows = [request.with_fields({"continue_final_message": wanted}) for wanted in (True, False)]
    by_engine, answer = sorted(chatty.engine(slots=2, capacity=64).run(rows), key=lambda result: result.number)
    assert "".join(streamed) == by_engine.text == expected != answer.text
    with pytest.raises(ValueError, match="continue_final_message must be true or false, but it is 1"):
        request.with_fields({"continue_final_message": 1})


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda llm: llm.generate("a", stream=True, log_probs=True), "a stream is one text without log_probs"),
        (lambda llm: llm.generate(["a", "b"], stream=True), "the call has 2 prompts"),
        (lambda llm: inspect.unwrap(LLM.generate)(llm, [USER]), "a prompt is a text, but one has the type dict"),
        (lambda llm: llm.generate(["a", ""]), r"generate\(prompts\): prompt 1 is empty"),
        (lambda llm: llm.generate("a", max_new_tokens=0), "max_new_tokens must be at least 1"),
        (lambda llm: inspect.unwrap(LLM.generate)(llm, 5), "a prompt is a text, but one has the type int"),
        (lambda llm: unchecked(Settings, stop=5), r"generate\(stop=5\): strings end a text"),
        (lambda llm: llm.generate("a", batch_size=0), r"generate\(batch_size=0\): at least 1 text"),
        (
            lambda llm: llm.chat([USER]),
            r"chat\(messages\): the model has no chat template that could be read; continue a",
        ),
        (lambda llm: inspect.unwrap(LLM.chat)(with_template(llm), "Hi"), "messages are a list of dicts"),
        (
            lambda llm: with_template(llm).chat([USER, {"role": "human", "content": "Hi"}]),
            r"chat\(messages\): message 1 has the role 'human', .* write user",
        ),
        (lambda llm: llm.log_likelihood("", "a"), "the context '' has no token"),
        (lambda llm: llm.log_likelihood("a", ""), "the continuation '' has no token"),
        (lambda llm: llm.log_likelihood(["a"], ["b", "c"]), "1 contexts and 2 continuations make no pairs"),
        (
            lambda llm: llm.generate("a", draft=dataclasses.replace(llm, tokenizer=Shouting())),
            "gives the prompt 1 ids and the draft's gives it 1, and not all are equal",
        ),
    ],
)
def test_bad_input_is_refused(llm, call, words):
    with pytest.raises(ValueError, match=words):
        call(llm)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda llm: llm.generate("a", temprature=1.0), r"generate\(temprature=...\): .* did you mean temperature\?"),
        (lambda llm: llm.chat([USER], zzz=1), r"chat\(zzz=...\): .* the options are max_new_tokens, stop"),
        (lambda llm: unchecked(LLM, llm.model, llm.tokenizer, "{{ x }}"), r"give data.ChatTemplate\(FOLDER\)"),
    ],
)
def test_wrong_kinds_and_names_of_arguments_are_refused(llm, call, words):
    with pytest.raises(TypeError, match=words):
        call(llm)


def test_full_memory_is_explained_by_the_size_of_the_cache():
    model = small_model()
    padded = pad_prompts(model, [[1, 2]], None, 100, None)
    size = 2 * 128 * 2 * 8 * 4  # keys and values of 128 slots, 2 heads of 8 numbers
    words = rf"1 rows of 128 tokens takes {size / 2**30:,.1f} GiB; lower max_new_tokens"
    with pytest.raises(MemoryError, match=words), explain_full_memory("generate", model, padded):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 48512265958544 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError, match="of another kind"), explain_full_memory("", model, padded):
        raise jax.errors.JaxRuntimeError("INTERNAL: of another kind")


def test_ids_that_the_model_does_not_know_are_refused(llm):
    few = dataclasses.replace(llm, model=eqx.tree_at(lambda model: model.vocab, llm.model, 64), end_ids=())
    with pytest.raises(ValueError, match=r"prompt 0 holds the id 97, but the model's 64 ids are 0 to 63"):
        few.generate("a")
    with pytest.raises(ValueError, match=r"continuation 0 holds the id 97, but the model's 64 ids"):
        few.log_likelihood(" ", "a")


@pytest.mark.grid
def test_a_draft_leaves_the_text_as_it_is():
    llm = LLM(small_model(), data.ByteTokenizer())
    stream = llm.generate("def ", max_new_tokens=12, stream=True, draft=llm, draft_tokens=3)
    assert "".join(stream) == llm.generate("def ", max_new_tokens=12)
    assert stream.draft is not None and stream.draft.acceptance == 1
