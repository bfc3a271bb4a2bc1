"""Training state and batches under a plan, which are made, restored and saved without an unsharded copy."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Key, PyTree

from .._files import JsonObject
from .._shapes import Batch, is_shape
from ..parallel import BATCH_AXES, init_sharded, Plan, shardings
from ._train_state import init_state, state_shardings, TrainState
from .checkpoint._checkpointer import Checkpointer
from .optimizer._optimizer import Optimizer


class PlannedState:
    """A factory that makes, restores and saves the `TrainState` of a model under a plan, without an unsharded copy.

    During training the state is sharded, with the layers in the order of the plan's pipeline stages. A checkpoint has
    the layers in the order of the model, so that it can be restored under any other plan.
    """

    def __init__(
        self, build: Callable[[], PyTree], optimizer: Optimizer, plan: Plan, *, model_shapes: PyTree | None = None
    ):
        """`build` makes the model with initial weights; pass the model's shapes as `model_shapes` if they are known."""
        self.build, self.optimizer, self.plan = build, optimizer, plan
        self._model_shapes = eqx.filter_eval_shape(build) if model_shapes is None else model_shapes
        self._mover = _LayerMover(plan)

    def init(self) -> TrainState:
        """Make the state before the first step, each array on the devices to which the plan assigns it."""

        def make() -> TrainState:
            return init_state(self.plan.shard(self.build()), self.optimizer)

        return init_sharded(make, self._shardings, shapes=self._sharded_shapes)

    def init_from(self, model: PyTree) -> TrainState:
        """Make the state before the first step from a model in memory, such as one that `models.load` returned."""
        arrays, static = eqx.partition(model, eqx.is_array)

        def make(arrays: PyTree) -> TrainState:
            return init_state(self.plan.shard(eqx.combine(arrays, static)), self.optimizer)

        shapes, static_state = eqx.partition(eqx.filter_eval_shape(make, arrays), is_shape)
        run = jax.jit(lambda x: eqx.filter(make(x), eqx.is_array), out_shardings=self._shardings(shapes))
        return eqx.combine(run(arrays), static_state)

    def restore(
        self, checkpointer: Checkpointer, step: int | None = None, *, reset_counters: bool = False
    ) -> tuple[TrainState, JsonObject]:
        """Return the state of the latest checkpoint, or of the checkpoint of `step`, and its metadata.

        The checkpoint may have been saved under any plan. With `reset_counters` the state's counters are 0, for a new
        run that starts from this state.
        """
        like, empty_batches = self.shapes(), operator.attrgetter("empty_batches")
        if "empty_batches" in checkpointer.leaves(step):
            state, metadata = checkpointer.restore(like, step)
        else:  # Checkpoints of older versions have no count of empty batches.
            state, metadata = checkpointer.restore(eqx.tree_at(empty_batches, like, None), step)
            state = eqx.tree_at(empty_batches, state, state.skipped * 0, is_leaf=lambda leaf: leaf is None)
        if reset_counters:
            counters = operator.attrgetter("step", "skipped", "skipped_in_a_row", "empty_batches")
            state = eqx.tree_at(counters, state, jax.tree.map(jnp.zeros_like, counters(state)))
        return self.shard(state), metadata

    def save(
        self, checkpointer: Checkpointer, state: TrainState, step: int, metadata: Mapping[str, object]
    ) -> TrainState:
        """Start to save a state, which is donated, and return the state with which training continues."""
        state = self.unshard(state)
        checkpointer.save(state, step, metadata)
        return self.shard(state)

    def shapes(self) -> TrainState:
        """Return the shapes of a checkpoint's state (layers in model order), with the plan's shardings."""
        return _with_shardings(self._plain_shapes, self._shardings(eqx.filter(self._plain_shapes, is_shape)))

    def sharded_shapes(self) -> TrainState:
        """Return the shapes of a step's state (layers in the order of stages), with the plan's shardings."""
        return _with_shardings(self._sharded_shapes, self._shardings(eqx.filter(self._sharded_shapes, is_shape)))

    def step_shapes(self, batch: Batch) -> tuple[TrainState, Batch, jax.ShapeDtypeStruct]:
        """Return the shapes of a step's state, batch and key with shardings; `batch` has arrays or their shapes."""

        def with_spec(spec: PartitionSpec, x: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.plan.mesh, spec))

        key = with_spec(PartitionSpec(), jax.eval_shape(jax.random.key, 0))
        batch_shapes = jax.tree.map(functools.partial(with_spec, PartitionSpec(BATCH_AXES)), batch)
        return self.sharded_shapes(), batch_shapes, key

    def with_plan(self, plan: Plan) -> "PlannedState":
        """Return the `PlannedState` of the same model and optimizer under another plan, without tracing the model."""
        states = PlannedState(self.build, self.optimizer, plan, model_shapes=self._model_shapes)
        states._plain_shapes = self._plain_shapes
        return states

    @functools.cached_property
    def _plain_shapes(self) -> TrainState:
        return eqx.filter_eval_shape(init_state, self._model_shapes, self.optimizer)

    @functools.cached_property
    def _sharded_shapes(self) -> TrainState:
        return eqx.filter_eval_shape(self.plan.shard, self._plain_shapes)

    def shard(self, state: TrainState) -> TrainState:
        """Convert a state with layers in model order, which is donated, to the layout of a step's state."""
        return self._mover.shard(state, self._shardings)

    def unshard(self, state: TrainState) -> TrainState:
        """Convert a step's state, which is donated, to a state with layers in model order."""
        return self._mover.unshard(state, self._shardings)

    def replicate(self, key: Key[Array, ""]) -> Key[Array, ""]:
        """Replicate a random key on all devices."""
        replicated = NamedSharding(self.plan.mesh, PartitionSpec())
        raw = np.asarray(jax.random.key_data(key))
        copies = jax.make_array_from_callback(raw.shape, replicated, raw.__getitem__)
        return jax.random.wrap_key_data(copies, impl=str(jax.random.key_impl(key)))

    def copy_model_to_one_device(self, model: PyTree) -> PyTree:
        """Copy the state's model, in model order, to this process's first device; all processes call this method."""
        return self._copy(model, self.plan.unshard)

    def copy_to_one_device(self, tree: PyTree) -> PyTree:
        """Copy a tree without layers, such as a batch, to this process's first device."""
        return self._copy(tree, lambda arrays: arrays)

    def _copy(self, tree: PyTree, convert: Callable[[PyTree], PyTree]) -> PyTree:
        """Apply `convert` to a tree's arrays, and copy the results to this process's first device."""
        arrays, static = eqx.partition(tree, eqx.is_array)
        if jax.process_count() == 1:
            return eqx.combine(jax.device_put(convert(arrays), jax.local_devices()[0]), static)
        replicated = NamedSharding(self.plan.mesh, PartitionSpec())
        copies = jax.jit(convert, out_shardings=replicated)(arrays)
        return eqx.combine(jax.tree.map(lambda x: x.addressable_data(0), copies), static)

    def _shardings(self, shapes: PyTree) -> PyTree:
        return state_shardings(self.plan, self.optimizer, shapes)


