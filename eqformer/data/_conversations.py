"""Conversations as training data: token ids, and a loss weight for each token, by a model's chat template."""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt

from .._files import parse_json
from ._chat_template import ChatTemplate
from ._documents import digest, Document, TextSource
from ._files import files
from ._tokenizer import ByteTokenizer, FileTokenizer


LossOn = Literal["assistant", "completion", "all"]
Message = Mapping[str, object]
Span = tuple[int, int]


@dataclass(frozen=True)
class Conversation:
    """Messages, with what the chat template needs to render them.

    Each message has a `role` and a `content`, and may have a `weight`, a number from 0 on that multiplies the loss of
    the message's tokens.
    """

    messages: Sequence[Message]
    """The messages in order."""
    completion_start: int
    """The index of the first message of the completion: the messages before it are the prompt."""
    options: Mapping[str, Any]
    """Variables of the template, such as `tools`."""
    has_prompt: bool = False
    """Whether the row gives the prompt by itself, so that only the completion is learned."""


@dataclass(frozen=True)
class PromptCompletion:
    """Plain text to learn, after a prompt of plain text."""

    prompt: str
    completion: str


Example = Conversation | PromptCompletion | str
Form = Literal["messages", "prompt and completion of messages", "prompt and completion", "text"]


def read_example(row: object, *, location: str) -> tuple[Form, Example]:
    """Return the form and the content of a row of chat data.

    The fields of a row tell its form: `messages` (optionally `tools` and `chat_template_kwargs`), `prompt` with
    `completion` (both texts, or both lists of messages), or `text`. Raises a `ValueError` that names the location for
    any other row, and for messages without a role.
    """
    match row:
        case {"messages": list(messages), **fields}:
            return "messages", _make_conversation(messages, None, fields, location)
        case {"prompt": str(prompt), "completion": str(completion)}:
            return "prompt and completion", PromptCompletion(prompt, completion)
        case {"prompt": list(prompt), "completion": list(completion), **fields}:
            messages = [*prompt, *completion]
            return "prompt and completion of messages", _make_conversation(messages, len(prompt), fields, location)
        case {"text": str(text)}:
            return "text", text
        case dict():
            raise ValueError(
                f"{location} must have `messages` (a list), `prompt` and `completion` (two texts or two lists of "
                f"messages), or `text`, but its fields are {', '.join(map(_describe_field, row.items()))}; rename them."
            )
        case _:
            raise ValueError(f"{location} must be an object with fields, but is {type(row).__name__}.")


def _describe_field(item: tuple[object, object]) -> str:
    return f"{item[0]} ({type(item[1]).__name__})"


def _make_conversation(
    messages: Sequence[object], completion_start: int | None, fields: Mapping[str, object], location: str
) -> Conversation:
    """Check messages and the other fields of their row.

    If `completion_start` is None, the completion begins after the user's last message.
    """
    checked: list[Message] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{location}: message {number} must be an object with a `role`, but is {str(message)[:80]!r}."
            )
        checked.append(message)
        weight = message.get("weight")
        if isinstance(weight, bool) or not (weight is None or (isinstance(weight, int | float) and 0 <= weight < 1e6)):
            raise ValueError(
                f"{location}: the weight of message {number} must be a number of at least 0 and below 1e6, "
                f"but is {weight!r}."
            )
    has_prompt = completion_start is not None
    if completion_start is None:
        users = [number for number, message in enumerate(checked) if message["role"] == "user"]
        completion_start = users[-1] + 1 if users else 0
    options = fields.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"{location}: `chat_template_kwargs` must be an object, but is {type(options).__name__}.")
    tools = {"tools": fields["tools"]} if fields.get("tools") else {}
    return Conversation(checked, completion_start, {**tools, **options}, has_prompt)


# A text is compared with a generation prompt token by token, where a token is a name such as <think>, a word, or one
# other character: so a reply that begins with "<" does not share the first character of "<think>".
_UNIT = re.compile(r"<[^<>\s]*>|\w+|.", re.DOTALL)


