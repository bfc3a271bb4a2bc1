"""Checks and padding of prompts, and stored caches of prompt prefixes.

Padded sizes are multiples of `BUCKET`, so that compiled programs are reused.
"""

import collections
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree, Shaped

from .._failures import requested_bytes
from .._shapes import Array
from ._decode import ProgramSizes
from ._model import count_cache_bytes, Model


BUCKET = 64
"""Sizes are rounded up to multiples of this, so that one program serves many prompts."""
PREFILL_CHUNK = 1024
"""Default maximum of tokens in a prefill chunk: larger chunks are no faster per token and need more memory."""


class PaddedPrompts(NamedTuple):
    """Right-padded prompts in one array, and the sizes of the program that continues them."""

    ids: Int[jax.Array, "batch prompt"]
    lengths: Int[jax.Array, "batch"]
    sizes: ProgramSizes
    initial_lengths: Int[jax.Array, "batch"]
    """Number of ids in each row before the first new token: the prompt's length; 1 (the start id) with an encoder."""


@contextmanager
def explain_full_memory(call: str, model: Model, padded: PaddedPrompts) -> Iterator[None]:
    """Turn the failure of an allocation in the block into a `MemoryError` that states the size of the cache."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if requested_bytes(error) is None:
            raise
        rows, sizes = len(padded.ids), padded.sizes
        cache = count_cache_bytes(model, rows, sizes.capacity, sizes.cache_dtype)
        raise MemoryError(
            f"{call}: the memory is full. The cache of {rows} rows of {sizes.capacity:,} tokens takes "
            f"{cache / 2**30:,.1f} GiB; lower max_new_tokens, give fewer prompts at a time, or store the cache as int8."
        ) from error


def pad_prompts(
    model: Model,
    prompts: Sequence[object] | Int[Array, "batch seq"],
    lengths: Sequence[int] | Int[Array, "batch"] | None,
    max_new_tokens: int,
    prefill_chunk: int | None,
    cache_dtype: str | None = None,
) -> PaddedPrompts:
    """Check prompts against the model and pad them; `generate` describes the arguments."""
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value is not None and value < 1:
            raise ValueError(f"generate({name}={value}): {name} must be at least 1.")
    rows = _split_rows(prompts, lengths)
    for number, row in enumerate(rows):
        check_ids(f"generate(prompts): prompt {number}", row, model.vocab)
    # Only a model with an encoder has a start id; the encoder reads the prompt, and each row begins with the start id.
    longest, has_encoder = max(map(len, rows)), model.start is not None
    initial = 1 if has_encoder else longest
    total = initial + max_new_tokens
    width = round_up(total, BUCKET)
    # With an encoder, the cross-attention's cache of the prompt has the same capacity, so the prompt must fit, too.
    capacity = max(width, round_up(longest, BUCKET)) if has_encoder else width
    if (limit := model.max_seq) is not None:
        # The model never reads the last token that is sampled, so that token needs no position.
        if total - 1 > limit:
            prompt = "each row begins with the start id" if has_encoder else f"the longest prompt has {longest} tokens"
            raise ValueError(
                f"generate(max_new_tokens={max_new_tokens}): {prompt}, and {initial} + {max_new_tokens} - 1 exceeds "
                f"the model's {limit} learned positions; ask for at most {max(limit - initial + 1, 0)} new tokens"
                f"{'' if has_encoder else ' or shorten the prompt'}."
            )
        capacity = min(capacity, limit)
    # Padding is never written to the cache, so the array of prompts may be wider than the cache.
    padded = round_up(longest, BUCKET)
    chunk_size = _default_chunk(padded) if prefill_chunk is None else prefill_chunk
    # `ProgramSizes.chunk` is None if the prompt is read in one piece.
    chunk = None if chunk_size >= padded or has_encoder else chunk_size
    ids = np.zeros((len(rows), padded if chunk is None else round_up(padded, chunk)), np.int32)
    for padded_row, row in zip(ids, rows):
        padded_row[: len(row)] = row
    sizes = ProgramSizes(width, capacity, chunk, cache_dtype)
    counts = jnp.asarray([len(row) for row in rows], jnp.int32)
    return PaddedPrompts(jnp.asarray(ids), counts, sizes, jnp.ones_like(counts) if has_encoder else counts)


def check_ids(name: str, ids: Shaped[np.ndarray, "tokens"], vocab: int) -> None:
    """Raise a `ValueError` for ids outside of the vocabulary; its message begins with `name`.

    The ids are integers of any dtype, or of dtype object: a user's id may be too large for an integer dtype.
    """
    if len(outside := ids[(ids < 0) | (ids >= vocab)]):
        raise ValueError(
            f"{name} holds the id {outside[0]}, but the model's {vocab} ids are 0 to {vocab - 1}; encode the text with "
            "the tokenizer that the model was trained with."
        )


def fit_to_positions(model: Model, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], int]:
    """Drop a prompt's first ids, and lower the number of new tokens, so that both fit a model's learned positions.

    For a model without learned positions, both are returned unchanged. `generate` itself shortens nothing: it refuses
    prompts that do not fit.
    """
    if model.max_seq is None:
        return list(prompt), max_new_tokens
    limit = model.max_seq
    cut = list(prompt)[-limit:]
    return cut, min(max_new_tokens, limit + 1 - len(cut))  # the last new token is never read and needs no position


def _default_chunk(padded: int) -> int:
    """Return the size of a prefill chunk: at most `PREFILL_CHUNK`, with little padding in the last chunk."""
    count = -(-padded // PREFILL_CHUNK)
    return round_up(-(-padded // count), BUCKET)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not below the number."""
    return -(-number // multiple) * multiple


def _split_rows(
    prompts: Sequence[object] | Int[Array, "batch seq"], lengths: Sequence[int] | Int[Array, "batch"] | None
) -> list[np.ndarray]:
    """Return the ids of each prompt; raise a `ValueError` for prompts that are not rows of ids."""
    if isinstance(prompts, Sequence):
        if lengths is not None:
            raise ValueError(
                "generate(prompts=[...], lengths=...): lists have lengths of their own; give lengths with arrays only."
            )
        rows = [np.asarray(row) for row in prompts]
    else:
        table = np.asarray(prompts)
        if table.ndim != 2:
            raise ValueError(
                f"generate(prompts of shape {table.shape}): an array of prompts has two dims, prompts and ids; "
                "pass prompts[None] for a single prompt."
            )
        counts = [table.shape[1]] * len(table) if lengths is None else [int(n) for n in np.asarray(lengths)]
        if len(counts) != len(table) or any(not 0 <= n <= table.shape[1] for n in counts):
            raise ValueError(
                f"generate(prompts of shape {table.shape}, lengths={counts}): there must be one length for each row, "
                f"of at most {table.shape[1]}."
            )
        rows = [row[:count] for row, count in zip(table, counts)]
    if not rows:
        raise ValueError("generate(prompts): there must be at least one prompt; 0 were given.")
    for number, row in enumerate(rows):
        if row.ndim != 1:
            raise ValueError(
                f"generate(prompts): prompt {number} has shape {row.shape}, but a prompt is a list of ids, and "
                "`prompts` is a list of prompts; put a single prompt in a list."
            )
        if not row.size:
            raise ValueError(
                f"generate(prompts): prompt {number} has 0 ids, but the first new token must follow at least 1 id; "
                "begin with the id that begins a text."
            )
        if not np.issubdtype(row.dtype, np.integer):
            raise ValueError(f"generate(prompts): prompt {number} holds {row.dtype}; ids must be integers.")
    return rows


class PrefixCaches:
    """Stored caches of up to `max_caches` prompt prefixes; the least recently used prefix is dropped first.

    A prefix consists of whole chunks. Its cache is stored when a second prompt begins with the same ids; the third and
    later prompts get a copy of the stored cache.
    """

    def __init__(self, max_caches: int, chunk: int):
        self.max_caches, self._chunk = max_caches, chunk
        self._caches: collections.OrderedDict[tuple[int, ...], PyTree] = collections.OrderedDict()
        self._earlier: collections.deque[tuple[int, ...]] = collections.deque(maxlen=_COMPARED)

    def find(self, prompt: tuple[int, ...]) -> tuple[PyTree, int, int]:
        """Return a copy of the cache of the prompt's longest stored prefix, the prefix's length, and `keep_at`.

        The cache is None if no prefix of the prompt is stored. `keep_at` is the length of a longer prefix that the
        prompt shares with an earlier prompt, or 0; the caller calls `keep` after reading that many ids.
        """
        if not self.max_caches:
            return None, 0, 0
        known = [ids for ids in self._caches if prompt[: len(ids)] == ids and len(ids) < len(prompt)]
        beginning = max(known, key=len, default=())
        longest = max((self._shared_length(prompt, earlier) for earlier in self._earlier), default=0)
        self._earlier.append(prompt)
        keep_at = longest if longest > len(beginning) else 0
        if not beginning:
            return None, 0, keep_at
        self._caches.move_to_end(beginning)
        return _copy(self._caches[beginning]), len(beginning), keep_at

    def caches(self) -> list[PyTree]:
        """Return the stored caches."""
        return list(self._caches.values())

    def keep(self, beginning: tuple[int, ...], cache: PyTree) -> None:
        """Store a copy of the cache of a prefix."""
        self._caches.pop(beginning, None)
        while len(self._caches) >= self.max_caches:
            self._caches.popitem(last=False)
        self._caches[beginning] = _copy(cache)

    def _shared_length(self, prompt: tuple[int, ...], earlier: tuple[int, ...]) -> int:
        """Return the length of the longest common prefix of two prompts that consists of full chunks.

        The prefix never includes the prompt's last id, which must be read to predict the first new token.
        """
        length, max_length = self._chunk, min(len(prompt) - 1, len(earlier))
        while length <= max_length and prompt[length - self._chunk : length] == earlier[length - self._chunk : length]:
            length += self._chunk
        return length - self._chunk


def _copy(cache: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, cache)


_COMPARED = 64
"""Earlier prompts that a new prompt is compared with."""
