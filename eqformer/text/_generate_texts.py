"""Generation of texts after prompts, whole or streamed: the settings of a call, its programs and its results."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TYPE_CHECKING, TypedDict

import jax

from .. import data, generation
from .._shapes import as_tuple


if TYPE_CHECKING:
    from ._llm import LLM


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments that `LLM.generate` and `LLM.chat` share; each may be left out."""

    max_new_tokens: int
    """Maximum number of tokens to generate for a text; 256 by default. A text that ends by itself is shorter."""
    stop: str | Sequence[str]
    """Strings that end a text, which does not contain them; none by default."""
    temperature: float | int
    """0, the default, takes the likeliest token each time; 1 samples from the model's own distribution."""
    top_k: int | None
    """Sample from the `top_k` likeliest tokens only."""
    top_p: float | int | None
    """Sample from the likeliest tokens that together have this probability."""
    min_p: float | int | None
    """Sample from the tokens whose probability is at least `min_p` times the largest probability."""
    repetition_penalty: float | int | None
    """Above 1: make tokens that are already in the text less likely."""
    seed: int
    """Seed of the sampling, 0 by default: the same seed gives the same text."""
    batch_size: int | None
    """Number of texts of a list that are generated together; None, the default: all. The texts are the same for every
    number."""
    cache_dtype: str | None
    """Dtype of keys and values in the cache: None, the default, is the dtype in which they are computed; `"int8"` and
    `"fp8"` take less memory."""
    draft: "LLM | generation.Model | str | None"
    """A smaller model that proposes tokens, or `"mtp"`, the model's own predictor. Generation is faster, and the texts
    have the same distribution."""
    draft_tokens: int
    """Tokens that the draft proposes at a time; 4 by default."""


class ChatOptions(GenerateOptions, total=False):
    """Keyword arguments of `LLM.chat`: the `GenerateOptions`, and two more."""

    template_options: Mapping[str, object]
    """Further variables of the chat template, such as `{"enable_thinking": False}`."""
    continue_final_message: bool
    """Whether to continue the final message instead of answering it; False by default."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The `GenerateOptions` of a call, with a default for each option that is left out."""

    max_new_tokens: int = 256
    stop: str | Sequence[str] = ()
    temperature: float | int = 0.0
    top_k: int | None = None
    top_p: float | int | None = None
    min_p: float | int | None = None
    repetition_penalty: float | int | None = None
    seed: int = 0
    batch_size: int | None = None
    cache_dtype: str | None = None
    draft: "LLM | generation.Model | str | None" = None
    draft_tokens: int = 4

    def __post_init__(self):
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(
                f"generate(batch_size={self.batch_size}): at least 1 text must be generated at a time; None generates "
                "all together."
            )
        if not isinstance(self.stop, str | Sequence) or not all(isinstance(text, str) for text in self.stop):
            raise ValueError(
                f"generate(stop={self.stop!r}): strings end a text; give a string, or a list such as ['\\n']."
            )

    @staticmethod
    def from_options(call: str, options: Mapping[str, Any]) -> "Settings":
        """Return the settings of a call; for an unknown option, raise a `TypeError` that suggests a similar name."""
        names = [field.name for field in dataclasses.fields(Settings)]
        if unknown := [name for name in options if name not in names]:
            near = difflib.get_close_matches(unknown[0], names, n=1)
            advice = f"did you mean {near[0]}?" if near else f"the options are {', '.join(names)}."
            raise TypeError(f"{call}({unknown[0]}=...): there is no such option; {advice}")
        return Settings(**options)

    @property
    def transforms(self) -> generation.Chain:
        """The transforms of logits that these settings describe."""
        return generation.sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


@dataclasses.dataclass(frozen=True)
class Completion:
    """A text that a model has generated, with its ids and their log-probabilities."""

    text: str
    """The text, without the end of text and without a stop string."""
    ids: tuple[int, ...]
    """Ids that were sampled, including the end-of-text id, or the ids of the stop string, if one ended the text."""
    log_probs: tuple[float, ...]
    """Log-probability of each id by the model's logits, before temperature and truncations, in nats."""
    finish_reason: Literal["stop", "length"]
    """Why the text ended: `"stop"` if an id or a string ended the text, `"length"` if `max_new_tokens` ended it."""


