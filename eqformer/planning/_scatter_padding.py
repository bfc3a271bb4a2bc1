"""Bytes that compilers for TPUs add to reduce-scatters of gradients, because they pad slices to whole chunks."""

import math
from collections.abc import Iterator

from .. import nn, parallel, training
from ..parallel import FSDP
from ._accelerators import Topology
from ._sent_bytes import place_arrays


# libtpu 0.0.42 cuts each device's slice into chunks of rows, so that one chunk per device fits into this many bytes of
# a core's own memory. The figures were read off 170 compiled reduce-scatters; other chips were not examined.
_CHUNKS = {"v5e": 14.4 * 2**20, "v5p": 14.4 * 2**20, "v6e": 29.4 * 2**20}
_TILE = 8  # rows of a tile, of which a chunk has a whole number


def scatter_padding(
    plan: parallel.Plan, model: nn.LanguageModel, topology: Topology, trained: training.Trained = training.trainable
) -> float:
    """Return the bytes that a device sends in a step beyond its gradients, because TPUs pad reduce-scatters.

    The compiler pads each device's slice to whole chunks of equal height. The padding shifts the slices, so the sums
    are then moved to the devices that they belong to, by as many rows as were padded before them.
    """
    if topology.accelerator.name not in _CHUNKS or plan.size(FSDP) == 1 or plan.zero == 0:
        return 0.0
    sent = 0.0
    for shape, dim, layers in _scattered_gradients(plan, model, trained):
        rows, row_bytes = shape[dim], 4 * math.prod(shape) // shape[dim]
        for devices in _scatter_steps(plan, topology):
            rows //= devices
            padding = _padded_rows(rows, row_bytes, devices, topology) - rows
            # In a ring each device sends all slices but one, and moves the padding of the slices before its own.
            sent += layers * padding * row_bytes * (devices - 1) * (1 + (devices - 1) / devices)
    return sent * (plan.microbatches if plan.zero > 1 else 1)


def _scattered_gradients(
    plan: parallel.Plan, model: nn.LanguageModel, trained: training.Trained
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield the shape of each gradient that `fsdp` scatters, its dim that is split, and how many layers have one.

    Tables of the vocabulary that are scattered in parts are left out.
    """
    model = plan.shapes(model)
    for array in place_arrays(plan, model, trained(model)):
        shard, dim = array.shard, array.fsdp_dim
        if dim is None or not array.is_trained or (plan.splits_tables and not array.layers):
            continue
        yield (shard[1:], dim - 1, shard[0]) if array.layers else (shard, dim, 1)


def _padded_rows(rows: int, row_bytes: int, devices: int, topology: Topology) -> int:
    """Return the rows of a device's slice once it is cut into equal chunks."""
    sides = [side for side in topology.shape if side > 1]
    tile = 2 * _TILE if sides == [2, 2] and devices == 4 else _TILE  # both ways round at once
    most = int(_CHUNKS[topology.accelerator.name] / (devices + 4) / row_bytes) // tile * tile
    if rows <= 1 or most == 0:
        return rows
    chunks = math.ceil(rows / most)
    return chunks * math.ceil(rows / chunks / tile) * tile if chunks > 1 else rows


def _scatter_steps(plan: parallel.Plan, topology: Topology) -> tuple[int, ...]:
    """Return the devices of each reduce-scatter over `fsdp`: two over a whole square or box, as in `torus_steps`."""
    sides, devices = [side for side in topology.shape if side > 1], plan.size(FSDP)
    is_square, is_box = len(sides) == 2 and sides[0] == sides[1] >= 4, len(sides) > 2
    if devices == topology.devices and (is_square or is_box):
        return devices // sides[-1], sides[-1]
    return (devices,)
