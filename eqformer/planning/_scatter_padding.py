"""Bytes that compilers for TPUs add to reduce-scatters of gradients."""

import math

from .. import parallel, training
from ..nn import LanguageModel
from ..parallel import FSDP
from ._accelerators import Topology
from ._sent_bytes import scattered_gradients


# libtpu 0.0.42 cuts the slice of each device into chunks of rows that fit into this much of a core's own memory beside
# those of the other devices; read off 170 compiled reduce-scatters. Of other chips nothing is known.
_CHUNKS = {"v5e": 14.4 * 2**20, "v5p": 14.4 * 2**20, "v6e": 29.4 * 2**20}
_TILE = 8  # rows of a tile, of which a chunk has a whole number


def scatter_padding(
    plan: parallel.Plan, model: LanguageModel, topology: Topology, trained: training.Trained = training.trainable
) -> float:
    """Return the bytes that a device sends in a step beside its gradients, as reduce-scatters are padded on TPUs.

    The compiler pads the slice of each device to whole chunks of equally many rows, and then moves the sums to the
    devices that they belong to, from as many rows away as were padded before them.
    """
    if topology.accelerator.name not in _CHUNKS or plan.size(FSDP) == 1 or plan.zero == 0:
        return 0.0
    sent = 0.0
    for shape, dim, layers in scattered_gradients(plan, model, trained):
        rows, row_bytes = shape[dim], 4 * math.prod(shape) // shape[dim]
        for devices in _steps(plan, topology):
            rows //= devices
            padding = _padded_rows(rows, row_bytes, devices, topology) - rows
            # Of a ring each device sends all slices but one, and moves what the slices before its own were padded by.
            sent += layers * padding * row_bytes * (devices - 1) * (1 + (devices - 1) / devices)
    return sent * (plan.microbatches if plan.zero > 1 else 1)


def _padded_rows(rows: int, row_bytes: int, devices: int, topology: Topology) -> int:
    """Return the rows of a device's slice once it is cut into equal chunks."""
    sides = [side for side in topology.shape if side > 1]
    tile = 2 * _TILE if sides == [2, 2] and devices == 4 else _TILE  # both ways round at once
    most = int(_CHUNKS[topology.accelerator.name] / (devices + 4) / row_bytes) // tile * tile
    if rows <= 1 or most == 0:
        return rows
    chunks = math.ceil(rows / most)
    return chunks * math.ceil(rows / chunks / tile) * tile if chunks > 1 else rows


def _steps(plan: parallel.Plan, topology: Topology) -> tuple[int, ...]:
    """Return the devices of each reduce-scatter over `fsdp`: two over a whole square or box, as in `torus_steps`."""
    sides, devices = [side for side in topology.shape if side > 1], plan.size(FSDP)
    is_square, is_box = len(sides) == 2 and sides[0] == sides[1] >= 4, len(sides) > 2
    if devices == topology.devices and (is_square or is_box):
        return devices // sides[-1], sides[-1]
    return (devices,)
