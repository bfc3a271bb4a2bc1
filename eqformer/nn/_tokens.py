"""Position, document and random key of each token, and values that layers read beside the residual stream."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt

from .._annotation_checks import checked, checked_fields
from ._module import map_modules, modules, take_members


class SharedKV(eqx.Module):
    """Keys and values that a mixer shares with mixers of later layers, which have no keys and values of their own."""

    keys: Float[Array, "*batch kv_seq kv_heads head_dim"]
    """The keys, rotated."""
    values: Float[Array, "*batch kv_seq kv_heads v_dim"]
    """The values."""
    positions: Int[Array, "*batch kv_seq"] | None = None
    """Positions of the keys, if they come from a cache; None: the keys belong to the call's own tokens."""


class SharedValue(eqx.Module):
    """A value that a mixer shares with mixers of later layers; `wrapped` carries a mixer's cache beside the value."""

    value: PyTree
    """A `SharedKV`, a `KeySelection`, or anything else that the later mixer understands."""
    wrapped: PyTree = None
    """The mixer's own cache, in the argument and the result of a mixer's call; None in a layer's aux."""
    name: str = eqx.field(static=True, default="")
    """The name by which later layers ask for the value."""


def _unknown() -> None:
    """Return None, the default of fields that only eqformer's own functions set."""


@checked_fields
class Tokens(eqx.Module):
    """Position, document and random key of each token, in arrays of one shape, which a mesh splits like the tokens.

    `whole_rows` is the number of tokens in each row, if it is known at trace time that each row is one document, at
    positions 0, 1, 2, ... with any padding at its end. Attention kernels then get a causal flag or a window, instead of
    a mask of `seq x seq`. With `segments`, each row is known to hold up to `documents` whole documents, one after
    another, each at positions 0, 1, 2, ...; kernels then get the indices where documents begin. Only `positions_like`,
    `right_padded` and `packed_in_order` set `whole_rows`. All other tokens, also tokens from `dataclasses.replace`, are
    masked by the values of their arrays.
    """

    positions: Int[Array, "*batch seq"]
    """Positions count from 0 in each document; -1 marks padding, which is never attended to."""
    segments: Int[Array, "*batch seq"] | None = None
    """A number for each token, which tells the documents of a packed row apart; None: each row is one document."""
    keys: Key[Array, "*batch seq"] | None = None
    """One PRNG key for each token, into which layers fold their indices. Tokens with keys are trained on. None means
    inference: there is no randomness, and no choice of experts is dropped."""
    lengths: Int[Array, "*batch seq"] | None = None
    """The length of each token's document, on which rotary frequencies may depend; needed if the tokens are only a part
    of their rows. None: computed from `positions`."""
    inputs: Float[Array, "*rows seq depth mlp"] | None = None
    """A vector for each layer that reads such a vector (`PerLayerInputs`); mixers do not get these vectors."""
    shared: tuple[SharedValue, ...] = ()
    """Values that earlier layers share; a mixer that reads such a value gets it as its argument `cache`."""
    names_read: frozenset[str] = eqx.field(static=True, default=frozenset())
    """Names of shared values that later layers read."""
    source: "Source | None" = None
    """The sequence that cross-attention reads."""
    score_bias: Callable[..., Array] | None = None
    """A `ScoreBias`, which a model sets for its own layers."""
    rotary_alpha: Float[Array, "half"] | None = None
    """Logarithms of the learned factors of rotary frequencies, which a model sets for its own layers
    (`LearnedFrequencies`)."""
    types: Int[Array, "*batch seq"] | None = None
    """The token type of each token, such as the number of its text in a pair (BERT); None: 0 for all tokens."""
    ids: Int[Array, "*batch seq"] | None = None
    """The id of each token; a model sets the ids if one of its layers reads ids (`ValueEmbeddedAttention`)."""
    whole_rows: int | None = eqx.field(static=True, init=False, default_factory=_unknown)
    documents: int | None = eqx.field(static=True, init=False, default_factory=_unknown)
    pieces: int | None = eqx.field(static=True, init=False, default_factory=_unknown)

    @property
    def are_whole_rows(self) -> bool:
        """Whether `whole_rows` is set for these tokens themselves, not for longer rows that they are a part of."""
        return self.segments is None and self._are_all_of_their_rows

    @property
    def are_packed_in_order(self) -> bool:
        """Whether these tokens themselves are known to be rows of whole documents, one after another."""
        return self.segments is not None and self.documents is not None and self._are_all_of_their_rows

    @property
    def _are_all_of_their_rows(self) -> bool:
        return self.pieces is None and self.whole_rows == self.positions.shape[-1]

    @property
    def is_training(self) -> bool:
        """Whether the tokens are trained on, so that layers use dropout, router noise and experts' capacities."""
        return self.keys is not None

    @property
    def bare(self) -> "Tokens":
        """These tokens without the inputs that a sublayer asks for by name."""
        return self.replace(inputs=None, shared=(), names_read=frozenset(), source=None)

    def replace(self, **fields: PyTree) -> "Tokens":
        """Return these tokens, in the same order and row layout, with other fields."""
        return with_row_layout_of(dataclasses.replace(self, **fields), self)

    def fold_in(self, number: int | Int[Array, ""]) -> "Tokens":
        """Return these tokens with `number` folded into every key; each layer and sublayer folds in its index."""
        if self.keys is None:
            return self
        return self.replace(keys=fold_in_each(self.keys, jnp.uint32(number)))


