"""Measured speeds of a device: FLOP/s in large matrix products, the peak that MFU refers to, and bytes/s in copies."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from ..nn import float_dtype


def matmul_peak(dtype: str = "float32", *, size: int | None = None, seconds: float = 0.5, device: Any = None) -> float:
    """Measure the best FLOP/s of a `size x size` product over `seconds` of repeats on one device (`None`: JAX's first).

    A product counts `2 size^3` operations; float32 is JAX's default matmul precision. `size=None` is 2048 on a CPU and
    8192 elsewhere. Multiply by the number of devices for a machine's peak.
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


def copy_bandwidth(*, size: int = 2**27, seconds: float = 0.5, device: Any = None) -> float:
    """Measure the most bytes/s that copies of `size` bytes read and write, over `seconds` of repeats on one device.

    A copy counts twice its bytes. `device=None` is JAX's first.
    """
    device = jax.devices()[0] if device is None else device
    if size < 4 or not seconds > 0:
        raise ValueError(f"copy_bandwidth(size={size}, seconds={seconds}): both must be positive, of 4 bytes at least.")
    x = jax.device_put(jnp.zeros(size // 4, jnp.float32), device)
    return 2 * x.nbytes / _best(jax.jit(jnp.copy), x, seconds)


def _best(run: Callable[[Array], Array], x: Array, seconds: float) -> float:
    """Return the seconds of the best repeat, after one that compiles."""
    run(x).block_until_ready()
    best, start = float("inf"), perf_counter()
    while perf_counter() - start < seconds:
        begin = perf_counter()
        run(x).block_until_ready()
        best = min(best, perf_counter() - begin)
    return best
