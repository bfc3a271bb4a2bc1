"""Generation of texts after prompts: whole, with log-probabilities, or streamed."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import jax

from .. import data, generation
from ._options import Settings
from ._results import complete, Completion, StopStrings, StreamedText, TextAssembler


if TYPE_CHECKING:
    from ._llm import LLM


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
        stream: Whether to return an iterator over the text while it is drawn.
        log_probs: Whether to return the texts with their ids and log-probabilities.
    """
    if stream and (log_probs or len(prompts.rows) != 1):
        fault = "log_probs=True" if log_probs else f"{len(prompts.rows)} prompts"
        raise ValueError(f"{call}(stream=True): one text is streamed without log_probs, not {fault}; leave one out.")
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
    """Draw the texts of `size` prompts from number `start` on, together."""
    numbers = range(len(prompts.rows))[start : start + size]
    assemblers = [_assembler(llm, prompts, number, settings) for number in numbers]
    counts = [0] * len(numbers)

    def contains_stop(row: int, ids: list[int]) -> bool:
        """Return whether a row's text has reached a stop string; the ids since the last call are read."""
        for token in ids[counts[row] :]:
            assemblers[row].push(token)
        counts[row] = len(ids)
        return assemblers[row].is_complete

    result = generation.generate(
        llm.model,
        [prompts.rows[number] for number in numbers],
        examples=list(numbers),  # The draws of a row depend on its number, and not on the batch.
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
    """Return the text of the only prompt, which is drawn while it is read."""
    options = _generation_options(llm, prompts, settings)
    return StreamedText(generation.stream(llm.model, prompts.rows[0], **options), _assembler(llm, prompts, 0, settings))


def _assembler(llm: "LLM", prompts: Prompts, number: int, settings: Settings) -> TextAssembler:
    """Return the assembler of the new text of one prompt."""
    continued = () if prompts.continued is None else prompts.continued[number]
    return TextAssembler(data.TextStream(llm.tokenizer, continued), llm.end_ids, StopStrings(settings.stop))


def _generation_options(llm: "LLM", prompts: Prompts, settings: Settings) -> dict[str, Any]:
    """Return the arguments that `generation.generate` and `generation.stream` share."""
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
