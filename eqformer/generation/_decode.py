"""Prefill and cached decoding as pure functions of arrays, which `generate` and `stream` compile."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from ..nn import right_padded, Source, token_keys, Tokens, with_source
from ._model import Model
from ._transforms import Chain, History, likeliest_ids


class SamplingState(eqx.Module):
    """Inputs of sampling besides the logits: transforms, and for each row a key, a number and end-of-text ids."""

    transforms: Chain
    keys: Key[Array, "batch"]
    examples: Int[Array, "batch"]
    """A number for each row; the row's key and this number determine the row's random samples."""
    end_of_text: Int[Array, "batch ends"]
    """Ids that end a row; -1 fills unused entries."""
    scores_transformed: bool = eqx.field(static=True, default=False)
    """Whether log-probabilities of sampled ids are computed after the transforms, rather than before."""

    def fold_in(self, stream: int | Int[Array, ""]) -> "SamplingState":
        """Return a state with other random samples; samples of different `stream` numbers are independent."""
        return dataclasses.replace(self, keys=jax.vmap(lambda key: jax.random.fold_in(key, stream))(self.keys))

    def token_keys(self, positions: Int[Array, "batch seq"]) -> Key[Array, "batch seq"]:
        """Return the keys of samples at these positions of each row."""

        def keys_of_row(key: Array, example: Array, positions: Array) -> Array:
            return token_keys(key, example[None], positions[None])[0]

        return jax.vmap(keys_of_row)(self.keys, self.examples, positions)


class ProgramSizes(NamedTuple):
    """Sizes that are compiled into the program."""

    width: int
    """Tokens of the longest row."""
    capacity: int
    """Number of tokens of a row for which the cache has room."""
    chunk: int | None
    """Tokens of a prefill chunk; None: the whole prompt."""
    cache_dtype: str | None = None
    """The dtype of the cache; None: the compute dtype."""


MAX_ALTERNATIVES = 20
"""Maximum number of likely ids that a request may ask for beside each sampled id."""


class Alternatives(eqx.Module):
    """The likeliest ids at the position of each sampled id, by the model's logits; only some rows ask for these ids."""

    wanted: Bool[Array, "batch"]
    """Whether each row asks for alternatives; if no row does, none are computed."""
    ids: Int[Array, "batch seq top"]
    log_probabilities: Float[Array, "batch seq top"]

    def append(
        self,
        logits: Float[Array, "batch new vocab"],
        index: tuple[Int[Array, "batch _"], Int[Array, "batch new"]],
        done: Bool[Array, "batch"],
    ) -> "Alternatives":
        """Return the alternatives with the likeliest ids of each new token, which are written at `index`.

        They are computed only if a row asks for alternatives and is not `done`.
        """
        count = self.ids.shape[2]
        shape = (*logits.shape[:2], count)

        def find() -> tuple[Array, Array]:
            likeliest, ids = jax.lax.top_k(logits, count)
            return log_probabilities_of(likeliest, logits), ids

        skip = lambda: (jnp.zeros(shape, logits.dtype), jnp.zeros(shape, jnp.int32))
        log_probabilities, ids = jax.lax.cond(jnp.any(self.wanted & ~done), find, skip)
        return Alternatives(
            self.wanted,
            self.ids.at[index].set(ids, mode="drop"),
            self.log_probabilities.at[index].set(log_probabilities, mode="drop"),
        )


def log_probabilities_of(
    chosen: Float[Array, "*batch top"], logits: Float[Array, "*batch vocab"]
) -> Float[Array, "*batch top"]:
    """Return the log-probabilities of a few of the ids, whose logits are `chosen`.

    The results have the bits of `jax.nn.log_softmax`, which would make an array as large as the logits.
    """
    highest = jnp.max(logits, axis=-1, keepdims=True)
    return chosen - highest - jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1, keepdims=True))


class RowState(eqx.Module):
    """State of the rows in a loop of generation, which decodes tokens or denoises blocks."""

    ids: Int[Array, "batch seq"]
    lengths: Int[Array, "batch"]
    """The number of ids of the prompt and of the text so far."""
    limits: Int[Array, "batch"]
    """The length at which a row ends at the latest."""
    done: Bool[Array, "batch"]
    logits_are_numbers: Bool[Array, "batch"]
    """Whether no logits of a row have been NaN so far."""
    has_candidates: Bool[Array, "batch"]
    """Whether the transforms have left a row at least one token to sample so far."""
    cache: PyTree


class Rows(RowState):
    """State of the decoding loop: each row's last token has been sampled, but the model has not read it yet."""

    log_probabilities: Float[Array, "batch seq"] | None
    alternatives: Alternatives | None = None


