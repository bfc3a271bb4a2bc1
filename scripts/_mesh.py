"""From a recipe to its plan, and the placement of a run's batches and state under a plan."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from _screen import Screen
from _setup import adapted, build_model, is_shape, load_model, placed
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from recipes import Lora, Recipe

from eqformer import Batch, parallel, training


def plan_of(recipe: Recipe, devices: Sequence[Any]) -> parallel.Plan:
    """The recipe's plan over all the devices; raises a `ValueError` that names the flags if it is impossible."""
    sizes = check_sizes(recipe)
    wanted, there = math.prod(sizes.values()), len(devices)
    given = flags(recipe) or "--mesh"
    if wanted > there:
        raise ValueError(
            f"{given}: the axes multiply to {wanted} devices, but there are {there}; make an axis smaller, or simulate "
            f"devices on the CPU with --simulate {math.ceil(wanted / jax.process_count())}."
        )
    if wanted < there:
        more = sizes["replica"] * (there // wanted)
        fix = f"give them to an axis, such as --mesh.replica {more}" if there % wanted == 0 else "make an axis larger"
        raise ValueError(
            f"{given}: the axes multiply to {wanted} devices, and {there - wanted} of {there} would be left over; "
            f"{fix}, or hide the rest from JAX (--simulate on a CPU, CUDA_VISIBLE_DEVICES on GPUs)."
        )
    return plan_over(recipe, parallel.make_mesh(**sizes, devices=devices))


def abstract_plan(recipe: Recipe) -> parallel.Plan:
    """The recipe's plan over an abstract mesh, which may be of any size, since it has no devices."""
    sizes = check_sizes(recipe)
    return plan_over(recipe, AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes)))


def plan_over(recipe: Recipe, mesh: Any) -> parallel.Plan:
    """The recipe's plan over a mesh; its microbatches are --accumulate times --microbatches."""
    choices = {**vars(recipe.plan), "microbatches": recipe.plan.microbatches * recipe.accumulate}
    return in_flags(recipe, lambda: parallel.Plan(mesh, **choices))


def check_plan(recipe: Recipe, plan: parallel.Plan, model: Any) -> None:
    """Raise a `ValueError`, with the flags in front, if the model (or its shapes) or the rows do not fit the plan."""
    more = f"--batch {recipe.batch} --seq {recipe.seq} --execution.core {recipe.execution.core}"
    in_flags(recipe, lambda: plan.check(model, rows=recipe.batch, seq=recipe.seq), more)


def check_sizes(recipe: Recipe) -> dict[str, int]:
    """The size of each axis; raises a `ValueError` for one below 1."""
    sizes = dataclasses.asdict(recipe.mesh)
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(f"--mesh.{axis} {size}: an axis has at least one device; give 1 or more.")
    return sizes


def flags(recipe: Recipe) -> str:
    """The mesh, and the plan's choices that differ from the defaults, as flags."""
    plain = {field.name: field.default for field in dataclasses.fields(Recipe)}
    plain |= vars(plain["plan"])
    axes = [f"--mesh.{axis} {size}" for axis, size in dataclasses.asdict(recipe.mesh).items() if size != 1]
    chosen = [*vars(recipe.plan).items(), ("accumulate", recipe.accumulate)]
    return " ".join(axes + [f"--{name.replace('_', '-')} {value}" for name, value in chosen if value != plain[name]])


def in_flags(recipe: Recipe, call: Callable[[], Any], *more: str) -> Any:
    """The result of `call`; if it raises a `ValueError`, the recipe's flags and `more` are put in front of it."""
    try:
        return call()
    except ValueError as error:
        given = " ".join(filter(None, (flags(recipe), *more)))
        raise ValueError(f"{given}: {error}" if given else str(error)) from error


