"""Perplexity and accuracy of texts by a sliding window, in which each token is scored once."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ..text import LLM


DEFAULT_WINDOW = 1024


class TextScores(NamedTuple):
    """Sums over the scored tokens of texts, and the means that are usually quoted."""

    nats: float
    """The sum of the negative log-probabilities, in nats; of a model of block diffusion, an upper bound of the sum."""
    correct: int
    """The number of tokens that greedy decoding would write."""
    tokens: int
    """The number of scored tokens."""
    text_bytes: int
    """The number of UTF-8 bytes of the scored tokens. The bytes of a text's first token, which is not scored, are not
    counted. If the first token ends inside a character, the character's bytes are shared evenly among its tokens."""

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-probability of a token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model needs for a byte of text; comparable between tokenizers."""
        return self.nats / math.log(2) / self.text_bytes

    @property
    def accuracy(self) -> float:
        """The share of tokens that greedy decoding would write."""
        return self.correct / self.tokens


class _Window(NamedTuple):
    """Ids that the model reads together; the ids from index `first` on are scored."""

    ids: list[int]
    first: int


def evaluate_texts(
    llm: LLM,
    texts: Iterable[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> TextScores:
    """Score each token of each text once, given at most `window - 1` tokens before it, and sum up.

    A text is read in windows of `window` tokens that begin `stride` tokens apart. Each window scores only the tokens
    that no earlier window has scored. After the first window, every scored token therefore has at least
    `window - stride` tokens of context. This is the sliding window of transformers' documentation. The first token has
    nothing before it and is not scored. If the tokenizer begins each text with a special token, the special token is
    the first token, so all tokens of the text itself are scored.

    The texts of a model of block diffusion are scored by `generation.score_blocks`: their nats estimate an upper bound,
    the negative evidence lower bound (ELBO).

    Args:
        llm: The model with its tokenizer.
        texts: The texts; each is scored by itself.
        window: Tokens that the model reads at once; None: the length that the model was published for, at most 1,024.
        stride: Tokens between the beginnings of two windows; None: half of a window.
        batch_size: Windows that are read together.
        progress: A function that is called with the number of scored windows and the number of all windows.

    **Raises:** `ValueError` for texts that together have no token to score, a window that is longer than the model's
    learned positions, or a stride that is not from 1 to `window - 1`.
    """
    window = _default_window(llm) if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    call = f"evaluate_texts(window={window}, stride={stride})"
    if llm.model.start is not None:
        raise ValueError(f"{call}: the model has an encoder, which gives texts no probability; score pairs of texts.")
    limit = llm.model.max_seq
    if window < 2 or (limit is not None and window > limit):
        sizes = "at least 2 tokens" if limit is None else f"2 to {limit} tokens"
        raise ValueError(f"{call}: a window must have {sizes}; pass another window.")
    if not 1 <= stride < window:
        raise ValueError(
            f"{call}: the stride must be from 1 to {window - 1}, so that windows overlap; pass another stride."
        )
    windows: list[_Window] = []
    text_bytes = 0
    for text in texts:
        ids = llm.tokens(text)
        text_bytes += len(text.encode("utf-8", errors="surrogatepass")) - _first_token_bytes(llm, ids)
        windows += _slide(ids, window, stride)
    if not windows:
        raise ValueError(f"{call}: the texts have no token to score; give a text of at least two tokens.")
    scores = llm.sampler.score(
        llm.model,
        [window.ids[: window.first] for window in windows],
        [window.ids[window.first :] for window in windows],
        batch_size=batch_size,
        progress=progress,
    )
    nats = -sum(float(np.sum(score.log_probabilities, dtype=np.float64)) for score in scores)
    correct = sum(int(score.is_greedy.sum()) for score in scores)
    return TextScores(nats, correct, sum(len(score.is_greedy) for score in scores), text_bytes)


def _default_window(llm: LLM) -> int:
    return min(llm.max_length or DEFAULT_WINDOW, llm.model.max_seq or DEFAULT_WINDOW, DEFAULT_WINDOW)


def _first_token_bytes(llm: LLM, ids: list[int]) -> int:
    """Return the number of bytes of the first token's text, which is not scored; 0 for a special first token.

    A character of several tokens is decoded as U+FFFD until it is complete; its bytes are shared evenly among them.
    """
    first = llm.tokenizer.decode(ids[:1])
    complete = first.rstrip("\ufffd")
    if complete == first:
        return len(first.encode())
    for count in range(2, 5):  # A character of UTF-8 has at most four bytes, and so at most four tokens.
        character = llm.tokenizer.decode(ids[:count])[len(complete) :][:1]
        if character != "\ufffd":
            return len(complete.encode()) + len(character.encode()) // count
    return len(first.encode())


def _slide(ids: list[int], window: int, stride: int) -> Iterator[_Window]:
    """Yield the windows of a text; nothing for a text of less than two tokens."""
    scored = 1  # The first token has nothing before it.
    for start in range(0, len(ids), stride):
        stop = min(start + window, len(ids))
        if scored < stop:
            yield _Window(ids[start:stop], scored - start)
            scored = stop
        if stop == len(ids):
            return
