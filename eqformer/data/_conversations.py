"""Conversations as training data: token ids, and a loss weight for each token, by a model's chat template."""

import abc
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt

from .._annotation_checks import fits
from .._files import JsonObject, parse_json
from ._chat_template import ChatTemplate, find_replies, Message
from ._documents import digest, Document, TextSource
from ._files import files
from ._tokenizer import ByteTokenizer, FileTokenizer


LossOn = Literal["assistant", "completion", "all"]


@dataclass(frozen=True)
class Conversation:
    """Messages, and the variables with which the chat template renders them.

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
    """Whether the row has a separate field for the prompt; then only the completion is trained on."""


@dataclass(frozen=True)
class PromptCompletion:
    """Plain text to learn, after a prompt of plain text."""

    prompt: str
    completion: str


Example = Conversation | PromptCompletion | str
Form = Literal[
    "messages",
    "prompt and completion of messages",
    "prompt and completion",
    "preferences of messages",
    "preferences",
    "labelled completion of messages",
    "labelled completion",
    "text",
]


def read_example(row: object, *, location: str) -> tuple[Form, Example]:
    """Return the form and the content of a row of chat data.

    The fields of a row determine its form: `messages` (optionally with `tools` and `chat_template_kwargs`), `prompt`
    and `completion` (two texts, or two lists of messages), or `text`. Raises a `ValueError` that names the location for
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
                f"messages), or `text`, but its fields are {describe_fields(row)}; rename them."
            )
        case _:
            raise ValueError(f"{location} must be an object with fields, but is {type(row).__name__}.")


def describe_fields(row: object) -> str:
    """Return the names of a row's fields with the types of their values; the row's own type if it is not a mapping."""
    if not isinstance(row, Mapping):
        return type(row).__name__
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items()) or "no field"


def _make_conversation(
    messages: Sequence[object], completion_start: int | None, fields: Mapping[str, object], location: str
) -> Conversation:
    """Return the conversation of a row, after checks of its messages and of the row's other fields.

    If `completion_start` is None, the completion begins after the user's last message.
    """
    checked: list[Message] = []
    for number, message in enumerate(messages):
        match message:
            case Mapping() if isinstance(message.get("role"), str):
                checked.append(message)
            case _:
                raise ValueError(
                    f"{location}: message {number} must be an object with a `role`, but is {str(message)[:80]!r}."
                )
        weight = checked[-1].get("weight")
        if weight is not None and not (fits(weight, float) and 0 <= weight < 1e6):
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
    tools = _read_tools(fields.get("tools"), location)
    return Conversation(checked, completion_start, {**tools, **options}, has_prompt)


def _read_tools(tools: object, location: str) -> dict[str, object]:
    """Return the template's variable `tools`, if there are tools; tables often store the list as JSON text."""
    if isinstance(tools, str):
        try:
            tools = parse_json(tools) if tools.strip() else None
        except ValueError as error:
            raise ValueError(f"{location}: `tools` is a text, which must be JSON, but {error}; correct it.") from error
    if not tools:
        return {}
    if not isinstance(tools, list):
        raise ValueError(
            f"{location}: `tools` must be a list, but is {type(tools).__name__}; give a list of functions."
        )
    return {"tools": tools}


class EncodedExample(NamedTuple):
    """Ids of an example, the loss weight of each id, and the ends of the replies, at which a long example may be cut.

    In rows of whole texts, `reply_ends` has other contents: the indices at which a new token type begins, and the end
    of the row unless the text is cut there.
    """

    ids: UInt[np.ndarray, "tokens"]
    weights: Float[np.ndarray, "tokens"]
    reply_ends: Int[np.ndarray, "replies"]
    text_bytes: int
    label: int | None = None
    """1 for a desirable completion, 0 for an undesirable one, or the number of a text's label; None for other rows."""


class MarkedSpan(NamedTuple):
    """Consecutive tokens of an example that are either all trained on or all left out of the loss."""

    text: str
    tokens: int
    """The number of tokens."""
    is_learned: bool
    """Whether the loss of these tokens has a weight above 0."""


class RowEncoder(abc.ABC):
    """Base class of encoders of rows to token ids and loss weights, which `open_store` takes in place of a tokenizer.

    Like a tokenizer, an encoder has the attributes `vocab`, `end_of_text` and `fingerprint`.
    """

    vocab: int
    """The number of token ids."""
    end_of_text: int
    """The id that ends a text."""
    fingerprint: str
    """A text that differs between encoders that encode differently."""
    label_dtype: str = "i1"
    """The dtype in which the labels of rows are stored."""

    @abc.abstractmethod
    def encode_documents(self, documents: Sequence[Document]) -> list[EncodedExample]:
        """Encode documents, each of which is a row. Raises a `ValueError` that names a row that cannot be encoded."""


