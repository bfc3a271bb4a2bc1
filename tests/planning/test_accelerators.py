"""Topologies by name: their devices and the speeds of their links, against numbers by hand."""

import pytest

from eqformer.planning import abstract_mesh, ACCELERATORS, topology


@pytest.mark.quick
@pytest.mark.parametrize(
    "text, devices", [("v5e:16x16", 256), ("v5p:8x8x16", 1024), ("tpu7x:4x4x4", 128), ("h100:8", 8), ("h100:8x4", 32)]
)
def test_a_topology_by_its_name(text, devices):
    found = topology(text)
    assert str(found) == text and found.devices == devices


@pytest.mark.parametrize(
    "text, message",
    [
        ("v9:4x4", "there is no accelerator 'v9'; known are v4, v5e"),
        ("v5e:4y4", "give the shape after the name, chips along each dim, such as v5e:4x4"),
        ("v5e:4x4x4", "such as v5e:4x4"),
        ("v5p:4x0x4", "such as v5p:4x4x4"),
        ("h100", "GPUs per machine x machines, 8 or 8x4"),
        ("h100:64", "a machine has at most 8 h100s; give several machines after an x, such as h100:8x8"),
    ],
)
def test_what_is_no_topology(text, message):
    with pytest.raises(ValueError, match="topology") as caught:
        topology(text)
    assert message in str(caught.value)


def test_the_links_of_an_axis():
    one = ACCELERATORS["v5e"].link
    speeds = lambda text, **sizes: {k: v for k, v in topology(text).speeds(abstract_mesh(sizes)).items() if k in sizes}
    assert speeds("v5e:16x16", fsdp=256) == {"fsdp": 4 * one}  # two rings
    assert speeds("v5e:16x16", fsdp=16, tensor=16) == {"fsdp": 2 * one, "tensor": 2 * one}
    assert speeds("v5e:16x16", fsdp=64, tensor=4) == {"fsdp": 3 * one, "tensor": one}  # a part of a ring is a line
    assert speeds("v5e:4x4", fsdp=16) == {"fsdp": 2 * one}  # lines: less than 16 chips
    cube = ACCELERATORS["v5p"].link
    assert speeds("v5p:4x4x4", fsdp=16, tensor=4) == {"fsdp": 4 * cube, "tensor": 2 * cube}
    gpu = ACCELERATORS["h100"]
    assert speeds("h100:8x4", fsdp=4, tensor=8) == {"fsdp": gpu.network, "tensor": 18 * gpu.link}


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="the topology has 16 devices, but the mesh has 8; give axes .* to 16, such"):
        topology("v5e:4x4").speeds(abstract_mesh({"fsdp": 8}))


def test_programs_fill_what_jax_takes_of_a_gpu():
    """Of a H100, of which CUDA reports 79.1 GiB; of a TPU, what its compiler says."""
    gpu, tpu = ACCELERATORS["h100"], ACCELERATORS["v5e"]
    assert gpu.whole == pytest.approx(79.1 * 2**30, rel=1e-3) and gpu.memory == pytest.approx(0.9 * gpu.whole)
    assert tpu.memory == 15.75 * 2**30 and not tpu.whole


def test_a_device_has_the_peak_of_its_dtype():
    one = ACCELERATORS["h100"]
    assert one.peak("bfloat16") == one.peak("float32") == 9.89e14
    assert one.peak("float8_e4m3fn") == one.peak("int8") == 1.979e15
