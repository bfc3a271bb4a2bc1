"""Meshes have all six axes and exactly the devices that they are given."""

from typing import Any

import jax
import numpy as np
import pytest

from eqformer.parallel import axis_sizes, make_mesh


def test_a_mesh_has_the_six_axes_in_order_and_every_device_once():
    mesh = make_mesh(fsdp=2, pipe=2, tensor=2)
    assert axis_sizes(mesh) == {"replica": 1, "fsdp": 2, "expert": 1, "pipe": 2, "context": 1, "tensor": 2}
    assert list(axis_sizes(mesh)) == ["replica", "fsdp", "expert", "pipe", "context", "tensor"]
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
    assert [device.id for device in mesh.devices[0, 0, 0, 0, 0]] == [0, 1]  # neighbours share `tensor`


def test_any_axis_can_have_all_devices_and_one_device_is_a_mesh():
    for axis in axis_sizes(make_mesh(tensor=8)):
        sizes: dict[str, Any] = {axis: 8}
        assert axis_sizes(make_mesh(**sizes)) == dict.fromkeys(axis_sizes(make_mesh(tensor=8)), 1) | {axis: 8}
    assert make_mesh(devices=jax.devices()[3:4]).devices.shape == (1,) * 6


def test_given_devices_are_used_and_no_others():
    mesh = make_mesh(tensor=2, devices=jax.devices()[4:6])
    assert sorted(device.id for device in mesh.devices.flat) == [4, 5]
    assert np.prod(mesh.devices.shape) == 2


@pytest.mark.parametrize(
    "sizes,words",
    [
        (dict(tensor=16), ["make_mesh(tensor=16)", "16 devices", "there are 8", "--simulate 16"]),
        (dict(fsdp=3, tensor=3), ["make_mesh(fsdp=3, tensor=3)", "9 devices", "there are 8"]),
        (dict(tensor=2, pipe=2), ["4 of 8 devices would be left over", "replica=2", "devices=jax.devices()[:4]"]),
        (dict(replica=2, tensor=2), ["4 of 8 devices would be left over", "replica=4"]),
        (dict(pipe=3), ["5 of 8 devices would be left over", "devices=jax.devices()[:3]"]),
        (dict(pipe=0), ["make_mesh(pipe=0)", "at least one device", "{'pipe': 0}"]),
        (dict(expert=-2, tensor=8), ["at least one device", "{'expert': -2}"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_use_the_devices_are_refused(sizes, words):
    with pytest.raises(ValueError) as error:
        make_mesh(**sizes)
    assert [word for word in words if word not in str(error.value)] == []


def test_no_axis_is_proposed_where_what_is_left_over_is_no_multiple():
    with pytest.raises(ValueError) as error:
        make_mesh(pipe=3)
    assert "replica=" not in str(error.value)
