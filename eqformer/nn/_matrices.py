"""The matrix parameters of a model, with their dims split into rows and columns, for optimizers such as Muon."""

import dataclasses

import equinox as eqx
import jax
from jaxtyping import PyTree

from ._embedding import LearnedPositions, TokenTypes
from ._linear import DenseMap
from ._model_contracts import EmbeddingTable
from ._module import has_shape


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The numbers of dims of a weight matrix: `ensemble` dims in front, then `outputs`, then `inputs`.

    A weight `layers heads head_dim embed` has one ensemble dim, two output dims and one input dim. `table` marks
    embeddings, tables of positions and heads: one of their sides is the vocabulary or the positions. Optimizers treat
    them differently from hidden matrices. `head` marks heads, whose outputs are the vocabulary.
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
