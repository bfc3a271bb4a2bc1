"""The bytes that each device holds under a plan, computed from shapes."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .. import nn, parallel, training
from .._shapes import Batch
from ..parallel import PIPE


def state_bytes(states: training.PlannedState) -> dict[str, tuple[int, int]]:
    """Bytes on one device, and in all, of parameters, gradients and the optimizer's state."""
    plan = states.plan
    shapes = states.held_shapes()
    wide = lambda x: jax.ShapeDtypeStruct(x.shape, nn.at_least_float32(x.dtype))
    trained = jax.tree.map(wide, states.optimizer.trained(shapes.model))
    # Gradients are reduce-scattered as soon as they are computed, or kept whole until the end of the backward pass.
    is_split = plan.zero == 3 or plan.scatters_layers
    of_gradients = plan.state_specs(trained) if is_split else plan.parameter_specs(trained)
    return {
        "parameters": _bytes(shapes.model, plan.parameter_specs(shapes.model), plan),
        "gradients": _bytes(trained, of_gradients, plan),
        "optimizer state": placed_bytes(shapes.optimizer_state),
    }


def activation_bytes(plan: parallel.Plan, model: nn.Transformer, batch: Batch) -> dict[str, int]:
    """The bytes that a device keeps for the backward pass, by tracing its program: nothing is compiled or run.

    In a pipeline: the inputs of a stage for as many microbatches as the schedule has in flight, and what the backward
    pass of one microbatch through one stage keeps.
    """
    model = plan.shapes(model)
    waiting, kept = (sum(x.size * x.dtype.itemsize for x in shapes) for shapes in _kept_shapes(plan, model, batch))
    if not plan.is_pipelined:
        return {"kept for the backward pass": kept}
    simulation = parallel.simulate(plan.timetable())
    held = int(simulation.peak(1.0, 0.0).max())
    parts = {f"inputs of stages, {held} at once": held * waiting, "kept in one stage": kept}
    if plan.timetable().is_split:
        products = int(simulation.peak(0.0, 1.0).max())
        parts[f"waiting for weights' gradients, at most {products}"] = products * kept
    return parts


def batch_shapes(rows: int, seq: int, *, packed: bool = False) -> Batch:
    """The shapes of a batch; that of `packed` documents, of 128 tokens each, has places."""

    def make() -> Batch:
        ids, weights, examples = jnp.zeros((rows, seq), jnp.int32), jnp.zeros((rows, seq)), jnp.zeros(rows, jnp.int32)
        places = ids if packed else None
        documents = max(seq // 128, 1) if packed else None
        return Batch(ids, ids, weights, examples, places, places, documents=documents)

    return eqx.filter_eval_shape(make)


def _kept_shapes(plan: parallel.Plan, model: nn.Transformer, batch: Batch) -> Any:
    """Shapes on a device: of a stage's input (None without a pipeline), and of what a backward pass keeps."""
    arrays, rest = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    device = plan.on_device(model)

    def of_device(own: PyTree, pieces: tuple) -> Any:
        wrapped = device.wrap(device.parameters(own), own)
        # With spread edges the rows are split over the stages too, and a microbatch holds rows of all of them.
        shares = plan.size(PIPE) if plan.spreads_edges else 1
        one = jax.tree.map(lambda x: x[: x.shape[0] * shares // plan.microbatches], pieces)
        run, *given = _stage(plan, wrapped, *one) if plan.is_pipelined else _loss(device, wrapped, *one)
        _, pull = eqx.filter_vjp(run, *given)
        # Returned as zeros, which do not vary over devices, so that `shard_map` accepts a replicated result.
        there = own, wrapped, pieces, one, given
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (given[1:], _beside(pull, there)))

    def program(arrays: PyTree, batch: Batch) -> Any:
        pieces = plan.arrange(batch, training.batch_tokens(batch, jax.random.key(0)))
        specs = plan.parameter_specs(model), plan.batch_specs(pieces)
        return parallel.filter_shard_map(of_device, plan.mesh, specs, PartitionSpec())(
            eqx.combine(arrays, rest), pieces
        )

    return jax.eval_shape(program, arrays, batch)


def _loss(device: parallel.OnDevice, wrapped: Any, batch: Batch, tokens: nn.Tokens) -> tuple:
    views = {"tokens": tokens, "vocabulary": device.vocabulary}
    return lambda wrapped: training.next_token_loss(wrapped, batch, None, **views)[0], wrapped


def _stage(plan: parallel.Plan, wrapped: Any, batch: Batch, tokens: nn.Tokens) -> tuple:
    """One chunk of a stage's layers, and its input."""
    # With spread edges, a stack is a `PipelinedStack` around the stage's layers.
    stacks = [stack.inner if isinstance(stack, parallel.PipelinedStack) else stack for stack in wrapped.stacks]
    x = parallel.vary(wrapped.embed(batch.ids, tokens), [PIPE])

    def run(stacks: tuple, x: jax.Array) -> jax.Array:
        for number, stack in enumerate(stacks):
            x = stack(x, tokens.fold_in(number))[0]
        return x

    return run, tuple(stack[: len(stack) // plan.timetable().chunks] for stack in stacks), x


def _beside(pull: PyTree, there: PyTree) -> list[Any]:
    """The arrays that a backward pass keeps, without those in `there` (parameters, inputs) and without random keys."""
    known = {id(leaf) for leaf in jax.tree.leaves(there)}
    kept = {id(leaf): leaf for leaf in jax.tree.leaves(pull) if id(leaf) not in known and eqx.is_array(leaf)}
    return [leaf for leaf in kept.values() if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]


def _bytes(tree: PyTree, specs: PyTree, plan: parallel.Plan) -> tuple[int, int]:
    placed = jax.tree.map(
        lambda spec, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(plan.mesh, spec)),
        specs,
        tree,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
    return placed_bytes(placed)


def placed_bytes(tree: PyTree) -> tuple[int, int]:
    """Bytes on one device, and in all, of shapes with their places."""
    shapes = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.ShapeDtypeStruct)]
    own = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in shapes if x.sharding is not None)
    return own, sum(x.size * x.dtype.itemsize for x in shapes)
