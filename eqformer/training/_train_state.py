"""The training state (model, optimizer state and counters), and the sharding and memory of its arrays under a plan."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from .._shapes import ArrayOrShape, as_tuple
from ..parallel import Plan, shardings
from .losses._loss_aux import init_loss_scale, LossScale
from .optimizer._moments import is_codes, is_preconditioner, Preconditioner
from .optimizer._optimizer import check_optimizer, Optimizer


class TrainState(eqx.Module):
    """Everything that a training step changes: the model, the optimizer's state, and counters of steps."""

    model: PyTree
    """The model."""
    optimizer_state: PyTree
    """The optimizer's state."""
    step: Int[Array, ""]
    """The number of steps taken."""
    skipped: Int[Array, ""]
    """The number of steps skipped because the loss or the gradient norm was not finite."""
    skipped_in_a_row: Int[Array, ""]
    """The number of consecutive skipped steps up to now."""
    loss_scale: LossScale | None = None
    """The loss scale of a model in float16; None for models in other dtypes."""
    empty_batches: Int[Array, ""] | None = None
    """The number of batches whose weights are all 0, which change nothing; None: such batches are not counted."""


def init_state(model: PyTree, optimizer: Optimizer) -> TrainState:
    """Return the state before step 0. A step donates its state, so the first step deletes the arrays of `model`."""
    check_optimizer(optimizer, "init_state(model, optimizer)")
    step, skipped, skipped_in_a_row, empty_batches = (jnp.zeros((), jnp.int32) for _ in range(4))
    state = TrainState(
        model,
        optimizer.init(model),
        step,
        skipped,
        skipped_in_a_row,
        loss_scale=init_loss_scale(model),
        empty_batches=empty_batches,
    )
    return _copy_repeated_arrays(state)


def state_shardings(plan: Plan, optimizer: Optimizer, state: PyTree) -> PyTree:
    """Return the sharding of each array of a `TrainState` (of arrays or shapes), as a tree like the state.

    Leaves that are not arrays become None. Raises a `ValueError` for an optimizer that holds an array of another shape
    than its parameter.
    """
    replicated, parameters = jax.sharding.PartitionSpec(), optimizer.trained(state.model)
    optimizer_specs = optimizer.map_state(
        functools.partial(_optimizer_spec, plan),
        state.optimizer_state,
        plan.state_specs(parameters),
        parameters,
        other=replicated,
    )
    model_specs = plan.parameter_specs(state.model)
    counters = eqx.tree_at(_model_and_optimizer_state, state, (None, None))
    counter_specs = jax.tree.map(lambda _: replicated, counters)
    specs = eqx.tree_at(
        _model_and_optimizer_state, counter_specs, (model_specs, optimizer_specs), is_leaf=lambda node: node is None
    )
    device_shardings = shardings(specs, plan.mesh)
    optimizer_shardings = jax.tree.map(
        _with_memory, device_shardings.optimizer_state, is_on_host(plan, optimizer, state.optimizer_state)
    )
    return eqx.tree_at(lambda s: s.optimizer_state, device_shardings, optimizer_shardings)


def _model_and_optimizer_state(state: PyTree) -> tuple[PyTree, PyTree]:
    return state.model, state.optimizer_state


def _with_memory(sharding: jax.sharding.NamedSharding, on_host: bool) -> jax.sharding.NamedSharding:
    return sharding.with_memory_kind("pinned_host") if on_host else sharding


def _optimizer_spec(plan: Plan, moment: PyTree, spec: jax.sharding.PartitionSpec, parameter: ArrayOrShape) -> PyTree:
    """Return the spec of an optimizer's array for a parameter; dims of size 1 are not sharded."""
    if is_preconditioner(moment):
        return _preconditioner_specs(plan, moment, spec)
    if is_codes(moment):
        parts = moment.levels, moment.scale
        specs = tuple(_optimizer_spec(plan, part, spec, parameter) for part in parts)
        return eqx.tree_at(lambda codes: (codes.levels, codes.scale), moment, specs)
    if moment.shape == parameter.shape:
        return spec
    if len(moment.shape) != len(parameter.shape) or any(
        size not in (1, of_parameter) for size, of_parameter in zip(moment.shape, parameter.shape)
    ):
        raise ValueError(
            f"state_shardings: the optimizer holds an array of shape {moment.shape} for a parameter of shape "
            f"{parameter.shape}, but a plan shards the array like the parameter; give the array the parameter's shape, "
            "in which some sizes may be 1."
        )
    return jax.sharding.PartitionSpec(*(None if size == 1 else axes for size, axes in zip(moment.shape, spec)))