def find_replies(
    template: ChatTemplate, messages: Sequence[Message], **options: Any
) -> tuple[str, list[tuple[Span, Span] | None]]:
    """Return a rendered conversation, and for each message of the assistant its span in the text and that of its reply.

    The first span is that of the whole message, with its header. The second begins after the generation prompt, at the
    character that the model writes first when it replies. A span is a start and a stop. Other messages have None, and
    so has a message of the assistant that the template leaves out.

    The conversation is rendered once, so the spans are right for templates that drop earlier reasoning, rewrite
    contents or join messages. Raises a `ValueError` if the template refuses the conversation, or if it has no loop over
    the messages and its text of a conversation does not begin with its text of the first messages.
    """
    text, spans = template.render_by_message(messages, **options)
    is_traced = any(span is not None for span in spans)
    replies: list[tuple[Span, Span] | None] = [None] * len(messages)
    header = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not is_traced:
            spans[number] = _find_by_prefix(template, text, messages, number, options)
        elif _includes_results(messages, spans, number):
            spans[number] = _cut_results(template, text, messages, spans, number, options)
        if (span := spans[number]) is None:
            continue
        if not header or not text.startswith(header, span[0]):
            header = _find_header(template, text, messages[:number], span, options)
        starts_whole = text.startswith(header, span[0])
        shared = len(header) if starts_whole else _shared_length(header, text[slice(*span)])
        replies[number] = span, (span[0] + shared, span[1])
    return text, replies


def _includes_results(messages: Sequence[Message], spans: Sequence[Span | None], number: int) -> bool:
    """Return whether the span of a call may contain the tools' results, because these have no span of their own."""
    following = number + 1
    return following < len(messages) and messages[following]["role"] == "tool" and spans[following] is None


def _cut_results(
    template: ChatTemplate,
    text: str,
    messages: Sequence[Message],
    spans: Sequence[Span | None],
    number: int,
    options: Mapping[str, Any],
) -> Span | None:
    """Return the span of a call without the tools' results: what it shares with a rendering without the results.

    The rendering without the results alone keeps the later messages, because templates drop reasoning before the
    user's last message. The rendering that ends at the call is for templates that refuse two replies in a row.
    """
    span = spans[number]
    if span is None:
        return None
    last_result = number
    while last_result + 1 < len(messages) and messages[last_result + 1]["role"] == "tool":
        last_result += 1
    start, stop = span
    shared, refusals = [], []
    for later in (messages[last_result + 1 :], ()):
        try:
            shorter, shorter_spans = template.render_by_message([*messages[: number + 1], *later], **options)
        except ValueError as error:
            refusals.append(error)
            continue
        if (shorter_span := shorter_spans[number]) is not None:
            shared.append(_shared_length(text[start:stop], shorter[slice(*shorter_span)]))
    if len(refusals) == 2:
        raise refusals[0]
    return (start, start + max(shared)) if shared else span


def _find_header(
    template: ChatTemplate, text: str, previous: Sequence[Message], span: Span, options: Mapping[str, Any]
) -> str:
    """Return the text after the previous messages that asks the model for its reply.

    The message begins with this text, unless the template drops earlier reasoning: then the conversation does not begin
    with the model's prompt, and the message may begin with a part of the text, without a name such as <think>. The
    text is that after a question for templates that refuse messages without one.
    """
    start, stop = span
    question = {"role": "user", "content": "?"}
    try:
        previous = previous or [question]
        prompt = template.render(previous, **options)
    except ValueError:
        if any(message["role"] == "user" for message in previous):
            raise
        previous = [*previous, question]
        prompt = template.render(previous, **options)
    if text.startswith(prompt) and start <= len(prompt) <= stop:
        return text[start : len(prompt)]
    without_header = template.render(previous, add_generation_prompt=False, **options)
    return prompt[_shared_length(prompt, without_header) :]


def _find_by_prefix(
    template: ChatTemplate, text: str, messages: Sequence[Message], number: int, options: Mapping[str, Any]
) -> Span:
    """Return the span of a message as the difference of two renderings, without and with the message."""
    before = template.render(messages[:number], add_generation_prompt=False, **options) if number else ""
    through = template.render(messages[: number + 1], add_generation_prompt=False, **options)
    if not (text.startswith(through) and through.startswith(before)):
        raise ValueError(
            f"the chat template has no loop over the messages, and its text of {len(messages)} messages does not begin "
            f"with its text of the first {number + 1}, so the replies' places are unknown; train on all tokens "
            "(loss_on='all'), or write the template as a loop over `messages`."
        )
    return len(before), len(through)


