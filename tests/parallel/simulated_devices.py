"""Stand-ins for the devices of absent machines, with the attributes of `jax.Device` that meshes read."""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Device:
    """A device with attributes named as those of `jax.Device`."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int = 0
    slice_index: int = 0
    process_index: int = 0


def tpus(kind: str, *sides: int, cores: int = 1, slices: int = 1) -> list[Device]:
    """Return the devices of tori, one for each slice, ordered by slice, z, y, x and core, as libtpu lists a host's."""
    x, y, z = (*sides, 1)[:3]
    ranges = range(slices), range(z), range(y), range(x), range(cores)
    places = enumerate(itertools.product(*ranges))
    return [Device(id, "tpu", kind, (x, y, z), core, piece) for id, (piece, z, y, x, core) in places]


def gpus(hosts: int, each: int, *, has_coords: bool = True) -> list[Device]:
    """Return the devices of `hosts` hosts with `each` GPUs each."""
    places = enumerate(itertools.product(range(hosts), range(each)))
    coords = lambda host, place: (0, host, place) if has_coords else ()
    return [Device(id, "gpu", "NVIDIA H100", coords(*place), process_index=place[0]) for id, place in places]


MACHINES = {
    "v4:2x2x1": tpus("TPU v4", 2, 2, 1, cores=2),
    "v4:4x4x4": tpus("TPU v4", 4, 4, 4),
    "v5e:2x2": tpus("TPU v5 lite", 2, 2),
    "v5e:2x4": tpus("TPU v5 lite", 2, 4),
    "v5e:4x4": tpus("TPU v5 lite", 4, 4),
    "v5e:16x16": tpus("TPU v5 lite", 16, 16),
    "v5p:2x2x2": tpus("TPU v5", 2, 2, 2),
    "v5p:4x4x8": tpus("TPU v5", 4, 4, 8),
    "v5p:8x8x8": tpus("TPU v5", 8, 8, 8),
    "v5p:8x16x16": tpus("TPU v5", 8, 16, 16),
    "v5p:4x4x12": tpus("TPU v5", 4, 4, 12),
    "v6e:8x16": tpus("TPU v6 lite", 8, 16),
    "v6e:16x16": tpus("TPU v6 lite", 16, 16),
    "tpu7x:2x2x1": tpus("TPU7x", 2, 2, 1, cores=2),
    "tpu7x:4x4x4": tpus("TPU7x", 4, 4, 4, cores=2),
    "2 x v5e:4x4": tpus("TPU v5 lite", 4, 4, slices=2),
    "6 x v6e:4x8": tpus("TPU v6 lite", 4, 8, slices=6),
    "h100:8": gpus(1, 8),
    "h100:4x8": gpus(4, 8),
    "h100:3x8 without coords": gpus(3, 8, has_coords=False),
}
