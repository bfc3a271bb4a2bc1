"""The compiled programs of an `Engine`: read a prompt, start a row in a slot, and continue all slots."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..nn import Tokens
from ._decode import (
    after_source,
    Alternatives,
    decode_until,
    draw_and_append,
    MAX_ALTERNATIVES,
    new_rows,
    Rows,
    SamplingState,
)
from ._model import Model
from ._requests import MAX_ENDS, RowSampling
from ._speculative import make_decode_step, put_cache_row, put_row
from ._transforms import chain, Temperature


class EngineRows(eqx.Module):
    """Rows of an engine and the sampling state of each row; the row of a free slot is done."""

    rows: Rows
    sampling: SamplingState


class NewTokens(NamedTuple):
    """Arrays that the host reads after a decoding step: for each row its new ids and its state."""

    ids: Int[Array, "batch new"]
    """Ids, from the first that the host does not have; entries after the row's length are unused."""
    log_probabilities: Float[Array, "batch new"]
    alternative_ids: Int[Array, "batch new top"]
    alternative_log_probabilities: Float[Array, "batch new top"]
    lengths: Int[Array, "batch"]
    done: Bool[Array, "batch"]
    logits_are_numbers: Bool[Array, "batch"]
    has_candidates: Bool[Array, "batch"]


@eqx.filter_jit
def init_cache(model: Model, batch: int, capacity: int, dtype: str | None) -> PyTree:
    """Return empty caches."""
    return model.init_cache(batch, capacity, dtype)


@eqx.filter_jit
def free_rows(model: Model, batch: int, width: int, capacity: int, dtype: str | None) -> EngineRows:
    """Return free slots for rows of up to `width` ids, with caches of `capacity` slots each."""
    lengths, cache = jnp.ones(batch, jnp.int32), model.init_cache(batch, capacity, dtype)
    alternatives = _no_alternatives(jnp.zeros(batch, bool), width, model.vocab)
    ids = jnp.zeros((batch, width), jnp.int32)
    rows = new_rows(ids, lengths, lengths, cache, is_done=True, alternatives=alternatives)
    settings = RowSampling(
        bias=jnp.zeros((batch, model.vocab), jnp.float32),
        repetition_penalty=jnp.ones(batch, jnp.float32),
        new_id_penalties=jnp.zeros((batch, 2), jnp.float32),
        temperature=jnp.zeros(batch, jnp.float32),
        top_k=jnp.full(batch, model.vocab, jnp.int32),
        start=jnp.zeros(batch, jnp.int32),
        top_p=jnp.ones(batch, jnp.float32),
        min_p=jnp.zeros(batch, jnp.float32),
    )
    keys = jnp.broadcast_to(jax.random.key(0), (batch,))
    ends = jnp.full((batch, MAX_ENDS), -1, jnp.int32)
    return EngineRows(rows, SamplingState(chain(settings), keys, jnp.zeros(batch, jnp.int32), ends))


