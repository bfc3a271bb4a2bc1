"""KV caches and recurrent states under a plan: their sharding, and key heads that several devices share.

If there are fewer key heads than devices of `tensor`, several devices use the same key head. The model's key heads are
then repeated until there is one key head per device, because a layout cannot give several devices the same slice. The
caches are not repeated: the devices that share a key head split its cache by batch rows. Before attention, an
all-to-all within such a group of devices gives each device all query heads of the group for the device's own rows.
After attention, a second all-to-all returns the outputs.
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
"""Dims of caches that are split over `tensor`."""


class ShardedCache(eqx.Module):
    """Cache of a model under a plan, made by `Plan.init_cache`, and read and returned by `Plan.run_forward`.

    The static fields are the arguments of `init_cache`, but `capacity` is rounded up to a multiple of the number of
    devices that split the slots.
    """

    arrays: PyTree
    batch: int = eqx.field(static=True)
    capacity: int = eqx.field(static=True)
    dtype: str | None = eqx.field(static=True)
    rollback: int = eqx.field(static=True)

    def one_device_shapes(self, model: nn.LanguageModel) -> PyTree:
        """Return the shapes that the cache has on a single device, for the unsplit model."""
        sizes = self.batch, self.capacity, self.dtype
        return eqx.filter_eval_shape(lambda model: model.init_cache(*sizes, rollback=self.rollback), model)


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Sharding of caches: rows over the batch axes, slots over `context`, heads over `tensor`, layers over `pipe`.

    Each group of `kv_row_shards` devices of `tensor` shares a key head, and splits the key head's cache by rows.
    """

    plan: Placement
    kv_row_shards: int = 1

    @property
    def row_groups(self) -> int:
        """Number of devices over all batch axes, which split the rows of the batch."""
        return math.prod(self.plan.size(axis) for axis in BATCH_AXES)

    def padded_rows(self, batch: int) -> int:
        """Return `batch` rounded up so that all devices that split rows of the batch or of caches get equal parts."""
        return round_to_multiple(batch, self.row_groups * self.kv_row_shards)

    def init(self, shapes: PyTree) -> PyTree:
        """Return empty sharded caches; `shapes` are the shapes of the unsplit caches."""
        pieces, tensor = self.plan.size(CONTEXT), self.plan.size(TENSOR)

        def padded_shape(names: str, x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
            sizes = dict(zip(_cache_dims(names), x.shape, strict=True))
            if "kv_seq" in sizes:
                sizes["kv_seq"] = round_to_multiple(sizes["kv_seq"], pieces)
            if "kv_heads" in sizes:
                # A layer that reads another layer's keys has a cache of 0 heads. Give this cache one head per device.
                sizes["kv_heads"] = max(sizes["kv_heads"], tensor)
            if "kv_heads" in sizes or self._is_split_by_kv_rows(x):
                sizes["batch"] //= self.kv_row_shards
            if _is_held_by_each_device(names, x) or self._is_split_by_kv_rows(x):
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
            if "heads" in used_axes and (_is_held_by_each_device(names, x) or self._is_split_by_kv_rows(x)):
                axes["batch"] = (*BATCH_AXES, TENSOR)
            return PartitionSpec(*axes.values())

        return jax.tree.map(spec_of, nn.dims(cache), cache)

    def put_row(self, cache: PyTree, rows: int, row: Int[Array, ""], single: PyTree) -> PyTree:
        """Return `cache`, which has `rows` rows, with its row of index `row` replaced by the only row of `single`.

        The devices that hold the row receive it from the devices that hold the row of `single`.
        """
        rows_per_device = self.padded_rows(rows) // self.row_groups
        specs = self.specs(cache)

        def put_on_device(cache: PyTree, row: Array, single: PyTree) -> PyTree:
            return jax.tree.map(
                lambda names, x, new: self._put_row(names, x, new, row, rows_per_device), names, cache, single
            )

        names = nn.dims(cache)
        run = filter_shard_map(put_on_device, self.plan.mesh, (specs, None, self.specs(single)), specs)
        return run(cache, row, single)

    def _put_row(self, names: str, x: Array, new: Array, row: Int[Array, ""], rows_per_device: int) -> Array:
        """Write the row of `new` over the row of index `row` of an array, if this device's part has that row.

        In `new`, the row is the first row of the first device along the batch axes.
        """
        axis = _cache_dims(names).index("batch")
        first = jax.lax.slice_in_dim(new, 0, 1, axis=axis)
        index, rows = row, x.shape[axis]
        if split_axes := tuple(mesh_axis for mesh_axis in BATCH_AXES if self.plan.size(mesh_axis) > 1):
            first = send.all_gather("cached rows", first, split_axes, stacks=True)[0]
            index = row - jax.lax.axis_index(split_axes) * rows_per_device
        if rows < rows_per_device:  # The devices that share a key head split the rows.
            row_shard = jax.lax.axis_index(TENSOR) % self.kv_row_shards
            gathered = send.all_gather("cached rows of shared key heads", first, TENSOR, stacks=True)
            first = gathered[jax.lax.axis_index(TENSOR) - row_shard]
            index = index - row_shard * rows
        updated = jax.lax.dynamic_update_slice_in_dim(x, first, jnp.clip(index, 0, rows - 1), axis)
        return jnp.where((index >= 0) & (index < rows), updated, x)

    def _is_split_by_kv_rows(self, x: ArrayOrShape) -> bool:
        """Return whether `tensor` splits the rows of an array: the array has positions, and devices share key heads."""
        return self.kv_row_shards > 1 and nn.is_position_array(x)


def run_on_cache_pieces(
    method: Callable[..., tuple[PyTree, PyTree]],
    model: nn.LanguageModel,
    plan: Placement,
    ids: Int[Array, "batch seq"],
    hidden_inputs: tuple[Float[Array, "batch seq embed"], ...],
    tokens: nn.Tokens,
    cache: PyTree,
) -> tuple[PyTree, PyTree]:
    """Return `method(model, ids, *hidden_inputs, tokens, cache)`; this device has a piece of each cache's slots."""
    pieces = plan.size(CONTEXT)
    if pieces > 1:
        # Compute the lengths of documents here, because a piece of the cache does not contain whole documents.
        lengths = jnp.broadcast_to(nn.document_lengths(tokens), ids.shape)
        tokens = dataclasses.replace(tokens, lengths=lengths)
        cache = nn.map_slot_caches(functools.partial(_as_piece, pieces=pieces), cache)
    results, cache = method(model, ids, *hidden_inputs, tokens, cache)
    return results, nn.map_slot_caches(lambda slots: dataclasses.replace(slots, first=None, capacity=None), cache)


def check_replicated_mixers(model: nn.LanguageModel) -> None:
    """Raise a `ValueError` if every device runs a mixer in full, although the heads of its cache are split."""
    for path, mixer in replicated_layers(model):
        if not isinstance(mixer, nn.Mixer):
            continue
        names = jax.tree.leaves(nn.dims(eqx.filter_eval_shape(mixer.init_cache, (1,), 2)))
        if head_dims := {"heads", "kv_heads"} & set(" ".join(map(str, names)).split()):
            raise ValueError(
                f"ShardedModel over {TENSOR}: the facts() of {path} declare no heads to split, but its cache has the "
                f"dims {' and '.join(head_dims)}, which are split; declare the heads in facts(), or rename the dims."
            )


def pad_batch(x: Int[Array, "batch seq"], rows: int, value: int) -> Int[Array, "padded_batch seq"]:
    """Pad an array with rows of `value` at the end, to `rows` rows."""
    return jnp.pad(x, [(0, rows - x.shape[0]), (0, 0)], constant_values=value)


def pad_tokens(tokens: nn.Tokens, rows: int) -> nn.Tokens:
    """Pad tokens at the end to `rows` rows; only the fields that a call with a cache reads are returned."""
    lengths = None if tokens.lengths is None else pad_batch(tokens.lengths, rows, 0)
    source = tokens.source
    if source is not None:
        widths = [(0, rows - len(source.values)), *[(0, 0)] * (source.values.ndim - 1)]
        source = nn.Source(jnp.pad(source.values, widths), pad_tokens(source.tokens, rows))
    return nn.Tokens(pad_batch(tokens.positions, rows, -1), lengths=lengths, source=source)


def round_to_multiple(size: int, divisor: int) -> int:
    """Round a size up to a multiple of `divisor`."""
    return -(-size // divisor) * divisor


def _as_piece(cache: nn.SlotCache, pieces: int) -> nn.SlotCache:
    """Mark a cache as this device's piece of a cache with `pieces` times as many slots."""
    *outer, size = cache.positions.shape
    first = jnp.broadcast_to(jax.lax.axis_index(CONTEXT) * size, outer).astype(jnp.int32)
    return dataclasses.replace(cache, first=vary_like(first, cache.positions), capacity=size * pieces)


def _cache_dims(names: str) -> list[str]:
    """Return the names of a cache's dims; the first is always the dim of layers."""
    return ["layers", *names.split()[1:]]


def _is_held_by_each_device(names: str, x: ArrayOrShape) -> bool:
    """Return whether an array has no heads or channels to split, so that each device of `tensor` has its own copy.

    The global array has the copies one after another, along the dim of rows.
    """
    return not nn.is_position_array(x) and not {*_SPLIT_DIMS} & {*_cache_dims(names)}


def count_kv_row_shards(model: PyTree, plan: Placement) -> int:
    """Return how many devices of `tensor` share each key head and split its cache by rows; 1 if caches are not split.

    Caches are split by rows if all mixers have the same number of devices per key head, allow the split
    (`MixerFacts.attends_by_rows`), and have no dim of heads outside of their linear maps (sinks, for example, have such
    a dim). In a pipeline, caches are not split, because microbatches already split the rows.
    """
    repeats = {_repeats(mixer, plan) for mixer in nn.modules(model, nn.Mixer)}
    if plan.size(PIPE) > 1 or len(repeats) != 1:
        return 1
    supported = jax.tree.map(_has_only_maps, model, nn.dims(model), is_leaf=_is_mixer)
    return repeats.pop() if jax.tree.all(supported) else 1


def repeat_key_heads(model: PyTree, plan: Placement) -> PyTree:
    """Repeat the key heads of a model, or of its shapes, until there is one for each device of `tensor`."""
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
    """Return the number of devices of `tensor` for each key head of a mixer, 1 if the key heads are not repeated."""
    kv_heads, devices = dim_size(mixer, "kv_heads"), plan.size(TENSOR)
    if not is_split(mixer) or kv_heads is None or kv_heads >= devices or devices % kv_heads:
        return 1
    return devices // kv_heads


def _is_mixer(node: object) -> bool:
    return isinstance(node, nn.Mixer)


def _has_only_maps(node: PyTree, names: PyTree) -> bool:
    """Return True for a mixer with `attends_by_rows` and with heads only in linear maps, and for any other node."""
    if not _is_mixer(node):
        return True
    if not node.facts().attends_by_rows:
        return False

    def names_outside_maps(child: PyTree, names: PyTree) -> str:
        return "" if nn.is_map(child) else str(names)

    names = jax.tree.leaves(jax.tree.map(names_outside_maps, node, names, is_leaf=nn.is_map))
    return not {"heads", "kv_heads"} & set(" ".join(names).split())
