"""Steps compiled from shapes, for devices that may not be here."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .. import nn, parallel, training
from .._shapes import Batch


def lowered_step(states: training.PlannedState, step: training.Step, batch: Batch) -> jax.stages.Lowered:
    """A training step under a plan, lowered from the shapes of its state and batch, the state donated."""
    mesh = states.plan.mesh
    arrays, rest = eqx.partition(states.held_shapes(), _is_shape)
    batch = _placed(batch, NamedSharding(mesh, PartitionSpec(parallel.BATCH_AXES)))
    key = _placed(jax.eval_shape(lambda: jax.random.key(0)), NamedSharding(mesh, PartitionSpec()))

    def run(arrays: PyTree, batch: Batch, key: Any) -> tuple[PyTree, Any]:
        state, metrics = step(eqx.combine(arrays, rest), batch, key)
        return eqx.filter(state, eqx.is_array), metrics

    return jax.jit(run, donate_argnums=0).lower(arrays, batch, key)


def decode_shapes(
    plan: parallel.Plan, model: nn.Transformer, rows: int, capacity: int, cache_dtype: str | None = None
) -> tuple[PyTree, PyTree]:
    """A model served under a plan, and its cache for `rows` of up to `capacity` tokens: shapes with their places."""
    served = parallel.Planned(model, plan)
    shardings = parallel.shardings(plan.parameter_specs(served.model), plan.mesh)
    arrays, rest = eqx.partition(served.model, _is_shape)
    arrays = jax.tree.map(_placed, arrays, eqx.filter(shardings, lambda leaf: isinstance(leaf, jax.sharding.Sharding)))
    served = eqx.tree_at(lambda s: s.model, served, eqx.combine(arrays, rest))
    return served, served.cache_shapes(rows, capacity, cache_dtype)


def lowered_decode(
    plan: parallel.Plan, model: nn.Transformer, rows: int, capacity: int, cache_dtype: str | None = None
) -> jax.stages.Lowered:
    """One token more of each of `rows`, by the likeliest of the logits, lowered from shapes, the cache donated."""
    served, cache = decode_shapes(plan, model, rows, capacity, cache_dtype)
    arrays, rest = eqx.partition(served, _is_shape)
    slabs, others = eqx.partition(cache, _is_shape)
    ids = jax.ShapeDtypeStruct((rows, 1), jnp.int32, sharding=NamedSharding(plan.mesh, PartitionSpec()))

    def run(arrays: PyTree, slabs: PyTree, ids: Any, positions: Any) -> tuple[PyTree, Any]:
        served = eqx.combine(arrays, rest)
        hidden, cache, _ = served.encode(ids, nn.Tokens(positions), eqx.combine(slabs, others))
        return eqx.filter(cache, eqx.is_array), jnp.argmax(served.unembed(hidden[:, 0]), axis=-1).astype(jnp.int32)

    return jax.jit(run, donate_argnums=1).lower(arrays, slabs, ids, ids)


def _is_shape(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _placed(tree: PyTree, sharding: jax.sharding.Sharding) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