def _shared_length(first: str, second: str) -> int:
    """Return the number of characters of the longest common beginning, in whole names and words."""
    length = 0
    for first_unit, second_unit in zip(_UNIT.finditer(first), _UNIT.finditer(second)):
        if first_unit[0] != second_unit[0]:
            break
        length = first_unit.end()
    return length


class EncodedExample(NamedTuple):
    """Ids of an example, the loss weight of each, and the ends of the replies, at which a long example may be cut."""

    ids: UInt[np.ndarray, "tokens"]
    weights: Float[np.ndarray, "tokens"]
    reply_ends: Int[np.ndarray, "replies"]
    text_bytes: int


class MarkedSpan(NamedTuple):
    """Consecutive tokens of an example that are all trained on, or all not."""

    text: str
    tokens: int
    """The number of tokens."""
    is_learned: bool
    """Whether the loss of these tokens has a weight above 0."""


class ConversationEncoder:
    """Encoder of chat data to token ids and loss weights; `open_store` takes it in place of a tokenizer.

    Each document of the source is one row as JSON, in a form of `read_example`: `conversations` makes such a source. A
    conversation is rendered once by the chat template and tokenized once, so that the ids are those that the model
    reads when it chats. The weight of a token is 0 if it is not trained on; otherwise it is the `weight` of its message
    (1 by default). The trained part of a reply begins with the character that the model writes after the generation
    prompt, and ends with the token that ends the turn; spaces after that token are not trained on. If the turn has no
    such token of its own, it is the next message's first token where that is one of `end_ids` (as in GLM-4), or one of
    `end_ids` is appended to the conversation.

    Args:
        tokenizer: The model's tokenizer.
        template: The model's chat template; None for data without messages.
        loss_on: "assistant": all replies, or the completion. "completion": only the messages after the last one of
            the user, or the completion. "all": every token.
        end_ids: Ids that end the model's turn, as `LLM.end_ids`; the first is appended where none ends a text. An
            empty tuple: the tokenizer's end of text.
    """

    def __init__(
        self,
        tokenizer: ByteTokenizer | FileTokenizer,
        template: ChatTemplate | None,
        *,
        loss_on: LossOn = "assistant",
        end_ids: Sequence[int] = (),
    ):
        if loss_on not in ("assistant", "completion", "all"):
            raise ValueError(
                f"ConversationEncoder(loss_on={loss_on!r}): loss_on must be 'assistant', 'completion' or 'all'."
            )
        self.tokenizer, self.template, self.loss_on = tokenizer, template, loss_on
        self.end_ids = tuple(end_ids) or (tokenizer.end_of_text,)
        self.vocab, self.end_of_text = tokenizer.vocab, self.end_ids[0]
        parts = ["conversations 2", tokenizer.fingerprint, loss_on, repr(self.end_ids)]
        self.fingerprint = digest([*parts, "" if template is None else template.fingerprint])

    def encode_documents(self, documents: Sequence[Document]) -> list[EncodedExample]:
        """Encode documents, each a row as JSON. Raises a `ValueError` that names the row."""
        return [self.encode(read_example(parse_json(text), location=name)[1], name) for name, text, _ in documents]

    def mark_learned(self, document: Document) -> list[MarkedSpan]:
        """Return the text of a document, a row as JSON, in spans that tell which tokens are trained on."""
        (example,) = self.encode_documents([document])
        spans = []
        for is_learned, group in groupby(range(len(example.ids)), key=lambda index: bool(example.weights[index] > 0)):
            indices = [*group]
            spans.append(MarkedSpan(self.tokenizer.decode_prompt(example.ids[indices]), len(indices), is_learned))
        return spans

    def encode(self, example: Example, location: str = "the example") -> EncodedExample:
        """Encode an example.

        Raises a `ValueError` that names the location if the template refuses the messages, or if no token or every
        token of a conversation would be trained on (unless `loss_on` is "all").
        """
        match example:
            case Conversation():
                encoded = self._encode_conversation(example, location)
            case PromptCompletion(prompt, completion):
                encoded = self._encode_completion(prompt, completion)
            case _:
                encoded = self._encode_completion("", example)
        if not encoded.weights.any():
            raise ValueError(f"{location}: no token is trained on; give a message of the assistant with text.")
        if isinstance(example, Conversation) and self.loss_on != "all" and encoded.weights.all():
            raise ValueError(
                f"{location}: every token is trained on, the user's too; see whether the chat template marks who "
                "speaks, or ask for it by loss_on='all'."
            )
        return encoded

    def _encode_completion(self, prompt: str, completion: str) -> EncodedExample:
        """Encode plain text; the prompt is tokenized by itself, as it is when the model continues it."""
        prompt_ids = self.tokenizer.encode_prompt(prompt)
        ids = np.concatenate([prompt_ids, self.tokenizer.encode(completion), np.array([self.end_of_text])])
        is_trained = np.arange(len(ids)) >= (0 if self.loss_on == "all" else len(prompt_ids))
        text_bytes = len(prompt.encode()) + len(completion.encode())
        return EncodedExample(ids.astype(np.uint32), is_trained.astype(np.float32), np.array([len(ids)]), text_bytes)

    def _encode_conversation(self, conversation: Conversation, location: str) -> EncodedExample:
        if self.template is None:
            raise ValueError(f"{location}: messages need a chat template, and the model has none; give texts.")
        messages = conversation.messages
        # The template does not see the weights, which are for the loss alone.
        shown = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
        try:
            text, replies = find_replies(self.template, shown, **conversation.options)
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error
        ids, starts, stops = self.tokenizer.encode_with_offsets(text)
        weights = np.full(len(ids), self.loss_on == "all", np.float32)
        reply_ends = []
        for number, reply in enumerate(replies):
            if reply is None:
                continue
            (_, message_stop), (start, stop) = reply
            first, last = np.searchsorted(stops, start, "right"), np.searchsorted(starts, stop, "left")
            end = self._turn_end(ids, starts, text, int(first), int(last), message_stop)
            if end > len(ids):
                ids, weights = np.append(ids, np.uint32(self.end_of_text)), np.append(weights, np.float32(0))
            reply_ends.append(end)
            learns_all = self.loss_on == "assistant" and not conversation.has_prompt
            if learns_all or number >= conversation.completion_start:
                weights[first:end] = _message_weight(messages[number])
        if self.loss_on == "all":
            weights[:] = 1
        return EncodedExample(ids, weights, np.array(reply_ends, np.int64), len(text.encode()))

    def _turn_end(
        self,
        ids: UInt[np.ndarray, "tokens"],
        starts: Int[np.ndarray, "tokens"],
        text: str,
        first: int,
        last: int,
        stop: int,
    ) -> int:
        """Return the index after the token that ends a reply, one more than there are ids if it must be appended.

        The reply's tokens are `first` to `last - 1`, and its last character is `text[stop - 1]`.
        """
        special = np.flatnonzero(np.isin(ids[first:last], (*self.tokenizer.special_ids, *self.end_ids)))
        if len(special):
            end = first + int(special[-1]) + 1
            if end == last or not text[int(starts[end]) : stop].strip():
                return end
        if last == len(ids):
            return last + 1
        return last + int(ids[last] in self.end_ids)


