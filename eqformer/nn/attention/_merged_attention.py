"""Attention of a sequence to itself and to another one at once."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...kernels import attend_to_sources, AttentionCall, blockwise_of, FEW, Mask, OF_SOURCE, Operation
from .._cache import KVCache, mask_overflow
from .._contracts import Attends, Mixer, MixerFacts
from .._linear import LinearMap
from .._norm import Norm
from .._tokens import Tokens, tokens_or_default
from ._attention import Attention
from ._cross_attention import read_source
from ._rotary import Rotary


class MergedAttention(Mixer):
    """Attention whose one softmax runs over a row's own keys and those of `tokens.source` (T5Gemma 2).

    The same maps and norms give the keys and values of both; the source's keys are not rotated, and each token sees all
    of them, or in packed rows those of its own segment, whatever `mask` says of its own keys. The cache is a pair: the
    row's own, and that of the source, which a call with a source stores and later calls without one read. Head counts
    are read off the weights, so the module runs on a slice of its heads.
    """

    query: LinearMap
    key: LinearMap
    value: LinearMap
    output: LinearMap
    query_norm: Norm | None
    key_norm: Norm | None
    rotary: Rotary | None
    mask: Mask
    core: Operation
    scale: float = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True)

    def __init__(self, own: Attention):
        """Take over the parts of an `Attention`; raises a `ValueError` for one with parts that have no place here."""
        late = own.rotary is not None and own.rotary.depends_on_length
        parts = {"value_norm": own.value_norm, "temperature": own.temperature, "gate": own.gate, "sinks": own.sinks}
        found = {name: part is not None for name, part in parts.items()}
        found |= {"keys_as_values": own.value is None, "norms_rotated": own.norms_rotated}
        found |= {"score_bias": own.score_bias, "rotary, whose frequencies depend on the length": late}
        if own.value is None or any(found.values()):
            names = " and ".join(name for name, is_found in found.items() if is_found)
            raise ValueError(f"MergedAttention(Attention): it has no place for {names}; leave it out of the Attention.")
        self.query, self.key, self.value, self.output = own.query, own.key, own.value, own.output
        self.query_norm, self.key_norm, self.rotary = own.query_norm, own.key_norm, own.rotary
        self.mask, self.core = dataclasses.replace(own.mask, source=True), own.core
        self.scale, self.softcap = own.scale, own.softcap

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: tuple[KVCache, KVCache] | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], tuple[KVCache, KVCache] | None]:
        """Attend to the tokens of `x`, with a cache to those stored in it, and to the source."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        own, other = (None, None) if cache is None else cache
        query, key, value = self.query(x), self._normed(self.key(x)), self.value(x)
        query = query if self.query_norm is None else self.query_norm(query)
        if self.rotary is not None:
            query, key = self.rotary(query, tokens.positions), self.rotary(key, tokens.positions)
        places = tokens
        if own is not None:
            own, key, value, places = own.update(key, value, tokens)
        keys, values, read, other = read_source("MergedAttention", self._of_source, tokens, other, x.dtype)
        pieces = (keys, values), (key.astype(x.dtype), value.astype(x.dtype))
        seen = _together(read, places, x.shape[:-2])
        rules: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap}
        if own is not None and x.shape[-2] <= FEW and blockwise_of(self.core):
            attended = attend_to_sources(query, pieces, self.mask(tokens, seen), **rules)  # caches stay where they lie
        else:
            both = (jnp.concatenate(parts, axis=-3) for parts in zip(*pieces))
            attended = self.core(AttentionCall(query, *both, mask=self.mask, tokens=tokens, kv_tokens=seen, **rules))
        if own is None or other is None:
            return self.output(attended), None
        return self.output(mask_overflow(attended, tokens, own)), (own, other)

    def _normed(self, key: Float[Array, "*batch _ kv_heads head_dim"]) -> Float[Array, "*batch _ kv_heads head_dim"]:
        return key if self.key_norm is None else self.key_norm(key)

    def _of_source(
        self, vectors: Float[Array, "*batch kv_seq embed"]
    ) -> tuple[Float[Array, "*batch kv_seq kv_heads head_dim"], Float[Array, "*batch kv_seq kv_heads head_dim"]]:
        return self._normed(self.key.of_other(vectors)), self.value.of_other(vectors)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> tuple[KVCache, KVCache]:
        """Empty caches for rows and sources of up to `capacity` tokens; the first rolls where the mask sees fewer."""
        self.mask.check_cached("MergedAttention")
        shapes = self.key.output_shape, self.value.output_shape
        own = KVCache.empty(batch, capacity, *shapes, dtype, reach=self.mask.reach(capacity))
        return own, KVCache.empty(batch, capacity, *shapes, dtype)

    def facts(self) -> MixerFacts:
        """It runs on a slice of its heads; a source as long as the row has its keys and values computed too."""
        shapes = ((each.output_shape,) for each in (self.query, self.key, self.value, self.query))
        needs = ("source",) if self.softcap is None else ("source", "softcap")
        operations = sum(2 * math.prod(each.sizes.values()) for each in (self.key, self.value))
        return MixerFacts(True, Attends(self.mask, *shapes, needs=needs), operations)


def _together(source: Tokens, own: Tokens, batch: tuple[int, ...]) -> Tokens:
    """The tokens of a source's keys, of which a mask knows that they are, before those of the row's own."""
    if own.segments is not None and source.segments is None:
        raise ValueError(
            "MergedAttention: the row has segments and its source has none; give nn.Source(values, "
            "nn.Tokens(positions, segments)) with those of the row that read it."
        )

    def joined(*parts: Array) -> Array:
        return jnp.concatenate([jnp.broadcast_to(part, (*batch, part.shape[-1])) for part in parts], axis=-1)

    segments = None if own.segments is None or source.segments is None else joined(source.segments, own.segments)
    return Tokens(joined(jnp.where(source.positions >= 0, OF_SOURCE, -1), own.positions), segments)
