"""A vector of each token for each layer, beside the residual stream: per-layer embeddings (Gemma 3n, Gemma 4)."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ._activation import gelu_tanh
from ._contracts import FeedForward
from ._linear import Linear, LinearMap
from ._mlp import recomputed
from ._model_contracts import EmbeddingTable
from ._module import Module
from ._norm import Norm, RMSNorm


class PerLayerEmbedding(EmbeddingTable):
    """A table with a vector for each token id and each of `depth` layers; `scale` as for `Embedding`.

    In a row the layers' numbers of one channel stand side by side. A table with a dim for layers would be stored by
    columns on some platforms, and copied as a whole to look up a token.
    """

    weight: Float[Array, "vocab mlp"]
    depth: int = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)

    def __init__(
        self,
        *,
        vocab: int,
        depth: int,
        mlp: int,
        std: float = 0.02,
        scale: float | None = None,
        key: Key[Array, ""],
    ):
        """Draw the table.

        Args:
            vocab: Ids.
            depth: Layers.
            mlp: Channels of a vector.
            std: The deviation of the table.
            scale: What looked-up vectors are multiplied by.
            key: For the table.
        """
        self.weight = std * jax.random.normal(key, (vocab, mlp * depth), jnp.float32)
        self.depth, self.scale = depth, scale

    def transform(self, x: Float[Array, "*batch seq mlp"]) -> Float[Array, "*batch seq depth _"]:
        """Return the vectors of all layers, from a token's row of the table."""
        x = x.reshape(*x.shape[:-1], -1, self.depth).swapaxes(-2, -1)
        return x if self.scale is None else x * jnp.asarray(self.scale, x.dtype)

    @property
    def has_transform(self) -> bool:
        """Whether vectors are scaled."""
        return self.scale is not None


class PerLayerInputs(Module):
    """`(norm(W x / sqrt(embed)) + sqrt(mlp) table[id]) / sqrt(2)` for each of `depth` layers (Gemma 4).

    `x` is what the first layer is given. Each `PerLayerGate` of a model takes its own, in the order of the layers.
    """

    embedding: PerLayerEmbedding
    project: LinearMap
    norm: Norm
    scale: float = eqx.field(static=True)

    def __init__(self, *, vocab: int, embed: int, depth: int, mlp: int, eps: float = 1e-6, key: Key[Array, ""]):
        """Draw the table and the map.

        Args:
            vocab: Ids of the table.
            embed: Channels of the stream.
            depth: Layers that are given a vector.
            mlp: Channels of such a vector.
            eps: What the norm adds before its root.
            key: For the weights.
        """
        one, two = jax.random.split(key)
        self.embedding = PerLayerEmbedding(vocab=vocab, depth=depth, mlp=mlp, scale=mlp**0.5, key=one)
        self.project = Linear("embed -> mlp depth", embed=embed, mlp=mlp, depth=depth, key=two)
        self.norm, self.scale = RMSNorm("mlp", mlp=mlp, eps=eps), embed**-0.5

    def __call__(
        self, x: Float[Array, "*batch _ embed"], ids: Int[Array, "*batch seq"]
    ) -> Float[Array, "*batch seq depth mlp"]:
        """The vectors of all layers."""
        projected = self.norm((self.project(x) * self.scale).swapaxes(-2, -1))
        return (projected + self.embedding(ids).astype(projected.dtype)) * 2**-0.5


class PerLayerGate(FeedForward):
    """`W_down (act(W_gate x) * input)`, of the vector that a token has for this layer (`PerLayerInputs`)."""

    gate: LinearMap
    down: LinearMap
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        mlp: int,
        activation: Callable[[Array], Array] = gelu_tanh,
        output_std: float | None = None,
        key: Key[Array, ""],
    ):
        """Draw the two maps; `mlp` counts the vector's channels."""
        one, two = jax.random.split(key)
        self.gate = Linear("embed -> mlp", embed=embed, mlp=mlp, key=one)
        self.down = Linear("mlp -> embed", embed=embed, mlp=mlp, std=output_std, key=two)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "*batch seq embed"], given: Float[Array, "*batch full_seq mlp"] | None = None
    ) -> Float[Array, "*batch seq embed"]:
        """Map each token by itself, with what it is `given` for this layer."""
        if given is None:
            raise ValueError(
                "PerLayerGate(x): the layer is given no vector of each token; let it stand in "
                "Block(gated_input=...), of a Transformer with layer_inputs."
            )
        return self.down(recomputed(lambda gate, given: self.activation(gate) * given)(self.gate(x), given))
