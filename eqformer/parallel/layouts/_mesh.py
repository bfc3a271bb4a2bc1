"""Devices as a grid with one axis for each way to split a model."""

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from .._axes import AXES, CONTEXT, EXPERT, FSDP, PIPE, REPLICA, TENSOR


def make_mesh(
    *,
    replica: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    pipe: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh with all six axes, most of size 1.

    Nothing is guessed: a product that is not the number of devices raises a `ValueError` that says how many are
    missing or left over. Whatever the devices' network is, every other product makes a mesh: neighbours along the last
    axes, `tensor` first, are the closest in the hardware, and `replica` goes over the slow network between slices of
    TPUs and hosts of GPUs (with `pipe`, then `fsdp`, where it is smaller than their number).

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
    if wrong := {axis: size for axis, size in sizes.items() if size < 1}:
        raise ValueError(f"{call}: an axis has at least one device; change {wrong}.")
    devices = jax.devices() if devices is None else devices
    wanted, there = math.prod(sizes.values()), len(devices)
    if wanted > there:
        raise ValueError(
            f"{call}: the axes multiply to {wanted} devices, but there are {there}; make an axis smaller, or simulate "
            f"devices on a CPU (--simulate {-(-wanted // jax.process_count())}, or eqformer.prepare(devices=...))."
        )
    if wanted < there:
        left = f"{there - wanted} of {there} devices would be left over"
        fix = f"give them to an axis, such as replica={replica * (there // wanted)}" if there % wanted == 0 else ""
        raise ValueError(
            f"{call}: the axes multiply to {wanted} devices, and {left}; "
            f"{fix + ', or ' if fix else ''}pass devices=jax.devices()[:{wanted}] to leave them idle (commands: "
            "--simulate on a CPU, CUDA_VISIBLE_DEVICES on GPUs)."
        )
    return Mesh(arranged(devices, tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_sizes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """The size of each axis by its name."""
    return dict(mesh.shape)


Device = Any
# Axes over the slow network, those that send least first; and those whose devices pass messages round a ring.
_CALMEST = (REPLICA, PIPE, FSDP, EXPERT, CONTEXT, TENSOR)
_RINGS = (PIPE, CONTEXT, TENSOR)


def arranged(devices: Sequence[Device], sizes: Sequence[int]) -> np.ndarray:
    """The devices in an array with a dim of each of these sizes, one for each of `AXES`; they multiply to as many.

    Devices of several slices or hosts are told apart by the axes that send least, `replica` first. Among those that
    fast links join, each axis gets sides of their torus, the busiest, `tensor`, first: the cores of a chip, then whole
    sides as far as they fit, then pieces of sides. Devices of the axes that pass messages round are in the order of a
    walk between neighbours, which ends beside its start where it can.
    """
    groups = _joined(devices)
    slow = _over_groups(len(groups), sizes)
    fast = tuple(size // outer for size, outer in zip(sizes, slow, strict=True))
    blocks = np.stack([_placed(_grid(group), fast) for group in groups]).reshape(*slow, *fast)
    both = [place for axis in range(len(sizes)) for place in (axis, len(sizes) + axis)]
    return blocks.transpose(both).reshape(sizes)


class Steps(NamedTuple):
    """How many devices each step of a collective over an axis has, one after another; none: it is done at once."""

    scatter: tuple[int, ...] = ()
    """Those of a reduce-scatter, the last of neighbours in the axis' order."""
    gather: tuple[int, ...] = ()
    """Those of an all-gather, which takes them from the last to the first."""


def torus_steps(devices: np.ndarray, axis: str) -> Steps:
    """The steps in which an axis is best scattered and gathered over.

    `devices` are those of a mesh, in its shape. To scatter among all devices of a square or a box of a torus at once,
    XLA's compiler for TPUs (libtpu 0.0.42, but for TPU7x) sums the whole on every device; to gather among those of a
    box (on TPU7x too, whose chips have two), it sums what is zero but for a device's own. It does as it is told where a
    step has one side of the torus and another step the rest.
    """
    line = np.moveaxis(devices, AXES.index(axis), -1).reshape(-1, devices.shape[AXES.index(axis)])[0]
    own, networks = _network(line[0]), [_network(device) for device in devices.ravel()]
    is_one = all(_network(device) == own for device in line) and networks.count(own) == len(line)
    if line[0].platform != "tpu" or not is_one:
        return Steps()
    places = np.array([_place(device) for device in line])
    long = [side for side in (len(set(column)) for column in places.T.tolist()) if side > 1]
    along = places.reshape(-1, long[-1] if long else 1, places.shape[1])
    is_side = (along != along[:, :1]).any(axis=(0, 1)).sum() == 1
    steps = along.shape[:2] if is_side else ()
    is_square, is_box = len(long) == 2 and long[0] == long[1] >= 4, len(long) > 2
    scatters = (is_square or is_box) and not line[0].device_kind.startswith("TPU7")
    return Steps(steps if scatters else (), steps if is_box else ())


def _joined(devices: Sequence[Device] | np.ndarray) -> list[list[Device]]:
    """The devices in groups that fast links join: slices of TPUs, hosts of GPUs; one where these are unequal."""
    groups: dict[Any, list[Device]] = collections.defaultdict(list)
    for device in devices:
        groups[_network(device)].append(device)
    found = [groups[key] for key in sorted(groups)]
    return found if len(set(map(len, found))) == 1 else [list(devices)]


def _network(device: Device) -> tuple[int, ...]:
    piece = getattr(device, "slice_index", None) or 0
    if device.platform not in ("gpu", "cuda", "rocm"):
        return (piece,)
    coords = getattr(device, "coords", None)  # of a GPU: its partition, its host, and its place there
    return (piece, *coords[:-1]) if coords else (piece, device.process_index)


def _over_groups(groups: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Into how many pieces each axis is cut by the slow network."""
    cut = [1] * len(sizes)
    for axis in _CALMEST:
        place = AXES.index(axis)
        cut[place] = math.gcd(groups, sizes[place])
        groups //= cut[place]
    return tuple(cut)


def _place(device: Device) -> tuple[int, ...]:
    return *device.coords, getattr(device, "core_on_chip", 0)


def _grid(devices: Sequence[Device]) -> np.ndarray:
    """The devices in the sides of their torus, a chip's cores last; in a line if they are no TPUs, or have gaps."""
    line = np.empty(len(devices), object)
    line[:] = devices
    if devices[0].platform == "gpu":
        line[:] = sorted(devices, key=lambda device: device.id)
    if devices[0].platform != "tpu" or getattr(devices[0], "coords", None) is None:
        return line
    places = np.array([_place(device) for device in devices])
    shape = tuple(places.max(0) - places.min(0) + 1)
    if math.prod(shape) != len(devices) or len(np.unique(places, axis=0)) != len(devices):
        return line
    grid = np.empty(shape, object)
    grid[tuple((places - places.min(0)).T)] = line
    return grid


def _placed(grid: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """A torus' devices in an array with a dim for each axis."""
    left, pieces = np.array(grid.shape), np.ones((len(sizes), grid.ndim), int)
    for axis in reversed(range(len(sizes))):
        pieces[axis] = _best(grid.shape, left, sizes[axis])
        left = left // pieces[axis]
    # Of a side that is cut, the busier axis has neighbours, so that the innermost pieces are those of the last axis.
    cut = grid.reshape(pieces.T.ravel())
    found = cut.transpose(np.arange(cut.ndim).reshape(grid.ndim, len(sizes)).T.ravel()).reshape(sizes)
    for name in _RINGS:
        axis = AXES.index(name)
        found = found.take(_walk([int(piece) for piece in pieces[axis] if piece > 1]), axis)
    return found


def _best(shape: Sequence[int], left: np.ndarray, size: int) -> tuple[int, ...]:
    """How much of each side of a torus an axis gets, of what is left of them."""
    *torus, cores = shape if len(shape) > 1 else (*shape, 1)

    def rank(pieces: tuple[int, ...]) -> tuple:
        *sides, inner = pieces if len(shape) > 1 else (*pieces, 1)
        is_cut = sum(1 < piece < side for piece, side in zip(sides, torus, strict=True))
        return -min(inner, cores), is_cut, -sum(piece > 1 for piece in sides), [-piece for piece in sides]

    divisors = [[piece for piece in range(1, side + 1) if side % piece == 0] for side in left.tolist()]
    fitting = [pieces for pieces in itertools.product(*divisors) if math.prod(pieces) == size]
    return min(fitting, key=rank)


def _walk(sides: Sequence[int]) -> list[int]:
    """Every place of a box by its number, each beside the one before it; of a rectangle, also the last by the first."""
    if len(sides) == 2 and not all(side % 2 for side in sides):
        rows, columns = sides
        if rows % 2:  # along the other side
            turned = np.arange(rows * columns).reshape(rows, columns).T.ravel()
            return [int(turned[place]) for place in _walk((columns, rows))]
        there: list[int] = []
        for row in range(rows):  # to and fro through all columns but the first, by which it comes back
            places = range(row * columns + 1, (row + 1) * columns)
            there += places if row % 2 == 0 else reversed(places)
        return [0, *there, *(row * columns for row in range(rows - 1, 0, -1))]
    order = [0]
    for side in reversed(sides):
        count = len(order)
        order = [row * count + place for row in range(side) for place in (order if row % 2 == 0 else order[::-1])]
    return order
