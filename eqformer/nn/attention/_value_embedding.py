"""Attention whose values have a part that depends on the token alone: value embeddings."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from .._contracts import LinearMap, MixerFacts
from .._dtype import lookup_rows
from .._linear import Linear
from .._model_contracts import EmbeddingTable
from .._tokens import Tokens
from ._attention import Attention


class ValueEmbedding(EmbeddingTable):
    """A table with a value for each token id and key head: the part of a layer's values that depends on the id alone.

    Each layer holds its own table, and devices of the axis `tensor` hold the heads of their keys. The value of an id
    outside the table is NaN.
    """

    weight: Float[Array, "ids kv_heads head_dim"]

    def __init__(self, *, vocab: int, kv_heads: int, head_dim: int, std: float = 0.02, key: Key[Array, ""]):
        """Initialize the table.

        Args:
            vocab: Number of token ids.
            kv_heads: Heads of values.
            head_dim: Channels of a head.
            std: Standard deviation of the table.
            key: For the table.
        """
        self.weight = std * jax.random.normal(key, (vocab, kv_heads, head_dim), jnp.float32)

    @property
    def vector_dims(self) -> int:
        """2: a key head and its channels."""
        return 2

    @property
    def has_transform(self) -> bool:
        """False: looked-up values are used as they are."""
        return False

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq kv_heads head_dim"]:
        """Look up the values of each id."""
        return lookup_rows(self.weight, ids)


class ValueEmbeddedAttention(Attention):
    """Attention with the values `W_v x + 2 sigmoid(W_g x) * table[id]`, where the gate is one number for each key head.

    The gate is 1 at the beginning. Tables of values are a trick of the speedruns of modded-nanogpt (2024-12), and the
    gate is nanochat's (2026-01), which applies it to a few channels of `x` where this layer reads all. The layer needs
    the ids of its tokens, `Tokens.ids`, which a `Transformer` passes to layers that read them.
    """

    value_embedding: ValueEmbedding
    value_gate: LinearMap

    def __init__(
        self,
        *,
        vocab: int,
        embed: int,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        value_std: float | None = None,
        key: Key[Array, ""],
        **options: Any,
    ):
        """Initialize the projections and the table.

        Args:
            vocab: Number of token ids of the table.
            embed: Channels of the input and the output.
            heads: Heads of queries.
            head_dim: Channels of a head.
            kv_heads: Heads of keys and values, a divisor of `heads`; None: as many.
            value_std: Standard deviation of the table; None: that of the projections, embed^-0.5, as in nanochat.
            key: For the weights.
            **options: Further arguments of `Attention`.
        """
        attention_key, table_key, gate_key = jax.random.split(key, 3)
        kv_heads = heads if kv_heads is None else kv_heads
        sizes = {"embed": embed, "heads": heads, "head_dim": head_dim, "kv_heads": kv_heads}
        super().__init__(**sizes, key=attention_key, **options)
        std = embed**-0.5 if value_std is None else value_std
        self.value_embedding = ValueEmbedding(vocab=vocab, kv_heads=kv_heads, head_dim=head_dim, std=std, key=table_key)
        self.value_gate = Linear("embed -> kv_heads", embed=embed, kv_heads=kv_heads, std=0.0, key=gate_key)

    def facts(self) -> MixerFacts:
        """State what an `Attention` does: devices that share the heads share the table and the gate by key heads."""
        return super().facts()

    def _project(
        self, x: Float[Array, "*batch _ embed"], tokens: Tokens
    ) -> tuple[
        Float[Array, "*rows seq heads head_dim"],
        Float[Array, "*rows seq kv_heads head_dim"],
        Float[Array, "*rows seq kv_heads head_dim"],
    ]:
        """Return queries, keys, and values with their embeddings."""
        if tokens.ids is None:
            raise ValueError(
                "ValueEmbeddedAttention(x): the layer reads the ids of its tokens; call it within a Transformer, or "
                "pass Tokens(positions, ids=ids)."
            )
        query, key, value = super()._project(x, tokens)
        gate = 2 * jax.nn.sigmoid(self.value_gate(x))[..., None]
        return query, key, value + gate * self.value_embedding(tokens.ids).astype(value.dtype)
