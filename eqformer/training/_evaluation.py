"""Evaluation under a plan: sums over a batch and nats of its rows, without gradients."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from .._shapes import Batch
from ..parallel import filter_shard_map, OnDevice, Plan
from ._loop import Every, Progress
from ._metrics import bits_per_byte
from .losses._row_loss import row_nats
from .losses._token_losses import batch_tokens, evaluation_sums


def make_evaluation(plan: Plan) -> Callable[[PyTree, Batch], dict[str, Float[Array, ""]]]:
    """Return `evaluation_sums` under a plan, jitted."""

    def sum_over_devices(device: OnDevice, *args: Any, **views: Any) -> dict[str, Array]:
        return {name: device.total(value) for name, value in evaluation_sums(*args, **views).items()}

    return _make_forward(plan, sum_over_devices, PartitionSpec())


def make_row_nats(plan: Plan) -> Callable[[PyTree, Batch], Float[Array, "batch"]]:
    """Return `row_nats` under a plan, jitted."""
    return _make_forward(plan, lambda _, *args, **views: row_nats(*args, **views), PartitionSpec(plan.batch_axes))


def _make_forward(plan: Plan, function: Callable[..., Any], out: PartitionSpec) -> Callable[[PyTree, Batch], Any]:
    """Jit `function(device, model, batch, tokens=..., vocabulary=...)`, run on each device's rows.

    Without a pipeline the batch is not cut into microbatches, since no residuals are held for a backward pass.
    """
    forward_plan = plan if plan.is_pipelined else dataclasses.replace(plan, microbatches=1)

    @eqx.filter_jit
    def of_batch(model: PyTree, batch: Batch) -> PyTree:
        forward_plan.check(model, rows=batch.ids.shape[0], seq=batch.ids.shape[1])
        device = plan.on_device(model)

        def per_device(model: PyTree, rows: PyTree) -> PyTree:
            wrapped, (batch, tokens) = device.wrap_forward(model), rows
            return function(device, wrapped, batch, tokens=tokens, vocabulary=device.vocabulary)

        rows = plan.arrange(batch, batch_tokens(batch))
        specs = plan.parameter_specs(model), plan.batch_specs(rows)
        return filter_shard_map(per_device, plan.mesh, specs, out)(model, rows)

    return of_batch


class Validation(Every):
    """Writes `validation_loss`, `validation_bits_per_byte` and `validation_accuracy` after each `every` steps.

    Of several sources it writes `validation_loss/NAME` of each too.
    """

    def __init__(
        self,
        every: int,
        means: Callable[[PyTree], tuple[Any, Mapping[str, Any]]],
        write: Callable[[dict[str, Any]], Any],
    ):
        """`means(model)` gives those of all that was held out and of each source, as `data.Corpus.validation` does.

        They have a `loss` in nats, an `accuracy` and `bytes_per_token`. `write` is given the row.
        """
        super().__init__(every, self._validate)
        self._means, self._to = means, write

    def _validate(self, run: Progress) -> None:
        mean, each = self._means(run.state.model)
        row = {
            "step": run.step,
            "validation_loss": mean.loss,
            "validation_bits_per_byte": bits_per_byte(mean.loss, mean.bytes_per_token),
            "validation_accuracy": mean.accuracy,
        }
        several = each if len(each) > 1 else {}
        self._to(row | {f"validation_loss/{name}": its.loss for name, its in several.items()})
