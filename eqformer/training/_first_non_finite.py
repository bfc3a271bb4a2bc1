"""The origin of a number that is not finite: a step's loss and gradients are computed again, equation by equation."""

import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .. import nn
from ..program import find_non_finite, NonFiniteOrigin
from ._gradients import make_gradient_function, split_microbatches
from .losses._loss_aux import LossFn
from .losses._loss_scale import Scale
from .optimizer._optimizer import trainable, Trained


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The origin of the first number that is not finite and reaches a loss or its gradients."""

    kind: str
    """`NaN` or `infinity`."""
    module: str
    """The path of the module that computes the number, or of the array that holds it; empty outside of the model."""
    layer: int | None
    """The index of the layer in the module's stack; None outside of stacks."""
    operation: str
    """JAX's name of the operation; empty for an array."""
    source: str
    """The line of code, `file:line (function)`; empty for an array."""
    is_backward: bool
    """Whether the operation is in the backward pass."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        if not self.operation:
            return f"{self.kind} in {self.module}{layer}"
        module = f"{self.module}{layer}" if self.module else "the loss"
        direction = "backward" if self.is_backward else "forward"
        return f"{self.kind} from `{self.operation}` in the {direction} pass of {module} ({self.source})"


def first_non_finite(
    loss_fn: LossFn,
    model: PyTree,
    batch: PyTree,
    key: PyTree = None,
    *,
    microbatches: int = 1,
    trained: Trained = trainable,
    scale: Scale = None,
) -> NonFinite | None:
    """Return the first number, in order of execution, that makes the loss or its gradients NaN or infinite.

    The loss and its gradients are computed on one device, a microbatch at a time, in the order of the program. If the
    result of a loop, a layer or a call is not finite, that result is computed again, part by part. Numbers that are
    meant to be infinite, such as those of a mask, do not count as long as the results that use them are finite. The
    result is None if the loss and its gradients are finite. Modules have names if they are `nn.Module`s.

    Args:
        loss_fn: The step's loss.
        model: The model before the step, on one device; it is not donated.
        batch: The step's batch.
        key: The step's key: the run's, into which the step's number is folded.
        microbatches: The number of microbatches into which the step splits the batch.
        trained: Picks the parameters that have gradients.
        scale: The step's `LossScale` value, in float16.
    """
    compute_gradients = make_gradient_function(loss_fn, trained=trained)
    pieces = split_microbatches(jax.tree.map(jnp.asarray, batch), microbatches)
    for number in range(microbatches):
        piece = jax.tree.map(lambda x, at=number: x[at], pieces)
        arrays, static = eqx.partition((model, piece, key, scale), eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)

        def run(*leaves: Array, structure: Any = structure, static: PyTree = static) -> tuple[Array, PyTree]:
            total, _, gradients = compute_gradients(*eqx.combine(jax.tree.unflatten(structure, leaves), static))
            return total, gradients

        program = jax.make_jaxpr(run)(*leaves)
        total, *gradients = find_non_finite(program, leaves)
        if total is not None:
            return _describe(total, model, arrays)
        if origins := [origin for origin in gradients if origin is not None]:
            return _describe(min(origins), model, arrays)
    return None


def _describe(origin: NonFiniteOrigin, model: PyTree, arrays: PyTree) -> NonFinite:
    """Name the module and the layer of an equation, or the array that holds the number.

    `arrays` are the program's inputs: a model, a batch, a key and a scale.
    """
    if origin.input is None:
        module, layer = _find_module(model, origin.scopes)
        return NonFinite(origin.kind, module, layer, origin.operation, origin.source, origin.is_backward)
    in_stack = [str(name).startswith("layers") for name in jax.tree.leaves(nn.dims(arrays[0]))]
    is_stacked = origin.input < len(in_stack) and in_stack[origin.input]
    path, x = jax.tree_util.tree_leaves_with_path(arrays)[origin.input]
    layer = int(jnp.argmax(~jnp.isfinite(x).all(tuple(range(1, x.ndim))))) if is_stacked else None
    owner = ("", "the batch's ", "the key ", "the loss scale ")[path[0].idx]
    return NonFinite(origin.kind, owner + nn.path_name(path[1:]), layer, "", "", False)


def _find_module(model: PyTree, scopes: tuple[str | int, ...]) -> tuple[str, int | None]:
    """Return the path of the module that scopes lead to, without names of operations, and the layer of its stack."""
    node, path, layer = model, "", None
    for scope in scopes:
        if isinstance(scope, int):
            layer = scope if layer is None and isinstance(node, nn.LayerStack) else layer
            continue
        for name in scope.split("/"):
            name = re.sub(r"^(?:\w+\()*|\)*$", "", name)
            match = re.fullmatch(r"([A-Za-z_]\w*)((?:\[\d+\])*)", name)
            child = _child(node, match[1], match[2]) if match else None
            if child is not None:
                node, path = child, f"{path}.{name}".lstrip(".")
    return path, layer


def _child(node: object, field: str, indices: str) -> eqx.Module | None:
    while isinstance(node, eqx.Module):
        fields = vars(node)
        if field in fields:
            child = fields[field]
            for index in map(int, re.findall(r"\d+", indices)):
                child = child[index] if isinstance(child, tuple | list) and index < len(child) else None
            return child if isinstance(child, eqx.Module) else None
        node = fields.get("inner")
    return None
