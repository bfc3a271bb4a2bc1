"""Meshes can be made for every machine, and the axes with the most communication join neighboring devices."""

import functools
from typing import Any

import numpy as np
import pytest
from compilers import tpus
from simulated_devices import MACHINES

from eqformer.parallel import _mesh, AXES, make_mesh
from eqformer.parallel._mesh import arrange_devices, torus_steps


def splits(number: int, parts: int) -> list[tuple[int, ...]]:
    """Every way to write a number as a product of so many."""
    if parts == 1:
        return [(number,)]
    own = [piece for piece in range(1, number + 1) if number % piece == 0]
    return [(piece, *rest) for piece in own for rest in splits(number // piece, parts - 1)]


@functools.cache
def sides_of(machine: str) -> np.ndarray:
    """Of a machine's torus."""
    return np.array([(*device.coords, device.core_on_chip) for device in MACHINES[machine]]).max(0) + 1


def hops(sides: np.ndarray, one: Any, other: Any) -> int:
    """Links between two devices of a torus; between the cores of a chip one too."""
    apart = np.abs(np.subtract((*one.coords, one.core_on_chip), (*other.coords, other.core_on_chip)))
    return int(np.minimum(apart, sides - apart).sum())


def check(machine: str, found: np.ndarray, sizes: tuple[int, ...], own: list[Any] | None = None) -> list[str]:
    """What is wrong with a mesh."""
    devices, wrong = MACHINES[machine] if own is None else own, []
    if found.shape != sizes or sorted(device.id for device in found.flat) != sorted(device.id for device in devices):
        wrong.append("devices")
    groups = {_mesh._network(device) for device in devices}
    if sizes[0] % len(groups) == 0:  # `replica` alone goes over the slow network
        wrong += ["network" for part in found if len({_mesh._network(device) for device in part.flat}) != 1]
    busiest = found.reshape(-1, sizes[-1])
    inside = all(len({_mesh._network(device) for device in line}) == 1 for line in busiest)
    if devices[0].platform == "tpu" and inside:
        # All of a machine's lines lie alike: the first and the last one are looked at.
        pairs = [pair for line in busiest[[0, -1]] for pair in zip(line, line[1:], strict=False)]
        wrong += ["neighbours" for one, other in pairs if hops(sides_of(machine), one, other) != 1]
    return wrong


def all_sizes(number: int) -> list[tuple[int, ...]]:
    """Meshes of three axes each, in the places of all six."""
    of = [("replica", "fsdp", "tensor"), ("fsdp", "expert", "pipe"), ("replica", "context", "tensor")]
    found = {
        tuple({**dict.fromkeys(AXES, 1), **dict(zip(names, cut, strict=True))}.values())
        for names in of
        for cut in splits(number, 3)
    }
    return sorted(found)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_mesh_has_every_device_once_and_its_busiest_axis_between_neighbours(machine):
    devices = MACHINES[machine]
    chosen = all_sizes(len(devices))
    for sizes in chosen[:: max(1, len(chosen) * len(devices) // 512)]:  # of large machines some of them
        assert check(machine, arrange_devices(devices, sizes), sizes) == [], sizes


def test_devices_in_the_order_in_which_they_are_listed_would_not_do():
    devices, sizes = MACHINES["v5e:4x4"], (1, 2, 1, 1, 1, 8)
    listed = np.array(devices, object).reshape(sizes)
    assert "neighbours" in check("v5e:4x4", listed, sizes)
    devices, sizes = MACHINES["2 x v5e:4x4"], (2, 4, 1, 1, 1, 4)
    assert "network" in check("2 x v5e:4x4", np.array(devices, object).reshape(4, 8).T.reshape(sizes), sizes)


@pytest.mark.parametrize(
    "machine,sizes",
    [
        ("v6e:16x16", dict(fsdp=64, tensor=4)),
        ("v5p:4x4x8", dict(fsdp=64, tensor=2)),
        ("v5p:8x8x8", dict(fsdp=128, tensor=4)),
        ("v5p:8x16x16", dict(fsdp=32, expert=64)),
        ("v4:2x2x1", dict(fsdp=8)),
    ],
    ids=str,
)
def test_meshes_that_jax_refuses_are_made(machine, sizes):
    devices = MACHINES[machine]
    mesh = make_mesh(**sizes, devices=devices)
    assert check(machine, mesh.devices, mesh.devices.shape) == []
    assert {axis: mesh.shape[axis] for axis in sizes} == sizes


def test_the_busiest_axis_has_the_cores_of_a_chip_and_a_ring_through_a_rectangle_is_closed():
    pairs = make_mesh(fsdp=64, tensor=2, devices=MACHINES["tpu7x:4x4x4"]).devices.reshape(-1, 2)
    assert all(one.coords == other.coords for one, other in pairs)
    for machine in ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v6e:8x16"):
        devices = MACHINES[machine]
        ring = make_mesh(context=len(devices), devices=devices).devices.ravel()
        assert hops(sides_of(machine), ring[0], ring[-1]) == 1
    whole = make_mesh(fsdp=16, tensor=8, devices=MACHINES["v5p:4x4x8"]).devices.reshape(16, 8)
    assert all(len({device.coords[:2] for device in line}) == 1 for line in whole)  # a side of its own, not two pieces


@pytest.mark.parametrize(
    "machine,sizes,slow",
    [
        ("2 x v5e:4x4", dict(replica=2, fsdp=16), "replica"),
        ("2 x v5e:4x4", dict(pipe=2, fsdp=16), "pipe"),
        ("2 x v5e:4x4", dict(fsdp=32), "fsdp"),
        ("6 x v6e:4x8", dict(replica=2, pipe=3, tensor=32), "replica pipe"),
        ("h100:4x8", dict(replica=4, fsdp=8), "replica"),
        ("h100:4x8", dict(replica=2, fsdp=2, tensor=8), "replica fsdp"),
        ("h100:3x8 without coords", dict(replica=3, tensor=8), "replica"),
    ],
    ids=str,
)
def test_the_calmest_axes_go_over_the_slow_network(machine, sizes, slow):
    devices = make_mesh(**sizes, devices=MACHINES[machine]).devices
    networks = np.array([str(_mesh._network(device)) for device in devices.flat]).reshape(devices.shape)
    cross = [
        axis
        for place, axis in enumerate(AXES)
        if (np.diff(np.unique(networks, return_inverse=True)[1].reshape(networks.shape), axis=place) != 0).any()
    ]
    assert cross == slow.split()


def test_devices_with_gaps_or_in_unequal_groups_are_taken_as_they_are_listed():
    some = [*MACHINES["v5e:4x4"][:7], MACHINES["v5e:4x4"][12]]
    assert list(make_mesh(fsdp=2, tensor=4, devices=some).devices.flat) == some
    unequal = [*MACHINES["h100:4x8"][:8], *MACHINES["h100:4x8"][8:12]]
    assert list(make_mesh(replica=3, tensor=4, devices=unequal).devices.flat) == unequal


@pytest.mark.parametrize(
    "machine,sizes,scatter,gather",
    [
        ("v5e:4x4", dict(fsdp=16), (4, 4), ()),
        ("v5e:16x16", dict(fsdp=256), (16, 16), ()),
        ("v5p:4x4x8", dict(fsdp=128), (16, 8), (16, 8)),
        ("2 x v5e:4x4", dict(replica=2, fsdp=16), (4, 4), ()),
        ("2 x v5e:4x4", dict(fsdp=32), (), ()),  # over both networks
        ("v5e:16x16", dict(fsdp=64, tensor=4), (), ()),  # what is not all of a torus is scattered as it should be
        ("v6e:8x16", dict(fsdp=128), (), ()),  # and so are rectangles
        ("v5e:2x2", dict(fsdp=4), (), ()),
        ("v5e:2x2", dict(tensor=4), (), ()),
        ("tpu7x:4x4x4", dict(fsdp=128), (), (64, 2)),
        ("h100:8", dict(fsdp=8), (), ()),
    ],
    ids=str,
)
def test_a_square_or_a_box_is_scattered_in_two_steps_and_a_box_gathered(machine, sizes, scatter, gather):
    devices = make_mesh(**sizes, devices=MACHINES[machine]).devices
    assert torus_steps(devices, "fsdp") == (scatter, gather)
    for steps in filter(None, (scatter, gather)):  # the last step is along one side
        line = devices.reshape(-1, steps[1])[0]
        assert [hops(sides_of(machine), *pair) for pair in zip(line, line[1:], strict=False)] == [1] * (steps[1] - 1)


@pytest.mark.parametrize(
    "name,slices",
    [
        ("v4:2x2x1", 1),
        ("v5e:4x4", 1),
        ("v5e:4x4", 2),
        ("v5e:16x16", 1),
        ("v5p:4x4x8", 1),
        ("v6e:16x16", 1),
        ("tpu7x:4x4x4", 1),
    ],
)
def test_the_compilers_own_devices_are_like_those(name, slices):
    devices, machine = tpus(name, slices), name if slices == 1 else f"{slices} x {name}"
    said = lambda device: (*device.coords, device.core_on_chip, getattr(device, "slice_index", 0))
    assert sorted(map(said, devices)) == sorted(map(said, MACHINES[machine]))
    for sizes in all_sizes(len(devices))[::7]:
        assert check(machine, arrange_devices(devices, sizes), sizes, devices) == [], sizes
