"""Collectives of the transforms, each with a name that the compiled program contains.

The name is in the program's metadata (`op_name`), before that of the operation; a collective of the backward pass has
the name of its forward collective. Profiles, byte counts, and tests that omit a collective all use these names.
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
"""Reason of collectives for parameters and gradients, over all axes along which they are replicated or split."""

# The reason of each collective: the axis that splits its operand, or the state that devices share.
COLLECTIVES: dict[str, str] = {
    "loss and token count": STATE,
    "row sums": CONTEXT,
    "row vectors": CONTEXT,
    "row vectors over tensor": TENSOR,
    "vectors of all rows": STATE,
    "gradients over replica": STATE,
    "gradients over fsdp": STATE,
    "weights over fsdp": STATE,
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
    """Return the arrays, marked as varying over `axes` too: the backward pass sums their gradients over the axes.

    The forward pass sends nothing.
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
    """Concatenate all devices' pieces along `dim` or, with `stacks`, stack them along a new one.

    With `steps`, the pieces are gathered in several steps, in the reverse order of `psum_scatter` with the same steps.
    """
    assert not (stacks and steps)
    for options in reversed(_step_options(steps)):
        x = _call("all_gather", name, x, axis, axis=dim if stacks else dim % x.ndim, tiled=not stacks, **options)
    return x


def psum_scatter(name: str, x: Array, axis: str, dim: int = 0, *, steps: Sequence[int] = ()) -> Array:
    """Sum over an axis and return this device's slice of the sum along `dim`.

    With `steps`, the sum is scattered in several steps, each among that many devices; the product of the steps is the
    size of the axis.
    """
    # If all dims in front of `dim` have size 1, XLA for TPUs all-reduces the whole array; so these dims are removed.
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
    """Exchange the parts of `x` along `split`, one for each device, and concatenate the received along `concat`."""
    split, concat = split % x.ndim, concat % x.ndim
    return _call(
        "all_to_all", name, x, axis, split_axis=split, concat_axis=concat, axis_index_groups=groups, tiled=True
    )


class Runs(NamedTuple):
    """Runs of rows that a device sends, the same number of runs to every device, and the sizes of runs it receives."""

    start: Int[Array, "runs"]
    """Index of the first row of each run."""
    size: Int[Array, "runs"]
    """Number of rows of each run."""
    target: Int[Array, "runs"]
    """Index of the run's first row on the device that receives it."""
    received: Int[Array, "runs"]
    """Numbers of rows of the runs that this device receives, from each device in turn."""


def ragged_all_to_all(
    name: str, x: Shaped[Array, "rows embed"], axis: str, received: int, runs: Runs, back: Runs
) -> Shaped[Array, "received embed"]:
    """Exchange runs of rows; return an array of `received` rows, zeros where no row arrives. CPUs cannot compile it.

    Do not differentiate this function: JAX's rule would exchange the offsets again, which the caller has as `back`.
    """
    x, runs, back = vary_like((x, runs, back), x, runs, back)
    return _call("ragged_all_to_all", name, x, axis, received=received, runs=runs, back=back)


def ppermute(name: str, x: Array, axis: str, pairs: Sequence[tuple[int, int]]) -> Array:
    """Send the array of each pair's first device to its second."""
    return _call("ppermute", name, x, axis, perm=pairs)


def _step_options(steps: Sequence[int]) -> list[dict[str, list[list[int]]]]:
    """Return a collective's options in each step; without steps, one empty dict for the whole axis."""
    return [{"axis_index_groups": groups} for groups in _step_groups(steps)] if steps else [{}]


def _step_groups(steps: Sequence[int]) -> list[list[list[int]]]:
    """Return the groups of device indices of each step: in step `k`, indices of a group differ in digit `k` only.

    The digits of an index are its coordinates in an array of shape `steps`.
    """
    indices = np.arange(math.prod(steps)).reshape(steps)
    return [np.moveaxis(indices, step, -1).reshape(-1, size).tolist() for step, size in enumerate(steps)]


def _call(kind: str, name: str, x: PyTree, axes: str | tuple[str, ...], **options: PyTree) -> PyTree:
    """Call the collective `kind` of `jax.lax` in a named scope."""
    collective = _ragged if kind == "ragged_all_to_all" else getattr(jax.lax, kind)
    with jax.named_scope(name):
        return collective(x, axes, **options)


def _ragged(x: Array, axis: str | tuple[str, ...], *, received: int, runs: Runs, back: Runs) -> Array:
    shape = (received, *x.shape[1:])
    on_tpus = functools.partial(_ragged_into_empty, axis, shape)
    elsewhere = functools.partial(_ragged_into_zeros, axis, shape)
    return jax.lax.platform_dependent(x, runs, back, tpu=on_tpus, default=elsewhere)


def _ragged_into_zeros(axis: str | tuple[str, ...], shape: tuple[int, ...], x: Array, runs: Runs, back: Runs) -> Array:
    """Exchange runs of rows into an array of zeros."""
    # XLA would allocate constant zeros before a loop over layers and keep them during the loop, so these depend on `x`.
    zero = ((runs.size[0] < 0) & jnp.isnan(x[0, 0])).astype(x.dtype)
    return jax.lax.ragged_all_to_all(x, jnp.broadcast_to(zero, shape), *runs, axis_name=axis)


def _ragged_into_empty(axis: str | tuple[str, ...], shape: tuple[int, ...], x: Array, runs: Runs, back: Runs) -> Array:
    """Exchange runs of rows into an uninitialized array, and replace the rows that did not arrive by zeros.

    TPUs take longer to write zeros, where a row is a tile, than to mask the rows afterwards.
    """
    rows = jax.lax.ragged_all_to_all(x, vary_like(jax.lax.empty(shape, x.dtype), x), *runs, axis_name=axis)
    row = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    has_arrived = jnp.any((row >= back.start) & (row < back.start + back.size), axis=1)
    return jnp.where(has_arrived[:, None], rows, 0)
