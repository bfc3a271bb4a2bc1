"""Search for the origin of a loss or gradient that is not finite, and a callback that runs the search.

The search computes a step's loss and gradients again, equation by equation.
"""

import dataclasses
import math
import operator
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from .. import nn
from .._shapes import Batch
from ..program import find_non_finite, NonFiniteOrigin
from ._gradients import make_gradient_function, split_microbatches
from ._loop import Callback, DivergedError, Progress
from ._planned_state import PlannedState
from .losses._loss_aux import LossFn, Scale
from .optimizer._optimizer import trainable, Trained


class DebugNans(Callback):
    """A callback that ends a run whose loss or gradient norm is not finite, and names the module that caused it.

    A step with such a loss or norm changes neither the model nor the optimizer state. `first_non_finite` can therefore
    compute the loss again from the state. Under a plan, this search runs on one device of each process, which must have
    memory for the whole model and a microbatch. In float16, gradients that are not finite are no error as long as the
    loss scale can be halved. The callback waits for the results of each step, and raises a `DivergedError`.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        key: Key[Array, ""] | None,
        *,
        microbatches: int = 1,
        trained: Trained = trainable,
        states: PlannedState | None = None,
    ):
        """Take the step's `loss_fn`, `key`, `microbatches` and `trained`; under a plan, pass its `PlannedState` too."""
        self._loss_fn, self._key, self._microbatches, self._trained = loss_fn, key, microbatches, trained
        self._states = states

    def after_step(self, run: Progress) -> None:
        """Raise a `DivergedError` with the origin if the step's loss or gradient norm is not finite."""
        if not float(run.metrics["count"]):  # a batch without any weight has no loss
            return
        loss, norm = (float(run.metrics[name]) for name in ("loss", "grad_norm"))
        scale = run.metrics.get("loss_scale")
        if math.isfinite(loss) and (math.isfinite(norm) or (scale is not None and float(scale) > 1)):
            return
        raise DivergedError(
            f"step {run.step}: the loss is {loss} and the gradient norm {norm}. {self._explain(run, scale)}. "
            f"The model is unchanged since step {run.step - 1}."
        )

    def _explain(self, run: Progress, scale: Array | None) -> str:
        """Return a sentence that names the origin."""
        state, model, batch = run.state, run.state.model, run.batch
        if self._states is not None:
            model = self._states.optimizer.gradient_point(model, state.optimizer_state)
            model = self._states.copy_model_to_one_device(model)
            batch, scale = self._states.copy_to_one_device((batch, scale))
        if message := _explain_unknown_id(batch, model):
            return message
        key = self._key
        if key is not None:
            data = jnp.asarray(jax.device_get(jax.random.key_data(key).addressable_data(0)))
            key = jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(key)))
            key = jax.random.fold_in(key, int(state.step) - 1)
        non_finite = first_non_finite(
            self._loss_fn, model, batch, key, microbatches=self._microbatches, trained=self._trained, scale=scale
        )
        if non_finite is None:
            return (
                "Computed on one device, the loss and its gradients are finite: a sum over the mesh, or the norm of "
                "large gradients, overflows"
            )
        return f"The first number that is not finite is {non_finite}"


def _explain_unknown_id(batch: PyTree, model: PyTree) -> str:
    """Name an id, or a target with a weight, that is outside of the model's vocabulary; empty if there is none."""
    if not isinstance(batch, Batch) or not isinstance(model, nn.LanguageModel):
        return ""
    ids, targets, weights = map(np.asarray, (batch.ids, batch.targets, batch.weights))
    for name, values, counts in (("ids", ids, np.ones_like(ids)), ("targets", targets, weights)):
        unknown = np.argwhere(((values < 0) | (values >= model.vocab)) & (counts != 0))
        if len(unknown):
            row, index = unknown[0]
            return (
                f"The batch's {name} hold {values[row, index]} in row {row} at index {index}, and the model's "
                f"{model.vocab} ids are 0 to {model.vocab - 1}; give a weight of 0 to targets that do not count"
            )
    return ""


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
    meant to be infinite, such as the entries of a mask, do not count as long as the results that use them are finite.
    Only modules that are `nn.Module`s are named. The result is None if the loss and its gradients are finite.

    Args:
        loss_fn: The step's loss.
        model: The model before the step, on one device; it is not donated.
        batch: The step's batch.
        key: The step's key: the run's key, with the number of the step folded in.
        microbatches: The number of microbatches into which the step splits the batch.
        trained: Picks the parameters that have gradients.
        scale: The step's `LossScale` value, in float16.
    """
    compute_gradients = make_gradient_function(loss_fn, trained=trained)
    pieces = split_microbatches(jax.tree.map(jnp.asarray, batch), microbatches)
    for number in range(microbatches):
        piece = jax.tree.map(operator.itemgetter(number), pieces)
        arrays, static = eqx.partition((model, piece, key, scale), eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)

        def run(*leaves: Array, structure: PyTree = structure, static: PyTree = static) -> tuple[Array, PyTree]:
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
    """Return the path of the innermost module that scopes name, and the index of its layer if it is in a stack."""
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
    """Return the module in a field of `node`, or of the module that `node` wraps; None if there is no such module.

    `indices`, such as `[0]`, select an element of a field that is a tuple or a list.
    """
    while isinstance(node, eqx.Module):
        fields = vars(node)
        if field in fields:
            child = fields[field]
            for index in map(int, re.findall(r"\d+", indices)):
                child = child[index] if isinstance(child, tuple | list) and index < len(child) else None
            return child if isinstance(child, eqx.Module) else None
        node = fields.get("inner")
    return None
