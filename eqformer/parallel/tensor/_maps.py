"""What stands in the places of a split layer's maps while it runs on its slice, between it and the residual stream."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ... import nn
from .. import _send as send
from .._axes import TENSOR
from ._collective_matmul import matmul_reduce_scatter
from ._stream import Stream


@dataclasses.dataclass(frozen=True)
class Reads:
    """How a layer's maps out of the stream find their products; `mixer` is the name of its class, if it is one."""

    stream: Stream
    sharers: int
    mixer: str | None

    def rows(self, linear: nn.LinearMap, y: Array) -> Array:
        """Of a map's product what this device goes on with: all of it, or some rows where key heads are shared."""
        if self.sharers == 1:
            return y
        if "kv_heads" in linear.outputs:
            return own_rows(y, self.sharers)
        return send.all_to_all("heads to rows", y, TENSOR, 0, -2, groups=_sharing(self.sharers))

    def of_another(self, linear: nn.LinearMap, x: Float[Array, "*batch seq embed"]) -> Array:
        """The product of a map with what the layer has made of its input, such as what a norm gives."""
        if self.stream.splits_tokens and self.mixer:
            spec = f"{' '.join(linear.inputs)} -> {' '.join(linear.outputs)}"
            raise ValueError(
                f"Plan(residual='sequence') over tensor={jax.lax.axis_size(TENSOR)}: the map {spec!r} of {self.mixer} "
                "reads what the mixer has made of its input, of which a device has some tokens and no others to make "
                "it of; let the map read the input itself, or take residual='replicated' or 'feature'."
            )
        return self.rows(linear, linear.product(self.stream.whole("maps from the stream", x)))


class Given(nn.LinearWrapper):
    """Stands for a map whose product with the layer's input, `given`, is known."""

    value: Float[Array, "..."]
    given: Float[Array, "..."]
    reads: Reads = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """What is known, of the layer's input; of anything else what `reads` finds."""
        y = self.value if x is self.given else self.reads.of_another(self.inner, x)
        return y if dtype is None else y.astype(dtype)

    def of_other(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The map's own."""
        return self.inner(x)


class Row(nn.LinearWrapper):
    """A map back into the stream, of which this device holds a slice of the inputs."""

    stream: Stream = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """What this device holds of the sum of all devices' products."""
        if self.stream.overlap == "none":
            y = self.stream.summed("maps to the stream", self.inner.product(x, dtype))
        else:
            flat = x.reshape(*x.shape[: x.ndim - len(self.inputs)], -1)
            weight = self.inner.flat_matrix(x.dtype)
            how: Any = {"overlap": self.stream.overlap, "products": self.products, "name": "maps to the stream"}
            y = matmul_reduce_scatter(flat, weight, TENSOR, scatter="seq", **how)
        y = checkpoint_name(y, "product")  # for remat policies that keep it, so that it is not reduced again
        return checkpoint_name(y, "own tokens") if self.stream.splits_tokens else y


class RowOfAll(nn.LinearWrapper):
    """A map back into the stream of some rows' heads, which are exchanged for the heads of all rows."""

    sharers: int = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """The inner map's, of all rows."""
        x = send.all_to_all("rows to heads", x, TENSOR, -2, 0, groups=_sharing(self.sharers))
        return self.inner.product(x, dtype)


def _sharing(sharers: int) -> list[list[int]]:
    """The devices that share each key head: they stand beside each other."""
    devices = range(jax.lax.axis_size(TENSOR))
    return [list(devices[first : first + sharers]) for first in devices[::sharers]]


def own_rows(x: Array, sharers: int) -> Array:
    """Of an array of all rows those that this device attends for, among those that share its key head."""
    size = x.shape[0] // sharers
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) % sharers * size, size)
