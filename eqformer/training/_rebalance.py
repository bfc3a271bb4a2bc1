"""Load balancing without an auxiliary loss: the routers' selection biases follow the load."""

import jax
from jaxtyping import PyTree

from ..nn import aux_of, modules, Routed


def rebalanced(model: PyTree, aux: PyTree, rate: float) -> PyTree:
    """The model with each routed layer rebalanced by `rate`: a router's `selection_bias`, where it has one.

    `aux` is what the model's layers returned for the whole batch. It is DeepSeek-V3's rule (arXiv:2408.15664), applied
    after each step.
    """
    layers = dict(zip(map(id, modules(model, Routed)), aux_of(aux), strict=True))
    moved = lambda node: node.rebalanced(layers[id(node)], rate) if isinstance(node, Routed) else node
    return jax.tree.map(moved, model, is_leaf=lambda node: isinstance(node, Routed))
