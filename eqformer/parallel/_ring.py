"""Rings over a mesh axis: neighbor exchange, and loops that send pieces round while each device works on one."""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ..nn import at_least_float32
from . import _collectives as send
from ._mesh import PIPE
from ._shard_map import vary, vary_like


Carry = TypeVar("Carry")
Parts = tuple[Shaped[Array, "..."], ...]


class Ring(NamedTuple):
    """Ring over the devices of `axis`: pieces go upwards, or two halves go both ways; `name` is that of `shift`."""

    name: str
    axis: str
    bidirectional: bool = False

    @property
    def devices(self) -> int:
        """Number of devices on the ring."""
        return jax.lax.axis_size(self.axis)

    def halves(self, size: int) -> tuple[tuple[int, int, int], ...]:
        """Return step, offset and length of each part of a piece of `size` rows; the upward half is the larger one."""
        upper = (size + 1) // 2 if self.bidirectional else size
        return tuple(half for half in ((1, 0, upper), (-1, upper, size - upper)) if half[2])


def circulate(
    ring: Ring,
    piece: Float[Array, "..."],
    dim: int,
    visit: Callable[[Carry, Float[Array, "..."], Int[Array, ""]], Carry],
    carry: Carry,
) -> Carry:
    """Call `carry = visit(carry, part, start)` on every device's piece, as the piece passes this device.

    `start` is the part's offset along `dim` of all pieces joined. The next part is sent while this one is visited;
    there are `devices - 1` steps in a loop whose body is compiled once.
    """
    size = piece.shape[dim]
    halves = ring.halves(size)
    index = jax.lax.axis_index(ring.axis)
    piece = vary(piece, [ring.axis])
    carry = vary_like(carry, piece)

    def visit_parts(carry: Carry, parts: Parts, turn: int | Int[Array, ""]) -> Carry:
        for (step, offset, _), part in zip(halves, parts, strict=True):
            carry = visit(carry, part, (index - step * turn) % ring.devices * size + offset)
        return carry

    def run_turn(turn: Int[Array, ""], state: tuple[Carry, Parts]) -> tuple[Carry, Parts]:
        carry, parts = state
        next_parts = _pass_on(ring, parts, dim)
        return visit_parts(carry, parts, turn), next_parts

    parts = tuple(jax.lax.slice_in_dim(piece, offset, offset + size, axis=dim) for _, offset, size in halves)
    carry, parts = jax.lax.fori_loop(0, ring.devices - 1, run_turn, (carry, parts))
    return visit_parts(carry, parts, ring.devices - 1)


def collect(
    ring: Ring, size: int, dim: int, produce: Callable[[Int[Array, ""], int], Float[Array, "..."]], dtype: jnp.dtype
) -> Float[Array, "..."]:
    """Return the sum over devices of `produce(start, length)` for the `size` rows that this device keeps.

    Each sum passes round the ring to its owner, and every device adds its `length` rows from `start`. Sums are sent in
    `dtype`, and added in float32 at least. This is the transpose of `circulate`.
    """
    halves = ring.halves(size)
    index = jax.lax.axis_index(ring.axis)
    exact = at_least_float32(dtype)

    def summands(turn: int | Int[Array, ""]) -> Parts:
        hops = ring.devices - 1 - turn
        starts = ((index + step * hops) % ring.devices * size + offset for step, offset, _ in halves)
        return tuple(produce(start, length).astype(exact) for start, (_, _, length) in zip(starts, halves))

    def run_turn(turn: Int[Array, ""], sums: Parts) -> Parts:
        received = _pass_on(ring, sums, dim)
        return tuple((x.astype(exact) + y).astype(dtype) for x, y in zip(received, summands(turn + 1)))

    sums = tuple(x.astype(dtype) for x in summands(0))
    return jnp.concatenate(jax.lax.fori_loop(0, ring.devices - 1, run_turn, sums), axis=dim)


def _pass_on(ring: Ring, parts: Parts, dim: int) -> Parts:
    return pass_on(parts, ring.axis, dim, name=ring.name)


def shift(tree: PyTree, axis: str, *, name: str = "ring") -> PyTree:
    """Send each array to the next device along `axis`; the first device gets the last one's.

    `name` is the collective's name in the compiled program. Where the mesh has an axis `pipe`, the call may be in a
    branch that the devices of other stages do not take. On CPUs and GPUs, XLA's permute waits for all devices of the
    program, whatever its pairs are, and would wait forever. On these platforms pairs of neighbors swap their arrays
    instead, in two rounds; TPUs permute.
    """
    return jax.tree.map(lambda x: pass_on((x,), axis, 0, name=name)[0], tree)


def pass_on(parts: Parts, axis: str, dim: int, *, name: str) -> Parts:
    """Send the first part to the next device and the second, if there is one, to the previous device.

    The parts have the same shape except along `dim`, where the first is at least as large as the second.
    """
    if axis == PIPE or _stages() == 1:
        return _permute(name, parts, axis)
    exchange = _swap_with_neighbors if jax.lax.axis_size(axis) % 2 == 0 else _gather_and_pick
    permute = functools.partial(_permute, name, axis=axis)
    return jax.lax.platform_dependent(parts, tpu=permute, default=functools.partial(exchange, name, axis=axis, dim=dim))


def _stages() -> int:
    """Return the number of pipeline stages: 1 where the mesh has no axis `pipe`."""
    try:
        return jax.lax.axis_size(PIPE)
    except NameError:  # JAX raises it for an axis that the mesh does not have.
        return 1


def _permute(name: str, parts: Parts, axis: str) -> Parts:
    size = jax.lax.axis_size(axis)
    routes = [[(i, (i + step) % size) for i in range(size)] for step in (1, -1)]
    return tuple(send.ppermute(name, part, axis, route) for part, route in zip(parts, routes))


def _gather_and_pick(name: str, parts: Parts, axis: str, dim: int) -> Parts:
    """Do the work of `_permute` by a gather of which each device keeps one piece, for an odd number of devices."""
    del dim
    size, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    gathered = [send.all_gather(name, part, axis, stacks=True) for part in parts]
    return tuple(
        jax.lax.dynamic_index_in_dim(x, (index - step) % size, keepdims=False) for x, step in zip(gathered, (1, -1))
    )


def _swap_with_neighbors(name: str, parts: Parts, axis: str, dim: int) -> Parts:
    """Do the work of `_permute` by swaps: even devices with the next one, then odd devices with the next one."""
    size = jax.lax.axis_size(axis)
    evens = tuple((i, i + 1) for i in range(0, size, 2))
    is_even = jax.lax.axis_index(axis) % 2 == 0
    if size == 2:  # The next device is also the previous one: one swap does both.
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
    is_first: Shaped[Array, ""],
) -> Shaped[Array, "..."]:
    """Return the partner's `x`; `is_first` says whether this device is the first of its pair."""
    pieces = send.all_to_all(name, jnp.stack([x, x]), axis, 0, 0, groups=pairs)
    return jnp.where(is_first, pieces[1], pieces[0])
