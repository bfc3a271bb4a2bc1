"""Global values of arrays that devices compute in parts: activations of a model, and one vector per row in a loss.

The name of a dim says which mesh axes may split the dim. The sizes of the dim in the whole array and in a device's part
show which of these axes split the dim.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from .._shapes import ArrayOrShape
from . import _collectives as send
from ._context_attention import context_order
from ._mesh import AXES, BATCH_AXES, CONTEXT, EXPERT, TENSOR
from ._placement import Placement
from ._shard_map import take_local_slice, vary, vary_like, varying_axes


# Axes that may split a dim of an activation, in the order in which they split it; other dims are split over `tensor`.
_AXES_OF_DIM: dict[str, tuple[str, ...]] = {
    "layers": (),
    "batch": BATCH_AXES,
    "seq": (CONTEXT, TENSOR),
    "kv_seq": (CONTEXT,),
    "experts": (EXPERT, TENSOR),
}
_OTHER_DIM = (TENSOR,)
# If the axis does not divide the vocabulary, the vocabulary is padded. If there are fewer key heads than devices, equal
# groups of devices hold one key head each.
_PADDED_DIM, _SHARED_DIM = "vocab", "kv_heads"

ON_EACH_DEVICE = PartitionSpec(*AXES)
"""The spec of arrays that `stack_devices` returns."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The mesh axes that split each dim of a global array, and the axes over which devices hold copies.

    `copied` lists the axes that split no dim, although the type of the device's part varies over these axes. The copies
    may still be equal, for example after an all-gather.
    """

    axes: tuple[tuple[str, ...], ...]
    copied: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DeviceParts:
    """Conversions between global values and this device's parts of them; for use inside `filter_shard_map`.

    A global value has its tokens in reading order. `shape` and `dims` are the shape of the global value and the names
    of its dims, in the format of `nn.dims`. The methods raise a `ValueError` if no split of the dims gives the sizes
    of the part.
    """

    plan: Placement

    def gather(self, part: Shaped[Array, "..."], shape: tuple[int, ...], dims: str) -> Shaped[Array, "..."]:
        """Return the global value on each device; the backward pass sums the gradients of the devices' parts."""
        for dim, axes in enumerate(find_split(self.plan, part, shape, dims).axes):
            if axes:
                part = _take_first_copies(send.all_gather("values of all devices", part, axes, dim), dim, shape[dim])
            part = _reorder(self.plan, part, dim, dims, axes, to_reading=True)
        return part

    def take_local(self, value: Shaped[Array, "..."], part: Shaped[Array, "..."], dims: str) -> Shaped[Array, "..."]:
        """Return this device's part of a global value.

        `part` has the shape and the varying axes of the result.
        """
        for dim, axes in enumerate(find_split(self.plan, part, value.shape, dims).axes):
            value = _reorder(self.plan, value, dim, dims, axes, to_reading=False)
            if axes:
                # Repeat the entries of a shared dim and pad a padded dim, so that all devices get slices of one size.
                size = part.shape[dim] * _product(self.plan, axes)
                value = jnp.repeat(value, max(1, size // value.shape[dim]), dim)
                value = jnp.pad(value, [(0, size - value.shape[dim] if i == dim else 0) for i in range(value.ndim)])
                value = take_local_slice(vary(value, axes), axes, dim)
        return vary_like(value, part)


def _reorder(plan: Placement, x: Array, dim: int, dims: str, axes: tuple[str, ...], *, to_reading: bool) -> Array:
    """Move the tokens of a dim of a global array from the order of `context_order` to reading order, or back.

    Only the dim `seq` is in the order of `context_order`; the slots of caches, `kv_seq`, are in order.
    """
    if CONTEXT not in axes or dims.split()[dim] == "kv_seq":
        return x
    order = context_order(plan.context_method, x.shape[dim], plan.size(CONTEXT))
    return jnp.take(x, np.argsort(order) if to_reading else order, axis=dim)


def _take_first_copies(x: Array, dim: int, size: int) -> Array:
    """Keep the first copy of each of the `size` entries of a dim that repeats every entry equally often, as in AABBCC.

    Padding at the end of the dim is dropped.
    """
    copies = max(1, x.shape[dim] // max(1, size))
    return jax.lax.slice_in_dim(x, 0, size * copies, copies, dim)


def _product(plan: Placement, axes: tuple[str, ...]) -> int:
    return math.prod(plan.size(axis) for axis in axes)


def find_split(plan: Placement, part: ArrayOrShape, shape: tuple[int, ...], dims: str) -> Split:
    """Return the `Split` of a global array with this shape, given one device's part."""
    return find_split_of_shapes(plan, part.shape, varying_axes(part), shape, dims)


def find_split_of_shapes(
    plan: Placement, part_shape: tuple[int, ...], varying: frozenset[str], shape: tuple[int, ...], dims: str
) -> Split:
    """Return the `Split` of a global array with this shape, given the shape and varying axes of one device's part."""
    free = [axis for axis in AXES if axis in varying and plan.size(axis) > 1]
    axes_by_dim: list[tuple[str, ...]] = []
    for name, size, part_size in zip(dims.split(), shape, part_shape, strict=True):
        candidates = [axis for axis in _AXES_OF_DIM.get(name, _OTHER_DIM) if axis in free]
        axes = _axes_that_split(plan, candidates, name, size, part_size)
        if axes is None:
            raise ValueError(
                f"the dims {dims!r} have the sizes {shape} in the global value and {part_shape} on each device; no "
                f"split of {name!r} over {' and '.join(candidates) or 'no axis'} gives these sizes, so the parts "
                "cannot be joined; request another module's value."
            )
        free = [axis for axis in free if axis not in axes]
        axes_by_dim.append(axes)
    return Split(tuple(axes_by_dim), tuple(free))


def _axes_that_split(
    plan: Placement, candidates: list[str], name: str, size: int, part_size: int
) -> tuple[str, ...] | None:
    """Return the fewest candidate axes that split a dim into parts of `part_size`; None if no candidates do."""
    for count in range(len(candidates) + 1):
        for axes in itertools.combinations(candidates, count):
            pieces = _product(plan, axes)
            is_padded = name == _PADDED_DIM and part_size == -(-size // pieces)
            is_shared = name == _SHARED_DIM and part_size == 1 and pieces % size == 0
            if part_size * pieces == size or is_padded or is_shared:
                return axes
    return None


def stack_devices(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return a device's array with a leading dim of size 1 for each mesh axis; its spec is `ON_EACH_DEVICE`."""
    return vary(x, AXES)[(None,) * len(AXES)]


def join_parts(
    plan: Placement, parts: Shaped[Array, "..."], split: Split, shape: tuple[int, ...], dims: str
) -> Shaped[Array, "..."]:
    """Join the parts that `stack_devices` returned on all devices into the global array.

    `shape` and `dims` are the shape of the global array and the names of its dims. Entries whose copies differ between
    devices become NaN, the smallest integer, or False.
    """
    used = [axis for axes in split.axes for axis in axes]
    copied = [AXES.index(axis) for axis in split.copied]
    equal = [index for index, axis in enumerate(AXES) if axis not in used and index not in copied]
    # Move the device dims of the axes that split a dim in front of this dim, and all other device dims to the front.
    order = [*equal, *copied]
    for dim, axes in enumerate(split.axes):
        order += [*map(AXES.index, axes), len(AXES) + dim]
    sizes = [parts.shape[len(AXES) + dim] * _product(plan, axes) for dim, axes in enumerate(split.axes)]
    copies = parts.transpose(order)[(0,) * len(equal)].reshape(-1, *sizes)
    value = copies[0]
    if copied:
        differs = jnp.any(jax.lax.stop_gradient(copies) != jax.lax.stop_gradient(value), axis=0)
        is_float = jnp.issubdtype(value.dtype, jnp.inexact)
        value = jnp.where(differs, jnp.asarray(jnp.nan if is_float else _smallest(value.dtype), value.dtype), value)
    for dim, axes in enumerate(split.axes):
        value = _reorder(plan, _take_first_copies(value, dim, shape[dim]), dim, dims, axes, to_reading=True)
    return value


def _smallest(dtype: jnp.dtype) -> int:
    return 0 if dtype == jnp.bool_ else int(jnp.iinfo(dtype).min)


# Vectors of rows, in a loss over a mesh.


def sum_row_vectors(x: Float[Array, "batch seq embed"]) -> tuple[Float[Array, "batch embed"], int]:
    """Return the sum of each row's tokens over all devices, and the number of devices that share a row.

    All devices that share a row compute the loss of the row's vector, so the caller divides the loss by the number of
    devices. The gradients then equal the gradients on one device. Outside of `shard_map`, return the sums of `x`, and
    1.
    """
    sums, devices = jnp.sum(x, axis=1), 1
    if CONTEXT in varying_axes(x):
        # Mark the sum as varying, so that its gradient is added up over the devices that share the row.
        sums = vary(send.psum("row vectors", sums, CONTEXT), (CONTEXT,))
        devices = jax.lax.axis_size(CONTEXT)
    return replicate_rows(sums), devices


def replicate_rows(x: Float[Array, "batch *features"]) -> Float[Array, "batch *features"]:
    """Return row values that all `tensor` devices computed identically, marked as replicated over `tensor`.

    The result is the `pmean` of `x` over `tensor`, so each of the n devices gets `1/n` of the gradient.
    """
    return send.pmean("row vectors over tensor", x, TENSOR) if TENSOR in varying_axes(x) else x


def gather_rows(x: Float[Array, "batch embed"]) -> tuple[Float[Array, "rows embed"], int | Int[Array, ""]]:
    """Return the rows of all devices that split the batch, and the index of this device's first row among them.

    The backward pass sums each row's gradients over the devices and returns the sum to the row's device. Outside of
    `shard_map`, return the rows of `x`, and 0.
    """
    axes = tuple(axis for axis in BATCH_AXES if axis in varying_axes(x))
    if not axes:
        return x, 0
    return send.all_gather("vectors of all rows", x, axes), jax.lax.axis_index(axes) * len(x)
