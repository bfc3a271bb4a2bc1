"""Rings over a mesh axis: exchange between neighbors, and loops that compute while pieces pass round the ring."""

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


class PartOfPiece(NamedTuple):
    """The entries of a piece that go in one direction round a ring."""

    direction: int
    """1 to the next device, -1 to the previous device."""
    offset: int
    """Index of the first entry in the piece."""
    length: int


class Ring(NamedTuple):
    """Ring over the devices of a mesh axis, in the order of the axis.

    A piece is sent to the next device. In a bidirectional ring, the first half of a piece is sent to the next device,
    and the second half to the previous device.
    """

    name: str
    """Name of the collective in the compiled program."""
    axis: str
    bidirectional: bool = False

    @property
    def devices(self) -> int:
        """Number of devices on the ring."""
        return jax.lax.axis_size(self.axis)

    def split_piece(self, size: int) -> tuple[PartOfPiece, ...]:
        """Split a piece of `size` entries into a part for each direction; the second part is never larger."""
        first = (size + 1) // 2 if self.bidirectional else size
        parts = PartOfPiece(1, 0, first), PartOfPiece(-1, first, size - first)
        return tuple(part for part in parts if part.length)


def circulate(
    ring: Ring,
    piece: Float[Array, "..."],
    dim: int,
    visit: Callable[[Carry, Float[Array, "..."], Int[Array, ""]], Carry],
    carry: Carry,
) -> Carry:
    """Return `carry` after `carry = visit(carry, part, start)` has been called with the pieces of all devices.

    The pieces pass round the ring. A device visits its own piece first, then each piece as it arrives; in a
    bidirectional ring, a visit gets half of a piece. `start` is the index of the visited part in the concatenation of
    all pieces along `dim`. Each device sends a part on while it visits the part. The `devices - 1` sends are in a loop
    whose body is compiled once.
    """
    size = piece.shape[dim]
    layout = ring.split_piece(size)
    index = jax.lax.axis_index(ring.axis)
    piece = vary(piece, [ring.axis])
    carry = vary_like(carry, piece)

    def visit_parts(carry: Carry, parts: Parts, step: int | Int[Array, ""]) -> Carry:
        for (direction, offset, _), part in zip(layout, parts, strict=True):
            carry = visit(carry, part, (index - direction * step) % ring.devices * size + offset)
        return carry

    def run_step(step: Int[Array, ""], state: tuple[Carry, Parts]) -> tuple[Carry, Parts]:
        carry, parts = state
        next_parts = send_to_neighbors(parts, ring.axis, dim, name=ring.name)
        return visit_parts(carry, parts, step), next_parts

    parts = tuple(jax.lax.slice_in_dim(piece, offset, offset + length, axis=dim) for _, offset, length in layout)
    carry, parts = jax.lax.fori_loop(0, ring.devices - 1, run_step, (carry, parts))
    return visit_parts(carry, parts, ring.devices - 1)


def ring_reduce_scatter(
    ring: Ring,
    size: int,
    dim: int,
    compute_term: Callable[[Int[Array, ""], int], Float[Array, "..."]],
    dtype: jnp.dtype,
) -> Float[Array, "..."]:
    """Return this device's piece, `size` entries along `dim`, of the sum of all devices' terms.

    `compute_term(start, length)` returns `length` entries along `dim`, from index `start`, of this device's term. Each
    piece of the sum passes round the ring towards its device, and every device on the way adds its term. Sums are sent
    in `dtype` and added in float32 at least. The function sends as many messages, of the same sizes, as `circulate`.
    """
    layout = ring.split_piece(size)
    index = jax.lax.axis_index(ring.axis)
    sum_dtype = at_least_float32(dtype)

    def compute_terms(step: int | Int[Array, ""]) -> Parts:
        remaining_sends = ring.devices - 1 - step
        starts = (
            (index + direction * remaining_sends) % ring.devices * size + offset for direction, offset, _ in layout
        )
        return tuple(compute_term(start, part.length).astype(sum_dtype) for start, part in zip(starts, layout))

    def run_step(step: Int[Array, ""], sums: Parts) -> Parts:
        received = send_to_neighbors(sums, ring.axis, dim, name=ring.name)
        return tuple((x.astype(sum_dtype) + y).astype(dtype) for x, y in zip(received, compute_terms(step + 1)))

    sums = tuple(x.astype(dtype) for x in compute_terms(0))
    return jnp.concatenate(jax.lax.fori_loop(0, ring.devices - 1, run_step, sums), axis=dim)