class StopStrings:
    """Filter that reads a text piece by piece, and ends the text before the first stop string.

    The first stop string is the string that ends first or, if several strings end at the same character, the longest.
    If the end of a piece may begin a stop string, this end is held back until more text decides. The result therefore
    does not depend on how the text is divided into pieces.
    """

    def __init__(self, stops: str | Sequence[str]):
        self._stops = as_tuple(stops)
        if not all(self._stops):
            raise ValueError(f"generate(stop={stops!r}): a stop string must have at least 1 character; leave out ''.")
        self._pending = ""
        self.is_complete = False
        """Whether a stop string has ended the text."""

    def push(self, piece: str) -> str:
        """Add a piece; return the new text that certainly precedes any stop string, empty after a stop string."""
        if self.is_complete:
            return ""
        text = self._pending + piece
        if (start := self._find(text)) is not None:
            self.is_complete, self._pending = True, ""
            return text[:start]
        pending = self._pending_length(text)
        self._pending = text[len(text) - pending :]
        return text[: len(text) - pending]

    def finish(self) -> str:
        """Return the text that was held back, which turned out not to begin a stop string."""
        pending, self._pending = self._pending, ""
        return pending

    def _find(self, text: str) -> int | None:
        """Return where the first stop string begins in the text; None without one."""
        # The smallest pair (end, start) ends first and, of several pairs with the same end, is the longest match.
        starts = [(text.find(stop), stop) for stop in self._stops if stop in text]
        matches = [(start + len(stop), start) for start, stop in starts]
        return min(matches)[1] if matches else None

    def _pending_length(self, text: str) -> int:
        """Return the length of the text's longest suffix that is a prefix of a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        return max((length for length in range(1, longest + 1) if self._is_beginning(text[-length:])), default=0)

    def _is_beginning(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)


class TextAssembler:
    """Assembler of a text from ids that come one by one, up to an id or a string that ends the text."""

    def __init__(self, text: data.TextStream, end_ids: Sequence[int], stops: StopStrings):
        self._text, self._end_ids, self._stops = text, frozenset(end_ids), stops
        self.is_complete = False
        """Whether an id or a string has ended the text."""

    def push(self, token: int) -> str:
        """Return the text that this id completes."""
        if token in self._end_ids:
            piece, self.is_complete = self.finish(), True
            return piece
        piece = self._stops.push(self._text.push(token))
        self.is_complete = self._stops.is_complete
        return piece

    def finish(self) -> str:
        """Return the text that was held back: an incomplete character, or characters that may begin a stop string."""
        if self.is_complete:
            return ""
        piece = self._stops.push(self._text.finish())
        self.is_complete = self._stops.is_complete
        return piece + self._stops.finish()


class StreamedText(Iterator[str]):
    """Iterator over the pieces of a text while it is generated.

    A piece is the text that one new id completes, and is often empty. Generation goes on only while pieces are
    requested. A model of block diffusion generates the ids of a block together.
    """

    ids: list[int]
    """Ids that have been sampled so far."""

    def __init__(self, tokens: generation.IdStream, assembler: TextAssembler):
        self.ids, self._tokens = [], tokens
        self._pieces = self._assemble(assembler)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def draft(self) -> generation.DraftStatistics | None:
        """Counts of the draft's proposals so far; None without a draft."""
        return self._tokens.draft

    def _assemble(self, assembler: TextAssembler) -> Iterator[str]:
        for token in self._tokens:
            self.ids.append(token)
            yield assembler.push(token)
            if assembler.is_complete:
                return
        yield assembler.finish()


def complete(ids: Sequence[int], log_probs: Sequence[float], assembler: TextAssembler) -> Completion:
    """Assemble the whole text of the ids that were sampled."""
    pieces: list[str] = []
    for token in ids:
        pieces.append(assembler.push(token))
        if assembler.is_complete:
            break
    count = len(pieces)
    text = "".join(pieces) + assembler.finish()
    finish_reason = "stop" if assembler.is_complete else "length"
    return Completion(text, tuple(ids[:count]), tuple(log_probs[:count]), finish_reason)


class Prompts(NamedTuple):
    """Prompts of a call: texts, and the ids that the model reads."""

    texts: Sequence[str]
    rows: Sequence[list[int]]
    continued: Sequence[list[int]] | None
    """Ids of the texts that the new texts continue; None if each new text is separate, such as an answer."""


