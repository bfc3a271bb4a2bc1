"""Caches of a model under a plan: the sharding of their arrays, pieces of slots, and key heads that devices share.

Several devices of `tensor` may share a key head. A layout cannot say that devices hold the same slice. So the key heads
are repeated: as many as there are devices, each as often as devices share it, and split like any heads. A cache of
repeated heads would repeat its entries. Instead the devices that share a head split its cache by rows: they exchange
their queries' heads for rows before they attend, and back after.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from .._shapes import ArrayOrShape
from . import _collectives as send
from ._mesh import BATCH_AXES, CONTEXT, is_spec, PIPE, shardings, TENSOR
from ._placement import Placement
from ._shard_map import filter_shard_map, vary_like
from .tensor._tensor import dim_size, is_split, replicated_layers


_SPLIT_DIMS = "heads", "kv_heads", "mlp"
"""Dims of caches that the axis `tensor` splits."""


class ShardedCache(eqx.Module):
    """The cache of a model under a plan, made by `Plan.init_cache` and read and returned by `Plan.run_forward`.

    The static fields are the arguments of `init_cache`. `capacity` is rounded up to a multiple of the devices that
    split the slots.
    """

    arrays: PyTree
    batch: int = eqx.field(static=True)
    capacity: int = eqx.field(static=True)
    dtype: str | None = eqx.field(static=True)
    rollback: int = eqx.field(static=True)

    def one_device_shapes(self, model: nn.LanguageModel) -> PyTree:
        """Return the shapes of the same cache on one device, for the model that is not split."""
        sizes = self.batch, self.capacity, self.dtype
        return eqx.filter_eval_shape(lambda model: model.init_cache(*sizes, rollback=self.rollback), model)


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The sharding of caches under a plan: rows over the axes of the batch, slots over `context`, heads over `tensor`.

    Layers are over `pipe`. Each group of `sharers` devices of `tensor` has the same key head, and splits its cache by
    rows.
    """

    plan: Placement
    sharers: int = 1

    @property
    def row_groups(self) -> int:
        """The number of groups of devices that have different rows."""
        return math.prod(self.plan.size(axis) for axis in BATCH_AXES)

    def padded_rows(self, batch: int) -> int:
        """Return `batch` rounded up to a multiple of the devices that rows, or their caches, are split over."""
        return round_to_multiple(batch, self.row_groups * self.sharers)

    def init(self, shapes: PyTree) -> PyTree:
        """Return empty caches, sharded; `shapes` are those of caches that no device splits."""
        pieces, tensor = self.plan.size(CONTEXT), self.plan.size(TENSOR)

        def padded_shape(names: str, x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
            sizes = dict(zip(_cache_dims(names), x.shape, strict=True))
            if "kv_seq" in sizes:
                sizes["kv_seq"] = round_to_multiple(sizes["kv_seq"], pieces)
            if "kv_heads" in sizes:
                # A layer that reads another's keys has caches of no heads; its axis is split, too.
                sizes["kv_heads"] = max(sizes["kv_heads"], tensor)
            if "kv_heads" in sizes or self._is_split_by_sharers(x):
                sizes["batch"] //= self.sharers
            if _is_held_by_each_device(names, x) or self._is_split_by_sharers(x):
                sizes["batch"] *= tensor
            return tuple(sizes.values())

        def init_array(spec: PartitionSpec, names: str, x: jax.ShapeDtypeStruct) -> Array:
            # Position -1 marks an empty slot.
            value = -1 if nn.is_position_array(x) and _cache_dims(names)[-1] == "kv_seq" else 0
            array = jnp.full(padded_shape(names, x), value, x.dtype)
            return jax.lax.with_sharding_constraint(array, NamedSharding(self.plan.mesh, spec))

        return jax.tree.map(init_array, self.specs(shapes), nn.dims(shapes), shapes, is_leaf=is_spec)

    def specs(self, cache: PyTree) -> PyTree:
        """Return the spec of each array of a cache, or of its shapes."""
        axis_of = {"layers": PIPE, "kv_seq": CONTEXT} | dict.fromkeys(_SPLIT_DIMS, TENSOR)
        used_axes = {name: axis for name, axis in axis_of.items() if self.plan.size(axis) > 1}

        def spec_of(names: str, x: ArrayOrShape) -> PartitionSpec:
            axes: dict[str, str | tuple[str, ...] | None] = {name: used_axes.get(name) for name in _cache_dims(names)}
            axes["batch"] = BATCH_AXES
            if "heads" in used_axes and (_is_held_by_each_device(names, x) or self._is_split_by_sharers(x)):
                axes["batch"] = (*BATCH_AXES, TENSOR)
            return PartitionSpec(*axes.values())

        return jax.tree.map(spec_of, nn.dims(cache), cache)

    def put_row(self, cache: PyTree, rows: int, number: Int[Array, ""], single: PyTree) -> PyTree:
        """Return a cache of `rows` rows whose row `number` is the row of `single`, a cache of one row.

        The devices that have the row get it from those that have the row of `single`.
        """
        rows_per_device = self.padded_rows(rows) // self.row_groups
        specs = self.specs(cache)

        def put_on_device(cache: PyTree, number: Array, single: PyTree) -> PyTree:
            return jax.tree.map(
                lambda names, x, new: self._put_row(names, x, new, number, rows_per_device), names, cache, single
            )

        names = nn.dims(cache)
        run = filter_shard_map(put_on_device, self.plan.mesh, (specs, None, self.specs(single)), specs)
        return run(cache, number, single)

    def _put_row(self, names: str, x: Array, new: Array, number: Int[Array, ""], rows_per_device: int) -> Array:
        """Write the row of `new`, which is the first row of the first devices, into this device's part of an array."""
        axis = _cache_dims(names).index("batch")
        first = jax.lax.slice_in_dim(new, 0, 1, axis=axis)
        index, rows = number, x.shape[axis]
        if split_axes := tuple(mesh_axis for mesh_axis in BATCH_AXES if self.plan.size(mesh_axis) > 1):
            first = send.all_gather("cached rows", first, split_axes, stacks=True)[0]
            index = number - jax.lax.axis_index(split_axes) * rows_per_device
        if rows < rows_per_device:  # Devices with the same key head split the rows.
            sharer = jax.lax.axis_index(TENSOR) % self.sharers
            gathered = send.all_gather("cached rows of shared key heads", first, TENSOR, stacks=True)
            first = gathered[jax.lax.axis_index(TENSOR) - sharer]
            index = index - sharer * rows
        updated = jax.lax.dynamic_update_slice_in_dim(x, first, jnp.clip(index, 0, rows - 1), axis)
        return jnp.where((index >= 0) & (index < rows), updated, x)

    def _is_split_by_sharers(self, x: ArrayOrShape) -> bool:
        """Return whether a cache's array has positions of rows that devices with the same key head split."""
        return self.sharers > 1 and nn.is_position_array(x)


def run_on_cache_pieces(
    method: Callable[..., tuple[PyTree, PyTree]],
    model: nn.LanguageModel,
    plan: Placement,
    ids: Int[Array, "batch seq"],
    hidden_inputs: tuple[Float[Array, "batch seq embed"], ...],
    tokens: nn.Tokens,
    cache: PyTree,
) -> tuple[PyTree, PyTree]:
    """Return `method(model, ids, *hidden_inputs, tokens, cache)` on a device that has a piece of each cache."""
    pieces = plan.size(CONTEXT)
    if pieces > 1:
        # A piece of a row does not tell how long its documents are.
        lengths = jnp.broadcast_to(nn.document_lengths(tokens), ids.shape)
        tokens = dataclasses.replace(tokens, lengths=lengths)
        cache = nn.map_slot_caches(functools.partial(_as_piece, pieces=pieces), cache)
    results, cache = method(model, ids, *hidden_inputs, tokens, cache)
    return results, nn.map_slot_caches(lambda slots: dataclasses.replace(slots, first=None, capacity=None), cache)


def check_replicated_mixers(model: nn.LanguageModel) -> None:
    """Refuse mixers that every device runs in full, but whose caches have heads, which would be split."""
    for path, mixer in replicated_layers(model):
        if not isinstance(mixer, nn.Mixer):
            continue
        names = jax.tree.leaves(nn.dims(eqx.filter_eval_shape(mixer.init_cache, (1,), 2)))
        if head_dims := {"heads", "kv_heads"} & set(" ".join(map(str, names)).split()):
            raise ValueError(
                f"ShardedModel over {TENSOR}: {path} declares no head dim to split, and its cache has "
                f"{' and '.join(head_dims)}, which are split; declare the dim in its facts(), or name the cache's dims "
                "otherwise."
            )


def pad_batch(x: Int[Array, "batch seq"], rows: int, value: int) -> Int[Array, "padded_batch seq"]:
    """Pad an array to `rows` rows, with rows of `value` at the end."""
    return jnp.pad(x, [(0, rows - x.shape[0]), (0, 0)], constant_values=value)


def pad_tokens(tokens: nn.Tokens, rows: int) -> nn.Tokens:
    """Return the fields of tokens that a call with a cache reads, padded to `rows` rows at the end."""
    lengths = None if tokens.lengths is None else pad_batch(tokens.lengths, rows, 0)
    source = tokens.source
    if source is not None:
        widths = [(0, rows - len(source.values)), *[(0, 0)] * (source.values.ndim - 1)]
        source = nn.Source(jnp.pad(source.values, widths), pad_tokens(source.tokens, rows))
    return nn.Tokens(pad_batch(tokens.positions, rows, -1), lengths=lengths, source=source)


def round_to_multiple(number: int, divisor: int) -> int:
    """Round a number up to a multiple of `divisor`."""
    return -(-number // divisor) * divisor


def _as_piece(cache: nn.SlotCache, pieces: int) -> nn.SlotCache:
    """Mark a cache as this device's piece of one with `pieces` times as many slots."""
    *outer, size = cache.positions.shape
    first = jnp.broadcast_to(jax.lax.axis_index(CONTEXT) * size, outer).astype(jnp.int32)
    return dataclasses.replace(cache, first=vary_like(first, cache.positions), capacity=size * pieces)


def _cache_dims(names: str) -> list[str]:
    """Return the names of a cache's dims; the first is always the dim of layers."""
    return ["layers", *names.split()[1:]]


def _is_held_by_each_device(names: str, x: ArrayOrShape) -> bool:
    """Return whether a cache's array has no heads or channels to split, so that each device of `tensor` has its own."""
    return not nn.is_position_array(x) and not {*_SPLIT_DIMS} & {*_cache_dims(names)}


def count_sharers(model: PyTree, plan: Placement) -> int:
    """Return how many devices of `tensor` share each key head and may split its cache by rows; 1 where none may.

    They may in mixers that say so (`MixerFacts.attends_by_rows`) and have nothing else for each head, such as sinks; in
    pipelines rows go through in pieces, and caches are not split.
    """
    repeats = {_repeats(mixer, plan) for mixer in nn.modules(model, nn.Mixer)}
    if plan.size(PIPE) > 1 or len(repeats) != 1:
        return 1
    supported = jax.tree.map(_has_only_maps, model, nn.dims(model), is_leaf=_is_mixer)
    return repeats.pop() if jax.tree.all(supported) else 1


def repeat_key_heads(model: PyTree, plan: Placement) -> PyTree:
    """Return the model, or its shapes, with a key head for each device of `tensor` where there are fewer."""
    if all(_repeats(mixer, plan) == 1 for mixer in nn.modules(model, nn.Mixer)):
        return model

    def repeat_in_mixer(mixer: nn.Mixer, names: PyTree) -> PyTree:
        repeats = _repeats(mixer, plan)

        def repeat_in_array(x: PyTree, names: str) -> PyTree:
            dims = names.split() if eqx.is_array(x) else []
            return jnp.repeat(x, repeats, axis=dims.index("kv_heads")) if "kv_heads" in dims else x

        return jax.tree.map(repeat_in_array, mixer, names) if repeats > 1 else mixer

    def repeat(model: PyTree) -> PyTree:
        return nn.map_modules(repeat_in_mixer, model, nn.Mixer, nn.dims(model))

    if not jax.tree.leaves(eqx.filter(model, eqx.is_array)):
        return eqx.filter_eval_shape(repeat, model)
    arrays, static = eqx.partition(repeat(model), eqx.is_array)
    return eqx.combine(jax.device_put(arrays, shardings(plan.parameter_specs(arrays), plan.mesh)), static)


def _repeats(mixer: nn.Mixer, plan: Placement) -> int:
    """Return how many devices share each of a mixer's key heads."""
    kv_heads, devices = dim_size(mixer, "kv_heads"), plan.size(TENSOR)
    if not is_split(mixer) or kv_heads is None or kv_heads >= devices or devices % kv_heads:
        return 1
    return devices // kv_heads


def _is_mixer(node: object) -> bool:
    return isinstance(node, nn.Mixer)


def _has_only_maps(node: PyTree, names: PyTree) -> bool:
    """Return whether a node is no mixer, or one that attends by rows and has nothing for each head but its maps."""
    if not _is_mixer(node):
        return True
    if not node.facts().attends_by_rows:
        return False

    def names_outside_maps(child: PyTree, names: PyTree) -> str:
        return "" if nn.is_map(child) else str(names)

    names = jax.tree.leaves(jax.tree.map(names_outside_maps, node, names, is_leaf=nn.is_map))
    return not {"heads", "kv_heads"} & set(" ".join(names).split())
