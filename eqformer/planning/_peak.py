"""The FLOP/s that one device reaches in large matrix products: the measured peak that MFU refers to."""

from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

from ..nn import float_dtype


def matmul_peak(dtype: str = "float32", *, size: int | None = None, seconds: float = 0.5, device: Any = None) -> float:
    """Best FLOP/s of a `size x size` product over `seconds` of repeats on one device (`None`: JAX's first).

    A product counts `2 size^3` operations; float32 is JAX's default matmul precision. `size=None` is 2048 on a CPU and
    8192 elsewhere. Multiply by the number of devices for a machine's peak.
    """
    device = jax.devices()[0] if device is None else device
    size = (2048 if device.platform == "cpu" else 8192) if size is None else size
    if size < 1 or not seconds > 0:
        raise ValueError(f"matmul_peak(size={size}, seconds={seconds}): both must be positive.")
    dtype = float_dtype(dtype, f"matmul_peak(dtype={dtype!r})")
    left = jax.device_put(jnp.full((size, size), 0.5, dtype), device)
    product = jax.jit(lambda x, y: x @ y)
    product(left, left).block_until_ready()
    best, start = float("inf"), perf_counter()
    while perf_counter() - start < seconds:
        before = perf_counter()
        product(left, left).block_until_ready()
        best = min(best, perf_counter() - before)
    return 2 * size**3 / best
