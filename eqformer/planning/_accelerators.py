"""Speeds of devices: accelerators by their data sheets, topologies that connect them, and measurements of devices."""

import dataclasses
import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, Mesh
from jaxtyping import Array

from .. import parallel
from .._prepare import GPU_SHARE
from ..nn import float_dtype


Device = Any
"""A `jax.Device`, which JAX does not export as a type."""


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One device as JAX sees it: a chip, or half of a chip that is two devices. All speeds are per second."""

    name: str
    """Name in the text of a topology, such as `v5e`."""
    memory: int
    """Bytes of memory that programs may fill; for a GPU, the share that JAX takes (`eqformer.prepare` sets it)."""
    bandwidth: float
    """Bytes that memory reads or writes."""
    bf16: float
    """Operations in bfloat16 (float16), a multiplication and an addition counted as two; no sparsity."""
    fp8: float
    """Operations in 8-bit floating point; equal to `bf16` if the device has no 8-bit floating point."""
    int8: float
    """Operations in 8-bit integers."""
    link: float
    """Bytes sent over one link in one direction."""
    links: int
    """Number of links: two for each dim of a torus, or, without a torus, all links to one switch."""
    network: float
    """Bytes sent in one direction over the slow network, between slices or machines."""
    host: float
    """Bytes sent in one direction over its link to the memory of its host."""
    platform: str
    """The compiler: `tpu` or `cuda`."""
    per_chip: int = 1
    """Number of JAX devices on a chip."""
    switched: int = 1
    """Number of devices on one switch, any two of which are neighbours; 1 in a torus."""
    clock: float = 0.0
    """Cycles of the cores, which convert a compiler's estimate to seconds; 0 if the clock rate is not published."""
    ring_multiple: int = 4
    """A torus dim whose size is a multiple of this is a ring; any other dim is a line."""
    whole: int = 0
    """Total bytes of a GPU's memory, of which `memory` is a share; 0 for a TPU, whose total is not needed."""

    def peak(self, dtype: str) -> float:
        """Return the operations a second in a dtype, by its name; wider dtypes than 16 bits are taken as bfloat16."""
        return self.int8 if "int8" in dtype else self.fp8 if "float8" in dtype or "f8" in dtype else self.bf16