class ConversationEncoder(RowEncoder):
    """Encoder of chat data to token ids and loss weights; `open_store` takes it in place of a tokenizer.

    Each document of the source is one row as JSON, in a form of `read_example`: `conversations` makes such a source. A
    conversation is rendered once by the chat template and tokenized once, so that its ids are the same ids that the
    model reads when it chats. The weight of a token is 0 if the token is not trained on, and otherwise the `weight` of
    its message (1 by default).

    The trained part of a reply begins with the first character after the generation prompt, and ends with the token
    that ends the turn; spaces after that token are not trained on. In some templates (GLM-4), a reply has no such
    token, and the first token of the next message, one of `end_ids`, ends the turn. If the conversation ends with a
    reply that has no such token, the first of `end_ids` is appended.

    Args:
        tokenizer: The model's tokenizer.
        template: The model's chat template; None for data without messages.
        loss_on: The tokens that are trained on. "assistant": all replies. "completion": only the messages after the
            user's last message. "all": every token. In rows with a prompt and a completion, the first two choices both
            mean the completion.
        end_ids: Ids that end the model's turn, as `LLM.end_ids`. The first id is appended to a text that ends with none
            of these ids. An empty tuple: the tokenizer's end of text.
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
        """Encode documents, each of which is a row as JSON. Raises a `ValueError` that names a row it cannot encode."""
        return [self._encode_row(parse_json(text), name) for name, text, _ in documents]

    def _encode_row(self, row: object, location: str) -> EncodedExample:
        label = row.get("label") if isinstance(row, dict) else None
        encoded = self.encode(read_example(row, location=location)[1], location)
        return encoded._replace(label=label if isinstance(label, bool) else None)

    def mark_learned(self, document: Document) -> list[MarkedSpan]:
        """Return the text of a document (a row as JSON) in spans, each with a flag whether it is trained on."""
        (example,) = self.encode_documents([document])
        spans = []
        for is_learned, group in groupby(range(len(example.ids)), key=lambda index: bool(example.weights[index] > 0)):
            indices = [*group]
            spans.append(MarkedSpan(self.tokenizer.decode_prompt(example.ids[indices]), len(indices), is_learned))
        return spans

    def encode(self, example: Example, location: str = "the example") -> EncodedExample:
        """Encode an example.

        Raises a `ValueError` that names the location if the template refuses the messages, if no token would be trained
        on, or if every token of a conversation would be trained on although `loss_on` is not "all".
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
                "speaks, or pass loss_on='all' if this is intended."
            )
        return encoded

    def _encode_completion(self, prompt: str, completion: str) -> EncodedExample:
        """Encode plain text; the prompt is tokenized by itself, as when the model continues the prompt."""
        prompt_ids = self.tokenizer.encode_prompt(prompt)
        ids = np.concatenate([prompt_ids, self.tokenizer.encode(completion), np.array([self.end_of_text])])
        is_trained = np.arange(len(ids)) >= (0 if self.loss_on == "all" else len(prompt_ids))
        text_bytes = len(prompt.encode()) + len(completion.encode())
        return EncodedExample(ids.astype(np.uint32), is_trained.astype(np.float32), np.array([len(ids)]), text_bytes)

    def _encode_conversation(self, conversation: Conversation, location: str) -> EncodedExample:
        if self.template is None:
            raise ValueError(f"{location}: messages need a chat template, and the model has none; give texts.")
        messages = conversation.messages
        # The template does not see the weights, which only the loss reads.
        self.template.check_roles(messages, location)
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
        """Return the index after the token that ends a reply; `len(ids) + 1` says that this token must be appended.

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
    `check`, which `open_store` calls, raises a `ValueError` for a row that `read_example` refuses, and for a row whose
    form differs from the first row's form.
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
                    f"conversations({source.name!r}): {name} has {form}, but {first[1]} has {first[0]}; give files "
                    "with rows of one form, or several sources as a mixture."
                )

    return replace(source, check=check)


def detect_form(path: str | os.PathLike[str]) -> Form:
    """Return the form of a path's first row, if it is a row of chat data or preferences; "text" for all other data.

    Raises a `ValueError` as `read_example` does if the row has the field names of chat data, but values of other types.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Reading the files later gives the same warnings.
        try:
            name, text, _ = next(iter(files(path, field=None)))
            row = parse_json(text)
        except (ValueError, StopIteration):
            return "text"
    match row:
        case {"prompt": list(), "completion": list(), "label": bool()}:
            return "labelled completion of messages"
        case {"prompt": str(), "completion": str(), "label": bool()}:
            return "labelled completion"
        case {"messages": _} | {"prompt": _, "completion": _} | {"text": str()}:
            return read_example(row, location=name)[0]
        case {"prompt": str(), "chosen": str(), "rejected": str()}:
            return "preferences"
        case {"chosen": list(), "rejected": list()}:
            return "preferences of messages"
        case _:
            return "text"


