"""Meshes with one axis for each way to split a model, and shardings of arrays over them from the names of dims.

Devices along the busiest axes are neighbors in the network; the axes that send least go over slow links.
`jax.make_mesh` refuses meshes that cut a side of a torus, and TPUs with two devices a chip, and does not say along
which sides of the torus an axis lies. So devices are placed here, by their coordinates alone.
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


# Names of the axes, spelled here and nowhere else.

REPLICA = "replica"  # Everything is replicated; the batch is split.
FSDP = "fsdp"  # The batch is split, and so is the training state.
EXPERT = "expert"  # The batch is split, and so are the experts of a mixture.
PIPE = "pipe"  # The layers are split.
CONTEXT = "context"  # The sequence is split.
TENSOR = "tensor"  # Heads, hidden features and the vocabulary are split.

AXES = (REPLICA, FSDP, EXPERT, PIPE, CONTEXT, TENSOR)
AXIS_TYPES = (jax.sharding.AxisType.Auto,) * len(AXES)
BATCH_AXES = (REPLICA, FSDP, EXPERT)

Device = Any
"""A `jax.Device`, or a description of one with its attributes."""
CALMEST_FIRST = (REPLICA, PIPE, FSDP, EXPERT, CONTEXT, TENSOR)
"""Axes in the order in which they go over the slow network: those that send least come first."""
RING_AXES = (PIPE, CONTEXT, TENSOR)
"""Axes whose devices pass messages round a ring."""


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

    No size is guessed: if the sizes do not multiply to the number of devices, a `ValueError` says how many devices are
    missing or left over. All other sizes make a mesh on every network. Neighbors along the last axes, `tensor` first,
    are the closest in the hardware. The axis `replica` goes over the slow network between slices of TPUs and hosts of
    GPUs (with `pipe`, then `fsdp`, if it is smaller than the number of slices or hosts).

    Args:
        replica: Devices among which rows are split and all state is replicated.
        fsdp: Devices among which rows and, by the plan's `zero`, state are split.
        expert: Devices among which rows and experts are split.
        pipe: Stages of a pipeline, among which layers are split.
        context: Devices among which a row's tokens are split.
        tensor: Devices among which heads and features are split.
        devices: Exactly the devices to use; None: all there are.
    """
    sizes = dict(zip(AXES, (replica, fsdp, expert, pipe, context, tensor), strict=True))
    call = f"make_mesh({', '.join(f'{axis}={size}' for axis, size in sizes.items() if size != 1)})"
    if wrong_sizes := {axis: size for axis, size in sizes.items() if size < 1}:
        raise ValueError(f"{call}: an axis has at least one device; change {wrong_sizes}.")
    devices = jax.devices() if devices is None else devices
    wanted, available = math.prod(sizes.values()), len(devices)
    if wanted > available:
        raise ValueError(
            f"{call}: the axes multiply to {wanted} devices, but there are {available}; make an axis smaller, or "
            f"simulate devices on a CPU (--simulate {-(-wanted // jax.process_count())}, or "
            "eqformer.prepare(devices=...))."
        )
    if wanted < available:
        idle = f"{available - wanted} of {available} devices would be left over"
        larger = replica * (available // wanted)
        fix = f"give them to an axis, such as replica={larger}, or " if available % wanted == 0 else ""
        raise ValueError(
            f"{call}: the axes multiply to {wanted} devices, and {idle}; {fix}pass "
            f"devices=jax.devices()[:{wanted}] to leave them idle (commands: --simulate on a CPU, "
            "CUDA_VISIBLE_DEVICES on GPUs)."
        )
    return jax.sharding.Mesh(arrange_devices(devices, tuple(sizes.values())), AXES, axis_types=AXIS_TYPES)


def axis_sizes(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> dict[str, int]:
    """Return the size of each axis by its name."""
    return dict(mesh.shape)


def arrange_devices(devices: Sequence[Device], sizes: Sequence[int]) -> np.ndarray:
    """Arrange devices in an array of shape `sizes`, a dim for each of `AXES`; the sizes multiply to their number.

    The axes that send least, `replica` first, go between several slices or hosts. Among devices that fast links join,
    each axis gets sides of their torus, the busiest, `tensor`, first: the cores of a chip, then whole sides as far as
    they fit, then pieces of sides. Devices of the axes that pass messages round a ring are in the order of a walk
    between neighbors, which ends beside its start if possible.
    """
    networks = _split_by_network(devices)
    slow_sizes = _split_over_networks(len(networks), sizes)
    fast_sizes = tuple(size // outer for size, outer in zip(sizes, slow_sizes, strict=True))
    blocks = np.stack([_arrange_torus(_torus(network), fast_sizes) for network in networks])
    blocks = blocks.reshape(*slow_sizes, *fast_sizes)
    slow_and_fast_dims = [dim for axis in range(len(sizes)) for dim in (axis, len(sizes) + axis)]
    return blocks.transpose(slow_and_fast_dims).reshape(sizes)


class TorusSteps(NamedTuple):
    """Numbers of devices in the successive steps of a collective over an axis; empty for a single step."""

    scatter: tuple[int, ...] = ()
    """Steps of a reduce-scatter; the devices of the last step are neighbors in the order of the axis."""
    gather: tuple[int, ...] = ()
    """Steps of an all-gather, which runs from the last to the first."""


def torus_steps(devices: np.ndarray, axis: str) -> TorusSteps:
    """Return the steps of scatters and gathers over an axis in which devices send the fewest bytes.

    `devices` are those of a mesh, in its shape. To scatter in one step among all devices of a square or a box of a
    torus, XLA's compiler for TPUs (libtpu 0.0.42, except on TPU7x) sums the whole array on every device. To gather in
    one step among the devices of a box (on TPU7x too, whose chips have two devices), it sums arrays that are zero
    except for a device's own piece. It sends only pieces if one step covers one side of the torus and another step the
    remaining sides.
    """
    line = np.moveaxis(devices, AXES.index(axis), -1).reshape(-1, devices.shape[AXES.index(axis)])[0]
    network, networks = _network(line[0]), [_network(device) for device in devices.ravel()]
    is_whole_network = all(_network(device) == network for device in line) and networks.count(network) == len(line)
    if line[0].platform != "tpu" or not is_whole_network:
        return TorusSteps()
    coords = np.array([_torus_coords(device) for device in line])
    long_sides = [side for side in (len(set(column)) for column in coords.T.tolist()) if side > 1]
    rows = coords.reshape(-1, long_sides[-1] if long_sides else 1, coords.shape[1])
    is_side = (rows != rows[:, :1]).any(axis=(0, 1)).sum() == 1
    steps = rows.shape[:2] if is_side else ()
    is_square, is_box = len(long_sides) == 2 and long_sides[0] == long_sides[1] >= 4, len(long_sides) > 2
    scatters = (is_square or is_box) and not line[0].device_kind.startswith("TPU7")
    return TorusSteps(steps if scatters else (), steps if is_box else ())


def _split_by_network(devices: Sequence[Device] | np.ndarray) -> list[list[Device]]:
    """Group devices that fast links join: slices of TPUs, hosts of GPUs; one group where these are unequal."""
    groups: dict[tuple[int, ...], list[Device]] = collections.defaultdict(list)
    for device in devices:
        groups[_network(device)].append(device)
    networks = [groups[key] for key in sorted(groups)]
    return networks if len(set(map(len, networks))) == 1 else [list(devices)]


def _network(device: Device) -> tuple[int, ...]:
    """Return an identifier of the fast network that a device is in: its slice and, for a GPU, its host."""
    slice_index = getattr(device, "slice_index", None) or 0
    if device.platform not in ("gpu", "cuda", "rocm"):
        return (slice_index,)
    # The coordinates of a GPU are its partition, its host, and its index in the host.
    coords = getattr(device, "coords", None)
    return (slice_index, *coords[:-1]) if coords else (slice_index, device.process_index)


def _split_over_networks(networks: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the number of pieces into which the slow network cuts each axis."""
    pieces = [1] * len(sizes)
    for axis in CALMEST_FIRST:
        index = AXES.index(axis)
        pieces[index] = math.gcd(networks, sizes[index])
        networks //= pieces[index]
    return tuple(pieces)


def _torus_coords(device: Device) -> tuple[int, ...]:
    return *device.coords, getattr(device, "core_on_chip", 0)


def _torus(devices: Sequence[Device]) -> np.ndarray:
    """Arrange devices by the sides of their torus, a chip's cores last; in a line if not TPUs, or with gaps."""
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
    """Arrange a torus' devices in an array with a dim for each axis."""
    unused, pieces = np.array(torus.shape), np.ones((len(sizes), torus.ndim), int)
    for axis in reversed(range(len(sizes))):
        pieces[axis] = _best_sides(torus.shape, unused, sizes[axis])
        unused = unused // pieces[axis]
    # Where axes share a side, the busier axis has neighbors: the innermost pieces are those of the last axis.
    cut = torus.reshape(pieces.T.ravel())
    arranged = cut.transpose(np.arange(cut.ndim).reshape(torus.ndim, len(sizes)).T.ravel()).reshape(sizes)
    for name in RING_AXES:
        axis = AXES.index(name)
        arranged = arranged.take(_walk([int(piece) for piece in pieces[axis] if piece > 1]), axis)
    return arranged


def _best_sides(shape: Sequence[int], unused: np.ndarray, size: int) -> tuple[int, ...]:
    """Return the length of each side of a torus that an axis of `size` devices gets, out of the `unused` lengths."""
    *torus, cores = shape if len(shape) > 1 else (*shape, 1)

    def rank(pieces: tuple[int, ...]) -> tuple:
        *sides, chip_cores = pieces if len(shape) > 1 else (*pieces, 1)
        cut_sides = sum(1 < piece < side for piece, side in zip(sides, torus, strict=True))
        return -min(chip_cores, cores), cut_sides, -sum(piece > 1 for piece in sides), [-piece for piece in sides]

    divisors = [[piece for piece in range(1, side + 1) if side % piece == 0] for side in unused.tolist()]
    fitting = [pieces for pieces in itertools.product(*divisors) if math.prod(pieces) == size]
    return min(fitting, key=rank)


def _walk(sides: Sequence[int]) -> list[int]:
    """Return a walk through all cells of a box, by their numbers, from neighbor to neighbor.

    In a rectangle with an even side the walk is round: it ends beside its start.
    """
    if len(sides) == 2 and not all(side % 2 for side in sides):
        rows, columns = sides
        if rows % 2:  # Only the other side is even: walk along it, in the transposed rectangle.
            transposed = np.arange(rows * columns).reshape(rows, columns).T.ravel()
            return [int(transposed[cell]) for cell in _walk((columns, rows))]
        outward: list[int] = []
        for row in range(rows):  # To and fro through all columns but the first, by which the walk comes back.
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
    """Mesh axis that splits each named dim: `Layout({"heads": "tensor", "mlp": "tensor", "layers": "pipe"})`.

    An axis splits at most one dim of an array. If several dims map to the same axis, the last of them is split; in a
    linear map (outputs, then inputs) this is a contracted dim. If an axis does not divide its dim, a dim in `lenient`
    stays whole, a dim in `moving` passes the axis to the largest other dim that the axis divides, and any other dim is
    an error. `fsdp_axis` is the axis of fully sharded state: it splits every array of at least `smallest` entries, on
    the largest dim that it divides, that no other axis splits, and that is no ensemble's.
    """

    dims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lenient: frozenset[str] = frozenset()
    fsdp_axis: str | None = None
    smallest: int = 1024
    moving: frozenset[str] = frozenset()


def partition_specs(model: PyTree, layout: Layout, mesh: Mesh | AbstractMesh) -> PyTree:
    """Return a tree like `model` with a `PartitionSpec` for each array, and None for all other leaves.

    Works on arrays and on shapes. Raises a `ValueError` that names the array, the dim, its size, the axis and its size
    where an axis does not divide a dim.
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
    """Return the axes that a spec splits each of its dims over; `()` for None."""
    return [as_tuple(entry or ()) for entry in spec or ()]


def axes_of(spec: PartitionSpec | None) -> frozenset[str]:
    """Return every axis that a spec splits over."""
    return frozenset(itertools.chain(*axes_by_dim(spec)))


def dim_over(spec: PartitionSpec | None, axis: str) -> int | None:
    """Return the dim that a spec splits over `axis`, or None."""
    return next((dim for dim, axes in enumerate(axes_by_dim(spec)) if axis in axes), None)


def init_sharded(
    make: Callable[..., PyTree], shardings: Callable[[PyTree], PyTree], *args: PyTree, shapes: PyTree | None = None
) -> PyTree:
    """Return `make(*args)`, computed by all devices together, each its own shards.

    No device, and no host, ever holds a whole model. `shardings` maps the shapes of the result to a tree of
    `NamedSharding`s; where these `shapes` are known already, `make` is traced once and not twice. Random numbers are
    functions of a key and an index in the array, so the values are those of one device, whatever the mesh.
    """
    shapes = eqx.filter_eval_shape(make, *args) if shapes is None else shapes
    lowered = lower_sharded(make, shardings, *args, shapes=shapes)
    run = lowered.compile(compiler_options=single_run_options(jax.default_backend()))
    return eqx.combine(run(), eqx.filter(shapes, is_shape, inverse=True))


def lower_sharded(
    make: Callable[..., PyTree], shardings: Callable[[PyTree], PyTree], *args: PyTree, shapes: PyTree | None = None
) -> jax.stages.Lowered:
    """Lower the program of `init_sharded`: `.compile().memory_analysis()` gives the bytes that each device needs."""
    shapes = eqx.filter_eval_shape(make, *args) if shapes is None else shapes
    with jax.default_device(None):
        return jax.jit(lambda: eqx.filter(make(*args), eqx.is_array), out_shardings=shardings(shapes)).lower()


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)


def _array_spec(
    layout: Layout, sizes: dict[str, int], path: str, names: list[str], shape: tuple[int, ...]
) -> PartitionSpec:
    """Return the spec of the array at `path` with dims of these `names`."""
    entries: list[str | None] = [None] * len(shape)
    used_axes: set[str] = set()
    # Axes that may split any free dim, and the least number of entries of an array for it.
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
                f"the layout splits dim {names[dim]!r} over axis {axis!r}, but {path} has {shape[dim]} of it and "
                f"the axis {sizes[axis]} devices; take an axis that divides the dim: {_divisors(shape[dim])}."
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