_GIB = 2**30
_H100_BYTES, _H200_BYTES, _B200_BYTES = 84_942_979_072, 150_110_000_000, 191_514_411_008
# TPUs: `memory` is what the compiler lets a program fill (the chip's memory minus the system's). `host` is from "How to
# Scale Your Model" (Austin et al. 2025, part 2); tpu7x is missing there and gets v6e's figure per chip. All other
# figures are from https://cloud.google.com/tpu/docs: `link` is "bidirectional ICI bandwidth per chip" divided by the
# links and by two directions, `network` is "DCN bandwidth per chip".
# GPUs: NVIDIA's data sheets (H100 SXM, H200 SXM, HGX B200), dense; PCIe 5 to the host, 128 GB/s for both directions
# together; one port of 400 Gb/s per GPU between machines. `whole` is what CUDA reports on an H100 and a B200, and is
# estimated from these two for an H200.
_V4 = Accelerator(
    name="v4",
    memory=int(30.5 * _GIB),
    bandwidth=1.228e12,
    bf16=2.75e14,
    fp8=2.75e14,
    int8=2.75e14,
    link=5e10,
    links=6,
    network=6.25e9,
    host=1.5e10,
    platform="tpu",
    clock=1.05e9,
)
_V5E = Accelerator(
    name="v5e",
    memory=int(15.75 * _GIB),
    bandwidth=8.19e11,
    bf16=1.97e14,
    fp8=1.97e14,
    int8=3.94e14,
    link=5e10,
    links=4,
    network=3.125e9,
    host=1.5e10,
    platform="tpu",
    clock=1.5e9,
    ring_multiple=16,
)
_V5P = Accelerator(
    name="v5p",
    memory=int(95.74 * _GIB),
    bandwidth=2.765e12,
    bf16=4.59e14,
    fp8=4.59e14,
    int8=9.18e14,
    link=1e11,
    links=6,
    network=6.25e9,
    host=1.5e10,
    platform="tpu",
    clock=1.75e9,
)
_V6E = Accelerator(
    name="v6e",
    memory=int(31.25 * _GIB),
    bandwidth=1.638e12,
    bf16=9.18e14,
    fp8=9.18e14,
    int8=1.836e15,
    link=1e11,
    links=4,
    network=1.25e10,
    host=3.2e10,
    platform="tpu",
    ring_multiple=16,
)
_TPU7X = Accelerator(
    name="tpu7x",
    memory=int(94.75 * _GIB),
    bandwidth=3.69e12,
    bf16=1.1535e15,
    fp8=2.307e15,
    int8=1.1535e15,
    link=5e10,
    links=6,
    network=6.25e9,
    host=1.6e10,
    platform="tpu",
    per_chip=2,
)
_H100 = Accelerator(
    name="h100",
    memory=int(GPU_SHARE * _H100_BYTES),
    bandwidth=3.35e12,
    bf16=9.89e14,
    fp8=1.979e15,
    int8=1.979e15,
    link=2.5e10,
    links=18,
    network=5e10,
    host=6.4e10,
    platform="cuda",
    switched=8,
    whole=_H100_BYTES,
)
_H200 = dataclasses.replace(
    _H100, name="h200", memory=int(GPU_SHARE * _H200_BYTES), whole=_H200_BYTES, bandwidth=4.8e12
)
_B200 = Accelerator(
    name="b200",
    memory=int(GPU_SHARE * _B200_BYTES),
    bandwidth=8e12,
    bf16=2.25e15,
    fp8=4.5e15,
    int8=4.5e15,
    link=5e10,
    links=18,
    network=5e10,
    host=6.4e10,
    platform="cuda",
    switched=8,
    whole=_B200_BYTES,
)
ACCELERATORS = {chip.name: chip for chip in (_V4, _V5E, _V5P, _V6E, _TPU7X, _H100, _H200, _B200)}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Accelerators in a shape: chips of a torus, `v5e:16x16`, or GPUs per machine x machines, `h100:8x4`."""

    accelerator: Accelerator
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.accelerator.name}:{'x'.join(map(str, self.shape))}"

    @property
    def devices(self) -> int:
        """Number of devices that JAX sees."""
        return math.prod(self.shape) * self.accelerator.per_chip

    @property
    def memory(self) -> int:
        """Bytes of memory of one device."""
        return self.accelerator.memory

    @property
    def platform(self) -> str:
        """Platform of the compiler, `cuda` or `tpu`."""
        return self.accelerator.platform

    def speeds(self, mesh: Mesh | AbstractMesh) -> dict[str, float]:
        """Return the bytes a second that a device sends in one direction over each axis of a mesh.

        Devices along the mesh's last axes are the nearest. In a torus, the last mesh axis is laid along the last
        torus dims, and so on; an axis covers several dims, or a part of one dim. A dim that is a ring and that the axis
        covers in full adds two links. Any other dim, or part of a dim, adds one link. Behind a switch, an axis inside
        one machine uses all links of a device, and an axis that reaches beyond one machine uses the slow network.
        Raises a `ValueError` for a mesh of another number of devices.
        """
        if mesh.size != self.devices:
            sizes = " x ".join(f"{axis} {size}" for axis, size in dict(mesh.shape).items() if size > 1) or "1"
            raise ValueError(
                f"Topology({str(self)!r}).speeds(mesh={sizes}): the topology has {self.devices} devices, but the mesh "
                f"has {mesh.size}; give axes whose sizes multiply to {self.devices}, such as fsdp {self.devices}."
            )
        return self._behind_switch(mesh) if self.accelerator.switched > 1 else self._in_torus(mesh)

    def _behind_switch(self, mesh: Mesh | AbstractMesh) -> dict[str, float]:
        gpu, speeds, inner_size = self.accelerator, {}, 1
        for axis, size in reversed(dict(mesh.shape).items()):
            inner_size *= size
            is_inside = inner_size <= min(gpu.switched, self.shape[0])
            speeds[axis] = gpu.link * gpu.links if is_inside else gpu.network
        return speeds

    def _in_torus(self, mesh: Mesh | AbstractMesh) -> dict[str, float]:
        chip, speeds = self.accelerator, {}
        dims, remaining = [size for size in self.shape if size > 1], 1
        if chip.per_chip > 1:
            dims.append(chip.per_chip)
        # Axes divide one torus dim after another. `dim_size` is the size of the current dim, and `remaining` the part
        # of this size that no axis has taken.
        dim_size = dims[-1] if dims else 1
        for axis, size in reversed(dict(mesh.shape).items()):
            links = 0
            while size > 1 and (dims or remaining > 1):
                if remaining == 1:
                    dim_size = remaining = dims.pop()
                taken = math.gcd(size, remaining)
                if taken == 1:
                    break
                links += 2 if taken == dim_size and dim_size % chip.ring_multiple == 0 else 1
                size, remaining = size // taken, remaining // taken
            speeds[axis] = chip.link * max(links, 1)
        return speeds


def topology(text: str) -> Topology:
    """Parse `v5e:16x16`, or `h100:8` and `h100:8x4` for four machines of eight; a `ValueError` for anything else."""
    name, _, sizes = text.partition(":")
    parts = sizes.split("x")
    if name not in ACCELERATORS:
        known = ", ".join(ACCELERATORS)
        raise ValueError(f"topology({text!r}): there is no accelerator {name!r}; known are {known}, as in v5e:16x16.")
    accelerator = ACCELERATORS[name]
    is_gpu = accelerator.platform == "cuda"
    max_dims = 2 if is_gpu or accelerator.links == 4 else 3
    if not all(part.isdecimal() and int(part) for part in parts) or len(parts) > max_dims:
        shape = "GPUs per machine x machines, 8 or 8x4" if is_gpu else "chips along each dim"
        example = f"{name}:{'x'.join(['8', '4'] if is_gpu else ['4'] * max_dims)}"
        raise ValueError(f"topology({text!r}): give the shape after the name, {shape}, such as {example}.")
    shape = tuple(map(int, parts))
    machine_size = accelerator.switched
    if is_gpu and shape[0] > machine_size:
        raise ValueError(
            f"topology({text!r}): a machine has at most {machine_size} {name}s; give several machines after an x, such "
            f"as {name}:{machine_size}x{-(-shape[0] // machine_size)}."
        )
    return Topology(accelerator, shape)


def for_platform(plan: parallel.Plan, platform: str) -> parallel.Plan:
    """Return the plan for a platform, `cuda` or `tpu`; a mesh of another platform's devices becomes abstract."""
    name, mesh = {"cuda": "gpu"}.get(platform, platform), plan.mesh
    if plan.platform == name:
        return plan
    device = AbstractDevice(name, None, name)
    abstract = AbstractMesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=device)
    return dataclasses.replace(plan, mesh=abstract)


