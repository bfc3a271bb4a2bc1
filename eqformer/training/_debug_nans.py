"""A callback that names the module in which the first loss or gradient that is not finite arises."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from .. import nn
from .._shapes import Batch
from ._first_non_finite import first_non_finite
from ._loop import Callback, DivergedError, Progress
from ._planned_state import PlannedState
from .losses._loss_aux import LossFn
from .optimizer._optimizer import trainable, Trained


class DebugNans(Callback):
    """A callback that ends a run at the first step whose loss or gradient norm is not finite, and names the module.

    Such a step has changed neither the model nor the optimizer, so `first_non_finite` computes its loss again from the
    state. A run under a plan does so on one device, which must hold the model and a microbatch (every process of the
    run does the same). In float16, gradients that are not finite are no error as long as the loss scale can be halved.
    The callback waits for each step, and raises a `DivergedError`.
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
        """`loss_fn`, `key`, `microbatches` and `trained` are the step's; `states` is that of a run under a plan."""
        self._loss_fn, self._key, self._microbatches, self._trained = loss_fn, key, microbatches, trained
        self._states = states

    def after_step(self, run: Progress) -> None:
        """Trace the step's numbers if they are not finite."""
        if not float(run.metrics["count"]):  # a batch without any weight has no loss
            return
        loss, norm = (float(run.metrics[name]) for name in ("loss", "grad_norm"))
        scale = run.metrics.get("loss_scale")
        if math.isfinite(loss) and (math.isfinite(norm) or (scale is not None and float(scale) > 1)):
            return
        raise DivergedError(
            f"step {run.step}: the loss is {loss} and the gradient norm {norm}. {self._explain(run, scale)}. "
            f"The model is that of step {run.step - 1}."
        )

    def _explain(self, run: Progress, scale: Array | None) -> str:
        state, model, batch = run.state, run.state.model, run.batch
        if self._states is not None:
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
            return "On one device both are finite: a sum over the mesh, or the norm of large gradients, overflows"
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
                f"{model.vocab} ids are 0 to {model.vocab - 1}; give targets that do not count a weight of 0"
            )
    return ""
