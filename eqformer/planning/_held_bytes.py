"""The bytes that each device holds under a plan, computed from shapes."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .. import nn, parallel, training
from .._shapes import Batch, is_shape
from ._temporary_bytes import StepBytes, temporary_bytes


ON_HOST = "optimizer state on its host"


def state_bytes(states: training.PlannedState) -> dict[str, tuple[int, int]]:
    """Bytes on one device, and in all, of parameters, gradients and the optimizer's state.

    What a plan keeps of the last in the memory of a device's host is counted by itself.
    """
    plan = states.plan
    shapes = states.sharded_shapes()
    wide = lambda x: jax.ShapeDtypeStruct(x.shape, nn.at_least_float32(x.dtype))
    trained = jax.tree.map(wide, states.optimizer.trained(shapes.model))
    # Gradients are reduce-scattered as soon as they are computed, or kept whole until the end of the backward pass.
    is_split = plan.zero == 3 or plan.scatters_layers
    of_gradients = plan.state_specs(trained) if is_split else plan.parameter_specs(trained)
    memory, _ = eqx.partition(shapes.optimizer_state, is_shape)
    far, near = eqx.partition(memory, training.is_on_host(plan, states.optimizer, memory))
    found = {
        "parameters": _bytes(shapes.model, plan.parameter_specs(shapes.model), plan),
        "gradients": _bytes(trained, of_gradients, plan),
        "optimizer state": placed_bytes(near),
    }
    return found | ({ON_HOST: placed_bytes(far)} if jax.tree.leaves(far) else {})


def updated_bytes(states: training.PlannedState, on_host: int) -> int:
    """Bytes on a device that an update needs for moments beside the state: copies of what lies on the host or, of
    moments of 8 bits, float32 of all, which compilers make before they look for the largest of a row."""
    leaves = jax.tree.leaves(states.sharded_shapes().optimizer_state)
    codes = [leaf for leaf in leaves if is_shape(leaf) and leaf.dtype == jnp.uint8]
    return 4 * placed_bytes(codes)[0] if codes else on_host


def step_bytes(
    states: training.PlannedState, model: nn.LanguageModel, batch: Batch, platform: str = "cuda"
) -> StepBytes:
    """Bytes of a step when they are most, on a device by cause: what stays between steps, and `temporary_bytes` or,
    where they are more, gradients and `updated_bytes`.

    `platform` is that of the compiler, `cuda` or `tpu`.
    """
    stays = {name: own for name, (own, _) in state_bytes(states).items()}
    updated = updated_bytes(states, stays.pop(ON_HOST, 0))
    update = {"gradients": stays.pop("gradients"), "moments in an update": updated}
    found = temporary_bytes(states, model, batch, platform)
    most = max(found.held, update if updated else {}, key=lambda held: sum(held.values()))
    return found._replace(held=stays | most)


def activation_bytes(plan: parallel.Plan, model: nn.LanguageModel, *, rows: int, seq: int) -> int:
    """Return the bytes of activations that a device keeps for a backward pass at least, from shapes alone.

    A layer keeps its input and, unless all is computed again, what its maps give that do not write the stream. Experts,
    tables, losses and further microbatches of a pipeline are left out.
    """
    if plan.reruns_stages:
        return 0
    pieces = math.prod(map(plan.size, parallel.BATCH_AXES)) * plan.microbatches
    tokens = (rows // pieces) * (seq // plan.size(parallel.CONTEXT))
    split, numbers = plan.size(parallel.TENSOR), 0.0
    experts = {id(one) for moe in nn.modules(model, nn.ExpertMixture) for one in nn.linear_maps(moe.experts)}
    for stack in model.stacks:
        if stack.remat.endswith("_on_host"):
            continue
        is_whole = plan.stream is None or plan.stream.is_whole
        numbers += len(stack) * model.embedding.weight.shape[-1] / (1 if is_whole else split)
        if stack.remat == "full" or nn.modules(stack, nn.LoRA):  # of a sum of two maps one result may do
            continue
        for linear in nn.linear_maps(stack):
            if id(linear) not in experts and linear.outputs != ("embed",):
                copies = math.prod(linear.shape[: len(linear.shape) - len(linear.sizes)])
                numbers += copies * math.prod(linear.output_shape) / split
    return int(tokens * numbers / plan.size(parallel.PIPE) * jnp.dtype(model.compute_dtype).itemsize)


def batch_shapes(rows: int, seq: int, *, packed: bool = False) -> Batch:
    """The shapes of a batch; that of `packed` documents, of 128 tokens each, has places."""

    def make() -> Batch:
        ids, weights, examples = jnp.zeros((rows, seq), jnp.int32), jnp.zeros((rows, seq)), jnp.zeros(rows, jnp.int32)
        places = ids if packed else None
        documents = max(seq // 128, 1) if packed else None
        return Batch(ids, ids, weights, examples, places, places, documents=documents)

    return eqx.filter_eval_shape(make)


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
    shapes = [leaf for leaf in jax.tree.leaves(tree) if is_shape(leaf)]
    own = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in shapes if x.sharding is not None)
    return own, sum(x.size * x.dtype.itemsize for x in shapes)