def matmul_peak(
    dtype: str = "float32", *, size: int | None = None, seconds: float = 0.5, device: Device = None
) -> float:
    """Measure the best FLOP/s of a `size x size` product over `seconds` of repeats on one device (`None`: JAX's first).

    A product counts `2 size^3` operations. float32 is multiplied in JAX's default matmul precision. `size=None` is 2048
    on a CPU and 8192 elsewhere. The peak of a machine is this figure times its number of devices.
    """
    device = jax.devices()[0] if device is None else device
    size = (2048 if device.platform == "cpu" else 8192) if size is None else size
    if size < 1 or not seconds > 0:
        raise ValueError(f"matmul_peak(size={size}, seconds={seconds}): both must be positive.")
    dtype = float_dtype(dtype, f"matmul_peak(dtype={dtype!r})")
    x = jax.device_put(jnp.full((size, size), 0.5, dtype), device)
    return 2 * size**3 / _best(jax.jit(lambda x: x @ x), x, seconds)


def mesh_peak(mesh: Mesh, dtype: str = "float32", *, seconds: float = 0.5) -> float:
    """Return `matmul_peak` of all devices of a mesh together; simulated devices share the CPU of their process."""
    device = mesh.local_devices[0]
    processes = {peer.process_index for peer in mesh.devices.flat}
    number = len(processes) if device.platform == "cpu" else mesh.size
    return number * matmul_peak(dtype, seconds=seconds, device=device)


def copy_bandwidth(*, size: int = 2**27, seconds: float = 0.5, device: Device = None) -> float:
    """Measure the best bytes/s that copies of `size` bytes read and write, over `seconds` of repeats on one device.

    A copy counts twice its bytes. `device=None` is JAX's first.
    """
    device = jax.devices()[0] if device is None else device
    if size < 4 or not seconds > 0:
        raise ValueError(
            f"copy_bandwidth(size={size}, seconds={seconds}): give a size of at least 4 bytes, and seconds above 0."
        )
    x = jax.device_put(jnp.zeros(size // 4, jnp.float32), device)
    return 2 * x.nbytes / _best(jax.jit(jnp.copy), x, seconds)


def _best(run: Callable[[Array], Array], x: Array, seconds: float) -> float:
    """Return the seconds of the fastest repeat, after a first run that compiles."""
    run(x).block_until_ready()
    best, start = float("inf"), perf_counter()
    while perf_counter() - start < seconds:
        begin = perf_counter()
        run(x).block_until_ready()
        best = min(best, perf_counter() - begin)
    return best
