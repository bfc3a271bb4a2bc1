"""Results of a call that generates text: a whole text with its ids, or a text while it is drawn, and its end."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from .. import data, generation


@dataclasses.dataclass(frozen=True)
class Completion:
    """A text that a model has generated, with its ids and their log-probabilities."""

    text: str
    """The text, without the end of text and without a stop string."""
    ids: tuple[int, ...]
    """Ids that were drawn, including the id or the ids of the stop string that ended the text."""
    log_probs: tuple[float, ...]
    """Log-probability of each id by the model's logits, before temperature and truncations, in nats."""
    finish_reason: Literal["stop", "length"]
    """Reason for the end of the text: `"stop"` for an id or a string that ends it, `"length"` for `max_new_tokens`."""


class StopStrings:
    """Filter of a text in pieces, which ends the text before the first stop string.

    The first stop string is the one that is complete first and, of several that are complete at once, the longest. The
    end of a piece that may begin a stop string is held back until the text goes on, so the result does not depend on
    how the text is divided into pieces.
    """

    def __init__(self, stops: str | Sequence[str]):
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if not all(self._stops):
            raise ValueError(f"generate(stop={stops!r}): a stop string must have at least 1 character; leave out ''.")
        self._pending = ""
        self.is_complete = False
        """Whether a stop string has ended the text."""

    def push(self, piece: str) -> str:
        """Return the further text that is certain to precede any stop string; empty after a stop string."""
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
        """Return the text that was held back, which began no stop string in the end."""
        pending, self._pending = self._pending, ""
        return pending

    def _find(self, text: str) -> int | None:
        """Return where the first stop string begins in the text; None without one."""
        # A match is (its end, minus its length), whose sum is its start: the least match ends first or, of several that
        # end there, is the longest.
        matches = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        return sum(min(matches)) if matches else None

    def _pending_length(self, text: str) -> int:
        """Return the length of the longest end of the text that is the beginning of a stop string."""
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
    """Iterator over the pieces of a text while it is drawn.

    A piece is the text that one new id completes, and is often empty. Drawing goes on only while pieces are requested.
    """

    ids: list[int]
    """Ids that have been drawn so far."""

    def __init__(self, tokens: generation.TokenStream, assembler: TextAssembler):
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
    """Assemble the whole text of the ids that were drawn."""
    pieces: list[str] = []
    for token in ids:
        pieces.append(assembler.push(token))
        if assembler.is_complete:
            break
    count = len(pieces)
    text = "".join(pieces) + assembler.finish()
    finish_reason = "stop" if assembler.is_complete else "length"
    return Completion(text, tuple(ids[:count]), tuple(log_probs[:count]), finish_reason)
