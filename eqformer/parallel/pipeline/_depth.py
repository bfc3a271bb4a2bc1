"""How layers fall into the parts of a pipeline."""

import numpy as np
from jaxtyping import Int


def check_depth(layers: int, stages: int, chunks: int = 1) -> None:
    """A `ValueError` that names the nearest depths, unless `layers` divide evenly into `stages * chunks` parts."""
    parts = stages * chunks
    if layers < parts or layers % parts:
        below, above = layers // parts * parts, (layers // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        wrong = f"{layers % parts} would be left over" if below else "there are more parts than layers"
        raise ValueError(
            f"check_depth(layers={layers}, stages={stages}, chunks={chunks}): each of the {parts} parts holds equally "
            f"many layers of the stack (a period or block of several counts once), but {wrong}; take {nearest} layers, "
            "or other stages or chunks."
        )


def layer_order(layers: int, stages: int, chunks: int = 1) -> Int[np.ndarray, "layers"]:
    """The order in which layers lie on the ring: device after device, each with its chunks in turn.

    `array[layer_order(...)]`, split evenly over `stages` devices, gives each its layers; `argsort` of it goes back.
    """
    check_depth(layers, stages, chunks)
    parts = np.arange(layers).reshape(chunks, stages, -1)
    return parts.swapaxes(0, 1).reshape(-1)
