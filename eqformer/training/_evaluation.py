"""Evaluation: sums over a batch under a plan, nats of its rows, and callbacks that validate and evaluate a run."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from .._shapes import Batch, PolicyBatch, PreferenceBatch
from ..parallel import CONTEXT, filter_shard_map, OnDevice, Plan
from ._loop import Every, Progress
from ._metrics import bits_per_byte
from .losses._policy import token_log_probs
from .losses._token_losses import batch_tokens, evaluation_sums, row_nats


def make_evaluation(plan: Plan) -> Callable[[PyTree, Batch], dict[str, Float[Array, ""]]]:
    """Return a jitted function `(model, batch)` that computes `evaluation_sums` under a plan."""

    def sum_over_devices(device: OnDevice, *args: PyTree, **views: PyTree) -> dict[str, Array]:
        return {name: device.total(value) for name, value in evaluation_sums(*args, **views).items()}

    return _make_forward(plan, sum_over_devices, PartitionSpec())


def make_row_nats(plan: Plan) -> Callable[[PyTree, Batch], Float[Array, "batch"]]:
    """Return a jitted function `(model, batch)` that computes `row_nats` under a plan."""

    def device_row_nats(device: OnDevice, *args: PyTree, **views: PyTree) -> Float[Array, "batch"]:
        return row_nats(*args, **views)

    return _make_forward(plan, device_row_nats, PartitionSpec(plan.batch_axes))


def make_token_log_probs(plan: Plan) -> Callable[[PyTree, PolicyBatch], Float[Array, "batch seq"]]:
    """Return a jitted function `(model, batch)` that computes `token_log_probs` under a plan."""

    def device_log_probs(device: OnDevice, *args: PyTree, **views: PyTree) -> Float[Array, "batch seq"]:
        return token_log_probs(*args, **views)

    forward = _make_forward(plan, device_log_probs, PartitionSpec(plan.batch_axes, CONTEXT))

    def log_probs(model: PyTree, batch: PolicyBatch) -> Float[Array, "batch seq"]:
        # Devices split the tokens of a row in another order than the row's.
        columns, _ = plan.arrange(np.arange(batch.ids.shape[1])[None], batch_tokens(batch))
        return jnp.take(forward(model, batch), np.argsort(np.asarray(columns)[0]), axis=1)

    return log_probs


def add_reference_nats(batches: Iterable[PreferenceBatch], reference: PyTree, plan: Plan) -> Iterator[PreferenceBatch]:
    """Yield each batch with its rows' nats by a frozen model, which are computed under a plan when the batch is due."""
    row_nats = make_row_nats(plan)
    for batch in batches:
        yield dataclasses.replace(batch, reference_nats=row_nats(reference, batch))


def _make_forward(
    plan: Plan, function: Callable[..., PyTree], out_specs: PartitionSpec
) -> Callable[[PyTree, Batch], PyTree]:
    """Jit `function(device, model, batch, tokens=..., vocabulary=...)`, run on each device's rows.

    Without a pipeline the batch is not split into microbatches, since no residuals are stored for a backward pass.
    """
    forward_plan = plan if plan.is_pipelined else dataclasses.replace(plan, microbatches=1)

    @eqx.filter_jit
    def forward(model: PyTree, batch: Batch) -> PyTree:
        forward_plan.check(model, rows=batch.ids.shape[0], seq=batch.ids.shape[1])
        device = plan.on_device(model)

        def per_device(model: PyTree, rows: PyTree) -> PyTree:
            wrapped, (batch, tokens) = device.wrap_forward(model), rows
            return function(device, wrapped, batch, tokens=tokens, vocabulary=device.vocabulary)

        rows = plan.arrange(batch, batch_tokens(batch))
        specs = plan.parameter_specs(model), plan.batch_specs(rows)
        return filter_shard_map(per_device, plan.mesh, specs, out_specs)(model, rows)

    return forward


class Means(Protocol):
    """Interface of means over held-out text, such as `data.ValidationMeans`."""

    @property
    def loss(self) -> float:
        """The mean loss, in nats a token."""
        ...

    @property
    def accuracy(self) -> float:
        """The share of tokens whose target has the largest logit."""
        ...

    @property
    def bytes_per_token(self) -> float:
        """The mean number of bytes of text for each token."""
        ...


class Validation(Every):
    """A callback that writes validation metrics after each `every` steps.

    The row has `validation_loss`, `validation_bits_per_byte` and `validation_accuracy` and, for several sources, the
    `validation_loss/NAME` of each source.
    """

    def __init__(
        self,
        every: int,
        means: Callable[[PyTree], tuple[Means, Mapping[str, Means]]],
        write: Callable[[dict[str, int | float]], object],
    ):
        """`means(model)` returns the means over all held-out text and those of each source, as `Corpus.validate` does.

        `write` is called with the row.
        """
        super().__init__(every, self._validate)
        self._means, self._write = means, write

    def _validate(self, run: Progress) -> None:
        mean, by_source = self._means(run.state.model)
        row: dict[str, int | float] = {
            "step": run.step,
            "validation_loss": mean.loss,
            "validation_bits_per_byte": bits_per_byte(mean.loss, mean.bytes_per_token),
            "validation_accuracy": mean.accuracy,
        }
        sources = by_source if len(by_source) > 1 else {}
        self._write(row | {f"validation_loss/{name}": source.loss for name, source in sources.items()})


class Evaluations(Every):
    """A callback that writes a model's scores before a run's first step, after each `every` steps, and after the last.

    A run that goes on from a checkpoint has the scores of its beginning already, and writes none before its next step.
    """

    def __init__(
        self,
        every: int,
        evaluate: Callable[[PyTree], Mapping[str, int | float]],
        write: Callable[[dict[str, int | float]], object],
    ):
        """`evaluate(model)` returns scores by name, and `write` is called with the row of a step."""
        super().__init__(every, self._evaluate)
        self._scores, self._write = evaluate, write

    def begin(self, run: Progress) -> None:
        """Write the scores of the model before its first step."""
        if run.step == 0:
            self._evaluate(run)

    def _evaluate(self, run: Progress) -> None:
        self._write({"step": run.step, **self._scores(run.state.model)})