# Rows of preferences have a prompt, a chosen completion and a rejected completion.


def split_preference(row: object, *, location: str) -> tuple[JsonObject, JsonObject]:
    """Split a row of preferences into two rows with `prompt` and `completion`: chosen first, then rejected.

    The row has `prompt`, `chosen` and `rejected`: three texts, or three lists of messages. If `prompt` is missing or a
    text, `chosen` and `rejected` may be whole conversations; the prompt is then the messages with which both begin. The
    row may also have `tools` and `chat_template_kwargs`. Raises a `ValueError` that names the location for any other
    row, and for a rejected completion that equals the chosen completion.
    """
    options: dict[str, object] = {}
    if isinstance(row, Mapping):
        options = {name: row[name] for name in ("tools", "chat_template_kwargs") if name in row}
    match row:
        case {"prompt": str(prompt), "chosen": str(chosen), "rejected": str(rejected)}:
            parts = prompt, chosen, rejected
        case {"prompt": list(prompt), "chosen": list(chosen), "rejected": list(rejected)}:
            parts = prompt, chosen, rejected
        case {"chosen": list(chosen), "rejected": list(rejected)}:
            longest = max(min(len(chosen), len(rejected)) - 1, 0)
            shared = next((number for number in range(longest) if chosen[number] != rejected[number]), longest)
            if not shared:
                raise ValueError(
                    f"{location}: `chosen` and `rejected` must begin with the messages of one prompt, but their first "
                    "messages differ, or one of the two has a single message; give the prompt as `prompt`."
                )
            parts = chosen[:shared], chosen[shared:], rejected[shared:]
        case dict():
            raise ValueError(
                f"{location} must have `prompt`, `chosen` and `rejected` (three texts or three lists of messages), or "
                "`chosen` and `rejected` as whole conversations, but its fields are "
                f"{describe_fields(row)}; rename them."
            )
        case _:
            raise ValueError(f"{location} must be an object with fields, but is {type(row).__name__}.")
    prompt, chosen, rejected = parts
    if chosen == rejected:
        raise ValueError(f"{location}: `rejected` equals `chosen`, so there is nothing to prefer; leave the row out.")
    chosen_row, rejected_row = ({"prompt": prompt, "completion": end, **options} for end in (chosen, rejected))
    return chosen_row, rejected_row


def read_label(row: object, *, location: str) -> bool:
    """Return the `label` of a row with `prompt` and `completion`: whether the completion is desirable, for KTO.

    Raises a `ValueError` that names the location for a row without a label of true or false.
    """
    label = row.get("label") if isinstance(row, Mapping) else None
    if not isinstance(label, bool):
        raise ValueError(f"{location} must have a `label` of true or false, but its label is {label!r}; correct it.")
    return label


def labelled(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> TextSource:
    """Return the rows of files or folders of labelled completions as a source for an encoder and `LabelledPacking`.

    Raises a `ValueError` as `files` does. The source's `check` raises a `ValueError` for a row that `read_label`
    refuses, and if all rows are desirable, or all rows undesirable.
    """
    source = files(path, field=None)

    def check() -> None:
        labels = set()
        for name, text, _ in source:
            row = parse_json(text)
            form, _ = read_example(row, location=name)
            if not form.startswith("prompt and completion"):
                raise ValueError(
                    f"{name} must have `prompt`, `completion` and `label`, but is {form}; give these three fields."
                )
            labels.add(read_label(row, location=name))
        if len(labels) == 1:
            raise ValueError(
                f"labelled({source.name!r}): KTO compares desirable and undesirable completions, but the label of "
                f"every row is {'true' if True in labels else 'false'}; add rows of the other label."
            )

    fingerprint = source.fingerprint
    return replace(source, check=check, fingerprint=lambda: f"labelled {fingerprint()}")


def preferences(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> TextSource:
    """Return the rows of files or folders of preferences as a source for a `ConversationEncoder` and `PairPacking`.

    Each row is two documents: the chosen completion, and then the rejected completion. Both have the same name, and are
    therefore in the same split. Raises a `ValueError` as `files` does. The source's `check` raises a `ValueError` for a
    row that `split_preference` refuses.
    """
    source = files(path, field=None)

    def documents() -> Iterator[Document]:
        for name, text, size in source:
            chosen, rejected = split_preference(parse_json(text), location=name)
            yield Document(name, json.dumps(chosen), size)
            yield Document(name, json.dumps(rejected), 0)

    def check() -> None:
        for name, text, _ in source:
            for row in split_preference(parse_json(text), location=name):
                read_example(row, location=name)

    fingerprint = source.fingerprint
    return replace(source, documents=documents, check=check, fingerprint=lambda: f"preferences {fingerprint()}")
