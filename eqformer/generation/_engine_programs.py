"""The compiled programs of an `Engine`: read a prompt, start a row in a slot, and continue all slots."""

import dataclasses
import functools
from typing import Any, NamedTuple

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


@jax.tree_util.register_pytree_node_class
class FlatTree:
    """A tree of modules in a form that JAX flattens quickly: one tuple of arrays, and the structure of the tree.

    The compiled programs take and return trees in this form, since JAX flattens all arguments at each call. Flattening
    the modules of a model took longer than reading a short prompt.
    """

    def __init__(self, tree: PyTree):
        """Flatten a tree."""
        leaves, treedef = jax.tree.flatten(tree)
        self._arrays = tuple(leaf for leaf in leaves if eqx.is_array(leaf))
        self._structure = _Structure(treedef, tuple(None if eqx.is_array(leaf) else leaf for leaf in leaves))

    @property
    def tree(self) -> Any:
        """The tree of modules."""
        arrays = iter(self._arrays)
        leaves = [next(arrays) if leaf is None else leaf for leaf in self._structure.static_leaves]
        return jax.tree.unflatten(self._structure.treedef, leaves)

    def tree_flatten(self) -> tuple[tuple[Any, ...], "_Structure"]:
        """Return the arrays, and the structure of the tree."""
        return self._arrays, self._structure

    @classmethod
    def tree_unflatten(cls, structure: "_Structure", arrays: tuple[Any, ...]) -> "FlatTree":
        """Return the tree of a structure with these arrays."""
        flat = object.__new__(cls)
        flat._arrays, flat._structure = tuple(arrays), structure
        return flat


class _Structure:
    """The structure of a `FlatTree`, with the leaves that are no arrays.

    JAX hashes and compares structures at each call. The hash is therefore computed only once, and a structure equals
    itself without a comparison of its parts.
    """

    def __init__(self, treedef: Any, static_leaves: tuple[Any, ...]):
        """Store the structure; in `static_leaves` None stands for an array."""
        self.treedef, self.static_leaves = treedef, static_leaves
        self._parts = (treedef, static_leaves)
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Structure) and self._hash == other._hash and self._parts == other._parts


class EngineRows(eqx.Module):
    """The rows of an engine's batch, and the sampling state of each row.

    A slot is the place of a row in the batch. The row of a free slot is done.
    """

    rows: Rows
    sampling: SamplingState


class NewTokens(NamedTuple):
    """Arrays that the host reads after a decoding step: the new ids and the state of each row."""

    ids: Int[Array, "batch new"]
    """Ids that the host does not have yet; entries after the row's length are unused."""
    log_probabilities: Float[Array, "batch new"]
    alternative_ids: Int[Array, "batch new top"]
    alternative_log_probabilities: Float[Array, "batch new top"]
    lengths: Int[Array, "batch"]
    done: Bool[Array, "batch"]
    logits_are_numbers: Bool[Array, "batch"]
    has_candidates: Bool[Array, "batch"]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def init_cache(model: FlatTree, batch: int, capacity: int, dtype: str | None) -> FlatTree:
    """Return empty caches."""
    return FlatTree(model.tree.init_cache(batch, capacity, dtype))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def free_rows(flat_model: FlatTree, batch: int, width: int, capacity: int, dtype: str | None) -> FlatTree:
    """Return `EngineRows` whose slots are all free, for rows of up to `width` ids and caches of `capacity` tokens."""
    model: Model = flat_model.tree
    lengths, cache = jnp.ones(batch, jnp.int32), model.init_cache(batch, capacity, dtype)
    alternatives = _no_alternatives(jnp.zeros(batch, bool), width, model.vocab)
    ids = jnp.zeros((batch, width), jnp.int32)
    rows = new_rows(ids, lengths, lengths, cache, is_done=True, alternatives=alternatives)
    keys = jnp.broadcast_to(jax.random.key(0), (batch,))
    ends = jnp.full((batch, MAX_ENDS), -1, jnp.int32)
    settings = RowSampling.neutral(batch, model.vocab)
    return FlatTree(EngineRows(rows, SamplingState(chain(settings), keys, jnp.zeros(batch, jnp.int32), ends)))