def new_rows(
    ids: Int[Array, "batch seq"],
    lengths: Int[Array, "batch"],
    limits: Int[Array, "batch"],
    cache: PyTree,
    *,
    is_done: bool = False,
    log_probabilities: bool = True,
    alternatives: Alternatives | None = None,
) -> Rows:
    """Return rows for which no token has been sampled yet."""
    batch = len(ids)
    return Rows(
        ids=ids,
        lengths=lengths,
        limits=limits,
        done=jnp.full(batch, is_done),
        logits_are_numbers=jnp.ones(batch, bool),
        has_candidates=jnp.ones(batch, bool),
        log_probabilities=jnp.zeros(ids.shape, jnp.float32) if log_probabilities else None,
        cache=cache,
        alternatives=alternatives,
    )


def after_source(
    model: Model, ids: Int[Array, "batch kv_seq"], lengths: Int[Array, "batch"]
) -> tuple[Int[Array, "batch seq"], Tokens]:
    """Return each row's start id, and `Tokens` that carry the right-padded prompts as the encoder's source."""
    assert model.start is not None, "only a model with an encoder reads a source"
    source = Source(ids, right_padded(lengths, ids.shape[1]))
    tokens = with_source(right_padded(jnp.ones_like(lengths), 1), source)
    return jnp.full((len(ids), 1), model.start, ids.dtype), tokens


def prefill(
    model: Model,
    ids: Int[Array, "batch prompt"],
    lengths: Int[Array, "batch"],
    max_new_tokens: Int[Array, ""],
    sampling: SamplingState,
    *,
    sizes: ProgramSizes,
    log_probabilities: bool,
) -> Rows:
    """Read right-padded prompts and sample the first new token of each row.

    Logits are computed for the last token of each row only. A model with an encoder reads the prompts with its encoder,
    and each row starts with the model's `start` id.
    """
    batch, prompt = ids.shape
    if model.start is None:
        tokens = right_padded(lengths, prompt)
    else:
        ids, tokens = after_source(model, ids, lengths)
        lengths = jnp.ones_like(lengths)
    cache = model.init_cache(batch, sizes.capacity, sizes.cache_dtype)
    if sizes.chunk is None:
        hidden, cache, _ = model.encode(ids, tokens, cache)
        last_hidden = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
    else:
        last_hidden, cache = _prefill_in_chunks(model, ids, tokens, lengths, cache, sizes.chunk)
    buffer = jnp.zeros((batch, sizes.width), jnp.int32)
    row_ids = jax.lax.dynamic_update_slice(buffer, ids[:, : sizes.width].astype(jnp.int32), (0, 0))
    rows = new_rows(row_ids, lengths, lengths + max_new_tokens, cache, log_probabilities=log_probabilities)
    return draw_and_append(rows, model.unembed(last_hidden), cache, sampling)


def decode_until(
    step: Callable[[Rows], Rows],
    rows: Rows,
    length: Int[Array, "batch"],
    done_limit: Int[Array, ""] | None = None,
) -> Rows:
    """Repeat `step` until each row has at least `length` tokens or is done; rows that are done do not change.

    With `done_limit`, the loop also ends when more than `done_limit` rows are done.
    """

    def goes_on(rows: Rows) -> Array:
        is_unfinished = jnp.any(~rows.done & (rows.lengths < length))
        return is_unfinished if done_limit is None else is_unfinished & (jnp.sum(rows.done) <= done_limit)

    return jax.lax.while_loop(goes_on, step, rows)


def decode_step(model: Model, rows: Rows, sampling: SamplingState) -> Rows:
    """Read the last token of each row and sample the next one."""
    position = rows.lengths[:, None] - 1
    # The token of a finished row counts as padding, which is not written to the cache.
    tokens = Tokens(jnp.where(rows.done[:, None], -1, position))
    logits, cache = model.decode(jnp.take_along_axis(rows.ids, position, axis=1), tokens, rows.cache)
    return draw_and_append(rows, logits, cache, sampling)


def sample_ids(
    logits: Float[Array, "batch vocab"], positions: Int[Array, "batch"], sampling: SamplingState
) -> Int[Array, "batch"]:
    """Sample one id for each row by the Gumbel-max trick, `argmax(logits + noise)`; ties go to the lowest id.

    The noise of a row depends only on the key, the row's number and the position of the new token. The id is -1 if no
    id can be sampled, because all logits are minus infinity or a logit is NaN.
    """
    keys = None if sampling.transforms.is_greedy else sampling.token_keys(positions[:, None])[:, 0]
    return draw_ids(logits, keys)


def draw_ids(logits: Float[Array, "*batch vocab"], keys: Key[Array, "*batch"] | None) -> Int[Array, "*batch"]:
    """Draw an id for each token from the softmax of the token's logits, with the token's own key.

    If `keys` is None, the id is the likeliest one. The id is -1 if all logits of a token are minus infinity, or if a
    logit is NaN.
    """
    if keys is not None:
        draw = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], logits.dtype))
        logits = logits + draw(keys.reshape(-1)).reshape(logits.shape)
    return jnp.where(jnp.max(logits, axis=-1) > -jnp.inf, likeliest_ids(logits), -1)


