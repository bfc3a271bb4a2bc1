"""Losses and gradients under a plan: the same functions, run once a device on its piece of the model and the batch."""

from typing import Any

import equinox as eqx
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ..parallel import filter_shard_map, Plan
from ._loss import batch_tokens
from ._step import accumulated_gradients, Gradients, GradientsOf, LossFn


def planned_gradients(plan: Plan) -> GradientsOf:
    """The seam `make_step(gradients_of=...)` for a plan: its result equals that of one device.

    The loss is called as `loss_fn(model, batch, None, tokens=..., vocabulary=...)` with the wrapped model, this
    device's rows and tokens, and the view of split logits, as `next_token_loss` takes them.
    """

    def gradients_of(loss_fn: LossFn, accumulate: int) -> Gradients:
        def of_batch(model: PyTree, batch: PyTree, key: Any) -> tuple[Any, Any, PyTree]:
            leaves, shapes = plan.leaves(model), eqx.filter_eval_shape(lambda: model)

            def per_device(model: PyTree, pieces: PyTree) -> tuple[Any, Any, PyTree]:
                def loss(parameters: PyTree, pieces: PyTree, key: None) -> tuple[Any, Any]:
                    wrapped = plan.wrap(parameters, model, leaves, shapes)
                    return loss_fn(wrapped, pieces[0], None, tokens=pieces[1], vocabulary=plan.vocabulary(shapes))

                parameters = plan.parameters(model, leaves)
                total, count, gradients = accumulated_gradients(loss, accumulate)(parameters, pieces, None)
                return plan.total(total), plan.total(count), plan.reduce(gradients, leaves)

            pieces = plan.arrange(batch, batch_tokens(batch, key))
            whole = PartitionSpec()
            specs = plan.parameter_specs(model), plan.batch_specs(pieces)
            mapped = filter_shard_map(per_device, plan.mesh, specs, (whole, whole, plan.state_specs(model)))
            return mapped(model, pieces)

        return of_batch

    return gradients_of
