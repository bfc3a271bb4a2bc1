"""A callback that names where the first loss or gradient that is not finite comes from."""

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
    """Ends a run at its first step whose loss or gradient norm is not finite: a `DivergedError` names the module.

    Such a step has changed neither the model nor the optimizer, so its loss is computed again from what is still there,
    by `first_non_finite`: of a run under a plan on one device, which must hold the model and a microbatch (every
    process of the run does the same). In float16, gradients that are not finite are no error while the loss scale can
    still be halved. It waits for each step.
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
        """`loss_fn`, the run's `key`, `microbatches` and `trained` are the step's; `states` those of a planned run."""
        self._loss_fn, self._key, self._microbatches, self._trained = loss_fn, key, microbatches, trained
        self._states = states

    def after_step(self, run: Progress) -> None:
        """Look into the step if its numbers are not finite; a batch without any weight has none."""
        if not float(run.metrics["count"]):
            return
        loss, norm = (float(run.metrics[name]) for name in ("loss", "grad_norm"))
        scale = run.metrics.get("loss_scale")
        if math.isfinite(loss) and (math.isfinite(norm) or (scale is not None and float(scale) > 1)):
            return
        raise DivergedError(
            f"step {run.step}: the loss is {loss} and the gradient norm {norm}. {self._explained(run, scale)}. "
            f"The model is that of step {run.step - 1}."
        )

    def _explained(self, run: Progress, scale: Array | None) -> str:
        state, model, given = run.state, run.state.model, (run.batch, scale)
        if self._states is not None:
            model, given = self._states.copy_model_to_one_device(model), self._states.copy_to_one_device(given)
        batch, scale = given
        if stranger := _no_id(batch, model):
            return stranger
        key = self._key
        if key is not None:
            data = jnp.asarray(jax.device_get(jax.random.key_data(key).addressable_data(0)))
            key = jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(key)))
            key = jax.random.fold_in(key, int(state.step) - 1)
        found = first_non_finite(
            self._loss_fn, model, batch, key, microbatches=self._microbatches, trained=self._trained, scale=scale
        )
        if found is None:
            return "On one device both are finite: what the mesh adds up, or the norm of large gradients, is too large"
        return f"The first number that is not finite is {found}"


def _no_id(batch: PyTree, model: PyTree) -> str:
    """Where a batch has an id that a model does not know, or a target of some weight; empty if it has none."""
    if not isinstance(batch, Batch) or not isinstance(model, nn.LanguageModel):
        return ""
    ids, targets, weights = map(np.asarray, (batch.ids, batch.targets, batch.weights))
    for name, held, counts in (("ids", ids, np.ones_like(ids)), ("targets", targets, weights)):
        found = np.argwhere(((held < 0) | (held >= model.vocab)) & (counts != 0))
        if len(found):
            row, place = found[0]
            return (
                f"The batch's {name} hold {held[row, place]} in row {row} at place {place}, and the model's "
                f"{model.vocab} ids are 0 to {model.vocab - 1}; give what is left out a weight of 0"
            )
    return ""
