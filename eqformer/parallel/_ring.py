"""Rings: pieces are sent from neighbour to neighbour round a mesh axis, while each device works on the one it has."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..nn import at_least_float32
from ._vary import vary, vary_like
from .context._shift import pass_on


Carry = TypeVar("Carry")
Parts = tuple[Float[Array, "..."], ...]


class Ring(NamedTuple):
    """How pieces go round `axis`: upwards, or in halves both ways round; `name` as for `shift`."""

    name: str
    axis: str
    bidirectional: bool = False

    @property
    def devices(self) -> int:
        """How many devices are on the ring."""
        return jax.lax.axis_size(self.axis)

    def halves(self, size: int) -> tuple[tuple[int, int, int], ...]:
        """Step, offset and length of each part of a piece of `size` rows; the half that goes up is the larger one."""
        upper = (size + 1) // 2 if self.bidirectional else size
        return tuple(half for half in ((1, 0, upper), (-1, upper, size - upper)) if half[2])


def circulate(
    ring: Ring,
    piece: Float[Array, "..."],
    dim: int,
    visit: Callable[[Carry, Float[Array, "..."], Int[Array, ""]], Carry],
    carry: Carry,
) -> Carry:
    """Call `carry = visit(carry, part, start)` on every device's piece, as it passes this device.

    `start` is the part's offset along `dim` of all pieces joined. The next part is sent while this one is visited;
    there are `devices - 1` steps in a loop whose body is compiled once.
    """
    size = piece.shape[dim]
    halves = ring.halves(size)
    index = jax.lax.axis_index(ring.axis)
    piece = vary(piece, [ring.axis])
    carry = vary_like(carry, piece)

    def visit_all(carry: Carry, parts: Parts, turn: int | Int[Array, ""]) -> Carry:
        for (step, offset, _), part in zip(halves, parts, strict=True):
            carry = visit(carry, part, (index - step * turn) % ring.devices * size + offset)
        return carry

    def one_turn(turn: Int[Array, ""], state: tuple[Carry, Parts]) -> tuple[Carry, Parts]:
        carry, parts = state
        coming = _sent(ring, parts, dim)
        return visit_all(carry, parts, turn), coming

    parts = tuple(jax.lax.slice_in_dim(piece, offset, offset + size, axis=dim) for _, offset, size in halves)
    carry, parts = jax.lax.fori_loop(0, ring.devices - 1, one_turn, (carry, parts))
    return visit_all(carry, parts, ring.devices - 1)


def collect(
    ring: Ring, size: int, dim: int, produce: Callable[[Int[Array, ""], int], Float[Array, "..."]], dtype: jnp.dtype
) -> Float[Array, "..."]:
    """The sum over devices of `produce(start, length)` for the `size` rows that this device keeps.

    Each sum passes round the ring to its owner, and every device adds its `length` rows from `start`. It is sent as
    `dtype`; every addition is made in float32 at least. The transpose of `circulate`.
    """
    halves = ring.halves(size)
    index = jax.lax.axis_index(ring.axis)
    exact = at_least_float32(dtype)

    def shares(turn: int | Int[Array, ""]) -> Parts:
        to_go = ring.devices - 1 - turn
        starts = ((index + step * to_go) % ring.devices * size + offset for step, offset, _ in halves)
        return tuple(produce(start, length).astype(exact) for start, (_, _, length) in zip(starts, halves))

    def one_turn(turn: Int[Array, ""], sums: Parts) -> Parts:
        coming = _sent(ring, sums, dim)
        return tuple((x.astype(exact) + y).astype(dtype) for x, y in zip(coming, shares(turn + 1)))

    sums = tuple(x.astype(dtype) for x in shares(0))
    return jnp.concatenate(jax.lax.fori_loop(0, ring.devices - 1, one_turn, sums), axis=dim)


def _sent(ring: Ring, parts: Parts, dim: int) -> Parts:
    return pass_on(parts, ring.axis, dim, name=ring.name)