@checked_fields
class Source(eqx.Module):
    """A sequence that another sequence reads by cross-attention: vectors, or ids, which an encoder reads first."""

    values: Int[Array, "*batch kv_seq"] | Float[Array, "*batch kv_seq source"]
    tokens: Tokens

    @property
    def is_of_ids(self) -> bool:
        """Whether the values are ids, which an encoder must read first."""
        return jnp.issubdtype(self.values.dtype, jnp.integer)

    def vectors(self, call: str) -> Float[Array, "*batch kv_seq source"]:
        """Return the vectors; raise a `ValueError` that begins with `call` if the values are ids."""
        if self.is_of_ids:
            raise ValueError(
                f"{call}: the source holds ids, and the model has no encoder that reads them; give vectors, or "
                "build the model with nn.Transformer(encoder=nn.Encoder(...))."
            )
        return self.values


def with_source(tokens: Tokens, source: Source | None) -> Tokens:
    """Return the tokens with a source for cross-attention."""
    return tokens.replace(source=source)


def mark_whole_rows(tokens: Tokens, length: int | None, documents: int | None = None) -> Tokens:
    """Mark the tokens as rows of `length` tokens, each one document from position 0 on; None marks nothing.

    With `documents`, each row consists of up to `documents` whole documents, one after another, which `segments` tells
    apart.
    """
    marked = copy.copy(tokens)  # `dataclasses.replace` drops `whole_rows` on purpose.
    object.__setattr__(marked, "whole_rows", length)
    object.__setattr__(marked, "documents", documents)
    return marked


def with_row_layout_of(tokens: Tokens, other: Tokens, pieces: int | None = None) -> Tokens:
    """Return the tokens with the row layout of `other`.

    The tokens must be in the order of `other`. With `pieces`, devices cut the rows of `other` into so many pieces, and
    the tokens are one piece.
    """
    marked = mark_whole_rows(tokens, other.whole_rows, other.documents)
    object.__setattr__(marked, "pieces", other.pieces if pieces is None else pieces)
    return marked


@checked
def positions_like(shape: Sequence[int], keys: Key[Array, "*batch seq"] | None = None) -> Tokens:
    """Return tokens of rows of one document each, at positions 0, 1, ..., for an array of shape `*batch seq`."""
    positions = jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), tuple(shape))
    return mark_whole_rows(Tokens(positions, keys=keys), shape[-1])


@checked
def right_padded(lengths: Int[Array, "*batch"], seq: int) -> Tokens:
    """Return tokens of rows of one document each, of these lengths, padded at the end to `seq` tokens."""
    positions = jnp.arange(seq, dtype=jnp.int32)
    return mark_whole_rows(Tokens(jnp.where(positions < lengths[..., None], positions, -1)), seq)


@checked
def packed_in_order(
    positions: Int[Array, "*batch seq"],
    segments: Int[Array, "*batch seq"],
    keys: Key[Array, "*batch seq"] | None = None,
    *,
    documents: int,
) -> Tokens:
    """Return tokens of rows of up to `documents` whole documents, one after another, with padding (-1) after them."""
    return mark_whole_rows(Tokens(positions, segments, keys), positions.shape[-1], documents)


def tokens_or_default(tokens: Tokens | None, shape: Sequence[int], cache: PyTree) -> Tokens:
    """Return the tokens of a call, by default the tokens of `positions_like`.

    Raises a `ValueError` for a cache without tokens.
    """
    if tokens is not None:
        return tokens
    if cache is not None:
        raise ValueError(
            f"a call on tokens of shape {tuple(shape)} has a cache and tokens=None: with a cache, only the caller "
            "knows how far each row has come; pass Tokens(positions), with -1 for padding."
        )
    return positions_like(shape)


