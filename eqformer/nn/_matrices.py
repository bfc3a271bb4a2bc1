"""Marks of the parameters that are matrices, with their dims split into rows and columns."""

import dataclasses

import equinox as eqx
import jax
from jaxtyping import PyTree

from ._dims import has_shape
from ._embedding import LearnedPositions
from ._linear import DenseMap
from ._model_contracts import EmbeddingTable


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Numbers of a matrix parameter's dims: `ensemble` dims in front, then `outputs`, then `inputs`.

    `table` marks those whose one side is the vocabulary or the positions: embeddings and heads, which optimizers
    treat apart from hidden matrices.
    """

    ensemble: int
    outputs: int
    inputs: int
    table: bool


def matrices(model: PyTree) -> PyTree:
    """A tree like `model` with a `Matrix` for each weight that is one and None for biases, norms and the rest."""

    def is_module(node: object) -> bool:
        tables = EmbeddingTable | LearnedPositions | eqx.nn.Embedding
        return isinstance(node, DenseMap | tables | eqx.nn.Linear)

    def mark(node: PyTree) -> PyTree:
        nothing = jax.tree.map(lambda _: None, node)
        if isinstance(node, DenseMap):
            outputs, inputs = len(node.outputs), len(node.inputs)
            table = "vocab" in node.outputs
        elif is_module(node):
            outputs, inputs = 1, 1
            table = not isinstance(node, eqx.nn.Linear)
        else:
            return None
        if not has_shape(node.weight):
            return nothing
        matrix = Matrix(node.weight.ndim - outputs - inputs, outputs, inputs, table)
        return eqx.tree_at(lambda n: n.weight, nothing, matrix, is_leaf=lambda x: x is None)

    return jax.tree.map(mark, model, is_leaf=is_module)
