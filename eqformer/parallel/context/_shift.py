"""Every device of an axis sends arrays to its neighbours, also inside branches that not all devices take."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from .. import _send as send
from .._axes import PIPE
from .._vary import vary_like


Parts = tuple[Shaped[Array, "..."], ...]


def shift(tree: PyTree, axis: str, *, name: str = "ring") -> PyTree:
    """Each array of the previous device along `axis`; the first device gets the last one's.

    `name` is the collective's name in the compiled program. Where the mesh has an axis `pipe`, the call may be in a
    branch that the devices of other stages do not take. On CPUs and GPUs, XLA's permute waits for all devices of the
    program, whatever its pairs are, and so would wait for ever. There, pairs of neighbours swap their arrays instead,
    in two rounds; TPUs permute.
    """
    return jax.tree.map(lambda x: pass_on((x,), axis, 0, name=name)[0], tree)


def pass_on(parts: Parts, axis: str, dim: int, *, name: str) -> Parts:
    """Send the first part to the next device and the second, if there is one, to the previous device.

    They have the same shape except along `dim`, where the first is at least as large as the second.
    """
    if axis == PIPE or _stages() == 1:
        return _permuted(name, parts, axis)
    swapped = _swapped if jax.lax.axis_size(axis) % 2 == 0 else _picked
    permuted = lambda parts: _permuted(name, parts, axis)
    return jax.lax.platform_dependent(parts, tpu=permuted, default=lambda parts: swapped(name, parts, axis, dim))


def _stages() -> int:
    try:
        return jax.lax.axis_size(PIPE)
    except NameError:  # the mesh has no such axis
        return 1


def _permuted(name: str, parts: Parts, axis: str) -> Parts:
    size = jax.lax.axis_size(axis)
    routes = [[(i, (i + step) % size) for i in range(size)] for step in (1, -1)]
    return tuple(send.ppermute(name, part, axis, route) for part, route in zip(parts, routes))


def _picked(name: str, parts: Parts, axis: str, dim: int) -> Parts:
    """`_permuted` by a gather of which each device keeps one piece, for rings of an odd number of devices."""
    del dim
    size, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    gathered = lambda x: send.all_gather(name, x, axis, stacks=True)
    pick = lambda x, step: jax.lax.dynamic_index_in_dim(gathered(x), (index - step) % size, keepdims=False)
    return tuple(pick(part, step) for part, step in zip(parts, (1, -1)))


def _swapped(name: str, parts: Parts, axis: str, dim: int) -> Parts:
    """`_permuted` by swaps of neighbours: even devices with the next one, then odd devices with the next one."""
    size = jax.lax.axis_size(axis)
    evens = tuple((i, i + 1) for i in range(0, size, 2))
    is_even = jax.lax.axis_index(axis) % 2 == 0
    if size == 2:  # the next device is the previous one
        return tuple(_swap(name, part, axis, evens, is_even) for part in parts)
    odds = tuple((i, (i + 1) % size) for i in range(1, size, 2))
    up, down = parts[0], jnp.zeros_like(parts[0])
    if len(parts) == 2:
        widths = [(0, 0)] * up.ndim
        widths[dim] = (0, up.shape[dim] - parts[1].shape[dim])
        down = jnp.pad(parts[1], widths)
    down = vary_like(down, up)
    first = _swap(name, jnp.where(is_even, up, down), axis, evens, is_even)
    second = _swap(name, jnp.where(is_even, down, up), axis, odds, ~is_even)
    up, down = jnp.where(is_even, second, first), jnp.where(is_even, first, second)
    return (up,) if len(parts) == 1 else (up, jax.lax.slice_in_dim(down, 0, parts[1].shape[dim], axis=dim))


def _swap(
    name: str,
    x: Shaped[Array, "..."],
    axis: str,
    pairs: tuple[tuple[int, int], ...],
    is_left: Shaped[Array, ""],
) -> Shaped[Array, "..."]:
    """The partner's `x`; `is_left` where this device is the first of its pair."""
    both = send.all_to_all(name, jnp.stack([x, x]), axis, 0, 0, groups=pairs)
    return jnp.where(is_left, both[1], both[0])
