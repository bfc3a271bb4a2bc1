"""Load balancing without an auxiliary loss: the routers' selection biases follow the load."""

from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from ..nn import aux_of, modules, MoE, TopKRouter, updated_selection_bias


def rebalanced(model: PyTree, aux: PyTree, rate: float) -> PyTree:
    """The model with each router's `selection_bias`, where it has one, moved by `rate` towards an even load.

    `aux` is what the model's layers returned for the whole batch. It is DeepSeek-V3's rule (arXiv:2408.15664), applied
    after each step.
    """
    places = [number for number, moe in enumerate(modules(model, MoE)) if _bias(moe) is not None]
    if not places:
        return model
    loads = [one.load for one in aux_of(aux)]
    biases = lambda model: [_bias(modules(model, MoE)[number]) for number in places]
    new = [updated_selection_bias(bias, loads[number], rate) for number, bias in zip(places, biases(model))]
    return eqx.tree_at(biases, model, new)


def _bias(moe: MoE) -> Any:
    return moe.router.selection_bias if isinstance(moe.router, TopKRouter) else None
