"""Checks that a plan, a model and a batch go together, before anything is compiled."""

import dataclasses
import math
from types import NoneType
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType
from jaxtyping import PyTree

from .. import nn
from ._axes import AXES, BATCH_AXES, CONTEXT, PIPE, TENSOR
from ._check_mixture import check_mixture
from ._choices import check_values
from ._placement import Placement
from .context._context import check_context, refuse_recurrence
from .layouts._layout import axes_of, is_spec
from .pipeline._depth import check_depth
from .tensor._tensor import MIXERS, TENSOR_MODULES


def check_choices(plan: Placement) -> None:
    """Raise a `ValueError` for an unknown choice, or for two that do not go together."""
    axes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_types))
    if axes != dict.fromkeys(AXES, AxisType.Auto):
        raise ValueError(
            f"Plan(mesh): a mesh has the axes {', '.join(AXES)}, all of type Auto; this one has "
            f"{', '.join(f'{axis} ({kind.name})' for axis, kind in axes.items())}; make it by make_mesh."
        )
    check_values(plan)
    if plan.overlap != "none" and plan.residual == "replicated" and plan.size(TENSOR) > 1:
        raise ValueError(
            f"Plan(overlap={plan.overlap!r}, residual='replicated'): a replicated stream is reduced whole, with no "
            "gather to overlap; take residual='sequence' or 'feature', or overlap='none'."
        )
    if plan.is_pipelined:
        plan.timetable()
    if plan.spreads_edges:
        if plan.schedule != "gpipe" or plan.chunks != 1:
            raise ValueError(
                f"Plan(edges='spread', schedule={plan.schedule!r}, chunks={plan.chunks}): other schedules begin to go "
                "back before all microbatches are through, so that the loss has to stand at the end; take "
                "schedule='gpipe' with chunks=1, or edges='ends'."
            )
        if plan.microbatches % plan.size(PIPE):
            raise ValueError(
                f"Plan(edges='spread', microbatches={plan.microbatches}) over pipe={plan.size(PIPE)}: each stage "
                f"embeds equally many microbatches; take a multiple of {plan.size(PIPE)}."
            )


def check_model(plan: Placement, model: nn.Transformer) -> None:
    """Raise a `ValueError` where the plan's mesh cannot split this model; `model` may be shapes."""
    if plan.is_pipelined:  # first, since what it says of depths helps more than what layouts say of the dim `layers`
        check_depth(sum(stack.depth for stack in model.stacks), plan.size(PIPE), plan.timetable().chunks)
        model = plan.shapes(model)
    specs = plan.parameter_specs(model)
    plan.state_specs(model)
    if plan.size(TENSOR) > 1:
        _check_tensor(plan, model, specs)
    for path, moe in nn.named_modules(model, (nn.MoE,)):
        check_mixture(plan, path, moe)


