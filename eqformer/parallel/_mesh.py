"""Meshes with one axis for each way to split a model, and shardings of arrays from the names of their dims.

The links between TPU chips form a torus, a grid whose sides close into rings. `make_mesh` arranges devices by their
coordinates in the torus: neighbors along the axes with most traffic are neighbors in the torus, and the axes with
least traffic cross the slow network between slices or hosts. `jax.make_mesh` is not used: on most TPUs it cannot split
one side of the torus over two axes, and it does not tell along which sides an axis lies.
"""

import collections
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .. import nn
from .._prepare import single_run_options
from .._shapes import as_tuple, ENSEMBLE_DIMS, is_shape


# Names of the axes. All other code uses these constants.

REPLICA = "replica"  # Everything is replicated; the batch is split.
FSDP = "fsdp"  # The batch and the training state are split.
EXPERT = "expert"  # The batch and the experts of mixtures are split.
PIPE = "pipe"  # The layers are split.
CONTEXT = "context"  # The sequence is split.
TENSOR = "tensor"  # Heads, hidden features and the vocabulary are split.

AXES = (REPLICA, FSDP, EXPERT, PIPE, CONTEXT, TENSOR)
AXIS_TYPES = (jax.sharding.AxisType.Auto,) * len(AXES)
BATCH_AXES = (REPLICA, FSDP, EXPERT)

Device = Any
"""A `jax.Device`, or an object with the same attributes."""
LEAST_TRAFFIC_FIRST = (REPLICA, PIPE, FSDP, EXPERT, CONTEXT, TENSOR)
"""Axes in the order in which they are laid over the slow network: the axis with least traffic comes first."""
RING_AXES = (PIPE, CONTEXT, TENSOR)
"""Axes along which each device sends messages to the next device, and the last device to the first."""


