"""Embeddings of tokens and of positions, also embeddings that differ by layer; and the matrices of a model.

A matrix is the table of an embedding or the weight of a linear map. Optimizers treat these two kinds differently.
"""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from .._annotation_checks import checked
from ._contracts import FeedForward
from ._dtype import lookup_rows, matmul_float32
from ._linear import DenseMap, Linear, LinearMap
from ._mlp import gelu_tanh, recompute_in_backward
from ._model_contracts import EmbeddingTable, PositionEmbedding, TokenEmbedding
from ._module import has_shape, Module
from ._norm import Norm, RMSNorm


class Embedding(TokenEmbedding):
    """A table with a vector for each token id, for lookup and, if the head is tied to it, for the logits.

    Looked-up vectors are multiplied by `scale` (Gemma: `sqrt(embed)`). The vector of an id outside the table is NaN.
    """

    weight: Float[Array, "vocab embed"]
    scale: float | None = eqx.field(static=True)

    def __init__(self, *, vocab: int, embed: int, std: float = 0.02, scale: float | None = None, key: Key[Array, ""]):
        """Initialize the table with standard deviation `std`."""
        self.weight = std * jax.random.normal(key, (vocab, embed), jnp.float32)
        self.scale = scale

    @property
    def has_transform(self) -> bool:
        """Whether vectors are scaled."""
        return self.scale is not None

    def transform(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Scale the vectors of a lookup."""
        return x if self.scale is None else x * jnp.asarray(self.scale, x.dtype)


class LearnedPositions(PositionEmbedding):
    """A table with a vector for each position, added to the token embeddings (GPT-2).

    The vector of a position outside the table is NaN.
    """

    weight: Float[Array, "max_seq embed"]
    offset: int = eqx.field(static=True)

    def __init__(self, *, max_seq: int, embed: int, offset: int = 0, std: float = 0.01, key: Key[Array, ""]):
        """Initialize the table.

        Args:
            max_seq: The number of positions.
            embed: Channels of a vector.
            offset: Number of rows before the row of position 0; no token reads them (RoBERTa).
            std: Standard deviation of the table.
            key: Random key for the table.
        """
        self.weight = std * jax.random.normal(key, (offset + max_seq, embed), jnp.float32)
        self.offset = offset

    @property
    def max_seq(self) -> int:
        """The number of positions in the table."""
        return self.weight.shape[0] - self.offset

    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up the vector of each position; padding, at position -1, gets the vector of position 0."""
        return lookup_rows(self.weight, jnp.maximum(positions, 0) + self.offset)


class TokenTypes(PositionEmbedding):
    """A table with a vector for each token type, added to the token embeddings (BERT: the first or second text).

    Types are looked up like positions. The vector of a type outside the table is NaN.
    """

    weight: Float[Array, "types embed"]

    def __init__(self, *, types: int, embed: int, std: float = 0.02, key: Key[Array, ""]):
        """Initialize the table with standard deviation `std`."""
        self.weight = std * jax.random.normal(key, (types, embed), jnp.float32)

    @property
    def max_seq(self) -> None:
        """None: types do not limit the number of positions."""
        return None

    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up the vector of each token's type."""
        return lookup_rows(self.weight, positions)


@checked
def unembed(x: Float[Array, "*batch embed"], weight: Float[Array, "vocab embed"]) -> Float[Array, "*batch vocab"]:
    """Return `x W^T`, multiplied in the dtype of `x`, and summed and returned in float32 at least.

    The gradients are computed in the same way.
    """
    return matmul_float32(x, weight)


class PerLayerEmbedding(EmbeddingTable):
    """A table with a vector for each token id and each of `depth` layers; looked-up vectors are multiplied by `scale`.

    The row of a token id holds its vectors for all layers: `depth` numbers of the first channel, then `depth` numbers
    of the second, and so on. The dim of a row, `mlp`, therefore counts the channels of all layers. If the table had a
    separate dim of layers, some platforms would store it by columns, and copy the whole table to look up a token.
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
        """Initialize the table.

        Args:
            vocab: Number of token ids.
            depth: Number of layers.
            mlp: Channels of a vector.
            std: Standard deviation of the table.
            scale: Factor of looked-up vectors; None: 1.
            key: Random key for the table.
        """
        self.weight = std * jax.random.normal(key, (vocab, mlp * depth), jnp.float32)
        self.depth, self.scale = depth, scale

    def transform(self, x: Float[Array, "*batch seq mlp"]) -> Float[Array, "*batch seq depth _"]:
        """Split looked-up rows into the vectors of all layers, and scale them."""
        x = x.reshape(*x.shape[:-1], -1, self.depth).swapaxes(-2, -1)
        return x if self.scale is None else x * jnp.asarray(self.scale, x.dtype)

    @property
    def has_transform(self) -> bool:
        """Whether vectors are scaled."""
        return self.scale is not None


class PerLayerInputs(Module):
    """Vectors for `depth` layers: `(norm(W x / sqrt(embed)) + sqrt(mlp) table[id]) / sqrt(2)` (Gemma 4).

    `x` is the input of the first layer. The first sublayer `Residual(reads="layer_input")` of the model reads each
    token's first vector, the second such sublayer the second vector, and so on.
    """

    embedding: PerLayerEmbedding
    project: LinearMap
    norm: Norm
    scale: float = eqx.field(static=True)

    def __init__(self, *, vocab: int, embed: int, depth: int, mlp: int, eps: float = 1e-6, key: Key[Array, ""]):
        """Initialize the table and the map.

        Args:
            vocab: Number of token ids of the table.
            embed: Channels of the stream.
            depth: Number of layers that read a vector.
            mlp: Channels of a vector.
            eps: Added to the mean of squares in the norm, before the root.
            key: Random key for the weights.
        """
        table_key, map_key = jax.random.split(key)
        self.embedding = PerLayerEmbedding(vocab=vocab, depth=depth, mlp=mlp, scale=mlp**0.5, key=table_key)
        self.project = Linear("embed -> mlp depth", embed=embed, mlp=mlp, depth=depth, key=map_key)
        self.norm, self.scale = RMSNorm("mlp", mlp=mlp, eps=eps), embed**-0.5

    def __call__(
        self, x: Float[Array, "*batch _ embed"], ids: Int[Array, "*batch seq"]
    ) -> Float[Array, "*batch seq depth mlp"]:
        """Return the vectors of each token for all layers."""
        projected = self.norm((self.project(x) * self.scale).swapaxes(-2, -1))
        return (projected + self.embedding(ids).astype(projected.dtype)) * 2**-0.5


class PerLayerGate(FeedForward):
    """A gated map of a token's vector for this layer, `W_down (act(W_gate x) * layer_input)` (Gemma 4).

    Use it in `Residual(reads="layer_input")`. `PerLayerInputs` computes the vectors.
    """

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
        """Initialize the two maps.

        Args:
            embed: Channels of the stream.
            mlp: Channels of the vector.
            activation: Applied to the output of the gate.
            output_std: Standard deviation of the second map's weights; None: the default of `Linear`.
            key: Random key for the weights.
        """
        gate_key, down_key = jax.random.split(key)
        self.gate = Linear("embed -> mlp", embed=embed, mlp=mlp, key=gate_key)
        self.down = Linear("mlp -> embed", embed=embed, mlp=mlp, std=output_std, key=down_key)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "*batch seq embed"], layer_input: Float[Array, "*batch full_seq mlp"] | None = None
    ) -> Float[Array, "*batch seq embed"]:
        """Map each token by itself, with its vector for this layer."""
        if layer_input is None:
            raise ValueError(
                "PerLayerGate(x): the layer needs a second argument, a vector of each token; use it in "
                "Residual(reads='layer_input') of a Transformer with layer_inputs."
            )
        multiply = recompute_in_backward(lambda gate, layer_input: self.activation(gate) * layer_input)
        return self.down(multiply(self.gate(x), layer_input))


# The matrix parameters of a model, with their dims split into rows and columns, for optimizers such as Muon.


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The dims of a weight matrix: the counts of `ensemble` dims in front, then of `outputs`, then of `inputs`.

    A weight `layers heads head_dim embed` has one ensemble dim, two output dims and one input dim. `table` marks
    embeddings, tables of positions, and heads, whose rows belong to token ids or positions. Optimizers treat tables
    differently from hidden matrices. `head` marks heads, whose outputs are the vocabulary.
    """

    ensemble: int
    outputs: int
    inputs: int
    table: bool
    head: bool = False


def matrices(model: PyTree) -> PyTree:
    """Return a tree like `model` with a `Matrix` for each weight matrix, and None for biases, norms and all else."""

    def has_matrix(node: object) -> bool:
        tables = EmbeddingTable | LearnedPositions | TokenTypes | eqx.nn.Embedding
        return isinstance(node, DenseMap | tables | eqx.nn.Linear)

    def mark_weight(node: PyTree) -> PyTree:
        unmarked = jax.tree.map(lambda _: None, node)
        if isinstance(node, DenseMap):
            outputs, inputs = len(node.outputs), len(node.inputs)
            table = is_head = "vocab" in node.outputs
        elif has_matrix(node):
            outputs, inputs = 1, node.vector_dims if isinstance(node, EmbeddingTable) else 1
            table, is_head = not isinstance(node, eqx.nn.Linear), False
        else:
            return None
        if not has_shape(node.weight):
            return unmarked
        matrix = Matrix(node.weight.ndim - outputs - inputs, outputs, inputs, table, is_head)
        return eqx.tree_at(lambda n: n.weight, unmarked, matrix, is_leaf=lambda x: x is None)

    return jax.tree.map(mark_weight, model, is_leaf=has_matrix)