def _no_alternatives(wanted: Bool[Array, "batch"], width: int, vocab: int) -> Alternatives:
    """Return empty alternatives, for rows without new tokens."""
    shape = (len(wanted), width, min(MAX_ALTERNATIVES, vocab))
    return Alternatives(wanted, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


class Chunk(NamedTuple):
    """The inputs of `read_chunk`: a part of one prompt."""

    model: FlatTree
    ids: Int[Array, "batch seq"]
    """Ids of the part, with padding after them."""
    start: Int[Array, "batch"]
    """The position of the first id in the prompt."""
    count: Int[Array, "batch"]
    """Number of ids before the padding."""
    length: Int[Array, "batch"]
    """Number of ids of the whole prompt."""


@functools.partial(jax.jit, donate_argnums=1)
def read_chunk(chunk: Chunk, cache: FlatTree) -> tuple[Float[Array, "batch embed"], FlatTree]:
    """Read a part of a prompt; return the hidden vector of its last id, and the cache, which is donated."""
    order = jnp.arange(chunk.ids.shape[1], dtype=jnp.int32)
    positions = jnp.where(order < chunk.count[:, None], chunk.start[:, None] + order, -1)
    tokens = Tokens(positions, lengths=jnp.broadcast_to(chunk.length[:, None], positions.shape))
    hidden, new_cache, _ = chunk.model.tree.encode(chunk.ids, tokens, cache.tree)
    return jnp.take_along_axis(hidden, chunk.count[:, None, None] - 1, axis=1)[:, 0], FlatTree(new_cache)


@functools.partial(jax.jit, donate_argnums=1)
def read_encoder_prompt(prompt: Chunk, cache: FlatTree) -> tuple[Float[Array, "batch embed"], FlatTree]:
    """Read a whole prompt with the model's encoder, and then the start id with its decoder.

    Returns the hidden vector of the start id, and the cache, which is donated.
    """
    model: Model = prompt.model.tree
    start, tokens = after_source(model, prompt.ids, prompt.length)
    hidden, new_cache, _ = model.encode(start, tokens, cache.tree)
    return hidden[:, 0], FlatTree(new_cache)


class NewRow(NamedTuple):
    """The inputs of `start_row`: a row whose ids have been read, and the slot that it gets."""

    model: FlatTree
    settings: RowSampling
    hidden: Float[Array, "batch embed"]
    """The hidden vector of the last id."""
    cache: FlatTree
    """The cache after the model has read the ids."""
    seed: Int[Array, ""]
    """The seed of the row's random key."""
    example: Int[Array, "batch"]
    end_of_text: Int[Array, "batch ends"]
    """Ids that end the row; -1 fills unused entries."""
    ids: Int[Array, "batch seq"]
    """Ids of the row, with padding after them."""
    length: Int[Array, "batch"]
    """Number of ids before the padding."""
    limit: Int[Array, "batch"]
    """The length at which the row ends."""
    slot: Int[Array, ""]
    wants_alternatives: Bool[Array, "batch"]
    """Whether the row asks for alternatives."""


@functools.partial(jax.jit, donate_argnums=1)
def start_row(new: NewRow, flat_slots: FlatTree) -> FlatTree:
    """Sample the first token of a row, and write the row into its slot.

    `flat_slots` holds the `EngineRows`, which are donated.
    """
    model: Model = new.model.tree
    slots: EngineRows = flat_slots.tree
    alternatives = _no_alternatives(new.wants_alternatives, new.ids.shape[1], model.vocab)
    sampling = SamplingState(chain(new.settings), jax.random.key(new.seed)[None], new.example, new.end_of_text)
    cache = new.cache.tree
    row = new_rows(new.ids, new.length, new.limit, cache, alternatives=alternatives)
    row = draw_and_append(row, model.unembed(new.hidden), cache, sampling)
    # The cache may be sharded, so the model writes the row.
    cache = put_cache_row(model, slots.rows.cache, len(slots.rows.ids), new.slot, row.cache)
    without_caches = [dataclasses.replace(rows, cache=None) for rows in (slots.rows, row)]
    rows = dataclasses.replace(put_row(without_caches[0], new.slot, without_caches[1]), cache=cache)
    return FlatTree(EngineRows(rows, put_row(slots.sampling, new.slot, sampling)))


class DecodeInputs(NamedTuple):
    """The inputs of `decode_slots`, beside the slots."""

    model: FlatTree
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


@functools.partial(jax.jit, donate_argnums=1, static_argnums=(2, 3))
def decode_slots(
    inputs: DecodeInputs, flat_slots: FlatTree, max_new: int, is_greedy: bool
) -> tuple[FlatTree, NewTokens]:
    """Sample tokens for all rows that have not ended. `flat_slots` holds the `EngineRows`, which are donated.

    `max_new` is the width of the returned arrays: after a step, at most `max_new` ids of a row are new to the host.
    With `is_greedy`, all rows take the likeliest tokens of the model's own logits.
    """
    slots: EngineRows = flat_slots.tree
    sampling = slots.sampling
    if is_greedy:
        sampling = dataclasses.replace(sampling, transforms=chain(Temperature(0)))
    elif inputs.bias is not None:
        sampling = eqx.tree_at(lambda state: state.transforms.transforms[0].bias, sampling, inputs.bias)
    rows = dataclasses.replace(slots.rows, done=slots.rows.done | inputs.ended)
    # While a request waits, the loop ends as soon as a further row is done; otherwise there is no such limit.
    done_limit = jnp.where(inputs.has_waiting, jnp.sum(rows.done), len(rows.done))
    rows = decode_until(make_decode_step(inputs.model.tree, sampling), rows, rows.lengths + inputs.count, done_limit)
    columns = inputs.known[:, None] + jnp.arange(max_new, dtype=jnp.int32)
    columns = jnp.minimum(columns, rows.ids.shape[1] - 1)
    alternatives = rows.alternatives
    assert rows.log_probabilities is not None and alternatives is not None
    progress = NewTokens(
        ids=jnp.take_along_axis(rows.ids, columns, axis=1),
        log_probabilities=jnp.take_along_axis(rows.log_probabilities, columns, axis=1),
        alternative_ids=jnp.take_along_axis(alternatives.ids, columns[..., None], axis=1),
        alternative_log_probabilities=jnp.take_along_axis(alternatives.log_probabilities, columns[..., None], axis=1),
        lengths=rows.lengths,
        done=rows.done,
        logits_are_numbers=rows.logits_are_numbers,
        has_candidates=rows.has_candidates,
    )
    return FlatTree(EngineRows(rows, slots.sampling)), progress