def make_mesh(
    *,
    replica: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    pipe: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[Device] | None = None,
) -> jax.sharding.Mesh:
    """Make a mesh with all six axes, most of size 1.

    Raises a `ValueError` if the sizes do not multiply to the number of devices; the message says how many are missing
    or left over. Any sizes with the right product work on every network. Neighbors along `tensor` are closest in the
    hardware, then neighbors along `context`, and so on in reverse order of the arguments. The axis `replica` crosses
    the slow network between slices of TPUs or hosts of GPUs. If `replica` is smaller than the number of slices or
    hosts, `pipe` crosses the network too, then `fsdp`.

    Args:
        replica: Number of devices that split the batch, each with all training state.
        fsdp: Number of devices that split the batch and the training state (the plan's `zero` says which parts of the
            state).
        expert: Number of devices that split the batch and the experts.
        pipe: Number of pipeline stages, which split the layers.
        context: Number of devices that split the tokens of a row.
        tensor: Number of devices that split heads, hidden features and the vocabulary.
        devices: The devices to use, all of them; None for `jax.devices()`.
    """
    sizes = dict(zip(AXES, (replica, fsdp, expert, pipe, context, tensor), strict=True))
    call = f"make_mesh({', '.join(f'{axis}={size}' for axis, size in sizes.items() if size != 1)})"
    if wrong_sizes := {axis: size for axis, size in sizes.items() if size < 1}:
        raise ValueError(f"{call}: an axis has at least one device, but got {wrong_sizes}; give 1 or more.")
    devices = jax.devices() if devices is None else devices
    needed, available = math.prod(sizes.values()), len(devices)
    if needed > available:
        raise ValueError(
            f"{call}: the axes multiply to {needed} devices, but there are {available}; make an axis smaller, or "
            f"simulate devices on a CPU (--simulate {-(-needed // jax.process_count())}, or "
            "eqformer.prepare(devices=...))."
        )
    if needed < available:
        idle = f"{available - needed} of {available} devices would be left over"
        larger = replica * (available // needed)
        fix = f"give them to an axis, such as replica={larger}, or " if available % needed == 0 else ""
        raise ValueError(
            f"{call}: the axes multiply to {needed} devices, and {idle}; {fix}pass "
            f"devices=jax.devices()[:{needed}] to leave them idle (commands: --simulate on a CPU, "
            "CUDA_VISIBLE_DEVICES on GPUs)."
        )
    return jax.sharding.Mesh(arrange_devices(devices, tuple(sizes.values())), AXES, axis_types=AXIS_TYPES)


def axis_sizes(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> dict[str, int]:
    """Return the size of each axis by its name."""
    return dict(mesh.shape)


def arrange_devices(devices: Sequence[Device], sizes: Sequence[int]) -> np.ndarray:
    """Arrange devices in an array of shape `sizes`, with a dim for each of `AXES`.

    The sizes multiply to the number of devices. The axes with least traffic, `replica` first, are laid across slices or
    hosts. Within a slice or host, each axis gets sides of the torus, and `tensor` chooses first: it takes the cores of
    a chip, then whole sides if they fit, then pieces of sides. Devices along a ring axis follow a path from neighbor to
    neighbor, which ends beside its start if possible.
    """
    networks = _split_by_network(devices)
    slow_sizes = _split_over_networks(len(networks), sizes)
    fast_sizes = tuple(size // outer for size, outer in zip(sizes, slow_sizes, strict=True))
    blocks = np.stack([_arrange_torus(_torus(network), fast_sizes) for network in networks])
    blocks = blocks.reshape(*slow_sizes, *fast_sizes)
    slow_and_fast_dims = [dim for axis in range(len(sizes)) for dim in (axis, len(sizes) + axis)]
    return blocks.transpose(slow_and_fast_dims).reshape(sizes)


class TorusSteps(NamedTuple):
    """Group sizes of the steps of a collective over an axis; an empty tuple means one step over the whole axis."""

    scatter: tuple[int, ...] = ()
    """Group sizes of a reduce-scatter's steps, in order. The groups of the last step are neighbors along the axis."""
    gather: tuple[int, ...] = ()
    """Group sizes of an all-gather's steps, which run from the last entry to the first."""


def torus_steps(devices: np.ndarray, axis: str) -> TorusSteps:
    """Return steps for reduce-scatters and all-gathers over an axis, so that devices send the fewest bytes.

    `devices` has the shape of the mesh. XLA's compiler for TPUs (libtpu 0.0.42) turns some collectives over a whole
    torus into an all-reduce of the full array: reduce-scatters over a two-dimensional square or over at least three
    dimensions (except on TPU7x), and all-gathers over at least three dimensions. For these collectives the result has
    two steps, in which devices send only pieces: one step along one side of the torus, the other over the remaining
    sides. The two cores of a TPU7x chip count as a side.
    """
    axis_devices = np.moveaxis(devices, AXES.index(axis), -1).reshape(-1, devices.shape[AXES.index(axis)])[0]
    first, networks = axis_devices[0], [_network(device) for device in devices.ravel()]
    is_one_network = all(_network(device) == _network(first) for device in axis_devices)
    is_whole_network = is_one_network and networks.count(_network(first)) == len(axis_devices)
    if first.platform != "tpu" or not is_whole_network:
        return TorusSteps()
    coords = np.array([_torus_coords(device) for device in axis_devices])
    long_sides = [side for side in (len(set(column)) for column in coords.T.tolist()) if side > 1]
    # Cut the axis into lines of consecutive devices. A line lies along one side if only one coordinate changes in it.
    lines = coords.reshape(-1, long_sides[-1] if long_sides else 1, coords.shape[1])
    lie_along_one_side = (lines != lines[:, :1]).any(axis=(0, 1)).sum() == 1
    steps = lines.shape[:2] if lie_along_one_side else ()
    is_square = len(long_sides) == 2 and long_sides[0] == long_sides[1] >= 4
    is_box = len(long_sides) > 2
    scatters_in_steps = (is_square or is_box) and not first.device_kind.startswith("TPU7")
    return TorusSteps(steps if scatters_in_steps else (), steps if is_box else ())


def _split_by_network(devices: Sequence[Device] | np.ndarray) -> list[list[Device]]:
    """Group devices by fast network (a TPU slice or a GPU host); return one group if networks differ in size."""
    groups: dict[tuple[int, ...], list[Device]] = collections.defaultdict(list)
    for device in devices:
        groups[_network(device)].append(device)
    networks = [groups[key] for key in sorted(groups)]
    return networks if len(set(map(len, networks))) == 1 else [list(devices)]


def _network(device: Device) -> tuple[int, ...]:
    """Return an identifier of a device's fast network: the slice and, for a GPU, the host."""
    slice_index = getattr(device, "slice_index", None) or 0
    if device.platform not in ("gpu", "cuda", "rocm"):
        return (slice_index,)
    # The coordinates of a GPU are its partition, its host, and its index in the host.
    coords = getattr(device, "coords", None)
    return (slice_index, *coords[:-1]) if coords else (slice_index, device.process_index)


def _split_over_networks(networks: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the number of fast networks that each axis spans; the product of these numbers is `networks`."""
    pieces = [1] * len(sizes)
    for axis in LEAST_TRAFFIC_FIRST:
        index = AXES.index(axis)
        pieces[index] = math.gcd(networks, sizes[index])
        networks //= pieces[index]
    return tuple(pieces)


def _torus_coords(device: Device) -> tuple[int, ...]:
    """Return the coordinates of a device in its torus; the last is the core of the chip."""
    return *device.coords, getattr(device, "core_on_chip", 0)


def _torus(devices: Sequence[Device]) -> np.ndarray:
    """Arrange devices in an array with a dim for each side of the torus, the cores of a chip last.

    If the devices are not TPUs, or leave gaps in the torus, the array has one dim.
    """
    line = np.empty(len(devices), object)
    line[:] = devices
    if devices[0].platform == "gpu":
        line[:] = sorted(devices, key=operator.attrgetter("id"))
    if devices[0].platform != "tpu" or getattr(devices[0], "coords", None) is None:
        return line
    coords = np.array([_torus_coords(device) for device in devices])
    shape = tuple(coords.max(0) - coords.min(0) + 1)
    if math.prod(shape) != len(devices) or len(np.unique(coords, axis=0)) != len(devices):
        return line
    torus = np.empty(shape, object)
    torus[tuple((coords - coords.min(0)).T)] = line
    return torus


def _arrange_torus(torus: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Arrange the devices of a torus in an array with a dim for each axis."""
    unused, lengths = np.array(torus.shape), np.ones((len(sizes), torus.ndim), int)
    for axis in reversed(range(len(sizes))):
        lengths[axis] = _choose_lengths(torus.shape, unused, sizes[axis])
        unused = unused // lengths[axis]
    # If several axes share a side, the last of these axes (the axis with most traffic) gets adjacent devices.
    split = torus.reshape(lengths.T.ravel())  # For each side of the torus, a dim for each axis.
    arranged = split.transpose(np.arange(split.ndim).reshape(torus.ndim, len(sizes)).T.ravel()).reshape(sizes)
    for name in RING_AXES:
        axis = AXES.index(name)
        arranged = arranged.take(_neighbor_path([int(length) for length in lengths[axis] if length > 1]), axis)
    return arranged


def _choose_lengths(shape: Sequence[int], unused: np.ndarray, size: int) -> tuple[int, ...]:
    """Return the length along each side of a torus that an axis of `size` devices gets.

    `unused` are the lengths that no axis has taken yet. The choice prefers, in this order: many cores of each chip, few
    partly used sides, many used sides, and great lengths along the first sides.
    """
    *torus, cores = shape if len(shape) > 1 else (*shape, 1)

    def rank(lengths: tuple[int, ...]) -> tuple:
        *chip_lengths, chip_cores = lengths if len(shape) > 1 else (*lengths, 1)
        split_sides = sum(1 < length < side for length, side in zip(chip_lengths, torus, strict=True))
        used_sides = sum(length > 1 for length in chip_lengths)
        return -min(chip_cores, cores), split_sides, -used_sides, [-length for length in chip_lengths]

    divisors = [[length for length in range(1, side + 1) if side % length == 0] for side in unused.tolist()]
    fitting = [lengths for lengths in itertools.product(*divisors) if math.prod(lengths) == size]
    return min(fitting, key=rank)


def _neighbor_path(sides: Sequence[int]) -> list[int]:
    """Return the cells of a box, numbered in row-major order, in the order of a path from neighbor to neighbor.

    In a rectangle with an even side the path is closed: it ends beside its start.
    """
    if len(sides) == 2 and not all(side % 2 for side in sides):
        rows, columns = sides
        if rows % 2:  # Only the number of columns is even: transpose the rectangle.
            transposed = np.arange(rows * columns).reshape(rows, columns).T.ravel()
            return [int(transposed[cell]) for cell in _neighbor_path((columns, rows))]
        outward: list[int] = []
        for row in range(rows):  # Zigzag down through all columns but the first, then return up the first column.
            cells = range(row * columns + 1, (row + 1) * columns)
            outward += cells if row % 2 == 0 else reversed(cells)
        return [0, *outward, *(row * columns for row in range(rows - 1, 0, -1))]
    order = [0]
    for side in reversed(sides):
        count = len(order)
        order = [row * count + cell for row in range(side) for cell in (order if row % 2 == 0 else order[::-1])]
    return order


@dataclasses.dataclass(frozen=True)
class Layout:
    """Map from names of dims to the mesh axes that split them: `Layout({"heads": "tensor", "layers": "pipe"})`.

    An axis splits at most one dim of an array. If several dims of an array map to the same axis, only the last of these
    dims is split. In the weight of a linear map, whose dims are outputs and then inputs, this is a dim of inputs. If
    the size of an axis does not divide the size of its dim, there are three cases. A dim in `lenient` is not split. If
    the dim is in `moving`, the axis splits another dim of the array. Any other dim raises a `ValueError`. `fsdp_axis`
    needs no entry in `dims`, and splits one dim of every array with at least `smallest` entries: the largest dim that
    `fsdp_axis` divides and that no other axis splits, but never `layers` or `experts`. If there is no such dim, the
    array is not split. An axis that cannot split its dim in `moving` chooses the other dim by the same rule, but in
    arrays of any size.
    """

    dims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lenient: frozenset[str] = frozenset()
    fsdp_axis: str | None = None
    smallest: int = 1024
    moving: frozenset[str] = frozenset()


def partition_specs(model: PyTree, layout: Layout, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return a tree like `model` with a `PartitionSpec` for each array, and None for all other leaves.

    The leaves may be arrays or shapes. Raises a `ValueError` if an axis does not divide a dim that is neither `lenient`
    nor `moving`; the message has the path of the array, the dim, the axis and their sizes.
    """
    sizes = axis_sizes(mesh)
    for name, axis in layout.dims.items():
        if axis not in sizes:
            raise ValueError(f"Layout({{{name!r}: {axis!r}}}): the mesh has no such axis; its axes are {list(sizes)}.")
    if layout.fsdp_axis not in (None, *sizes):
        raise ValueError(
            f"Layout(fsdp_axis={layout.fsdp_axis!r}): the mesh has no such axis; its axes are {list(sizes)}."
        )
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    names = jax.tree.leaves(nn.dims(model))
    specs = [
        _array_spec(layout, sizes, nn.path_name(path), name.split(), leaf.shape) if nn.has_shape(leaf) else None
        for (path, leaf), name in zip(leaves, names, strict=True)
    ]
    return jax.tree.unflatten(structure, specs)


def shardings(specs: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return the `NamedSharding` of each `PartitionSpec`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def is_spec(node: object) -> TypeGuard[PartitionSpec]:
    """Return whether a node is a `PartitionSpec`."""
    return isinstance(node, PartitionSpec)


def axes_by_dim(spec: PartitionSpec | None) -> list[tuple[str, ...]]:
    """Return, for each dim of a spec, the axes that split the dim; `()` for None."""
    return [as_tuple(entry or ()) for entry in spec or ()]


def axes_of(spec: PartitionSpec | None) -> frozenset[str]:
    """Return all axes in a spec."""
    return frozenset(itertools.chain(*axes_by_dim(spec)))


def dim_over(spec: PartitionSpec | None, axis: str) -> int | None:
    """Return the index of the dim that a spec splits over `axis`, or None."""
    return next((dim for dim, axes in enumerate(axes_by_dim(spec)) if axis in axes), None)


def init_sharded(
    make: Callable[..., PyTree], shardings: Callable[[PyTree], PyTree], *args: PyTree, shapes: PyTree | None = None
) -> PyTree:
    """Return `make(*args)` in shards: every device computes only its own shards of each array.

    No device or host ever holds a whole model. `shardings` maps the shapes of the result to a tree of `NamedSharding`s.
    If these `shapes` are passed, `make` is traced once instead of twice. JAX's random numbers depend on the key and on
    the index in the array, so the values are the same on every mesh.
    """
    shapes = eqx.filter_eval_shape(make, *args) if shapes is None else shapes
    lowered = lower_sharded(make, shardings, *args, shapes=shapes)
    run = lowered.compile(compiler_options=single_run_options(jax.default_backend()))
    return eqx.combine(run(), eqx.filter(shapes, is_shape, inverse=True))


def lower_sharded(
    make: Callable[..., PyTree], shardings: Callable[[PyTree], PyTree], *args: PyTree, shapes: PyTree | None = None
) -> jax.stages.Lowered:
    """Lower the program of `init_sharded`, to compile it or to read its memory from `compile().memory_analysis()`."""
    shapes = eqx.filter_eval_shape(make, *args) if shapes is None else shapes
    with jax.default_device(None):
        return jax.jit(lambda: eqx.filter(make(*args), eqx.is_array), out_shardings=shardings(shapes)).lower()


def _list_divisors(size: int) -> str:
    """Return the divisors of a size, up to 64, as text."""
    return ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)


def _array_spec(
    layout: Layout, sizes: dict[str, int], path: str, names: list[str], shape: tuple[int, ...]
) -> PartitionSpec:
    """Return the spec of the array at `path`, with these names of dims and this shape."""
    entries: list[str | None] = [None] * len(shape)
    used_axes: set[str] = set()
    # The axes that may split any free dim, each with the number of entries that an array must have to be split.
    any_dim_axes = dict.fromkeys(() if layout.fsdp_axis is None else (layout.fsdp_axis,), layout.smallest)
    for dim in reversed(range(len(shape))):
        axis = layout.dims.get(names[dim])
        if axis is None or axis in used_axes or sizes[axis] == 1:
            continue
        if shape[dim] % sizes[axis]:
            if names[dim] in layout.lenient:
                continue
            if names[dim] in layout.moving:
                any_dim_axes[axis] = 0
                continue
            raise ValueError(
                f"the layout splits dim {names[dim]!r} over axis {axis!r}, but the dim has size {shape[dim]} in {path} "
                f"and the axis has {sizes[axis]} devices; take an axis that divides {shape[dim]}: "
                f"{_list_divisors(shape[dim])}."
            )
        entries[dim] = axis
        used_axes.add(axis)
    for axis, smallest in any_dim_axes.items():
        free_dims = [
            dim
            for dim, size in enumerate(shape)
            if entries[dim] is None and names[dim] not in ENSEMBLE_DIMS and size % sizes[axis] == 0
        ]
        if free_dims and axis not in used_axes and sizes[axis] > 1 and math.prod(shape) >= smallest:
            entries[max(free_dims, key=lambda dim: shape[dim])] = axis
            used_axes.add(axis)
    return PartitionSpec(*entries)
