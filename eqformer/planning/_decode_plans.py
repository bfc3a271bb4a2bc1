"""Where a model can be served on accelerators that are not here, by formulas."""

import dataclasses
from typing import NamedTuple

from .. import nn, parallel
from ._accelerators import Topology
from ._compile import decode_shapes
from ._fitting import every_mesh, Progress
from ._forecast import decode_forecast, decode_held, Forecast


_NARROW = "int8"


class Served(NamedTuple):
    """A way to decode that fits."""

    plan: parallel.Plan
    rows: int
    cache_dtype: str | None
    found: Forecast


def best_decodes(
    plan: parallel.Plan,
    model: nn.Transformer,
    topology: Topology,
    *,
    rows: int,
    capacity: int,
    cache_dtype: str | None = None,
    most: int = 3,
    progress: Progress = lambda what, done, most: None,
) -> list[Served]:
    """The ways to decode that fit into a topology's memory, by formulas, the nearest first.

    These are other meshes of tensor, expert and fsdp with the plan's other choices, by their time; the same with caches
    in int8; and, where no mesh holds so many rows, with half as many, a quarter, and so on. A mesh that the model does
    not suit is left out.

    Args:
        plan: Where it would not fit.
        model: The model, or its shapes, in the dtype in which it is served.
        topology: What it would run on.
        rows: Rows that are decoded together.
        capacity: Slots of a row's caches.
        cache_dtype: What keys and values are kept in; None: the compute dtype.
        most: How many to give.
        progress: Called with how many ways were tried, and how many there are at most.
    """
    whole = dataclasses.replace(plan, microbatches=1)  # without stages
    meshes = every_mesh(topology.devices, whole, model, tensor=topology.devices, context=1)
    plans = [dataclasses.replace(plan, mesh=mesh) for mesh, zero in meshes if zero == plan.zero]
    narrow = _NARROW if cache_dtype is None else cache_dtype
    kinds = dict.fromkeys([(rows, cache_dtype), *((rows >> times, narrow) for times in range(rows.bit_length()))])
    found: list[Served] = []
    for kind, (number, dtype) in enumerate(kinds):
        if len(found) >= most or (found and number < rows):
            break
        fitting = []
        for place, one in enumerate(plans):
            progress("ways to decode tried, at most", kind * len(plans) + place, len(kinds) * len(plans))
            try:
                held = decode_held(*decode_shapes(one, model, number, capacity, dtype))
                if sum(held.values()) > topology.accelerator.memory:  # a step that does not fit need not be traced
                    continue
                sizes = {"rows": number, "capacity": capacity, "cache_dtype": dtype}
                its = decode_forecast(one, model, topology, **sizes)
            except ValueError:  # the mesh suits neither the model nor so few rows
                continue
            fitting.append(Served(one, number, dtype, its))
        found += sorted(fitting, key=lambda its: its.found.time.seconds)
    return found[:most]
