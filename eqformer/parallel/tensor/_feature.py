"""The `feature` residual stream: every activation is split over its features, every map ends in a reduce-scatter.

JAXformer's division: a map holds a slice of what it contracts, so that its products are partial sums of all outputs,
which are reduced and scattered over the outputs' first dim. Nothing is ever gathered but attention's few shared keys.
"""

from typing import Any

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ... import nn
from .. import _send as send
from .._axes import TENSOR
from ..state._gather import gather_parameter
from ._collective_matmul import matmul_reduce_scatter


# The dims of activations that are split; `rope_dim` stays whole, since all heads read the one rotated key.
FEATURE_DIMS = ("embed", "heads", "kv_heads", "mlp", "latent", "q_latent")


class FeatureLinear(nn.MapAround):
    """A map of which this device holds a slice of the inputs; it gives a slice of the outputs' first dim, or all.

    `split_outputs` tells for each of its arrays the dim, counted from the end, by which it is a slice of the outputs:
    the bias is added to such a slice, and anything else is gathered, since it belongs to the sums.
    """

    scatters: bool = eqx.field(static=True)
    overlap: str = eqx.field(static=True, default="none")
    is_branched: bool = eqx.field(static=True, default=False)
    split_outputs: tuple[int | None, ...] | None = eqx.field(static=True, default=None)

    def product(self, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Contract the slices, add them up over the devices, and keep this device's outputs."""
        linear = self._of_all_outputs()
        outputs = linear.output_shape
        if not self.scatters:
            y = send.psum("whole maps of features", linear.product(x, dtype), TENSOR)
        else:
            flat = x.reshape(*x.shape[: x.ndim - len(linear.inputs)], -1)
            kind = {"scatter": "outputs", "overlap": self.overlap, "is_branched": self.is_branched}
            y = matmul_reduce_scatter(flat, linear.flat_matrix(x.dtype), TENSOR, name="maps of features", **kind)
            y = y.reshape(*y.shape[:-1], -1, *outputs[1:])
        return checkpoint_name(y, "product")  # for remat policies that keep it, so that it is not reduced again

    def _of_all_outputs(self) -> nn.LinearMap:
        if self.split_outputs is None or all(dim is None for dim in self.split_outputs):
            return self.inner
        arrays, rest = eqx.partition(self.inner, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        pairs = zip(leaves, self.split_outputs, strict=True)
        whole = [x if dim is None or x is self.inner.bias else gather_parameter(x, dim) for x, dim in pairs]
        return eqx.combine(jax.tree.unflatten(structure, whole), rest)


class FeatureKeyHead(nn.MapAround):
    """A map to all key heads, of which the one that this device's query heads share is kept."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of one head's map."""
        return (1, *self.inner.shape[1:])

    @property
    def bias(self) -> None:
        """None that is left to add: the heads' sums have theirs."""

    def product(self, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """All heads' sums, then this device's head."""
        y = self.inner(x)
        first = jax.lax.axis_index(TENSOR) * y.shape[-2] // jax.lax.axis_size(TENSOR)
        return jax.lax.dynamic_slice_in_dim(y, first, 1, y.ndim - 2)
