"""Attention to keys that an indexer selects for each query, with keys and values of any number of heads."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, Key

from ...kernels import causal
from .._cache import KVCache
from .._contracts import MixerFacts
from .._tokens import answer_request, SharedValue, ShareRequest, Tokens, tokens_or_default, unwrap_request
from ._attention import Attention
from ._compressed_cache import VectorCache
from ._indexer import KeyIndexer


class IndexedCache(eqx.Module):
    """The cache of an `IndexedAttention`, which consists of caches with slots."""

    attention: KVCache
    """Keys and values."""
    index: VectorCache
    """The channels by which the indexer scores keys."""


class IndexedAttention(Attention):
    """An `Attention` to the keys that a `KeyIndexer` selects for each query; all heads see the same keys (Qwen4-Exp).

    The indexer reads the input: it must not need the latent of a `LatentAttention`.
    """

    indexer: KeyIndexer

    def __init__(self, indexer: KeyIndexer, *, embed: int, heads: int, key: Key[Array, ""], **options: Any):
        """Initialize the projections.

        Args:
            indexer: Selects the keys of each query.
            embed: Channels of the input and the output.
            heads: Heads of queries.
            key: Random key for the weights.
            **options: Further arguments of `Attention`, except the mask, which is causal.
        """
        if indexer.reads_latent:
            raise ValueError(
                f"IndexedAttention({type(indexer).__name__}): the indexer reads the latent of queries, which this "
                "attention lacks; give an indexer that reads the input, or use it in a LatentAttention."
            )
        super().__init__(embed=embed, heads=heads, mask=causal(), key=key, **options)
        self._check_scores()
        self.indexer = indexer

    def _check_scores(self) -> None:
        """Raise a `ValueError` for scores that attention to selected keys cannot compute."""
        if self.scores.softcap is not None or self.scores.has_bias:
            raise ValueError(
                f"IndexedAttention(scores={self.scores}): attention to selected keys has no softcap and no bias; leave "
                "them out of the scores."
            )

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: IndexedCache | ShareRequest | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], IndexedCache | SharedValue | None]:
        """Attend among the tokens of `x` and, with a cache, to its tokens; the new tokens are stored in the cache."""
        is_shared, cache = unwrap_request(cache)
        tokens = kv_tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        index_keys, index_cache = self.indexer.index_keys(x, tokens), None
        if cache is not None:
            index_cache = cache.index.store(index_keys, tokens)
            index_keys, positions = index_cache.read(index_keys.dtype)
            kv_tokens = Tokens(positions)
        queries = self.indexer.index_queries(x, x, tokens)  # The second `x` is in place of a latent that is not read.
        selection = self.indexer.select_keys(queries, index_keys, mask=self.mask, tokens=tokens, kv_tokens=kv_tokens)
        core = self.core if selection is None else selection
        attended, shared, kv_cache = self._attend(core, x, tokens, None if cache is None else cache.attention)
        if kv_cache is not None and index_cache is not None:
            cache = IndexedCache(kv_cache, index_cache)
        return attended, answer_request(is_shared, shared, cache)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> IndexedCache:
        """Return an empty cache for rows of up to `capacity` tokens."""
        attention = super().init_cache(batch, capacity, dtype)
        channels = self.indexer.key_channels
        return IndexedCache(attention, VectorCache.empty(batch, capacity, channels, attention.keys.dtype.name))

    def facts(self) -> MixerFacts:
        """Declare that a device can run a slice of the heads; the indexer chooses among all keys, so rows are not
        split."""
        return MixerFacts(True)