def _preconditioner_specs(plan: Plan, moment: Preconditioner, spec: jax.sharding.PartitionSpec) -> Preconditioner:
    """Return the specs of a preconditioner's arrays.

    An array of the left side has the parameter's output dims, sharded as in the parameter; an array of the right side
    has the input dims. The array's last dim is sharded over the mesh axes of the parameter's other dims.
    """
    first, last = moment.ensemble, moment.ensemble + moment.outputs

    def with_flat_dim(array: ArrayOrShape | None, side: tuple, other_side: tuple) -> jax.sharding.PartitionSpec | None:
        if array is None:
            return None
        padded = (*side, *(None for _ in array.shape[len(side) :]))[: len(array.shape) - 1]
        axes = tuple(axis for axes in other_side if axes for axis in as_tuple(axes))
        is_divisible = axes and array.shape[-1] % math.prod(map(plan.size, axes)) == 0
        return jax.sharding.PartitionSpec(*padded, axes if is_divisible else None)

    ensemble, outputs, inputs = tuple(spec)[:first], tuple(spec)[first:last], tuple(spec)[last:]
    ensemble = (*ensemble, *(None for _ in range(first - len(ensemble))))
    specs = {
        "left": with_flat_dim(moment.left, ensemble + outputs, inputs),
        "right": with_flat_dim(moment.right, ensemble + inputs, outputs),
        "left_basis": with_flat_dim(moment.left_basis, ensemble + outputs, inputs),
        "right_basis": with_flat_dim(moment.right_basis, ensemble + inputs, outputs),
    }
    names = [name for name, part in specs.items() if part is not None]
    return eqx.tree_at(lambda m: [getattr(m, name) for name in names], moment, [specs[name] for name in names])


def _copy_repeated_arrays(tree: PyTree) -> PyTree:
    """Copy each array that occurs again in a tree, because no array can be donated twice."""
    seen_ids: set[int] = set()

    def copy_if_seen(leaf: PyTree) -> PyTree:
        is_first = id(leaf) not in seen_ids
        seen_ids.add(id(leaf))
        return leaf if is_first or not eqx.is_array(leaf) else leaf.copy()

    return jax.tree.map(copy_if_seen, tree)


def is_on_host(plan: Plan, optimizer: Optimizer, optimizer_state: PyTree) -> PyTree:
    """Return for each array of an optimizer's state whether a plan keeps it in host memory; False for counters."""
    on_host = plan.optimizer_memory == "pinned_host"

    def mark(moments: PyTree) -> PyTree:
        return jax.tree.map(lambda _: on_host, moments)

    marks = optimizer.map_state(mark, optimizer_state, other=False)

    def mark_on_device(weights: PyTree) -> PyTree:
        return jax.tree.map(lambda _: False, weights)

    return optimizer.map_fast_weights(mark_on_device, marks)  # The forward pass reads these weights.


def fetch_from_host(
    plan: Plan, optimizer: Optimizer, optimizer_state: PyTree, gradients: PyTree
) -> tuple[PyTree, PyTree]:
    """Copy the arrays that a plan keeps in host memory to the devices; return the optimizer state and the gradients.

    Call this function inside jit. A barrier makes the copies wait for the gradients. Compilers for GPUs would otherwise
    copy at the beginning of the step, so that the copies would take memory beside the residuals of the backward pass.
    """
    if plan.optimizer_memory == "device":
        return optimizer_state, gradients
    arrays, static = eqx.partition(optimizer_state, eqx.is_array)
    arrays, gradients = jax.lax.optimization_barrier((arrays, gradients))
    return eqx.combine(_move(plan, optimizer, arrays, to_host=False), static), gradients


def return_to_host(plan: Plan, optimizer: Optimizer, optimizer_state: PyTree) -> PyTree:
    """Move the arrays that a plan keeps in host memory back to the host; call this function inside jit."""
    return _move(plan, optimizer, optimizer_state, to_host=True)


def _move(plan: Plan, optimizer: Optimizer, arrays: PyTree, *, to_host: bool) -> PyTree:
    """Move the arrays that a plan keeps in host memory to the host or to the devices; other arrays stay in place."""
    space = jax.memory.Space.Host if to_host else jax.memory.Space.Device

    def move(x: Array, on_host: bool) -> Array:
        return jax.device_put(x, space) if on_host else x

    return jax.tree.map(move, arrays, is_on_host(plan, optimizer, arrays))