@checked
def document_lengths(tokens: Tokens, kv_tokens: Tokens | None = None) -> Int[Array, "*batch #seq"]:
    """Return the length of each token's document: `tokens.lengths`, or one more than the document's last position.

    Segments tell documents apart, wherever their tokens stand in the row. Without segments, or with a cache (whose
    tokens are `kv_tokens`), each row is one document, and the result has one length for each row.
    """
    if kv_tokens is not None:
        if tokens.lengths is not None:
            return jnp.max(tokens.lengths, axis=-1, keepdims=True)
        return jnp.max(kv_tokens.positions, axis=-1, keepdims=True) + 1
    if tokens.lengths is not None:
        return tokens.lengths
    if tokens.segments is None:
        return jnp.max(tokens.positions, axis=-1, keepdims=True) + 1

    def lengths_in_row(positions: Int[Array, "seq"], segments: Int[Array, "seq"]) -> Int[Array, "seq"]:
        # An index that is the same for all tokens of a document.
        document = jnp.searchsorted(jnp.sort(segments), segments)
        return jnp.full_like(positions, -1).at[document].max(positions)[document] + 1

    positions, segments = jnp.broadcast_arrays(tokens.positions, tokens.segments)
    flat = (x.reshape(-1, x.shape[-1]) for x in (positions, segments))
    return jax.vmap(lengths_in_row)(*flat).reshape(positions.shape)


def fold_in_each(keys: Key[Array, "*shape"], number: UInt[Array, ""]) -> Key[Array, "*shape"]:
    """Fold a number into every key of an array by `jax.random.fold_in`."""
    flat = keys.reshape(-1)
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(flat).reshape(keys.shape)


@checked
def token_keys(
    key: Key[Array, ""], examples: Int[Array, "batch"], positions: Int[Array, "batch seq"]
) -> Key[Array, "batch seq"]:
    """Return a key for each token, which depends on the example's index and the token's position, but on no device.

    `examples` has the index of each row in the whole run. `positions` are integers that are distinct within a row.
    """
    rows = jax.vmap(lambda example: jax.random.fold_in(key, example))(examples)
    over_seq = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(over_seq)(rows, positions)


def documents_of(tokens: Tokens, shape: tuple[int, ...]) -> Int[Array, "*batch seq"]:
    """Return the index of each token's document.

    Documents that begin in the row have the indices 1, 2, ... Tokens before the first of these documents have index 0:
    they continue the document in the cache. A document begins at position 0, and at a token whose segment differs from
    the previous token's segment. Padding belongs to the document before it.
    """
    positions = jnp.broadcast_to(tokens.positions, shape)
    begins = positions == 0
    if tokens.segments is not None:
        segments = jnp.broadcast_to(tokens.segments, shape)
        begins |= jnp.pad(segments[..., 1:] != segments[..., :-1], [(0, 0)] * (len(shape) - 1) + [(1, 0)])
    return jnp.cumsum(begins & (positions >= 0), axis=-1, dtype=jnp.int32)


def continues(positions: Int[Array, "*batch seq"], lengths: Int[Array, "*batch"]) -> Bool[Array, "*batch"]:
    """Return whether each row's first token is padding or follows the tokens in a cache."""
    first = positions[..., 0]
    return (first < 0) | (first == lengths)


def lengths_after(positions: Int[Array, "*batch seq"], lengths: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Return the position of each row's next token after these tokens; a row of padding alone keeps its length."""
    last = jnp.max(positions, axis=-1).astype(jnp.int32)
    return jnp.where(last >= 0, last + 1, lengths)


class ShareRequest(eqx.Module):
    """A mixer's cache, passed in this wrapper to ask the mixer for a `SharedValue` around its new cache."""

    cache: PyTree


Cache = TypeVar("Cache")


def unwrap_request(cache: Cache | ShareRequest) -> tuple[bool, Cache]:
    """Return whether a mixer's cache argument asks for a `SharedValue`, and the cache itself."""
    return (True, cache.cache) if isinstance(cache, ShareRequest) else (False, cache)


def answer_request(is_requested: bool, value: PyTree, cache: PyTree) -> PyTree:
    """Return a mixer's new cache, within a `SharedValue` if the mixer was asked for one."""
    return SharedValue(value, cache) if is_requested else cache


def find_shared(shared: Iterable[SharedValue], name: str) -> SharedValue:
    """Return the last shared value of this name; raise a `ValueError` if there is none."""
    matches = [value for value in shared if value.name == name]
    if not matches:
        names = sorted({value.name for value in shared})
        raise ValueError(
            f"Residual(reads={name!r}): layers before it share values under {names or 'no name'}; write "
            f"Residual(shares={name!r}) in one of them."
        )
    return matches[-1]


def collect_shared(aux: PyTree) -> list[SharedValue]:
    """Return the values that layers with this aux share, in the order of the layers."""
    return modules(aux, SharedValue)


def keep_shared(aux: PyTree, names: Iterable[str]) -> PyTree:
    """Return the aux with only the shared values of these names; other shared values become None."""
    return map_modules(lambda shared: shared if shared.name in names else None, aux, SharedValue)


def take_last_layer(aux: PyTree) -> PyTree:
    """Return a stack's aux with shared values of the last layer only; all else keeps its `layers` dim in front."""
    return map_modules(functools.partial(take_members, index=-1), aux, SharedValue)