def mesh_line(plan: parallel.Plan) -> str:
    """The mesh and the plan's choices, in one line."""
    number, sizes = plan.mesh.size, parallel.axis_sizes(plan.mesh)
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "no axis is split"
    parts = [f"{number} device{'s' * (number > 1)}: {axes}"]
    if sizes["fsdp"] > 1:
        parts.append(f"zero {plan.zero}")
    if sizes["tensor"] > 1:
        parts.append(f"{plan.residual} stream" + (f", overlap {plan.overlap}" if plan.overlap != "none" else ""))
    if sizes["expert"] > 1:
        parts.append(f"experts by {plan.expert_method}")
    if sizes["context"] > 1:
        parts.append(f"context by {plan.context_method}")
    if plan.is_pipelined:
        schedule = plan.timetable()
        timing = parallel.simulate(schedule).lock_step
        chunks = f", {schedule.chunks} chunks" if schedule.chunks > 1 else ""
        bubble = f"bubble {100 * timing.bubble:.1f} %"
        parts.append(f"{schedule.name}, {plan.microbatches} microbatches{chunks}, {bubble}")
    elif plan.microbatches > 1:
        parts.append(f"{plan.microbatches} microbatches one after another")
    return "; ".join(parts)


def step_of(recipe: Recipe, plan: parallel.Plan, optimizer: training.Optimizer) -> training.Step:
    """The recipe's step under a plan."""

    def loss(model: Any, batch: Batch, key: Any, **views: Any) -> tuple[Any, Any]:
        return training.next_token_loss(model, batch, key, z_loss=recipe.optimizer.z_loss, **views)

    return training.planned_step(
        loss, optimizer, plan, clip=recipe.optimizer.clip, balance_rate=recipe.optimizer.balance_rate
    )