def check_rows(plan: Placement, model: nn.Transformer, rows: int, seq: int) -> None:
    """Raise a `ValueError` if the rows of a microbatch, or the tokens of a row, do not divide over the devices."""
    devices = math.prod(plan.size(axis) for axis in BATCH_AXES)
    if rows % (devices * plan.microbatches):
        raise ValueError(
            f"Plan over {devices} pieces of the batch ({', '.join(f'{a}={plan.size(a)}' for a in BATCH_AXES)}) in "
            f"{plan.microbatches} microbatches: {rows} rows do not fall into {devices} x {plan.microbatches} equal "
            f"pieces; take a multiple of {devices * plan.microbatches} rows."
        )
    size = plan.size(CONTEXT)
    pieces = 2 * size if size > 1 and plan.context_method != "heads" else size
    if seq % pieces:
        raise ValueError(
            f"Plan over context={size} by {plan.context_method!r}: rows of {seq} tokens are cut into {pieces} equal "
            f"pieces; take a multiple of {pieces} tokens."
        )
    routes = plan.residual == "feature" and bool(nn.named_modules(model, (nn.MoE,)))
    if (plan.residual == "sequence" or routes) and (seq // size) % plan.size(TENSOR):
        who = "are split over the axis" if plan.residual == "sequence" else "are split over the axis where they choose"
        raise ValueError(
            f"Plan(residual={plan.residual!r}) over tensor={plan.size(TENSOR)}: the {seq // size} tokens that a device "
            f"of context={size} holds {who}; take a multiple of {size * plan.size(TENSOR)} tokens."
        )
    for path, module in nn.named_modules(model, MIXERS):
        _check_mixer(plan, path, module, seq)


def _check_mixer(plan: Placement, path: str, module: Any, seq: int) -> None:
    size, tensor = plan.size(CONTEXT), plan.size(TENSOR)
    heads = _first(module.query)
    kv_heads = heads if isinstance(module, nn.LatentAttention) else _first(module.key)
    if tensor > 1 and kv_heads % tensor and tensor % kv_heads:
        raise ValueError(
            f"Plan over tensor={tensor}: {path} has {kv_heads} key heads, which neither split over {tensor} devices "
            "nor are shared by equal groups of them; take an axis that divides them, or that they divide."
        )
    if size > 1 and isinstance(module, nn.GatedDeltaNet):
        refuse_recurrence(size, path)
    if size > 1:
        sinks = isinstance(module, nn.Attention) and module.sinks is not None
        try:
            check_context(
                plan.context_method,
                size,
                module.core,
                seq=seq,
                heads=heads // tensor,
                kv_heads=max(1, kv_heads // tensor),
                has_sinks=sinks,
            )
        except ValueError as error:
            raise ValueError(f"Plan over context={size}: {path}: {error}") from error


def _check_tensor(plan: Placement, model: nn.Transformer, specs: PyTree) -> None:
    known = (*TENSOR_MODULES, nn.MoE, nn.Embedding, nn.LearnedPositions, nn.RMSNorm, nn.LayerNorm)
    is_known = lambda node: isinstance(node, known)
    headless = lambda tree: eqx.tree_at(lambda m: m.head, tree, None, is_leaf=lambda node: node is None)
    nodes = jax.tree_util.tree_leaves_with_path(headless(model), is_leaf=is_known)
    parts = jax.tree.map(lambda _, part: _Part(part), headless(model), headless(specs), is_leaf=is_known)
    for (path, node), part in zip(nodes, jax.tree.leaves(parts), strict=True):
        is_split = any(TENSOR in axes_of(spec) for spec in jax.tree.leaves(part.specs, is_leaf=is_spec))
        if is_split and not is_known(node):
            raise ValueError(
                f"Plan over tensor={plan.size(TENSOR)}: {nn.path_name(path)} would be split by the names of its dims, "
                "but no transform knows how to run the module that it is in on a slice; name its dims otherwise, or "
                "build it of attentions and feed-forward layers of eqformer.nn."
            )
        if plan.residual == "feature":
            _check_feature(plan, nn.path_name(path), node)
    if plan.residual == "feature":
        parts = [("norm", model.norm)]
        for path, block in nn.named_modules(model, nn.ParallelBlock):
            parts += [(f"{path}.norm", block.norm), (f"{path}.sum_norm", block.sum_norm)]
        for path, sublayer in nn.named_modules(model, nn.Residual):
            fields = [field.name for field in dataclasses.fields(sublayer) if not field.metadata.get("static")]
            parts += [(f"{path}.{name}", getattr(sublayer, name)) for name in fields]
        for path, part in parts:
            if not isinstance(part, (*known, nn.Dropout, NoneType)):
                raise ValueError(
                    f"Plan(residual='feature') over tensor={plan.size(TENSOR)}: {path} is a {type(part).__name__}, "
                    "which would be given a slice of each token's features and take it for all; take "
                    "residual='replicated' or 'sequence', or a layer or norm of eqformer.nn."
                )


def _check_feature(plan: Placement, path: str, node: Any) -> None:
    if not isinstance(node, nn.Attention | nn.GatedDeltaNet):
        return
    shares = _first(node.key) % plan.size(TENSOR) != 0
    if shares and isinstance(node, nn.GatedDeltaNet):
        raise ValueError(
            f"Plan(residual='feature') over tensor={plan.size(TENSOR)}: {path} convolves {_first(node.key)} key heads, "
            "fewer than the axis has devices; take residual='replicated' or 'sequence', or a smaller axis."
        )
    if shares and isinstance(node, nn.Attention) and "kv_heads" in getattr(node.key_norm, "dims", ()):
        raise ValueError(
            f"Plan(residual='feature') over tensor={plan.size(TENSOR)}: {path} normalises all its key heads together "
            "and has fewer than the axis has devices; take residual='replicated' or 'sequence', or a smaller axis."
        )


class _Part:
    """A subtree as a leaf."""

    def __init__(self, specs: PyTree):
        self.specs = specs


def _first(linear: nn.Linear | nn.LoRA) -> int:
    """The size of a map's first output dim, ensembles left out."""
    return linear.weight.shape[linear.weight.ndim - len(linear.weight_dims)]
