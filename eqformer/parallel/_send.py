"""Every collective of the transforms, each with a name that is found in the compiled program.

A name stands in the program's metadata (`op_name`), before that of the operation; what the backward pass sends for it
goes by the same name. So profiles, counted bytes and the tests that leave one out all speak of the same things.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree, Shaped

from ._axes import CONTEXT, EXPERT, PIPE, TENSOR
from ._vary import vary as vary_over, vary_like


STATE = "state"  # parameters and gradients, over all axes along which they are copied or shared out

# What asks for each: the axis whose split does, or the state that devices share.
COLLECTIVES: dict[str, str] = {
    "losses and counts": STATE,
    "sums of rows": CONTEXT,
    "gradients over replicas": STATE,
    "gradients over fsdp": STATE,
    "parameters over fsdp": STATE,
    "maps from the stream": TENSOR,
    "maps to the stream": TENSOR,
    "maps of features": TENSOR,
    "whole maps of features": TENSOR,
    "weights over tensor": TENSOR,
    "means of split norms": TENSOR,
    "squares of split norms": TENSOR,
    "looked-up vectors": TENSOR,
    "stream for the head": TENSOR,
    "table from features to ids": TENSOR,
    "highest logits": TENSOR,
    "normalisers": TENSOR,
    "logits of targets": TENSOR,
    "highest logits of all ids": TENSOR,
    "first of the highest": TENSOR,
    "keys and values round": CONTEXT,
    "keys and values gathered": CONTEXT,
    "tokens to heads": CONTEXT,
    "heads to tokens": CONTEXT,
    "tokens beside heads": CONTEXT,
    "peaks over split caches": CONTEXT,
    "sums over split caches": CONTEXT,
    "rows for experts": TENSOR,
    "slices of experts": TENSOR,
    "features to tokens": TENSOR,
    "tokens to features": TENSOR,
    "features of experts": TENSOR,
    "loads of experts": STATE,
    "same on all slices": TENSOR,
    "tokens to all experts": EXPERT,
    "sums of all experts": EXPERT,
    "rounds of choices": EXPERT,
    "counts of choices": EXPERT,
    "choices to experts": EXPERT,
    "choices from experts": EXPERT,
    "activations between stages": PIPE,
    "gradients between stages": PIPE,
    "inputs between stages": PIPE,
    "tokens for all stages": PIPE,
    "outputs of the last stage": PIPE,
    "sums over stages": STATE,
    "stream for wide maps": TENSOR,
    "wide maps": TENSOR,
    "keys and values of rows": TENSOR,
    "heads to rows": TENSOR,
    "rows to heads": TENSOR,
    "inputs of maps to the stream": TENSOR,
    "stream for logits": TENSOR,
    "partial logits": TENSOR,
    "all_gather_matmul": TENSOR,
    "matmul_reduce_scatter": TENSOR,
    "ring": STATE,
}


def vary(name: str, tree: PyTree, axes: str | Iterable[str]) -> PyTree:
    """The same values, typed as differing over `axes` too; nothing is sent but the sum of their gradients."""
    with jax.named_scope(name):
        return vary_over(tree, (axes,) if isinstance(axes, str) else axes)


def psum(name: str, x: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """The sum over the devices of some axes."""
    return _sent("psum", name, x, axes)


def pmean(name: str, x: Array, axes: str | tuple[str, ...]) -> Array:
    """The mean over the devices of some axes."""
    return _sent("pmean", name, x, axes)


def pmax(name: str, x: Array, axes: str | tuple[str, ...]) -> Array:
    """The largest over the devices of some axes."""
    return _sent("pmax", name, x, axes)


def pmin(name: str, x: Array, axes: str | tuple[str, ...]) -> Array:
    """The smallest over the devices of some axes."""
    return _sent("pmin", name, x, axes)


def all_gather(
    name: str, x: Array, axis: str, dim: int = 0, *, stacks: bool = False, steps: Sequence[int] = ()
) -> Array:
    """All devices' pieces joined along `dim`, or with `stacks` one after another along a new one.

    With `steps` they are joined several times, as `psum_scatter` with the same steps takes them apart, its last first.
    """
    assert not (stacks and steps)
    for options in reversed(_options(steps)):
        x = _sent("all_gather", name, x, axis, axis=dim if stacks else dim % x.ndim, tiled=not stacks, **options)
    return x


def psum_scatter(name: str, x: Array, axis: str, dim: int = 0, *, steps: Sequence[int] = ()) -> Array:
    """This device's slice, along `dim`, of the sum over the axis.

    With `steps` it is scattered several times, each time among so many devices; they multiply to the axis' size.
    """
    # Behind dims of one entry, XLA's compiler for TPUs sums the whole on every device instead.
    dim %= x.ndim
    single = x.shape[:dim] if math.prod(x.shape[:dim]) == 1 else ()
    x = x.reshape(x.shape[len(single) :])
    for options in _options(steps):
        x = _sent("psum_scatter", name, x, axis, scatter_dimension=dim - len(single), tiled=True, **options)
    return x.reshape(*single, *x.shape)


def all_to_all(
    name: str,
    x: Array,
    axis: str | tuple[str, ...],
    split: int,
    concat: int,
    *,
    groups: Sequence[Sequence[int]] | None = None,
) -> Array:
    """The parts of `x` along `split`, one for each device, exchanged and joined along `concat`."""
    split, concat = split % x.ndim, concat % x.ndim
    return _sent(
        "all_to_all", name, x, axis, split_axis=split, concat_axis=concat, axis_index_groups=groups, tiled=True
    )


class Runs(NamedTuple):
    """Runs of rows that a device sends, equally many to each other device one after another, and how many it gets."""

    start: Int[Array, "runs"]
    """The first row of each."""
    size: Int[Array, "runs"]
    """How many rows it has."""
    place: Int[Array, "runs"]
    """Where its first row is to be on the device that gets it."""
    taken: Int[Array, "runs"]
    """How many rows the runs have that this device gets, from each other device one after another."""


def ragged_all_to_all(
    name: str, x: Shaped[Array, "rows embed"], axis: str, made: int, runs: Runs, back: Runs
) -> Shaped[Array, "made embed"]:
    """Runs of rows exchanged, in an array of so many rows, zeros where none comes. XLA for CPUs cannot compile it.

    Not to be differentiated: JAX's own rule asks other devices for what the caller knows, the runs `back`.
    """
    x, runs, back = vary_like((x, runs, back), x, runs, back)
    return _sent("ragged_all_to_all", name, x, axis, made=made, runs=runs, back=back)


def ppermute(name: str, x: Array, axis: str, pairs: Sequence[tuple[int, int]]) -> Array:
    """What the first of each pair has, on the second."""
    return _sent("ppermute", name, x, axis, perm=pairs)


def _options(steps: Sequence[int]) -> list[dict[str, Any]]:
    """What a collective is told at each step; nothing where there is one, of the whole axis."""
    return [{"axis_index_groups": groups} for groups in _groups(steps)] if steps else [{}]


def _groups(steps: Sequence[int]) -> list[list[list[int]]]:
    """For each step the groups of places along an axis that share it: first those that differ in the first digit."""
    places = np.arange(math.prod(steps)).reshape(steps)
    return [np.moveaxis(places, step, -1).reshape(-1, size).tolist() for step, size in enumerate(steps)]


def _sent(kind: str, name: str, x: PyTree, axes: str | tuple[str, ...], **options: Any) -> PyTree:
    send = _ragged if kind == "ragged_all_to_all" else getattr(jax.lax, kind)
    with jax.named_scope(name):
        return send(x, axes, **options)


def _ragged(x: Array, axis: str | tuple[str, ...], *, made: int, runs: Runs, back: Runs) -> Array:
    ways = {"tpu": _into_nothing, "default": _into_zeros}
    ways = {name: functools.partial(way, axis, (made, *x.shape[1:])) for name, way in ways.items()}
    return jax.lax.platform_dependent(x, runs, back, **ways)


def _into_zeros(axis: str | tuple[str, ...], shape: tuple[int, ...], x: Array, runs: Runs, back: Runs) -> Array:
    """Over zeros, which wait for the rows: others would be made before a loop over layers, and held by it."""
    zero = ((runs.size[0] < 0) & jnp.isnan(x[0, 0])).astype(x.dtype)
    return jax.lax.ragged_all_to_all(x, jnp.broadcast_to(zero, shape), *runs, axis_name=axis)


def _into_nothing(axis: str | tuple[str, ...], shape: tuple[int, ...], x: Array, runs: Runs, back: Runs) -> Array:
    """Over what nobody wrote. TPUs take longer to write zeros where a row is a tile than to leave out rows behind."""
    found = jax.lax.ragged_all_to_all(x, vary_like(jax.lax.empty(shape, x.dtype), x), *runs, axis_name=axis)
    row = jnp.arange(len(found), dtype=jnp.int32)[:, None]
    is_there = jnp.any((row >= back.start) & (row < back.start + back.size), axis=1)
    return jnp.where(is_there[:, None], found, 0)
