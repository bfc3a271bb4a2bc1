"""What a plan asks of a model's mixtures of experts."""

import math

import jax

from .. import nn
from ._axes import BATCH_AXES, CONTEXT, EXPERT, TENSOR
from ._placement import Placement


def check_mixture(plan: Placement, path: str, moe: nn.MoE) -> None:
    """Raise a `ValueError` if a mixture's results would depend on the mesh, or its experts cannot be split.

    The former: choices that depend on rows or a batch of which a device has only a part. The latter: experts that are
    not made of linear maps, or whose hidden dim the layout leaves whole.
    """
    facts = moe.router.facts()
    _check_among(plan, path, moe.router, facts.among)
    if not facts.gives_slots:
        _check_among(plan, path, moe.dispatch, moe.dispatch.among(facts))
    linears: list[nn.LinearMap] = []
    rest = nn.map_linears(linears.append, moe.experts)
    splits = plan.size(EXPERT) > 1 or plan.size(TENSOR) > 1
    if splits and not facts.gives_slots and any(map(nn.has_shape, jax.tree.leaves(rest))):
        raise ValueError(
            f"Plan over expert={plan.size(EXPERT)}, tensor={plan.size(TENSOR)}: {path} has experts with parameters "
            "that are not those of a linear map, and choices are brought to split experts as rows sorted by expert; "
            "leave both axes at 1, or build the experts of nn.LinearMaps."
        )
    if plan.size(TENSOR) > 1:
        split = plan.layout(splits_fsdp=False).dims
        for linear in linears:
            hidden = (*linear.inputs, *linear.outputs)
            if "rank" in hidden:  # a factor of a LoRA: its other factor, or the map itself, is split
                continue
            if "embed" in hidden and not any(split.get(dim) == TENSOR for dim in hidden if dim != "embed"):
                raise ValueError(
                    f"Plan over tensor={plan.size(TENSOR)}: {path} has experts with a map from {linear.inputs} to "
                    f"{linear.outputs}, of which no dim is split over the axis, so that each device would compute all "
                    "of it and their sum be too much; name the hidden dim `mlp`."
                )


def _check_among(plan: Placement, path: str, part: nn.Router | nn.Dispatch, among: str) -> None:
    context, rows, what = plan.size(CONTEXT), math.prod(map(plan.size, BATCH_AXES)), type(part).__name__
    if among != "token" and context > 1:
        raise ValueError(
            f"Plan over context={context}: {path} has a {what}, whose choices depend on whole rows, and a device has "
            "pieces of them; take another axis, a router by which each token chooses, and Dropless or a factor of "
            "experts / top_k, which drop nothing."
        )
    if among not in ("token", "sequence") and rows > 1:
        raise ValueError(
            f"Plan over {rows} pieces of the batch: {path} has a {what}, whose choices depend on the whole batch, and "
            "a device has some of its rows; take per='sequence'."
        )
