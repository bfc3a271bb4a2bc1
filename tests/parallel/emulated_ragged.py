"""`jax.lax.ragged_all_to_all` for CPUs, whose XLA has none, from its documentation: all rows are gathered."""

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
    """What a device gets of the runs that each device sends it, one after another, written into `output`.

    A device that is sent other numbers of rows than it says, or rows that are not there, gets no numbers.
    """
    devices, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    rows = jax.lax.all_gather(operand, axis_name)

    def mine(array: Any) -> Any:  # by device, what it says of the runs that it sends this one
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
    """Plans over CPUs exchange by ragged all-to-alls, as on TPUs and GPUs."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(Placement, "platform", "gpu")
