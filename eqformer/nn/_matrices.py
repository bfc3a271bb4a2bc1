"""The matrix parameters of a model, with their dims split into rows and columns, for optimizers such as Muon."""

import dataclasses

import equinox as eqx
import jax
from jaxtyping import PyTree

from ._embedding import LearnedPositions
from ._linear import DenseMap
from ._model_contracts import EmbeddingTable
from ._module import has_shape


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The dims of a matrix parameter, counted: `ensemble` dims in front, then `outputs`, then `inputs`.

    `table` marks matrices with one side of the vocabulary or the positions: embeddings and heads, which optimizers
    treat differently from hidden matrices.
    """

    ensemble: int
    outputs: int
    inputs: int
    table: bool


def matrices(model: PyTree) -> PyTree:
    """Return a tree like `model` with a `Matrix` for each weight matrix, and None for biases, norms and all else."""

    def is_module(node: object) -> bool:
        tables = EmbeddingTable | LearnedPositions | eqx.nn.Embedding
        return isinstance(node, DenseMap | tables | eqx.nn.Linear)

    def mark(node: PyTree) -> PyTree:
        unmarked = jax.tree.map(lambda _: None, node)
        if isinstance(node, DenseMap):
            outputs, inputs = len(node.outputs), len(node.inputs)
            table = "vocab" in node.outputs
        elif is_module(node):
            outputs, inputs = 1, 1
            table = not isinstance(node, eqx.nn.Linear)
        else:
            return None
        if not has_shape(node.weight):
            return unmarked
        matrix = Matrix(node.weight.ndim - outputs - inputs, outputs, inputs, table)
        return eqx.tree_at(lambda n: n.weight, unmarked, matrix, is_leaf=lambda x: x is None)

    return jax.tree.map(mark, model, is_leaf=is_module)
