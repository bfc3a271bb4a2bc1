"""Steps compiled from shapes, for devices that may not be here."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .. import nn, parallel, training
from .._shapes import Batch, is_shape


def lowered_step(states: training.PlannedState, step: training.Step, batch: Batch) -> jax.stages.Lowered:
    """A training step under a plan, lowered from the shapes of its state and batch, the state donated."""
    shapes = states.step_shapes(batch)
    if states.plan.optimizer_memory == "device" or _say_what_memory(states.plan.mesh):
        return step.lower(*shapes)
    lowered, arrays = step.lower(*shapes, keep_unused=True), eqx.filter(shapes[0], is_shape)
    memory = training.is_on_host(states.plan, states.optimizer, arrays.optimizer_state)
    nowhere = jax.tree.map(lambda _: False, arrays)
    _keep_on_host(lowered, jax.tree.leaves(eqx.tree_at(lambda s: s.optimizer_state, nowhere, memory)))
    return lowered


def _say_what_memory(mesh: Mesh | AbstractMesh) -> bool:
    """Whether devices say which memories they have."""
    return not isinstance(mesh, Mesh) or bool(mesh.devices.flat[0].addressable_memories())


def _keep_on_host(lowered: jax.stages.Lowered, are_far: list[bool]) -> None:
    """Have a program take some of its first arguments from the host's memory.

    Where devices are there, shardings say so; those of a compiler for GPUs that are not here know of no memory, and
    JAX drops what shardings say of it.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        given = list(main.attributes["arg_attrs"])
        for place, is_far in enumerate(are_far):
            if is_far:
                said: dict[str, Any] = {each.name: each.attr for each in given[place]}
                said["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
                given[place] = ir.DictAttr.get(said)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(given)


def decode_shapes(
    plan: parallel.Plan, model: nn.LanguageModel, rows: int, capacity: int, cache_dtype: str | None = None
) -> tuple[parallel.ShardedModel, PyTree]:
    """A model served under a plan, and its cache for `rows` of up to `capacity` tokens: shapes with their places."""
    served = parallel.ShardedModel(model, plan)
    shardings = parallel.shardings(plan.parameter_specs(served.model), plan.mesh)
    arrays, rest = eqx.partition(served.model, is_shape)
    arrays = jax.tree.map(_placed, arrays, eqx.filter(shardings, lambda leaf: isinstance(leaf, jax.sharding.Sharding)))
    served = eqx.tree_at(lambda s: s.model, served, eqx.combine(arrays, rest))
    return served, served.cache_shapes(rows, capacity, cache_dtype)


def lowered_decode(
    plan: parallel.Plan,
    model: nn.LanguageModel,
    rows: int,
    capacity: int,
    cache_dtype: str | None = None,
    *,
    tokens: int = 1,
) -> jax.stages.Lowered:
    """One token more of each of `rows`, by the likeliest of the logits, lowered from shapes, the cache donated.

    Args:
        plan: Where the model is served.
        model: Its shapes.
        rows: Rows that are decoded together.
        capacity: Slots of a row's caches.
        cache_dtype: What keys and values are kept in; None: the compute dtype.
        tokens: How many of each row are read: the last one, or so many of a prompt.
    """
    run, shapes = _decode(plan, *decode_shapes(plan, model, rows, capacity, cache_dtype), rows, tokens)
    return jax.jit(run, donate_argnums=1).lower(*shapes)


def traced_decode(plan: parallel.Plan, served: PyTree, cache: PyTree, rows: int) -> Any:
    """The same as a traced program, of what `decode_shapes` gives."""
    run, shapes = _decode(plan, served, cache, rows)
    return jax.make_jaxpr(run)(*shapes).jaxpr


def _decode(
    plan: parallel.Plan, served: PyTree, cache: PyTree, rows: int, tokens: int = 1
) -> tuple[Callable[..., Any], tuple]:
    """A step of decoding, and the shapes of what it is given."""
    arrays, rest = eqx.partition(served, is_shape)
    slabs, others = eqx.partition(cache, is_shape)
    ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32, sharding=NamedSharding(plan.mesh, PartitionSpec()))

    def run(arrays: PyTree, slabs: PyTree, ids: Any, positions: Any) -> tuple[PyTree, Any]:
        served = eqx.combine(arrays, rest)
        logits, cache = served.decode(ids, nn.Tokens(positions), eqx.combine(slabs, others))
        return eqx.filter(cache, eqx.is_array), jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return run, (arrays, slabs, ids, ids)


def _placed(tree: PyTree, sharding: jax.sharding.Sharding) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
