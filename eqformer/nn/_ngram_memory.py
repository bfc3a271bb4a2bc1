"""Tables of hashed n-grams: vectors of a token and the tokens before it, which a layer adds to its residual streams."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt

from .._annotation_checks import checked_fields
from ._cache import check_one_document
from ._contracts import Mixer, MixerFacts
from ._dtype import at_least_float32, float_dtype
from ._linear import Linear, LinearMap
from ._mlp import silu
from ._model_contracts import EmbeddingTable
from ._norm import Norm, RMSNorm
from ._streams import tokens_of_streams
from ._tokens import continues, documents_of, lengths_after, Tokens, tokens_or_default
from .recurrent._convolution import CausalConv


_LARGEST_ID = 2**31 - 1
_INT64 = 2**63 - 1
_MOST_HEADS = 2**12


@dataclasses.dataclass(frozen=True)
class NGramHash:
    """A hash that maps the n-grams that end at a token, with 2, 3, ... tokens, to rows of one table.

    An n-gram of the ids `t_0` (the token itself), `t_1` (the token before it), ... has the hash
    `h = (t_0 * m_0) xor (t_1 * m_1) xor ...`, in unsigned integers of 64 bits. Each n has several heads. The table has
    `sizes[i]` rows for head `i`, after the rows for the heads before it. Head `i` takes row `h mod sizes[i]` of its
    rows.

    N-grams do not reach beyond a token `end_id` or the beginning of a document: `end_id` replaces all tokens before
    this place.
    """

    multipliers: tuple[int, ...]
    """The factors `m_0`, `m_1`, ... of the token and of the tokens before it, as many as the longest n-gram has
    tokens."""
    sizes: tuple[int, ...]
    """The number of rows of each head: first the heads of 2-grams, then the heads of 3-grams, and so on."""
    end_id: int
    """The id that ends a text."""

    def __post_init__(self):
        orders = len(self.multipliers) - 1
        if orders < 1 or not self.sizes or len(self.sizes) % orders:
            raise ValueError(
                f"NGramHash: there are {len(self.sizes)} heads, and n-grams of 2 to {len(self.multipliers)} tokens; "
                "give multipliers for at least 2 tokens, and equally many heads for each length."
            )
        if min(self.sizes) < 1 or sum(self.sizes) > _LARGEST_ID or not all(0 < m <= _INT64 for m in self.multipliers):
            raise ValueError(
                f"NGramHash: the heads have {sum(self.sizes)} rows; each head needs at least 1 row, all heads together "
                f"at most {_LARGEST_ID} rows, and multipliers are positive numbers of 63 bits."
            )

    @property
    def rows(self) -> int:
        """The number of rows of all heads."""
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each head."""
        return tuple(itertools.accumulate(self.sizes[:-1], initial=0))

    @property
    def context(self) -> int:
        """The number of tokens before a token on which its rows may depend."""
        return len(self.multipliers) - 1

    def __call__(
        self,
        ids: Int[Array, "*batch seq"],
        documents: Int[Array, "*batch seq"],
        previous: Int[Array, "*batch context"] | None = None,
    ) -> Int[Array, "*batch seq ngram_heads"]:
        """Return the rows of each token.

        `previous` has the ids of the `context` tokens before the row, which belong to document 0 (see `documents_of`);
        None means `end_id`.
        """
        high, low = _multiply(ids, self.multipliers[0])
        rows, first, heads = [], 0, len(self.sizes) // self.context
        for token_ids, multiplier in zip(
            self._tokens_before(ids, documents, previous), self.multipliers[1:], strict=True
        ):
            other_high, other_low = _multiply(token_ids, multiplier)
            high, low = high ^ other_high, low ^ other_low
            rows.append(_remainders(high, low, self.sizes[first : first + heads]))
            first += heads
        return jnp.concatenate(rows, -1).astype(jnp.int32) + jnp.asarray(self.starts, jnp.int32)

    def _tokens_before(
        self,
        ids: Int[Array, "*batch seq"],
        documents: Int[Array, "*batch seq"],
        previous: Int[Array, "*batch context"] | None,
    ) -> Iterator[Int[Array, "*batch seq"]]:
        """Yield the id of the token before each token, then of the second token before it, and so on."""
        history, history_documents = self._prepend(ids, documents, previous)
        has_ended, seq = jnp.zeros(ids.shape, bool), ids.shape[-1]
        for distance in range(1, self.context + 1):
            start = self.context - distance
            earlier = history[..., start : start + seq]
            has_ended |= (earlier == self.end_id) | (history_documents[..., start : start + seq] != documents)
            yield jnp.where(has_ended, self.end_id, earlier)

    def last_ids(
        self,
        ids: Int[Array, "*batch seq"],
        documents: Int[Array, "*batch seq"],
        previous: Int[Array, "*batch context"],
        count: Int[Array, "*batch"],
    ) -> Int[Array, "*batch context"]:
        """Return the argument `previous` of the next call; `count` is the number of tokens before a row's padding."""
        indices = count[..., None] + jnp.arange(self.context, dtype=jnp.int32)
        last, last_documents = (jnp.take_along_axis(x, indices, -1) for x in self._prepend(ids, documents, previous))
        return jnp.where(last_documents == documents[..., -1:], last, self.end_id)

    def _prepend(
        self,
        ids: Int[Array, "*batch seq"],
        documents: Int[Array, "*batch seq"],
        previous: Int[Array, "*batch context"] | None,
    ) -> tuple[Int[Array, "*batch all"], Int[Array, "*batch all"]]:
        """Return the ids and the documents of the tokens before the row and of the row."""
        before = (*ids.shape[:-1], self.context)
        previous = jnp.full(before, self.end_id, ids.dtype) if previous is None else previous.astype(ids.dtype)
        return jnp.concatenate([previous, ids], -1), jnp.concatenate(
            [jnp.zeros(before, documents.dtype), documents], -1
        )


