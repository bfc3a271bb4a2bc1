"""The training state under a plan: made, restored and saved without an unsharded copy anywhere."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Key, PyTree

from .._shapes import Batch, is_shape
from ..parallel import BATCH_AXES, init_sharded, LayerMover, Plan, shardings
from ._train_state import init_state, state_shardings, TrainState
from .checkpoint._checkpointer import Checkpointer
from .optimizer._optimizer import Optimizer


class PlannedState:
    """Makes, restores and saves the `TrainState` of a model under a plan, without an unsharded copy anywhere.

    In training, layers are where a plan's devices hold them; a checkpoint has them in the order of the model, so that
    it can be restored under any other plan.
    """

    def __init__(
        self, build: Callable[[], PyTree], optimizer: Optimizer, plan: Plan, *, model_shapes: PyTree | None = None
    ):
        """`build` makes the model with its first weights; `model_shapes` are its shapes, where they are known."""
        self.build, self.optimizer, self.plan = build, optimizer, plan
        self._model_shapes = eqx.filter_eval_shape(build) if model_shapes is None else model_shapes
        self._mover = LayerMover(plan)

    def init(self) -> TrainState:
        """The state before the first step, each array made where the plan keeps it."""
        make = lambda: init_state(self.plan.shard(self.build()), self.optimizer)
        return init_sharded(make, self._shardings, shapes=self._held)

    def init_from(self, model: PyTree) -> TrainState:
        """The state before the first step of a model in memory, such as one that `models.load` gave."""
        arrays, rest = eqx.partition(model, eqx.is_array)

        def make(arrays: PyTree) -> TrainState:
            return init_state(self.plan.shard(eqx.combine(arrays, rest)), self.optimizer)

        shapes, others = eqx.partition(eqx.filter_eval_shape(make, arrays), is_shape)
        run = jax.jit(lambda x: eqx.filter(make(x), eqx.is_array), out_shardings=self._shardings(shapes))
        return eqx.combine(run(arrays), others)

    def restore(
        self, checkpointer: Checkpointer, step: int | None = None, *, reset_counters: bool = False
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state of a checkpoint (the latest, or of `step`) that was saved under any plan, and its metadata.

        With `reset_counters` it has taken no step yet: another run begins with it.
        """
        like, count = self.shapes(), lambda s: s.empty_batches
        if "empty_batches" in checkpointer.leaves(step):
            state, metadata = checkpointer.restore(like, step)
        else:  # older versions did not count empty batches
            state, metadata = checkpointer.restore(eqx.tree_at(count, like, None), step)
            state = eqx.tree_at(count, state, state.skipped * 0, is_leaf=lambda leaf: leaf is None)
        if reset_counters:
            counts = lambda s: (s.step, s.skipped, s.skipped_in_a_row, s.empty_batches)
            state = eqx.tree_at(counts, state, jax.tree.map(lambda x: x * 0, counts(state)))
        return self.shard(state), metadata

    def save(self, checkpointer: Checkpointer, state: TrainState, step: int, metadata: Mapping[str, Any]) -> TrainState:
        """Start to save a state, which is donated; returns the state to train on with."""
        state = self.unshard(state)
        checkpointer.save(state, step, metadata)
        return self.shard(state)

    def shapes(self) -> TrainState:
        """The shapes of a plain model's state, with the plan's shardings: what a checkpoint is restored into."""
        return _placed(self._read, self._shardings(eqx.filter(self._read, is_shape)))

    def sharded_shapes(self) -> TrainState:
        """The shapes of what a step takes, each where the plan keeps it."""
        return _placed(self._held, self._shardings(eqx.filter(self._held, is_shape)))

    def step_shapes(self, batch: Batch) -> tuple[TrainState, Batch, Any]:
        """The shapes of a step's state, batch and key, each with its place; `batch` has arrays or their shapes."""
        placed = lambda axes, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.plan.mesh, axes))
        key = placed(PartitionSpec(), jax.eval_shape(lambda: jax.random.key(0)))
        return self.sharded_shapes(), jax.tree.map(functools.partial(placed, PartitionSpec(BATCH_AXES)), batch), key

    def with_plan(self, plan: Plan) -> "PlannedState":
        """The same state under another plan; shapes are shared, since tracing them takes long."""
        other = PlannedState(self.build, self.optimizer, plan, model_shapes=self._model_shapes)
        other._read = self._read
        return other

    @functools.cached_property
    def _read(self) -> TrainState:
        return eqx.filter_eval_shape(lambda model: init_state(model, self.optimizer), self._model_shapes)

    @functools.cached_property
    def _held(self) -> TrainState:
        return eqx.filter_eval_shape(self.plan.shard, self._read)

    def shard(self, state: TrainState) -> TrainState:
        """The state of a plain model, which is donated, as a step takes it."""
        return self._mover.shard(state, self._shardings)

    def unshard(self, state: TrainState) -> TrainState:
        """A step's state, which is donated, with the layers in the order of the model."""
        return self._mover.unshard(state, self._shardings)

    def replicate(self, key: Key[Array, ""]) -> Key[Array, ""]:
        """A random key, replicated on all devices."""
        whole = NamedSharding(self.plan.mesh, PartitionSpec())
        raw = np.asarray(jax.random.key_data(key))
        copies = jax.make_array_from_callback(raw.shape, whole, raw.__getitem__)
        return jax.random.wrap_key_data(copies, impl=str(jax.random.key_impl(key)))

    def copy_model_to_one_device(self, model: PyTree) -> PyTree:
        """A plain copy of the state's model on this process's first device; all processes call together."""
        return self._copied(model, self.plan.unshard)

    def copy_to_one_device(self, tree: PyTree) -> PyTree:
        """A copy of a batch, or of anything but a state, on this process's first device."""
        return self._copied(tree, lambda arrays: arrays)

    def _copied(self, tree: PyTree, ordered: Callable[[PyTree], PyTree]) -> PyTree:
        arrays, rest = eqx.partition(tree, eqx.is_array)
        if jax.process_count() == 1:
            return eqx.combine(jax.device_put(ordered(arrays), jax.local_devices()[0]), rest)
        whole = NamedSharding(self.plan.mesh, PartitionSpec())
        copies = jax.jit(ordered, out_shardings=whole)(arrays)
        return eqx.combine(jax.tree.map(lambda x: x.addressable_data(0), copies), rest)

    def _shardings(self, shapes: PyTree) -> PyTree:
        return state_shardings(self.plan, self.optimizer, shapes)