def generate_texts(
    llm: "LLM", prompts: Prompts, call: str, settings: Settings, *, stream: bool, log_probs: bool
) -> list[str] | list[Completion] | list[StreamedText]:
    """Return a text for each prompt: a string, a `Completion` with `log_probs`, or a `StreamedText` with `stream`.

    Args:
        llm: The model and its tokenizer.
        prompts: The prompts.
        call: The name of the call, for errors.
        settings: The settings of the call.
        stream: Whether to return an iterator over the text while it is generated.
        log_probs: Whether to return the texts with their ids and log-probabilities.
    """
    if stream and (log_probs or len(prompts.rows) != 1):
        fault = "log_probs=True" if log_probs else f"{len(prompts.rows)} prompts"
        raise ValueError(
            f"{call}(stream=True): a stream is one text without log_probs, but the call has {fault}; leave out "
            "stream=True, or give a single prompt without log_probs."
        )
    if not prompts.rows:
        return []
    if stream:
        return [_stream(llm, prompts, settings)]
    size = settings.batch_size or len(prompts.rows)
    starts = range(0, len(prompts.rows), size)
    completions = [text for start in starts for text in _complete_rows(llm, prompts, start, size, settings, log_probs)]
    return completions if log_probs else [completion.text for completion in completions]


def _complete_rows(
    llm: "LLM", prompts: Prompts, start: int, size: int, settings: Settings, log_probs: bool
) -> Iterator[Completion]:
    """Generate the texts of `size` prompts from number `start` on, together."""
    numbers = range(len(prompts.rows))[start : start + size]
    assemblers = [_assembler(llm, prompts, number, settings) for number in numbers]
    counts = [0] * len(numbers)

    def contains_stop(row: int, ids: list[int]) -> bool:
        """Return whether a row's text has reached a stop string; the ids since the last call are read."""
        for token in ids[counts[row] :]:
            assemblers[row].push(token)
        counts[row] = len(ids)
        return assemblers[row].is_complete

    result = llm.sampler.generate(
        llm.model,
        [prompts.rows[number] for number in numbers],
        examples=numbers,  # The samples of a row depend on its number, and not on the batch.
        log_probabilities=log_probs,
        ends_row=contains_stop if settings.stop else None,
        **_generation_options(llm, prompts, settings),
    )
    table = result.log_probabilities
    for row, (number, ids) in enumerate(zip(numbers, result.new_ids())):
        first = int(result.prompt_lengths[row])
        scores = () if table is None else table[row, first : first + len(ids)].tolist()
        yield complete(ids, scores, _assembler(llm, prompts, number, settings))


def _stream(llm: "LLM", prompts: Prompts, settings: Settings) -> StreamedText:
    """Return the text of the only prompt; tokens are generated while the caller reads the text."""
    options = _generation_options(llm, prompts, settings)
    ids = llm.sampler.stream(llm.model, prompts.rows[0], **options)
    return StreamedText(ids, _assembler(llm, prompts, 0, settings))


def _assembler(llm: "LLM", prompts: Prompts, number: int, settings: Settings) -> TextAssembler:
    """Return the assembler of the new text of one prompt."""
    continued = () if prompts.continued is None else prompts.continued[number]
    return TextAssembler(data.TextStream(llm.tokenizer, continued), llm.end_ids, StopStrings(settings.stop))


def _generation_options(llm: "LLM", prompts: Prompts, settings: Settings) -> generation.SamplerOptions:
    """Return the arguments that the methods `generate` and `stream` of a sampler share."""
    return {
        "max_new_tokens": settings.max_new_tokens,
        "transforms": settings.transforms,
        "end_of_text": list(llm.end_ids) or None,
        "cache_dtype": settings.cache_dtype,
        "draft": _draft_model(llm, prompts, settings),
        "draft_tokens": settings.draft_tokens,
        "key": jax.random.key(settings.seed),
    }


def _draft_model(llm: "LLM", prompts: Prompts, settings: Settings) -> generation.Model | str | None:
    """Return the draft's model; raise a `ValueError` if the draft's tokenizer gives other ids than the model's."""
    draft = settings.draft
    if draft is None or isinstance(draft, str | generation.Model):
        return draft
    check_draft_ids(llm, draft, prompts.texts)
    return draft.model


def check_draft_ids(llm: "LLM", draft: "LLM", texts: Sequence[str]) -> None:
    """Raise a `ValueError` if a draft's tokenizer gives a text other ids than the model's."""
    for text in texts:
        ids, draft_ids = (tokenizer.encode(text).tolist() for tokenizer in (llm.tokenizer, draft.tokenizer))
        if ids != draft_ids:
            raise ValueError(
                f"generate(draft=...): both models must read the same ids, but the model's tokenizer gives the prompt "
                f"{len(ids)} ids and the draft's gives it {len(draft_ids)}, and not all are equal; give a model of the "
                "same tokenizer."
            )