def restore_model(
    checkpointer: Checkpointer, shapes: PyTree, plan: Plan | None = None, *, step: int | None = None
) -> PyTree:
    """Return the model of the latest checkpoint, or of the checkpoint of `step`, on one device or under a plan.

    Layers are in model order. `shapes` are the model's shapes, from `eqx.filter_eval_shape`. Raises a `CheckpointError`
    for a checkpoint of another model.
    """
    if plan is not None:
        shapes = _with_shardings(shapes, shardings(plan.parameter_specs(shapes), plan.mesh))
    return checkpointer.restore({"model": shapes}, step, partial=True)[0]["model"]


def _with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Return a tree of shapes, each with its sharding."""
    arrays, static = eqx.partition(shapes, is_shape)

    def with_sharding(x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return eqx.combine(jax.tree.map(with_sharding, arrays, eqx.filter(shardings, _is_sharding)), static)


def _is_sharding(leaf: object) -> bool:
    return isinstance(leaf, jax.sharding.Sharding)


AnyBatch = TypeVar("AnyBatch", bound=Batch)


class ProcessRows:
    """The rows of a batch that this process loads: `start` to `stop - 1` of the whole batch, split by a plan."""

    def __init__(self, plan: Plan, rows: int):
        """`rows` is the number of rows of the whole batch, over all processes."""
        self._sharding = NamedSharding(plan.mesh, PartitionSpec(BATCH_AXES))
        self._rows = rows
        indices = self._sharding.addressable_devices_indices_map((rows,)).values()
        spans = [index[0].indices(rows) for index in indices if index is not None]
        self.start, self.stop = min(span[0] for span in spans), max(span[1] for span in spans)

    def shapes(self, batch: Batch) -> Batch:
        """Return the shapes of the whole batch, from this process's rows."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((self._rows, *x.shape[1:]), x.dtype), batch)

    def place(self, batch: AnyBatch) -> AnyBatch:
        """Return the whole batch on the mesh; each process passes its own rows, as numpy arrays."""

        def put(x: np.ndarray) -> jax.Array:
            def shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                first, last, _ = index[0].indices(self._rows)
                return x[first - self.start : last - self.start]

            return jax.make_array_from_callback((self._rows, *x.shape[1:]), self._sharding, shard)

        return jax.tree.map(put, batch)


