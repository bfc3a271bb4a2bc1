"""Collectives of the parallel transforms, each with a name that the compiled program contains.

The name is in the metadata of the operation (`op_name`), as a scope. A collective of the backward pass has the name of
its forward collective. Profiles, byte counts, and tests that leave out a collective use these names.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree, Shaped

from .._shapes import as_tuple
from ._mesh import CONTEXT, EXPERT, PIPE, TENSOR
from ._shard_map import vary, vary_like


STATE = "state"
"""Group of all collectives that no single axis needs, such as gathers of parameters and sums of gradients."""

# Maps the name of each collective to its group: the mesh axis that makes the collective necessary, or `STATE`. The
# collective may run over another axis: "keys and values over fsdp" runs over `fsdp`.
COLLECTIVES: dict[str, str] = {
    "loss and token count": STATE,
    "row sums": CONTEXT,
    "row vectors": CONTEXT,
    "row vectors over tensor": TENSOR,
    "vectors of all rows": STATE,
    "gradients over replica": STATE,
    "gradients over fsdp": STATE,
    "weights over fsdp": STATE,
    "table ids over fsdp": STATE,
    "looked-up vectors over fsdp": STATE,
    "column-parallel input": TENSOR,
    "row-parallel output": TENSOR,
    "feature-parallel output": TENSOR,
    "replicated feature-parallel output": TENSOR,
    "weights over tensor": TENSOR,
    "norm means": TENSOR,
    "norm mean squares": TENSOR,
    "stream weights": TENSOR,
    "token embeddings": TENSOR,
    "head input": TENSOR,
    "vocabulary table by ids": TENSOR,
    "logit maxima": TENSOR,
    "softmax denominators": TENSOR,
    "target logits": TENSOR,
    "argmax logits": TENSOR,
    "argmax ids": TENSOR,
    "ring keys and values": CONTEXT,
    "gathered keys and values": CONTEXT,
    "tokens to heads": CONTEXT,
    "heads to tokens": CONTEXT,
    "token positions": CONTEXT,
    "split cache maxima": CONTEXT,
    "split cache sums": CONTEXT,
    "cached rows": STATE,
    "cached rows of shared key heads": TENSOR,
    "expert input over tensor": TENSOR,
    "expert output over tensor": TENSOR,
    "features to tokens": TENSOR,
    "tokens to features": TENSOR,
    "expert weights by hidden features": TENSOR,
    "expert loads": STATE,
    "replicated values": TENSOR,
    "gathered expert input": EXPERT,
    "summed expert output": EXPERT,
    "exchange rounds": EXPERT,
    "tokens per expert": EXPERT,
    "expert dispatch": EXPERT,
    "expert combine": EXPERT,
    "activations between stages": PIPE,
    "gradients between stages": PIPE,
    "inputs between stages": PIPE,
    "tokens for all stages": PIPE,
    "outputs of the last stage": PIPE,
    "loss and edge gradients over stages": STATE,
    "column-parallel input over tensor": TENSOR,
    "column-parallel output over fsdp": TENSOR,
    "keys and values over fsdp": TENSOR,
    "heads to rows": TENSOR,
    "rows to heads": TENSOR,
    "row-parallel input over fsdp": TENSOR,
    "logits input": TENSOR,
    "partial logits": TENSOR,
    "all_gather_matmul": TENSOR,
    "matmul_reduce_scatter": TENSOR,
    "ring": STATE,
    "values of all devices": STATE,
}


def sum_gradients(name: str, tree: PyTree, axes: str | Iterable[str]) -> PyTree:
    """Mark arrays as varying over `axes` too, so that the backward pass sums their gradients over the axes.

    The forward pass does not communicate.
    """
    with jax.named_scope(name):
        return vary(tree, as_tuple(axes))


def psum(name: str, x: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """Sum over the devices of some axes."""
    return _call("psum", name, x, axes)


def pmean(name: str, x: Array, axes: str | tuple[str, ...]) -> Array:
    """Average over the devices of some axes."""
    return _call("pmean", name, x, axes)


def pmax(name: str, x: Array, axes: str | tuple[str, ...]) -> Array:
    """Take the maximum over the devices of some axes."""
    return _call("pmax", name, x, axes)


def pmin(name: str, x: Array, axes: str | tuple[str, ...]) -> Array:
    """Take the minimum over the devices of some axes."""
    return _call("pmin", name, x, axes)


def all_gather(
    name: str,
    x: Array,
    axis: str | tuple[str, ...],
    dim: int = 0,
    *,
    stacks: bool = False,
    steps: Sequence[int] = (),
) -> Array:
    """Concatenate the arrays of all devices along `dim`, or stack them along a new dim if `stacks`.

    With `steps`, the group sizes of `psum_scatter`, the gather runs these steps from the last to the first. So a gather
    of scattered slices returns each slice to its place.
    """
    assert not (stacks and steps)
    for options in reversed(_step_options(steps)):
        x = _call("all_gather", name, x, axis, axis=dim if stacks else dim % x.ndim, tiled=not stacks, **options)
    return x


def psum_scatter(name: str, x: Array, axis: str, dim: int = 0, *, steps: Sequence[int] = ()) -> Array:
    """Sum over an axis, and return this device's slice of the sum along `dim`.

    `steps` are the sizes of the groups of devices in several consecutive steps. Their product is the size of the axis.
    """
    # If all dims before `dim` have size 1, XLA for TPUs all-reduces the full array. So remove these dims.
    dim %= x.ndim
    unit_dims = x.shape[:dim] if math.prod(x.shape[:dim]) == 1 else ()
    x = x.reshape(x.shape[len(unit_dims) :])
    for options in _step_options(steps):
        x = _call("psum_scatter", name, x, axis, scatter_dimension=dim - len(unit_dims), tiled=True, **options)
    return x.reshape(*unit_dims, *x.shape)


def all_to_all(
    name: str,
    x: Array,
    axis: str | tuple[str, ...],
    split: int,
    concat: int,
    *,
    groups: Sequence[Sequence[int]] | None = None,
) -> Array:
    """Send a slice of `x` along `split` to each device, and concatenate the received slices along `concat`."""
    split, concat = split % x.ndim, concat % x.ndim
    return _call(
        "all_to_all", name, x, axis, split_axis=split, concat_axis=concat, axis_index_groups=groups, tiled=True
    )


class Runs(NamedTuple):
    """Runs of consecutive rows that a device exchanges: the device sends the same number of runs to each device."""

    start: Int[Array, "runs"]
    """Index of the first row of each run."""
    size: Int[Array, "runs"]
    """Number of rows of each run."""
    target: Int[Array, "runs"]
    """Index of each run's first row on the receiving device."""
    received: Int[Array, "runs"]
    """Number of rows of each run that this device receives, ordered by sender."""