def _message_weight(message: Message) -> float:
    match message.get("weight"):
        case int() | float() as weight:
            return float(weight)
        case _:
            return 1.0


def conversations(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> TextSource:
    """Return the rows of .jsonl and .parquet files or folders as a source of chat data, for a `ConversationEncoder`.

    A path may be the name of a dataset of the hub, as in `files`. Raises a `ValueError` as `files` does. The source's
    `check`, which `open_store` calls, raises one for a row in no form of `read_example`, and for a row in another form
    than the first.
    """
    source = files(path, field=None)

    def check() -> None:
        # Reading the rows raises what `source.check` would raise.
        first: tuple[Form, str] | None = None
        for name, text, _ in source:
            form, _ = read_example(parse_json(text), location=name)
            first = first or (form, name)
            if form != first[0]:
                raise ValueError(
                    f"conversations({source.name!r}): {name} has {form}, but {first[1]} has {first[0]}; give files of "
                    "one form, or several sources as a mixture."
                )

    return replace(source, check=check)


def detect_form(path: str | os.PathLike[str]) -> Form:
    """Return the form of the first row of a path of `conversations`; "text" for plain files and rows of other fields.

    Raises a `ValueError` as `read_example` does if the row has the fields of a chat, but not as a chat has them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Those of skipped files come when the files are read.
        try:
            name, text, _ = next(iter(files(path, field=None)))
            row = parse_json(text)
        except (ValueError, StopIteration):
            return "text"
    match row:
        case {"messages": _} | {"prompt": _, "completion": _} | {"text": str()}:
            return read_example(row, location=name)[0]
        case _:
            return "text"
