"""Checks that products which round gradients are given whole gradients."""

import jax
from jaxtyping import PyTree

from .. import nn
from ._axes import TENSOR
from ._placement import Placement
from .layouts._layout import axes_of, is_spec


def check_products(plan: Placement, specs: PyTree) -> None:
    """Raise a `ValueError` for a map of 8 bits that every device of `tensor` repeats.

    Each has the gradient of its own heads there, a part of a sum, and rounded parts are not the rounded sum.
    """
    nodes = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda node: nn.is_map(node) or is_spec(node))
    for path, linear in nodes:
        if not nn.is_map(linear) or isinstance(linear.products, nn.ComputeDtypeMatmul):
            continue
        if not any(TENSOR in axes_of(spec) for spec in jax.tree.leaves(linear, is_leaf=is_spec)):
            name = nn.path_name(path)
            raise ValueError(
                f"Plan(residual={plan.residual!r}) over tensor={plan.size(TENSOR)}: {name} multiplies in 8 bits and is "
                f"whole on every device, each of which would round its own part of a gradient; leave it out "
                f"(nn.with_fp8(model, where=...)), or take an axis that divides its {linear.outputs[0]}."
            )