def draw_and_append(rows: Rows, logits: Float[Array, "batch vocab"], cache: PyTree, sampling: SamplingState) -> Rows:
    """Append one sampled token to each row that is not done; the position of the new token is the row's length."""
    transformed = sampling.transforms(logits, History(rows.ids, rows.lengths))
    new_ids = sample_ids(transformed, rows.lengths, sampling)
    scored = transformed if sampling.scores_transformed else logits
    return append_tokens(rows, new_ids[:, None], scored[:, None], (~rows.done).astype(jnp.int32), cache, sampling)


def append_tokens(
    rows: Rows,
    new_ids: Int[Array, "batch new"],
    logits: Float[Array, "batch new vocab"],
    count: Int[Array, "batch"],
    cache: PyTree,
    sampling: SamplingState,
) -> Rows:
    """Append the first `count` new tokens to each row, stopping at an end of text and at the row's limit.

    The log-probabilities of the new tokens are computed from `logits`.
    """
    order = jnp.arange(new_ids.shape[1], dtype=jnp.int32)
    # A row for which no token could be sampled (-1) has ended, too.
    is_end = jnp.any(new_ids[..., None] == sampling.end_of_text[:, None], axis=-1) | (new_ids < 0)
    ends_before = jnp.cumsum(is_end, axis=1, dtype=jnp.int32) - is_end.astype(jnp.int32)
    appended = (order < jnp.minimum(count, rows.limits - rows.lengths)[:, None]) & (ends_before == 0)
    # Tokens that are not appended get an index beyond the buffer, which `mode="drop"` ignores.
    columns = jnp.where(appended, rows.lengths[:, None] + order, rows.ids.shape[1])
    index = (jnp.arange(len(new_ids))[:, None], columns)
    log_probabilities, alternatives = rows.log_probabilities, rows.alternatives
    if log_probabilities is not None:
        wide_logits = logits.astype(log_probabilities.dtype)
        chosen = jnp.take_along_axis(wide_logits, new_ids[..., None], axis=-1)
        values = log_probabilities_of(chosen, wide_logits)[..., 0]
        log_probabilities = log_probabilities.at[index].set(values, mode="drop")
        alternatives = None if alternatives is None else alternatives.append(wide_logits, index, rows.done)
    has_candidates = rows.has_candidates & ~jnp.any((new_ids < 0) & appended, axis=1)
    new_ids = jnp.maximum(new_ids, 0)
    lengths = rows.lengths + jnp.sum(appended, axis=1, dtype=jnp.int32)
    return Rows(
        ids=rows.ids.at[index].set(new_ids, mode="drop"),
        lengths=lengths,
        limits=rows.limits,
        done=rows.done | jnp.any(is_end & appended, axis=1) | (lengths >= rows.limits),
        logits_are_numbers=rows.logits_are_numbers & ~jnp.any(jnp.isnan(logits) & appended[..., None], axis=(1, 2)),
        has_candidates=has_candidates,
        log_probabilities=log_probabilities,
        cache=cache,
        alternatives=alternatives,
    )


def _prefill_in_chunks(
    model: Model,
    ids: Int[Array, "batch prompt"],
    tokens: Tokens,
    lengths: Int[Array, "batch"],
    cache: PyTree,
    chunk: int,
) -> tuple[Float[Array, "batch embed"], PyTree]:
    """Read as many chunks as the longest prompt has; return each row's last hidden vector, and the cache."""
    batch, prompt = ids.shape
    assert prompt % chunk == 0, "the last chunk would overlap the one before it"

    def read_chunk(number: Array, carry: tuple) -> tuple:
        last_hidden, cache = carry
        start = number * chunk
        chunk_ids, positions = (jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1) for x in (ids, tokens.positions))
        # Rotary frequencies may depend on the length of the whole prompt, which a chunk does not show.
        prompt_lengths = jnp.broadcast_to(lengths[:, None], positions.shape)
        hidden, cache, _ = model.encode(chunk_ids, Tokens(positions, lengths=prompt_lengths), cache)
        index = lengths - 1 - start
        candidate = jnp.take_along_axis(hidden, jnp.clip(index, 0, chunk - 1)[:, None, None], axis=1)[:, 0]
        return jnp.where(((index >= 0) & (index < chunk))[:, None], candidate, last_hidden), cache

    shapes = eqx.filter_eval_shape(lambda: model.encode(ids[:, :1], Tokens(tokens.positions[:, :1]), cache)[0])
    zeros = jnp.zeros((batch, shapes.shape[-1]), shapes.dtype)
    return jax.lax.fori_loop(0, (jnp.max(lengths) + chunk - 1) // chunk, read_chunk, (zeros, cache))