def _no_alternatives(wanted: Bool[Array, "batch"], width: int, vocab: int) -> Alternatives:
    """Return empty alternatives, for rows without new tokens."""
    shape = (len(wanted), width, min(MAX_ALTERNATIVES, vocab))
    return Alternatives(wanted, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


class Chunk(NamedTuple):
    """The inputs of `read_chunk`: a part of one prompt."""

    model: Model
    ids: Int[Array, "batch seq"]
    """Ids of the part, with padding after them."""
    start: Int[Array, "batch"]
    """The position of the first id in the prompt."""
    count: Int[Array, "batch"]
    """Number of ids before the padding."""
    length: Int[Array, "batch"]
    """Number of ids of the whole prompt."""


@eqx.filter_jit(donate="all-except-first")
def read_chunk(chunk: Chunk, cache: PyTree) -> tuple[Float[Array, "batch embed"], PyTree]:
    """Read a part of a prompt; return the hidden vector of its last id, and the cache, which is donated."""
    order = jnp.arange(chunk.ids.shape[1], dtype=jnp.int32)
    positions = jnp.where(order < chunk.count[:, None], chunk.start[:, None] + order, -1)
    tokens = Tokens(positions, lengths=jnp.broadcast_to(chunk.length[:, None], positions.shape))
    hidden, cache, _ = chunk.model.encode(chunk.ids, tokens, cache)
    return jnp.take_along_axis(hidden, chunk.count[:, None, None] - 1, axis=1)[:, 0], cache


@eqx.filter_jit(donate="all-except-first")
def read_encoder_prompt(prompt: Chunk, cache: PyTree) -> tuple[Float[Array, "batch embed"], PyTree]:
    """Read a whole prompt with the model's encoder, and then the start id with its decoder.

    Returns the hidden vector of the start id, and the cache, which is donated.
    """
    start, tokens = after_source(prompt.model, prompt.ids, prompt.length)
    hidden, cache, _ = prompt.model.encode(start, tokens, cache)
    return hidden[:, 0], cache


class NewRow(NamedTuple):
    """The inputs of `start_row`: a row whose ids have been read, and the slot that it gets."""

    model: Model
    sampling: SamplingState
    ids: Int[Array, "batch seq"]
    """Ids of the row, with padding after them."""
    length: Int[Array, "batch"]
    """Number of ids before the padding."""
    limit: Int[Array, "batch"]
    """The length at which the row ends."""
    hidden: Float[Array, "batch embed"]
    """The hidden vector of the last id."""
    cache: PyTree
    """The cache after the model has read the ids."""
    slot: Int[Array, ""]
    wants_alternatives: Bool[Array, "batch"]
    """Whether the row asks for alternatives."""


@eqx.filter_jit(donate="all-except-first")
def start_row(new: NewRow, slots: EngineRows) -> EngineRows:
    """Sample the first token of a row, and write the row into its slot; the slots are donated."""
    alternatives = _no_alternatives(new.wants_alternatives, new.ids.shape[1], new.model.vocab)
    row = new_rows(new.ids, new.length, new.limit, new.cache, alternatives=alternatives)
    row = draw_and_append(row, new.model.unembed(new.hidden), new.cache, new.sampling)
    # The cache may be sharded, so the model writes the row.
    cache = put_cache_row(new.model, slots.rows.cache, len(slots.rows.ids), new.slot, row.cache)
    without_caches = [dataclasses.replace(rows, cache=None) for rows in (slots.rows, row)]
    rows = dataclasses.replace(put_row(without_caches[0], new.slot, without_caches[1]), cache=cache)
    return EngineRows(rows, put_row(slots.sampling, new.slot, new.sampling))


class DecodeInputs(NamedTuple):
    """The inputs of `decode_slots`, beside the slots."""

    model: Model
    ended: Bool[Array, "batch"]
    """Rows that the host has ended."""
    known: Int[Array, "batch"]
    """Number of ids of each row that the host has."""
    count: Int[Array, ""]
    """Maximum number of tokens to generate for each row."""
    has_waiting: Bool[Array, ""]
    """Whether a request waits for a slot, so that the step ends as soon as a row has ended."""
    bias: Float[Array, "batch vocab"] | None
    """Biases that replace the slots' biases if the host restricts the next ids of a row; None: no row is restricted."""


@eqx.filter_jit(donate="all-except-first")
def decode_slots(
    inputs: DecodeInputs, slots: EngineRows, max_new: int, is_greedy: bool
) -> tuple[EngineRows, NewTokens]:
    """Sample tokens for all rows that have not ended; the slots are donated.

    `max_new` is the width of the returned arrays: after a step, the host lacks at most this many ids of a row. With
    `is_greedy`, all rows take the likeliest tokens of the model's own logits.
    """
    sampling = slots.sampling
    if is_greedy:
        sampling = dataclasses.replace(sampling, transforms=chain(Temperature(0)))
    elif inputs.bias is not None:
        sampling = eqx.tree_at(lambda state: state.transforms.transforms[0].bias, sampling, inputs.bias)
    rows = dataclasses.replace(slots.rows, done=slots.rows.done | inputs.ended)
    done_limit = jnp.where(inputs.has_waiting, jnp.sum(rows.done), len(rows.done))
    rows = decode_until(make_decode_step(inputs.model, sampling), rows, rows.lengths + inputs.count, done_limit)
    columns = inputs.known[:, None] + jnp.arange(max_new, dtype=jnp.int32)
    columns = jnp.minimum(columns, rows.ids.shape[1] - 1)
    assert rows.log_probabilities is not None and rows.alternatives is not None
    take = lambda x: jnp.take_along_axis(x, columns.reshape(columns.shape + (1,) * (x.ndim - 2)), axis=1)
    progress = NewTokens(
        take(rows.ids),
        take(rows.log_probabilities),
        take(rows.alternatives.ids),
        take(rows.alternatives.log_probabilities),
        rows.lengths,
        rows.done,
        rows.logits_are_numbers,
        rows.has_candidates,
    )
    return EngineRows(rows, slots.sampling), progress
