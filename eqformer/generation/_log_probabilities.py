"""`log_probabilities`: the log-probabilities that a model gives to known continuations."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..nn import right_padded, Source, with_source
from ._model import Model
from ._prompts import BUCKET, round_up


CHUNK = 64
"""Tokens of each row whose logits are in memory at once."""


def log_probabilities(
    model: Model, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> list[Float[np.ndarray, "_"]]:
    """Return the log-probability of each id of each continuation, in nats, after the prompt and the ids before it.

    All rows are read in one forward pass. Sizes are rounded up to multiples of 64, so that other rows mostly reuse the
    compiled program. A model with an encoder reads the prompts with its encoder. Raises a `ValueError` for prompts and
    continuations that are empty or hold unknown ids, and for more tokens than learned positions.
    """
    _check_rows(model, prompts, continuations)
    if not prompts:
        return []
    starts: Sequence[Sequence[int]] = prompts if model.start is None else [[model.start]] * len(prompts)
    # The model does not read the last id, since nothing is predicted after it.
    ids, lengths = _pad([[*start, *new[:-1]] for start, new in zip(starts, continuations)], model.max_seq)
    source = None if model.start is None else _pad(prompts, None)
    targets, counts = _pad(continuations, None)
    first = jnp.asarray([len(start) - 1 for start in starts], jnp.int32)
    table = np.asarray(_log_probabilities(model, ids, lengths, source, first, targets))
    return [row[:count] for row, count in zip(table, np.asarray(counts))]


@eqx.filter_jit
def _log_probabilities(
    model: Model,
    ids: Int[Array, "batch seq"],
    lengths: Int[Array, "batch"],
    source: tuple[Int[Array, "batch kv_seq"], Int[Array, "batch"]] | None,
    first: Int[Array, "batch"],
    targets: Int[Array, "batch new"],
) -> Float[Array, "batch new"]:
    """Return the log-probabilities of the targets; the model predicts a row's first target at its token `first`."""
    batch, seq = ids.shape
    tokens, capacity = right_padded(lengths, seq), seq
    if source is not None:
        source_ids, source_lengths = source
        tokens = with_source(tokens, Source(source_ids, right_padded(source_lengths, source_ids.shape[1])))
        capacity = max(seq, source_ids.shape[1])
    hidden, _, _ = model.encode(ids, tokens, model.init_cache(batch, capacity))
    # Positions beyond a row's last token give numbers that the caller leaves out.
    positions = jnp.minimum(first[:, None] + jnp.arange(targets.shape[1], dtype=jnp.int32), seq - 1)
    hidden = jnp.take_along_axis(hidden, positions[..., None], axis=1)

    def score_chunk(chunk: tuple[Float[Array, "batch chunk embed"], Int[Array, "batch chunk"]]) -> Array:
        hidden, targets = chunk
        logits = model.unembed(hidden.reshape(-1, hidden.shape[-1]))
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        return jnp.take_along_axis(log_probs, targets.reshape(-1, 1), axis=-1).reshape(targets.shape)

    split = lambda x: jnp.moveaxis(x.reshape(batch, -1, CHUNK, *x.shape[2:]), 1, 0)
    scores = jax.lax.map(score_chunk, (split(hidden), split(targets)))
    return jnp.moveaxis(scores, 0, 1).reshape(targets.shape)


def _pad(rows: Sequence[Sequence[int]], limit: int | None) -> tuple[Int[Array, "batch seq"], Int[Array, "batch"]]:
    """Return rows of ids as one array, padded to a multiple of `BUCKET` or to the `limit`, and their lengths."""
    lengths = [len(row) for row in rows]
    width = round_up(max(lengths), BUCKET)
    ids = np.zeros((len(rows), width if limit is None else min(width, limit)), np.int32)
    for padded, row in zip(ids, rows):
        padded[: len(row)] = row
    return jnp.asarray(ids), jnp.asarray(lengths, jnp.int32)


def _check_rows(model: Model, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> None:
    """Raise a `ValueError` for prompts and continuations that the model cannot read."""
    call = "log_probabilities(model, prompts, continuations)"
    if len(prompts) != len(continuations):
        raise ValueError(
            f"{call}: each prompt has one continuation, but there are {len(prompts)} prompts and {len(continuations)} "
            "continuations; give as many of both."
        )
    for number, (prompt, continuation) in enumerate(zip(prompts, continuations)):
        for name, row in (("prompt", prompt), ("continuation", continuation)):
            if not len(row):
                raise ValueError(f"{call}: {name} {number} has 0 ids; give at least 1.")
            if outside := [token for token in row if not 0 <= token < model.vocab]:
                raise ValueError(
                    f"{call}: {name} {number} holds the id {outside[0]}, but the model's {model.vocab} ids are 0 to "
                    f"{model.vocab - 1}; encode the text with the tokenizer that the model was trained with."
                )
        total = len(continuation) + (len(prompt) if model.start is None else 1)
        if model.max_seq is not None and total - 1 > model.max_seq:
            raise ValueError(
                f"{call}: row {number} has {total} ids, of which the model reads {total - 1}, but it has "
                f"{model.max_seq} learned positions; shorten the prompt."
            )
