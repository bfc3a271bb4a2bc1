"""Prefill and cached decode as pure functions of arrays: what `generate` and `stream` compile."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from ..nn import right_padded, Source, token_keys, Tokens, with_source
from ._model import Model
from ._transforms import Chain, History


class Draws(eqx.Module):
    """Sampling settings: transforms, the random key, the rows' numbers, and the ids that end a row."""

    transforms: Chain
    key: Key[Array, ""]
    examples: Int[Array, "batch"]
    end_of_text: Int[Array, "ends"]


class Sizes(NamedTuple):
    """What is compiled in: the longest row, the slots and dtype of the cache, tokens a prefill chunk (None: one)."""

    width: int
    capacity: int
    chunk: int | None
    cache_dtype: str | None = None


class Rows(eqx.Module):
    """The state of the decoding loop: each row's last token has been drawn, but the model has not read it yet."""

    ids: Int[Array, "batch seq"]
    lengths: Int[Array, "batch"]
    limits: Int[Array, "batch"]  # the lengths that rows may reach
    done: Bool[Array, "batch"]
    sound: Bool[Array, ""]  # no logits were NaN so far
    left: Bool[Array, ""]  # and the transforms have left each row a token
    log_probabilities: Float[Array, "batch seq"] | None
    cache: PyTree


def prefill(
    model: Model,
    ids: Int[Array, "batch prompt"],
    lengths: Int[Array, "batch"],
    most: Int[Array, ""],
    draws: Draws,
    *,
    sizes: Sizes,
    log_probabilities: bool,
) -> Rows:
    """Read the prompts, which are right-padded in `ids`, and draw the first of at most `most` new tokens of each row.

    Logits are computed for each row's last token only. A model with an encoder reads them by that, and begins each row
    with its own `start`.
    """
    batch, prompt = ids.shape
    tokens = right_padded(lengths, prompt)
    if model.start is not None:
        source = Source(ids, tokens)
        ids, lengths = jnp.full((batch, 1), model.start, ids.dtype), jnp.ones_like(lengths)
        tokens = with_source(right_padded(lengths, 1), source)
    cache = model.init_cache(batch, sizes.capacity, sizes.cache_dtype)
    if sizes.chunk is None:
        hidden, cache, _ = model.encode(ids, tokens, cache)
        last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
    else:
        last, cache = _prefill_in_chunks(model, ids, tokens, lengths, cache, sizes.chunk)
    held = jnp.zeros((batch, sizes.width), jnp.int32)
    rows = Rows(
        ids=jax.lax.dynamic_update_slice(held, ids[:, : sizes.width].astype(jnp.int32), (0, 0)),
        lengths=lengths,
        limits=lengths + most,
        done=jnp.zeros(batch, bool),
        sound=jnp.ones((), bool),
        left=jnp.ones((), bool),
        log_probabilities=jnp.zeros((batch, sizes.width), jnp.float32) if log_probabilities else None,
        cache=cache,
    )
    return _drawn(rows, model.unembed(last), cache, draws)


def advance(step: Callable[[Rows], Rows], rows: Rows, until: Int[Array, "batch"]) -> Rows:
    """Take steps until each row is at least `until` tokens long or done; rows that are done stay unchanged."""

    def unfinished(rows: Rows) -> Array:
        return jnp.any(~rows.done & (rows.lengths < until))

    return jax.lax.while_loop(unfinished, step, rows)


def decode_step(model: Model, rows: Rows, draws: Draws) -> Rows:
    """Read each row's last token and draw one more."""
    place = rows.lengths[:, None] - 1
    # A finished row's token counts as padding, which is not written to the cache.
    tokens = Tokens(jnp.where(rows.done[:, None], -1, place))
    hidden, cache, _ = model.encode(jnp.take_along_axis(rows.ids, place, axis=1), tokens, rows.cache)
    return _drawn(rows, model.unembed(hidden[:, 0]), cache, draws)


def draw(logits: Float[Array, "batch vocab"], history: History, draws: Draws) -> Int[Array, "batch"]:
    """One id for each row from the transformed logits; the new token's position is the row's length."""
    return pick(draws.transforms(logits, history), history.lengths, draws)