def ragged_all_to_all(
    name: str, x: Shaped[Array, "rows embed"], axis: str, received: int, runs: Runs, back: Runs
) -> Shaped[Array, "received embed"]:
    """Exchange runs of rows; return an array of `received` rows, with zeros where no row arrives.

    `back` are the runs of the exchange in the opposite direction. XLA for CPUs cannot compile this function. Do not
    differentiate it: JAX's rule would exchange offsets, which the caller already has in `back`.
    """
    x, runs, back = vary_like((x, runs, back), x, runs, back)
    return _call("ragged_all_to_all", name, x, axis, received=received, runs=runs, back=back)


def ppermute(name: str, x: Array, axis: str, pairs: Sequence[tuple[int, int]]) -> Array:
    """Send the array of the first device of each pair to the second device of the pair."""
    return _call("ppermute", name, x, axis, perm=pairs)


def _step_options(steps: Sequence[int]) -> list[dict[str, list[list[int]]]]:
    """Return the options of a collective for each step; without steps, an empty dict for one step over the axis."""
    return [{"axis_index_groups": groups} for groups in _step_groups(steps)] if steps else [{}]


def _step_groups(steps: Sequence[int]) -> list[list[list[int]]]:
    """Return the groups of devices in each step.

    If the devices of the axis are an array of shape `steps`, the groups of step `k` are the lines along dim `k`.
    """
    indices = np.arange(math.prod(steps)).reshape(steps)
    return [np.moveaxis(indices, step, -1).reshape(-1, size).tolist() for step, size in enumerate(steps)]


def _call(kind: str, name: str, x: PyTree, axes: str | tuple[str, ...], **options: PyTree) -> PyTree:
    """Call the collective `kind` of `jax.lax` in a named scope."""
    collective = _ragged if kind == "ragged_all_to_all" else getattr(jax.lax, kind)
    with jax.named_scope(name):
        return collective(x, axes, **options)


def _ragged(x: Array, axis: str | tuple[str, ...], *, received: int, runs: Runs, back: Runs) -> Array:
    """Exchange runs of rows by the implementation that is faster on the platform."""
    shape = (received, *x.shape[1:])
    on_tpus = functools.partial(_ragged_into_empty, axis, shape)
    elsewhere = functools.partial(_ragged_into_zeros, axis, shape)
    return jax.lax.platform_dependent(x, runs, back, tpu=on_tpus, default=elsewhere)


def _ragged_into_zeros(axis: str | tuple[str, ...], shape: tuple[int, ...], x: Array, runs: Runs, back: Runs) -> Array:
    """Exchange runs of rows into an array of zeros."""
    # These zeros depend on `x`, because XLA would allocate constant zeros before a loop over layers and keep them.
    zero = ((runs.size[0] < 0) & jnp.isnan(x[0, 0])).astype(x.dtype)
    return jax.lax.ragged_all_to_all(x, jnp.broadcast_to(zero, shape), *runs, axis_name=axis)


def _ragged_into_empty(axis: str | tuple[str, ...], shape: tuple[int, ...], x: Array, runs: Runs, back: Runs) -> Array:
    """Exchange runs of rows into an uninitialized array, and set rows that did not arrive to zero.

    On TPUs, masking the rows takes less time than writing zeros before the exchange.
    """
    rows = jax.lax.ragged_all_to_all(x, vary_like(jax.lax.empty(shape, x.dtype), x), *runs, axis_name=axis)
    row = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    has_arrived = jnp.any((row >= back.start) & (row < back.start + back.size), axis=1)
    return jnp.where(has_arrived[:, None], rows, 0)
