"""Checks prompts, and pads them to few different sizes, so that compiled programs are reused."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from .._shapes import Array
from ._decode import Sizes
from ._model import Model


BUCKET = 64  # sizes are rounded up to multiples of it, so that one program serves many prompts
PREFILL = 1024  # the most tokens in a prefill chunk: larger chunks are no faster per token and need more memory


class Prompts(NamedTuple):
    """Right-padded prompts in one array, and the sizes of the program that continues them."""

    ids: Int[jax.Array, "batch prompt"]
    lengths: Int[jax.Array, "batch"]
    sizes: Sizes
    begun: Int[jax.Array, "batch"]
    """How many ids each row holds before any is drawn: the prompt's or, where an encoder reads that, the first."""


def prepare(
    model: Model,
    prompts: Sequence[Any] | Int[Array, "batch seq"],
    lengths: Sequence[int] | Int[Array, "batch"] | None,
    max_new_tokens: int,
    prefill_chunk: int | None,
    cache_dtype: str | None = None,
) -> Prompts:
    """Check prompts against the model and pad them."""
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value is not None and value < 1:
            raise ValueError(f"generate({name}={value}): {name} must be at least 1.")
    rows = _rows(prompts, lengths)
    for number, row in enumerate(rows):
        outside = row[(row < 0) | (row >= model.vocab)]
        if len(outside):
            raise ValueError(
                f"generate(prompts): prompt {number} holds the id {outside[0]}, but the model's {model.vocab} ids are "
                f"0 to {model.vocab - 1}; encode the prompt with the tokenizer that the model was trained with."
            )
    longest, is_encoded = max(map(len, rows)), model.start is not None
    total = (1 if is_encoded else longest) + max_new_tokens
    width = rounded_up(total, BUCKET)
    # A cache of a model with an encoder has slots for the prompt's keys and as many for the text's.
    capacity = max(width, rounded_up(longest, BUCKET)) if is_encoded else width
    if model.positions is not None:
        known = model.positions.weight.shape[0]
        # The model never reads the last token that is drawn, so it needs no position.
        if total - 1 > known:
            raise ValueError(
                f"generate(max_new_tokens={max_new_tokens}): the longest prompt has {longest} tokens, and {longest} + "
                f"{max_new_tokens} - 1 exceeds the model's {known} learned positions; ask for at most "
                f"{max(known - longest + 1, 0)} new tokens or shorten the prompt."
            )
        capacity = min(capacity, known)
    # Padding is never written to the cache, so the array of prompts may be wider than the cache.
    padded = rounded_up(longest, BUCKET)
    chunk = _even_chunk(padded) if prefill_chunk is None else prefill_chunk
    chunk = None if chunk >= padded or is_encoded else chunk
    ids = np.zeros((len(rows), padded if chunk is None else rounded_up(padded, chunk)), np.int32)
    for row, given in zip(ids, rows):
        row[: len(given)] = given
    sizes = Sizes(width, capacity, chunk, cache_dtype)
    counts = jnp.asarray([len(row) for row in rows], jnp.int32)
    return Prompts(jnp.asarray(ids), counts, sizes, jnp.ones_like(counts) if is_encoded else counts)


def within_positions(model: Model, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], int]:
    """The end of a prompt, and how many tokens may follow, of which a model with learned positions can write on.

    They are the prompt and `max_new_tokens` as far as there are positions, since `generate` refuses longer ones.
    """
    if model.positions is None:
        return list(prompt), max_new_tokens
    known = model.positions.weight.shape[0]
    kept = list(prompt)[-known:]
    return kept, min(max_new_tokens, known + 1 - len(kept))  # the last token is not read


def _even_chunk(padded: int) -> int:
    """The default size of a prefill chunk: at most `PREFILL`, and such that the last chunk has little padding."""
    count = -(-padded // PREFILL)
    return rounded_up(-(-padded // count), BUCKET)


def rounded_up(number: int, multiple: int) -> int:
    """The least multiple that is not below the number."""
    return -(-number // multiple) * multiple


def _rows(
    prompts: Sequence[Any] | Int[Array, "batch seq"], lengths: Sequence[int] | Int[Array, "batch"] | None
) -> list[np.ndarray]:
    if isinstance(prompts, Sequence):
        if lengths is not None:
            raise ValueError(
                "generate(prompts=[...], lengths=...): lists have lengths of their own; give lengths with arrays alone."
            )
        rows = [np.asarray(row) for row in prompts]
    else:
        table = np.asarray(prompts)
        if table.ndim != 2:
            raise ValueError(
                f"generate(prompts of shape {table.shape}): an array of prompts has a row for each; give prompts[None] "
                "for a single one."
            )
        counts = [table.shape[1]] * len(table) if lengths is None else [int(n) for n in np.asarray(lengths)]
        if len(counts) != len(table) or any(not 0 <= n <= table.shape[1] for n in counts):
            raise ValueError(
                f"generate(prompts of shape {table.shape}, lengths={counts}): there must be one length a row, of at "
                f"most {table.shape[1]}."
            )
        rows = [row[:count] for row, count in zip(table, counts)]
    if not rows:
        raise ValueError("generate(prompts): there must be at least one prompt; 0 were given.")
    for number, row in enumerate(rows):
        if row.ndim != 1:
            raise ValueError(
                f"generate(prompts): prompt {number} has shape {row.shape}, but a prompt is a list of ids and prompts "
                "a list of prompts; put a single prompt in a list."
            )
        if not row.size:
            raise ValueError(
                f"generate(prompts): prompt {number} has 0 ids, but the first token is drawn after at least 1; "
                "begin with the id that begins a text."
            )
        if not np.issubdtype(row.dtype, np.integer):
            raise ValueError(f"generate(prompts): prompt {number} holds {row.dtype}; ids must be integers.")
    return rows
