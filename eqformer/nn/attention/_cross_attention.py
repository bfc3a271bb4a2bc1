"""Attention of a sequence to another one."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ...kernels import ATTENTION, AttentionCall, full, Mask, Operation
from .._cache import KVCache
from .._contracts import Attends, Mixer, MixerFacts
from .._linear import Linear, LinearMap
from .._tokens import Tokens, tokens_or_default
from ._reader import attend


class CrossAttention(Mixer):
    """Attention of a sequence's queries to the keys and values of another, `tokens.source` (Vaswani et al. 2017).

    Each token sees every token of the source, or in packed rows those of its own segment. A call with a cache and a
    source stores its keys and values; later calls, without a source, read them, so that they are computed once for a
    text. Head counts are read off the weights, so the module runs on a slice of its heads.
    """

    query: LinearMap
    key: LinearMap
    value: LinearMap
    output: LinearMap
    mask: Mask
    core: Operation
    scale: float = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        source: int | None = None,
        bias: bool = False,
        output_std: float | None = None,
        core: Operation | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        key: Key[Array, ""],
    ):
        """Draw the projections.

        Args:
            embed: Channels of the input and the output.
            heads: Heads of queries.
            head_dim: Channels of a head.
            kv_heads: Heads of keys and values, a divisor of `heads`; None: as many.
            source: Channels of the source's vectors; None: as many as `embed`.
            bias: Whether the four maps have biases.
            output_std: The deviation of the output's weights; None: as the others'.
            core: How the attention is computed; None: `kernels.ATTENTION`.
            scale: What the scores are multiplied by; None: `head_dim^-0.5`.
            softcap: The bound of the scores, `softcap * tanh(scores / softcap)` (T5Gemma).
            key: For the weights.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(f"CrossAttention(heads={heads}, kv_heads={kv_heads}): kv_heads must divide heads.")
        keys = jax.random.split(key, 4)
        given = {"source": embed if source is None else source, "kv_heads": kv_heads, "head_dim": head_dim}
        own = {"embed": embed, "heads": heads, "head_dim": head_dim}
        self.query = Linear("embed -> heads head_dim", bias=bias, key=keys[0], **own)
        self.key = Linear("source -> kv_heads head_dim", bias=bias, key=keys[1], **given)
        self.value = Linear("source -> kv_heads head_dim", bias=bias, key=keys[2], **given)
        self.output = Linear("heads head_dim -> embed", bias=bias, std=output_std, key=keys[3], **own)
        self.mask = full()
        self.core = ATTENTION if core is None else core
        self.scale, self.softcap = head_dim**-0.5 if scale is None else scale, softcap

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: KVCache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], KVCache | None]:
        """Attend to the source of the tokens or, where they have none, to that which the cache holds."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        of_source = lambda vectors: (self.key(vectors), self.value(vectors))
        key, value, kv_tokens, cache = read_source("CrossAttention", of_source, tokens, cache, x.dtype)
        is_read = tokens.source is None and x.shape[-2] == 1
        call = AttentionCall(
            self.query(x),
            key,
            value,
            mask=self.mask,
            tokens=tokens,
            kv_tokens=kv_tokens,
            scale=self.scale,
            softcap=self.softcap,
        )
        return self.output(attend(self.core, call, cache if is_read else None)), cache

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> KVCache:
        """An empty cache for sources of up to `capacity` tokens."""
        return KVCache.empty(batch, capacity, self.key.output_shape, self.value.output_shape, dtype)

    def facts(self) -> MixerFacts:
        """It runs on a slice of its heads."""
        shapes = ((each.output_shape,) for each in (self.query, self.key, self.value, self.query))
        needs = ("source",) if self.softcap is None else ("source", "softcap")
        return MixerFacts(True, Attends(self.mask, *shapes, needs=needs))


def read_source(
    call: str,
    of_source: Callable[[Array], tuple[Array, Array]],
    tokens: Tokens,
    cache: KVCache | None,
    dtype: jnp.dtype,
) -> tuple[
    Float[Array, "*batch all kv_heads head_dim"], Float[Array, "*batch all kv_heads v_dim"], Tokens, KVCache | None
]:
    """Keys and values of the tokens' source and its tokens, and the cache with them, or what that holds already.

    `of_source` gives keys and values of a source's vectors. Raises a `ValueError`, which begins with `call`, where
    neither is there, and where the cache has no room.
    """
    if tokens.source is None:
        if cache is None:
            raise ValueError(
                f"{call}: neither a source nor a cache that holds one; pass nn.Tokens(positions, "
                "source=nn.Source(...)), or nn.with_source(tokens, source)."
            )
        keys, values, places = cache.stored(dtype)
        return keys.astype(dtype), values.astype(dtype), places, cache
    vectors, places = tokens.source.vectors(call), tokens.source.tokens
    keys, values = of_source(vectors)
    if cache is not None:
        if vectors.shape[-2] > (slots := cache.positions.shape[-1]):
            raise ValueError(
                f"{call}: a source of {vectors.shape[-2]} tokens and a cache of capacity {slots}, which keeps its keys "
                "too; make it by init_cache(..., capacity) with as many."
            )
        cache, keys, values, places = cache.update(keys, values, places)
    return keys.astype(dtype), values.astype(dtype), places, cache
