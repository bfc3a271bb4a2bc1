"""Looking up vectors in a table that `fsdp` splits, part by part: neither it nor its gradient is ever whole."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ... import nn
from .. import _send as send
from .._axes import FSDP
from .._vary import vary_like
from ..layouts._devices import Steps


PART = 2**27  # bytes of a part's float32 gradient; smaller tables are gathered whole


class TableInParts(nn.Module):
    """An embedding of which this device holds a slice, `table`, along `dim`; `weight`, if anybody reads it, is whole.

    `table` may be a stand-in for `value`. Vectors are sent in the dtype `sent`, and their gradients are summed over
    tokens and devices in float32 at least, in as many `parts` of the table's rows.
    """

    weight: Float[Array, "vocab embed"]
    table: Float[Array, "some_vocab some_embed"]
    value: Float[Array, "some_vocab some_embed"] | None
    scale: float | None = eqx.field(static=True)
    dim: int = eqx.field(static=True)
    sent: str = eqx.field(static=True)
    parts: int = eqx.field(static=True)
    steps: Steps = eqx.field(static=True)

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up one vector a token; NaN for an id outside the table."""
        value = None if self.value is None else vary_like(self.value, self.table)
        x = _look_up(self.dim, self.sent, self.parts, self.steps, value, self.table, ids)
        return x if self.scale is None else x * jnp.asarray(self.scale, x.dtype)


def parts_of(table: Shaped[Array, "vocab embed"] | jax.ShapeDtypeStruct) -> int:
    """Into how many parts a whole table, or its shape, is taken."""
    return math.ceil(table.size * 4 / PART)


def _look_up_plainly(
    dim: int, sent: str, parts: int, steps: Steps, value: Array | None, table: Array, ids: Array
) -> Array:
    held = table if value is None else value
    rows, (part_of, row_of) = _rows(held, parts), _places(held, dim, parts, ids)
    spare = parts * rows - len(held)
    pieces = (jnp.pad(held, [(0, spare), (0, 0)]) if spare else held).reshape(parts, rows, -1)
    width = held.shape[1] * (jax.lax.axis_size(FSDP) if dim == 1 else 1)

    def add(x: Array, given: tuple[Array, Array]) -> tuple[Array, None]:
        number, piece = given
        whole = send.all_gather("parameters over fsdp", piece.astype(sent), FSDP, dim, steps=steps.gather)
        is_there = part_of == number
        found = whole[jnp.where(is_there, row_of, 0)].astype(x.dtype)
        return jnp.where(is_there[..., None], found, x), None

    nothing = vary_like(jnp.full((*ids.shape, width), jnp.nan, held.dtype), held, ids)
    return jax.lax.scan(add, nothing, (jnp.arange(parts), pieces))[0]


def _look_up_backward(
    dim: int, sent: str, parts: int, steps: Steps, saved: tuple[Array, Array], gradient: Array
) -> tuple[None, Array, None]:
    table, ids = saved
    rows, (part_of, row_of) = _rows(table, parts), _places(table, dim, parts, ids)
    count = rows * (jax.lax.axis_size(FSDP) if dim == 0 else 1)
    wide = gradient.astype(nn.at_least_float32(gradient.dtype))

    def of_part(number: Array) -> Array:
        row = jnp.where(part_of == number, row_of, count)  # behind the last: left out
        zeros = vary_like(jnp.zeros((count, wide.shape[-1]), wide.dtype), wide, ids)
        whole = zeros.at[row].add(wide, mode="drop")
        return send.psum_scatter("gradients over fsdp", whole, FSDP, dim, steps=steps.scatter)

    found = jax.lax.map(of_part, jnp.arange(parts))
    return None, found.reshape(parts * rows, -1)[: len(table)].astype(table.dtype), None


_look_up = jax.custom_vjp(_look_up_plainly, nondiff_argnums=(0, 1, 2, 3))
_look_up.defvjp(lambda *given: (_look_up_plainly(*given), given[-2:]), _look_up_backward)


def _rows(held: Array, parts: int) -> int:
    """The rows of this device's slice in a part; of the last one some may be missing."""
    return -(-len(held) // parts)


def _places(held: Array, dim: int, parts: int, ids: Array) -> tuple[Array, Array]:
    """In which part each id's row is, -1 for an id outside the table, and where in the gathered part."""
    own, rows = len(held), _rows(held, parts)
    device, within = ids // own, ids % own  # where devices hold slices of features, each has all rows
    is_there = (ids >= 0) & (device < (jax.lax.axis_size(FSDP) if dim == 0 else 1))
    return jnp.where(is_there, within // rows, -1), device * rows + within % rows