def restore_model(
    checkpointer: Checkpointer, shapes: PyTree, plan: Plan | None = None, *, step: int | None = None
) -> PyTree:
    """The plain model of a checkpoint (the latest, or of `step`), on one device or placed by a plan.

    `shapes` are the model's, from `eqx.filter_eval_shape`. Raises a `CheckpointError` for a checkpoint of another
    model.
    """
    if plan is not None:
        shapes = _placed(shapes, shardings(plan.parameter_specs(shapes), plan.mesh))
    return checkpointer.restore({"model": shapes}, step, partial=True)[0]["model"]


def _placed(shapes: PyTree, shardings: PyTree) -> PyTree:
    """A tree of shapes, each with its sharding."""
    arrays, rest = eqx.partition(shapes, is_shape)
    with_place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return eqx.combine(jax.tree.map(with_place, arrays, eqx.filter(shardings, _is_sharding)), rest)


def _is_sharding(leaf: object) -> bool:
    return isinstance(leaf, jax.sharding.Sharding)


class ProcessRows:
    """The rows of a batch that this process loads: `start` to `stop - 1` of the whole batch, split as a plan says."""

    def __init__(self, plan: Plan, rows: int):
        """`rows` are those of the whole batch, over all processes."""
        self._sharding = NamedSharding(plan.mesh, PartitionSpec(BATCH_AXES))
        self._rows = rows
        pieces = self._sharding.addressable_devices_indices_map((rows,)).values()
        spans = [index[0].indices(rows) for index in pieces if index is not None]
        self.start, self.stop = min(span[0] for span in spans), max(span[1] for span in spans)

    def shapes(self, batch: Batch) -> Batch:
        """The shapes of the whole batch, from this process's rows."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((self._rows, *x.shape[1:]), x.dtype), batch)

    def place(self, batch: Batch) -> Batch:
        """The whole batch on the mesh, from this process's rows, as numpy arrays, and those of the other processes."""

        def put(x: np.ndarray) -> jax.Array:
            def piece(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                first, last, _ = index[0].indices(self._rows)
                return x[first - self.start : last - self.start]

            return jax.make_array_from_callback((self._rows, *x.shape[1:]), self._sharding, piece)

        return jax.tree.map(put, batch)
