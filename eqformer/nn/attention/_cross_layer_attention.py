"""Attention to the keys and values of an earlier layer."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key, PyTree

from ...kernels import ATTENTION, AttentionCall, causal, Mask, Operation
from .._contracts import Attends, Mixer, MixerFacts
from .._cross_layer import SharedKV, SharedValue
from .._linear import Linear, LinearMap
from .._norm import Norm
from .._tokens import document_lengths, Tokens, tokens_or_default
from ._rotary import Rotary


class CrossLayerAttention(Mixer):
    """Attention whose keys and values an earlier layer shares (Brandon et al. 2024, arXiv:2405.12981).

    It has queries and an output of its own, stands in `Residual(reads=name)`, and is called with the `SharedValue` of
    that name in the place of a cache, of which it has none. Masks and rotary positions are as for `Attention`, whose
    keys it reads; `kv_heads` of the whole layer are for costs alone, since keys come with their heads.
    """

    query: LinearMap
    output: LinearMap
    query_norm: Norm | None
    rotary: Rotary | None
    mask: Mask
    core: Operation
    scale: float = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True)
    kv_heads: int = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        head_dim: int,
        kv_heads: int,
        bias: bool = False,
        output_std: float | None = None,
        query_norm: Norm | None = None,
        rotary: Rotary | None = None,
        mask: Mask | None = None,
        core: Operation | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        key: Key[Array, ""],
    ):
        """Draw the projections; parts that are modules are passed built.

        Args:
            embed: Channels of the input and the output.
            heads: Heads of queries, a multiple of `kv_heads`.
            head_dim: Channels of a head.
            kv_heads: Heads of the keys and values that are read.
            bias: Whether queries and the output have biases.
            output_std: The deviation of the output's weights; None: as the queries'.
            query_norm: A norm of the queries.
            rotary: Rotary positions of queries; keys are left rotated.
            mask: Which keys a query may see; None: `causal()`.
            core: How the attention is computed; None: `kernels.ATTENTION`.
            scale: What the scores are multiplied by; None: `head_dim^-0.5`.
            softcap: The bound of the scores.
            key: For the weights.
        """
        if heads % kv_heads:
            raise ValueError(
                f"CrossLayerAttention(heads={heads}, kv_heads={kv_heads}): each key head serves equally many queries, "
                "so kv_heads must divide heads."
            )
        one, two = jax.random.split(key)
        sizes: dict[str, Any] = {"embed": embed, "heads": heads, "head_dim": head_dim, "bias": bias}
        self.query = Linear("embed -> heads head_dim", key=one, **sizes)
        self.output = Linear("heads head_dim -> embed", std=output_std, key=two, **sizes)
        self.query_norm, self.rotary = query_norm, rotary
        self.mask = causal() if mask is None else mask
        self.core = ATTENTION if core is None else core
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap, self.kv_heads = softcap, kv_heads

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: SharedValue | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], SharedValue]:
        """Attend to the keys and values that the earlier layer shares."""
        seen = None if cache is None else cache.value
        if cache is None or not isinstance(seen, SharedKV):
            raise ValueError(
                "CrossLayerAttention(x): it reads keys of an earlier layer; let it stand in Residual(reads=), behind "
                "an Attention in Residual(shares=)."
            )
        tokens = tokens_or_default(tokens, x.shape[:-1], None)
        kv_tokens = None if seen.positions is None else Tokens(seen.positions)
        query = self.query(x)
        query = query if self.query_norm is None else self.query_norm(query)
        if self.rotary is not None:
            lengths = document_lengths(tokens, kv_tokens) if self.rotary.depends_on_length else None
            query = self.rotary(query, tokens.positions, lengths)
        call = AttentionCall(
            query,
            seen.keys,
            seen.values,
            mask=self.mask,
            tokens=tokens,
            kv_tokens=kv_tokens,
            scale=self.scale,
            softcap=self.softcap,
        )
        return self.output(self.core(call)), cache

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """None: what it reads is in another layer's cache."""
        return None

    def facts(self) -> MixerFacts:
        """It runs on a slice of its heads, and its core attends for pieces of rows."""
        query, output = self.query.output_shape, self.output.sizes
        key = (self.kv_heads, query[1])
        needs = ("softcap",) if self.softcap is not None else ()
        shape = output["heads"], output["head_dim"]
        return MixerFacts(True, Attends(self.mask, (query,), (key,), (key,), (shape,), needs))
