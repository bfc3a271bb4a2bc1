"""Devices as a grid with one axis for each way to split a model."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from .._axes import AXES
from ._devices import arranged


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