# Layers move between the order of the model and the order of a pipeline's stages.

ShardingsOf = Callable[[PyTree], PyTree]
"""A function from the shapes of a tree's arrays to their shardings."""


class _LayerMover:
    """`Plan.shard` and `unshard` for large trees on the devices, such as a training state.

    The trees are donated, and one array is moved at a time, so that at most one array exists twice. For each sharding,
    two functions are jitted: one for arrays whose number of layers changes, and one for all other arrays.
    """

    def __init__(self, plan: Plan):
        """Prepare to move layers between the orders of the model and of the plan's stages."""
        self.plan = plan
        self._programs: dict[tuple[bool, NamedSharding], Callable[..., jax.Array]] = {}

    def shard(self, tree: PyTree, shardings_of: ShardingsOf) -> PyTree:
        """Return the tree in the layout that programs of the plan take, with these shardings."""
        return self._move(tree, self.plan.shard, shardings_of)

    def unshard(self, tree: PyTree, shardings_of: ShardingsOf) -> PyTree:
        """Return the tree with the layers in the order of the model, with these shardings."""
        return self._move(tree, self.plan.unshard, shardings_of)

    def _move(self, tree: PyTree, move: Callable[..., PyTree], shardings_of: ShardingsOf) -> PyTree:
        arrays, static = eqx.partition(tree, eqx.is_array)
        # For each array, the new order of its layers; the array itself if its layers do not move.
        orders = move(arrays, lambda x, order: order)
        if all(x is order for x, order in zip(jax.tree.leaves(arrays), jax.tree.leaves(orders), strict=True)):
            return tree
        moved_shapes = move(arrays, lambda x, order: jax.ShapeDtypeStruct((len(order), *x.shape[1:]), x.dtype))

        def move_array(x: jax.Array, order: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
            return x if x is order else self._take(x, np.asarray(order), sharding)

        return eqx.combine(jax.tree.map(move_array, arrays, orders, shardings_of(moved_shapes)), static)

    def _take(self, x: jax.Array, order: np.ndarray, sharding: NamedSharding) -> jax.Array:
        """Return a donated array's rows at the indices in `order`; an index beyond the last row gives zeros."""
        keeps_length = len(order) == x.shape[0]
        if (key := (keeps_length, sharding)) not in self._programs:
            donated = (0,) if keeps_length else ()  # A result of another shape cannot use the array's memory.
            self._programs[key] = jax.jit(_take_rows, donate_argnums=donated, out_shardings=sharding)
        # Wait, so that at most one array exists twice, and that simulated devices do not run out of threads (see
        # `take_layer_rows`).
        taken = jax.block_until_ready(self._programs[key](x, order))
        if not keeps_length:
            x.delete()
        return taken


def _take_rows(x: jax.Array, order: jax.Array) -> jax.Array:
    """Return an array's rows at the indices in `order`, in device memory; an index beyond the last row gives zeros."""
    return jax.device_put(x, jax.memory.Space.Device).at[order].get(mode="fill", fill_value=0)
