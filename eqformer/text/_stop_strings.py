"""Stop strings: a text that comes in pieces ends before the first stop string in it."""

from collections.abc import Sequence


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