class Rows:
    """The rows of a batch that this process loads, and their placement on its devices."""

    def __init__(self, plan: parallel.Plan, batch: int):
        self._sharding = NamedSharding(plan.mesh, PartitionSpec(parallel.BATCH_AXES))
        self._batch = batch
        pieces = self._sharding.addressable_devices_indices_map((batch,)).values()
        spans = [index[0].indices(batch) for index in pieces if index is not None]
        self.start, self.stop = min(span[0] for span in spans), max(span[1] for span in spans)

    def place(self, batch: Batch) -> Batch:
        """The global batch on the mesh, from rows `start` to `stop - 1` here and the other rows in other processes."""

        def put(x: Any) -> jax.Array:
            shape = (self._batch, *x.shape[1:])

            def piece(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                first, last, _ = index[0].indices(self._batch)
                return x[first - self.start : last - self.start]

            return jax.make_array_from_callback(shape, self._sharding, piece)

        return jax.tree.map(put, batch)


class State:
    """The training state under a plan: made, restored and saved without an unsharded copy anywhere.

    In training, layers are in ring order (the order in which the pipeline's devices hold them); a checkpoint has them
    in reading order, so that it can be restored under any other plan.
    """

    def __init__(self, recipe: Recipe, plan: parallel.Plan, optimizer: training.Optimizer):
        self.recipe, self.plan, self.optimizer = recipe, plan, optimizer
        self._movers: dict[Any, Callable] = {}  # a jitted program for each sharding, compiled once for all saves

    def first(self, screen: Screen) -> training.TrainState:
        """The state before the first step."""
        if self.recipe.published is not None:
            return self.of(load_model(self.recipe, self.plan, screen))

        def make() -> training.TrainState:
            return training.init_state(self.plan.to_ring_order(build_model(self.recipe)), self.optimizer)

        return parallel.init_sharded(make, self._shardings)

    def brought(self, checkpointer: training.Checkpointer) -> training.TrainState:
        """The state before the first step, from a checkpoint that holds a model only."""
        plain = State(dataclasses.replace(self.recipe, lora=Lora()), self.plan, self.optimizer)
        saved, _ = checkpointer.restore({"model": plain.model_shapes()})
        return self.of(adapted(self.recipe, saved["model"]))

    def model_shapes(self) -> Any:
        """The model's shapes in reading order, with the plan's shardings."""
        shapes = eqx.filter_eval_shape(build_model, self.recipe)
        return placed(shapes, parallel.shardings(self.plan.parameter_specs(shapes), self.plan.mesh))

    def of(self, model: Any) -> training.TrainState:
        """The state before the first step, from a model in memory."""
        arrays, rest = eqx.partition(model, eqx.is_array)

        def make(arrays: Any) -> training.TrainState:
            return training.init_state(self.plan.to_ring_order(eqx.combine(arrays, rest)), self.optimizer)

        shapes, others = eqx.partition(eqx.filter_eval_shape(make, arrays), is_shape)
        run = jax.jit(lambda x: eqx.filter(make(x), eqx.is_array), out_shardings=self._shardings(shapes))
        return eqx.combine(run(arrays), others)

    def shapes(self) -> training.TrainState:
        """The state's shapes in reading order, with the plan's shardings: what a checkpoint is restored into."""
        return placed(self._unplaced, self._shardings(eqx.filter(self._unplaced, is_shape)))

    def held_shapes(self) -> training.TrainState:
        """The shapes of what a step takes: in ring order, each where the plan keeps it."""
        parts = lambda s: (s.model, s.optimizer_state)
        held = tuple(eqx.filter_eval_shape(self.plan.to_ring_order, part) for part in parts(self._unplaced))
        state = eqx.tree_at(parts, self._unplaced, held)
        return placed(state, self._shardings(eqx.filter(state, is_shape)))

    def under(self, plan: parallel.Plan) -> "State":
        """The same state under another plan; shapes are shared, since tracing them takes long."""
        other = State(self.recipe, plan, self.optimizer)
        other._unplaced = self._unplaced
        return other

    @functools.cached_property
    def _unplaced(self) -> training.TrainState:
        return eqx.filter_eval_shape(lambda: training.init_state(build_model(self.recipe), self.optimizer))

    def to_ring_order(self, state: training.TrainState) -> training.TrainState:
        """A state in reading order, brought into ring order."""
        return self._ordered(state, self.plan.to_ring_order)

    def to_reading_order(self, state: training.TrainState) -> training.TrainState:
        """A state in ring order, brought into reading order."""
        return self._ordered(state, self.plan.to_reading_order)

    def _ordered(self, state: training.TrainState, order: Callable[..., Any]) -> training.TrainState:
        """The state with its layers in another order; donates the one it is given, one array at a time.

        So there is never a second copy of more than one array.
        """
        arrays, rest = eqx.partition(state, eqx.is_array)
        parts = lambda s: (s.model, s.optimizer_state)
        given = parts(arrays)
        orders = tuple(order(part, lambda x, order: order) for part in given)  # or the array, if it stays as it is
        if all(x is rows for x, rows in zip(jax.tree.leaves(given), jax.tree.leaves(orders), strict=True)):
            return state
        after = eqx.tree_at(parts, arrays, tuple(eqx.filter_eval_shape(order, part) for part in given))
        move = lambda x, rows, sharding: x if x is rows else self._taken(x, rows, sharding)
        moved = jax.tree.map(move, given, orders, parts(self._shardings(after)))
        return eqx.combine(eqx.tree_at(parts, arrays, moved), rest)

    def _taken(self, x: Any, order: np.ndarray, sharding: NamedSharding) -> Any:
        """The rows of an array in an order, donated; zeros for numbers beyond its last, where rows are padding."""
        is_as_long = len(order) == x.shape[0]
        if (key := (is_as_long, sharding)) not in self._movers:
            take = lambda x, order: x.at[order].get(mode="fill", fill_value=0)
            donated = (0,) if is_as_long else ()  # another shape has no use for the memory
            self._movers[key] = jax.jit(take, donate_argnums=donated, out_shardings=sharding)
        # Waited for, so that there is one copy at a time, and as in `parallel.pipeline`'s `taken_rows`.
        taken = jax.block_until_ready(self._movers[key](x, order))
        if not is_as_long:
            x.delete()
        return taken

    def everywhere(self, key: Any) -> Any:
        """A random key, replicated on all devices."""
        whole = NamedSharding(self.plan.mesh, PartitionSpec())
        raw = np.asarray(jax.random.key_data(key))
        copies = jax.make_array_from_callback(raw.shape, whole, raw.__getitem__)
        return jax.random.wrap_key_data(copies, impl=str(jax.random.key_impl(key)))

    def on_one_device(self, model: Any) -> Any:
        """A copy of the model in reading order on this process's first device; all processes must call it together."""
        arrays, rest = eqx.partition(model, eqx.is_array)
        if jax.process_count() == 1:
            arrays = self.plan.to_reading_order(arrays)
            return eqx.combine(jax.device_put(arrays, jax.local_devices()[0]), rest)
        whole = NamedSharding(self.plan.mesh, PartitionSpec())
        copies = jax.jit(self.plan.to_reading_order, out_shardings=whole)(arrays)
        return eqx.combine(jax.tree.map(lambda x: x.addressable_data(0), copies), rest)

    def _shardings(self, shapes: Any) -> Any:
        return training.state_shardings(self.plan, self.optimizer, shapes)
