"""Prefill and cached decode as pure functions of arrays: what `generate` and `stream` compile."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from ..nn import right_padded, token_keys, Tokens
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
    done: Bool[Array, "batch"]
    steps: Int[Array, ""]
    sound: Bool[Array, ""]  # no logits were NaN so far
    log_probabilities: Float[Array, "batch seq"] | None
    cache: PyTree


def prefill(
    model: Model,
    ids: Int[Array, "batch prompt"],
    lengths: Int[Array, "batch"],
    draws: Draws,
    *,
    sizes: Sizes,
    log_probabilities: bool,
) -> Rows:
    """Read the prompts, which are right-padded in `ids`, and draw the first new token of each row.

    Logits are computed for each row's last token only.
    """
    batch, prompt = ids.shape
    tokens = right_padded(lengths, prompt)
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
        done=jnp.zeros(batch, bool),
        steps=jnp.zeros((), jnp.int32),
        sound=jnp.ones((), bool),
        log_probabilities=jnp.zeros((batch, sizes.width), jnp.float32) if log_probabilities else None,
        cache=cache,
    )
    return _drawn(rows, model.unembed(last), cache, draws)


def advance(model: Model, rows: Rows, draws: Draws, until: Int[Array, ""]) -> Rows:
    """Draw tokens until each row has `until` new ones or has drawn an end of text; finished rows stay unchanged."""

    def unfinished(rows: Rows) -> Array:
        return (rows.steps < until) & ~jnp.all(rows.done)

    def step(rows: Rows) -> Rows:
        place = rows.lengths[:, None] - 1
        # A finished row's token counts as padding, which is not written to the cache.
        tokens = Tokens(jnp.where(rows.done[:, None], -1, place))
        hidden, cache, _ = model.encode(jnp.take_along_axis(rows.ids, place, axis=1), tokens, rows.cache)
        return _drawn(rows, model.unembed(hidden[:, 0]), cache, draws)

    return jax.lax.while_loop(unfinished, step, rows)


def draw(logits: Float[Array, "batch vocab"], history: History, draws: Draws) -> Int[Array, "batch"]:
    """One id for each row by the Gumbel-max trick: `argmax(transformed logits + noise)`; ties go to the lowest id.

    A row's noise depends on the key, the row's number and the new token's position alone.
    """
    logits = draws.transforms(logits, history)
    if not draws.transforms.is_greedy:
        keys = token_keys(draws.key, draws.examples, history.lengths[:, None])[:, 0]
        logits = logits + jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], logits.dtype))(keys)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _drawn(rows: Rows, logits: Float[Array, "batch vocab"], cache: PyTree, draws: Draws) -> Rows:
    """The rows with one more token each, except for those that are done."""
    going = ~rows.done
    chosen = draw(logits, History(rows.ids, rows.lengths), draws)
    at = (jnp.arange(chosen.shape[0]), jnp.where(going, rows.lengths, rows.ids.shape[1]))
    kept = rows.log_probabilities
    if kept is not None:
        of_all = jax.nn.log_softmax(logits.astype(kept.dtype), axis=-1)
        kept = kept.at[at].set(jnp.take_along_axis(of_all, chosen[:, None], axis=-1)[:, 0], mode="drop")
    return Rows(
        ids=rows.ids.at[at].set(chosen, mode="drop"),
        lengths=rows.lengths + going.astype(jnp.int32),
        done=rows.done | jnp.any(chosen[:, None] == draws.end_of_text, axis=-1),
        steps=rows.steps + 1,
        sound=rows.sound & ~jnp.any(jnp.isnan(logits) & going[:, None]),
        log_probabilities=kept,
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