def splitmix_hash(
    *, vocab: int, longest: int, heads: int, smallest: int, end_id: int, table_index: int = 0, seed: int = 1234
) -> NGramHash:
    """Return the hash of Qwen4-Exp for one of the layers' tables.

    The multipliers are odd numbers that SplitMix64 (Steele, Lea and Flood 2014) draws; their products with ids are
    below `2^63`. The sizes of the heads are primes from `smallest` on, and all heads of all tables differ in size.

    Args:
        vocab: The number of token ids.
        longest: Tokens of the longest n-gram, at least 2.
        heads: Heads of each length of n-grams.
        smallest: A lower bound of the number of rows of a head.
        end_id: The id that ends a text.
        table_index: The index of the table among the tables of all layers, counted from 0.
        seed: The seed of the multipliers.
    """
    count = (longest - 1) * heads
    if longest < 2 or heads < 1 or count * smallest > _LARGEST_ID or (table_index + 1) * count > _MOST_HEADS:
        raise ValueError(
            f"splitmix_hash(longest={longest}, heads={heads}, smallest={smallest}, table_index={table_index}): the "
            "longest n-gram must have at least 2 tokens, each length at least 1 head, the heads of a table together at "
            f"most {_LARGEST_ID} rows, and all tables together at most {_MOST_HEADS} heads; give other numbers."
        )
    if not 0 <= end_id < vocab:
        raise ValueError(
            f"splitmix_hash(vocab={vocab}, end_id={end_id}): the id that ends a text must be one of the ids from 0 to "
            f"{vocab - 1}; give another end_id."
        )
    bound = max(1, _INT64 // vocab // 2)
    start = seed + 10_007 * table_index
    multipliers = tuple(
        2 * (_splitmix64(start + _SPLITMIX_GAMMA * (index + 1)) % bound) + 1 for index in range(longest)
    )
    primes = _primes_from(smallest, (table_index + 1) * count)
    return NGramHash(multipliers, tuple(primes[table_index * count :]), end_id)


_UINT64 = 2**64 - 1
_SPLITMIX_GAMMA = 0x9E3779B97F4A7C15


def _splitmix64(value: int) -> int:
    value = (value + _SPLITMIX_GAMMA) & _UINT64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64
    return value ^ (value >> 31)


def _primes_from(smallest: int, count: int) -> list[int]:
    """Return the first `count` primes that are at least `smallest`."""
    primes: list[int] = []
    candidate = max(smallest, 2)
    while len(primes) < count:
        if all(candidate % divisor for divisor in (2, *range(3, math.isqrt(candidate) + 1, 2)) if divisor < candidate):
            primes.append(candidate)
        candidate += 1
    return primes


# JAX has no integers of 64 bits unless the whole process enables them, so an integer of 64 bits is a pair of integers
# of 32 bits: the upper and the lower bits.


def _multiply(
    ids: Int[Array, "*batch seq"], factor: int
) -> tuple[UInt[Array, "*batch seq"], UInt[Array, "*batch seq"]]:
    """Return the upper and the lower 32 bits of `ids * factor`, for a factor of up to 64 bits."""
    ids = ids.astype(jnp.uint32)
    upper, lower = jnp.uint32(factor >> 32), factor & 0xFFFFFFFF
    # The products of 16 bits by 16 bits have 32 bits.
    id_high, id_low = ids >> 16, ids & 0xFFFF
    low_high, low_low = jnp.uint32(lower >> 16), jnp.uint32(lower & 0xFFFF)
    first, second, third = id_low * low_low, id_low * low_high, id_high * low_low
    middle = (first >> 16) + (second & 0xFFFF) + (third & 0xFFFF)
    high = id_high * low_high + (second >> 16) + (third >> 16) + (middle >> 16)
    return high + ids * upper, (first & 0xFFFF) | (middle << 16)


def _remainders(
    high: UInt[Array, "*batch seq"], low: UInt[Array, "*batch seq"], sizes: Sequence[int]
) -> UInt[Array, "*batch seq ngram_heads"]:
    """Return the remainders of dividing an integer of 64 bits by each size; a size has at most 31 bits."""
    divisors = jnp.asarray(sizes, jnp.uint32)
    remainder, step = high[..., None] % divisors, 32 - max(sizes).bit_length()
    # Long division: a remainder and the next `step` bits of the integer fit into 32 bits.
    for start in range(32, 0, -step):
        bits = min(step, start)
        digits = (low >> (start - bits)) & ((1 << bits) - 1)
        remainder = ((remainder << bits) | digits[..., None]) % divisors
    return remainder


class NGramTable(EmbeddingTable):
    """A table with a vector for each row of an `NGramHash`; further rows at the end of the table are never read."""

    weight: Float[Array, "ngrams ngram_dim"]
    heads: int = eqx.field(static=True)

    def __init__(self, *, rows: int, dim: int, heads: int, std: float = 0.02, key: Key[Array, ""]):
        """Initialize the table with standard deviation `std`; `heads` is the number of vectors of each token."""
        self.weight = std * jax.random.normal(key, (rows, dim), jnp.float32)
        self.heads = heads

    @property
    def ids_per_token(self) -> int:
        """The number of heads of the hash."""
        return self.heads

    @property
    def has_transform(self) -> bool:
        """False: looked-up vectors are used as they are."""
        return False


@checked_fields
class NGramCache(eqx.Module):
    """The cache of an `NGramMemory`, whose size does not depend on the length of its rows."""

    ids: Int[Array, "*batch context"]
    """The ids of the last tokens."""
    inputs: Float[Array, "*batch kept streams embed"]
    """The convolution's inputs of the last tokens."""
    lengths: Int[Array, "*batch"]
    """The position of each row's next token."""


class NGramMemory(Mixer):
    """The per-layer embedding of Qwen4-Exp (Qwen team 2026): vectors of hashed n-grams, added to all residual streams.

    `e` is the concatenation of the token's vectors, one from each head of the hash. All streams have the same value
    `v = W_v e`. Stream `s` has a key `k_s = norm((W_k e)_s)` and a query `q_s = norm(x_s)`, and its result is
    `g_s v + silu(conv(norm(g_s v)))`. The gate `g_s` is the sigmoid of the signed root of `q_s . k_s / sqrt(embed)`.
    The tokens that the convolution (`CausalConv`) reads are as far apart as the longest n-gram has tokens.

    The layer needs the ids of its tokens, `Tokens.ids`, which a `Transformer` passes to layers that read them. Tokens
    must be in reading order, with padding at the end of a row. Neither n-grams nor the convolution reach beyond the
    beginning of a document.
    """

    hash: NGramHash = eqx.field(static=True)
    table: NGramTable
    key: LinearMap
    value: LinearMap
    key_norm: Norm
    query_norm: Norm
    conv_norm: Norm
    conv: CausalConv

    def __init__(
        self,
        hash: NGramHash,
        *,
        embed: int,
        streams: int,
        dim: int,
        divisor: int = 1,
        taps: int = 4,
        eps: float = 1e-6,
        output_std: float | None = None,
        key: Key[Array, ""],
    ):
        """Initialize the weights; the convolution begins with zeros.

        Args:
            hash: The rows of the table for each token.
            embed: Channels of a stream.
            streams: Residual streams of a token.
            dim: Channels of a row of the table.
            divisor: The number of rows is rounded up to a multiple of this number.
            taps: Tokens that the convolution reads.
            eps: Added to the means of squares in the norms.
            output_std: Standard deviation of the weights of `value`; None: as for the other weights.
            key: Random key for the weights.
        """
        keys = jax.random.split(key, 4)
        rows, heads = -(-hash.rows // divisor) * divisor, len(hash.sizes)
        sizes: dict[str, Any] = {"ngram_heads": heads, "ngram_dim": dim, "embed": embed}
        self.hash, self.table = hash, NGramTable(rows=rows, dim=dim, heads=heads, key=keys[0])
        self.key = Linear("ngram_heads ngram_dim -> streams embed", streams=streams, key=keys[1], **sizes)
        self.value = Linear("ngram_heads ngram_dim -> embed", std=output_std, key=keys[2], **sizes)
        self.key_norm, self.query_norm, self.conv_norm = (
            RMSNorm("streams embed", over="embed", streams=streams, embed=embed, eps=eps, offset=1.0) for _ in range(3)
        )
        conv = CausalConv(
            "streams embed", taps=taps, dilation=hash.context + 1, streams=streams, embed=embed, key=keys[3]
        )
        self.conv = eqx.tree_at(lambda c: c.weight, conv, jnp.zeros_like(conv.weight))

    def __call__(
        self, x: Float[Array, "*batch streams seq embed"], tokens: Tokens | None = None, cache: NGramCache | None = None
    ) -> tuple[Float[Array, "*batch streams seq embed"], NGramCache | None]:
        """Return what is added to the streams; a cache supplies the tokens before `x`, and the new cache includes
        `x`."""
        tokens = tokens_of_streams(tokens_or_default(tokens, x.shape[:-1], cache), x)
        if tokens.ids is None:
            raise ValueError(
                "NGramMemory(x): the layer reads the ids of its tokens; call it within a Transformer, or pass "
                "Tokens(positions, ids=ids)."
            )
        shape = (*x.shape[:-3], x.shape[-2])
        ids, positions = (jnp.broadcast_to(array, shape) for array in (tokens.ids, tokens.positions))
        documents, is_real = documents_of(tokens, shape), (positions >= 0)[..., None, None]
        rows = self.hash(ids, documents, None if cache is None else cache.ids)
        gated = jnp.where(is_real, self._recall(x, self.table(rows).astype(x.dtype)), 0)
        conv_input = jnp.where(is_real, self.conv_norm(gated), 0)
        previous = None
        if cache is not None:
            check_one_document(tokens)
            follows_cache = continues(positions, cache.lengths)[..., None, None, None]
            previous = jnp.where(follows_cache, cache.inputs, jnp.nan)
            count = jnp.sum(positions >= 0, axis=-1, dtype=jnp.int32)
            last_inputs = self.conv.last_inputs(conv_input, documents, previous, count)
            last_ids = self.hash.last_ids(ids, documents, cache.ids, count)
            cache = NGramCache(last_ids, last_inputs, lengths_after(positions, cache.lengths))
        y = gated + silu(self.conv(conv_input, documents, previous)).astype(gated.dtype)
        return jnp.swapaxes(y, -3, -2), cache

    def _recall(
        self, x: Float[Array, "*batch streams seq embed"], vectors: Float[Array, "*batch seq ngram_heads ngram_dim"]
    ) -> Float[Array, "*batch seq streams embed"]:
        """Return the gated value of each stream."""
        query, key = self.query_norm(jnp.swapaxes(x, -3, -2)), self.key_norm(self.key(vectors))
        wide = at_least_float32(x.dtype)
        score = jnp.sum(query.astype(wide) * key.astype(wide), -1, keepdims=True) * x.shape[-1] ** -0.5
        gate = jax.nn.sigmoid(jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6)))
        return (gate * self.value(vectors).astype(wide)[..., None, :]).astype(x.dtype)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> NGramCache:
        """Return an empty cache; its size does not depend on `capacity`."""
        dtype, (streams, embed) = float_dtype(dtype, f"init_cache(dtype={dtype!r})"), self.key.output_shape
        return NGramCache(
            jnp.full((*batch, self.hash.context), self.hash.end_id, jnp.int32),
            jnp.zeros((*batch, self.conv.reach, streams, embed), dtype),
            jnp.zeros(tuple(batch), jnp.int32),
        )

    def facts(self) -> MixerFacts:
        """Declare that every device runs the whole layer; each channel of a stream costs its taps, norms and gate."""
        streams, embed, taps = self.conv.weight.shape[-3:]
        return MixerFacts(operations=(2 * taps + 4) * streams * embed)
