"""An emulation of `jax.lax.ragged_all_to_all` for CPUs, where XLA has none: it gathers all rows.

The emulation follows the documentation of `jax.lax.ragged_all_to_all`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eqformer.parallel import Placement


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: str,
) -> Any:
    """Return `output` with the runs of rows written into it that the devices send to this one.

    All of it is NaN if a run has another length than `recv_sizes` says, or reaches beyond an array.
    """
    devices, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    rows = jax.lax.all_gather(operand, axis_name)

    def mine(array: Any) -> Any:  # by sending device: its entries about the runs for this device
        each = jax.lax.all_gather(array, axis_name).reshape(devices, devices, -1)
        return jax.lax.dynamic_index_in_dim(each, me, 1, keepdims=False)

    starts, sizes, places = map(mine, (input_offsets, send_sizes, output_offsets))
    is_right = jnp.all(sizes == recv_sizes.reshape(devices, -1)) & jnp.all((sizes >= 0) & (starts >= 0) & (places >= 0))
    is_right &= jnp.all(starts + sizes <= len(operand)) & jnp.all(places + sizes <= len(output))
    place = jnp.arange(len(output), dtype=jnp.int32)
    for device in range(devices):
        for run in range(sizes.shape[1]):
            start, size, first = starts[device, run], sizes[device, run], places[device, run]
            row = rows[device][jnp.clip(place - first + start, 0, len(operand) - 1)]
            output = jnp.where(((place >= first) & (place < first + size))[:, None], row, output)
    return jnp.where(is_right, output, jnp.nan)


def as_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans over CPUs exchange rows by (emulated) ragged all-to-alls, as plans over TPUs and GPUs do."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(Placement, "platform", "gpu")