def shift(tree: PyTree, axis: str, *, name: str = "ring") -> PyTree:
    """Send each array to the next device along `axis`, and from the last device to the first.

    `name` is the collective's name in the compiled program. On a mesh with several pipeline stages, the call may be in
    a branch that the devices of other stages do not take. On TPUs, `shift` is always a permute. On CPUs and GPUs, XLA's
    permute waits for all devices of the program, even for devices that take the other branch and never call the
    permute. With several stages, these platforms therefore use collectives that wait only for devices of the axis: two
    devices swap their arrays; a larger even number of devices swaps in two rounds, first with one neighbor and then
    with the other; an odd number of devices all-gathers the arrays, and each device keeps the array of the previous
    device.
    """
    return jax.tree.map(lambda x: send_to_neighbors((x,), axis, 0, name=name)[0], tree)


def send_to_neighbors(parts: Parts, axis: str, dim: int, *, name: str) -> Parts:
    """Send the first part to the next device and the second part, if there is one, to the previous device.

    The parts have the same shape except along `dim`, where the first is at least as large as the second. See `shift`
    for the collectives.
    """
    if axis == PIPE or _stages() == 1:
        return _permute(name, parts, axis)
    exchange = _swap_with_neighbors if jax.lax.axis_size(axis) % 2 == 0 else _gather_and_pick
    permute = functools.partial(_permute, name, axis=axis)
    return jax.lax.platform_dependent(parts, tpu=permute, default=functools.partial(exchange, name, axis=axis, dim=dim))


def _stages() -> int:
    """Return the number of pipeline stages, which is 1 if the mesh has no axis `pipe`."""
    try:
        return jax.lax.axis_size(PIPE)
    except NameError:  # JAX raises a NameError for an axis that the mesh does not have.
        return 1


def _permute(name: str, parts: Parts, axis: str) -> Parts:
    size = jax.lax.axis_size(axis)
    routes = [[(i, (i + direction) % size) for i in range(size)] for direction in (1, -1)]
    return tuple(send.ppermute(name, part, axis, route) for part, route in zip(parts, routes))


def _gather_and_pick(name: str, parts: Parts, axis: str, dim: int) -> Parts:
    """Return the results of `_permute` from an all-gather: each device keeps the neighbor's array of each part."""
    del dim
    size, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    gathered = [send.all_gather(name, part, axis, stacks=True) for part in parts]
    return tuple(
        jax.lax.dynamic_index_in_dim(x, (index - direction) % size, keepdims=False)
        for x, direction in zip(gathered, (1, -1))
    )


def _swap_with_neighbors(name: str, parts: Parts, axis: str, dim: int) -> Parts:
    """Return the results of `_permute` from swaps: devices 0 and 1, 2 and 3, ...; then 1 and 2, ..., last and 0.

    The number of devices is even. In each of the two swaps, a device sends its neighbor the part for this neighbor.
    """
    size = jax.lax.axis_size(axis)
    evens = tuple((i, i + 1) for i in range(0, size, 2))
    is_even = jax.lax.axis_index(axis) % 2 == 0
    if size == 2:  # The next device is also the previous device, so each part needs a single swap.
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
    """Return the array of this device's partner; `is_first` says whether this device is the first of its pair."""
    pieces = send.all_to_all(name, jnp.stack([x, x]), axis, 0, 0, groups=pairs)
    return jnp.where(is_first, pieces[1], pieces[0])