def pick(logits: Float[Array, "batch vocab"], positions: Int[Array, "batch"], draws: Draws) -> Int[Array, "batch"]:
    """One id for each row by the Gumbel-max trick: `argmax(logits + noise)`; ties go to the lowest id.

    A row's noise depends on the key, the row's number and the new token's position alone. The id is -1 where none may
    be drawn: all logits are minus infinity, or one is NaN.
    """
    if not draws.transforms.is_greedy:
        keys = token_keys(draws.key, draws.examples, positions[:, None])[:, 0]
        logits = logits + jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], logits.dtype))(keys)
    found = jnp.argmax(logits, axis=-1)
    highest = jnp.take_along_axis(logits, found[:, None], axis=-1)[:, 0]
    return jnp.where(highest > -jnp.inf, found, -1).astype(jnp.int32)


def _drawn(rows: Rows, logits: Float[Array, "batch vocab"], cache: PyTree, draws: Draws) -> Rows:
    """The rows with one more token each, except for those that are done."""
    chosen = draw(logits, History(rows.ids, rows.lengths), draws)
    return lengthened(rows, chosen[:, None], logits[:, None], (~rows.done).astype(jnp.int32), cache, draws)


def lengthened(
    rows: Rows,
    new: Int[Array, "batch new"],
    logits: Float[Array, "batch new vocab"],
    count: Int[Array, "batch"],
    cache: PyTree,
    draws: Draws,
) -> Rows:
    """The rows with the first `count` of their new tokens, up to an end of text and their limits."""
    order = jnp.arange(new.shape[1], dtype=jnp.int32)
    is_end = jnp.any(new[..., None] == draws.end_of_text, axis=-1)
    ends_before = jnp.cumsum(is_end, axis=1, dtype=jnp.int32) - is_end.astype(jnp.int32)
    kept = (order < jnp.minimum(count, rows.limits - rows.lengths)[:, None]) & (ends_before == 0)
    at = (jnp.arange(len(new))[:, None], jnp.where(kept, rows.lengths[:, None] + order, rows.ids.shape[1]))
    likely = rows.log_probabilities
    if likely is not None:
        of_all = jax.nn.log_softmax(logits.astype(likely.dtype), axis=-1)
        likely = likely.at[at].set(jnp.take_along_axis(of_all, new[..., None], axis=-1)[..., 0], mode="drop")
    left, new = rows.left & ~jnp.any((new < 0) & kept), jnp.maximum(new, 0)
    lengths = rows.lengths + jnp.sum(kept, axis=1, dtype=jnp.int32)
    return Rows(
        ids=rows.ids.at[at].set(new, mode="drop"),
        lengths=lengths,
        limits=rows.limits,
        done=rows.done | jnp.any(is_end & kept, axis=1) | (lengths >= rows.limits),
        sound=rows.sound & ~jnp.any(jnp.isnan(logits) & kept[..., None]),
        left=left,
        log_probabilities=likely,
        cache=cache,
    )


def _prefill_in_chunks(
    model: Model,
    ids: Int[Array, "batch prompt"],
    tokens: Tokens,
    lengths: Int[Array, "batch"],
    cache: PyTree,
    chunk: int,
) -> tuple[Float[Array, "batch embed"], PyTree]:
    """Each row's last hidden vector, and the cache, after reading as many chunks as the longest prompt has."""
    batch, prompt = ids.shape
    assert prompt % chunk == 0, "the last chunk would overlap the one before it"

    def read(number: Array, carry: tuple) -> tuple:
        last, cache = carry
        first = number * chunk
        piece, positions = (jax.lax.dynamic_slice_in_dim(x, first, chunk, axis=1) for x in (ids, tokens.positions))
        # Rotary frequencies may depend on the whole prompt's length, which cannot be seen from a chunk.
        of_prompt = jnp.broadcast_to(lengths[:, None], positions.shape)
        hidden, cache, _ = model.encode(piece, Tokens(positions, lengths=of_prompt), cache)
        place = lengths - 1 - first
        found = jnp.take_along_axis(hidden, jnp.clip(place, 0, chunk - 1)[:, None, None], axis=1)[:, 0]
        return jnp.where(((place >= 0) & (place < chunk))[:, None], found, last), cache

    shapes = eqx.filter_eval_shape(lambda: model.encode(ids[:, :1], Tokens(tokens.positions[:, :1]), cache)[0])
    nothing = jnp.zeros((batch, shapes.shape[-1]), shapes.dtype)
    return jax.lax.fori_loop(0, (jnp.max(lengths) + chunk - 1) // chunk, read, (nothing, cache))
