"""The `feature` residual stream: every activation is split over its features, every map ends in a reduce-scatter.

JAXformer's division: a map holds a slice of what it contracts, so that its products are partial sums of all outputs,
which are reduced and scattered over the outputs' first dim. Nothing is ever gathered but attention's few shared keys.
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ... import nn
from .. import _send as send
from .._axes import TENSOR
from ._collective_matmul import matmul_reduce_scatter


# The dims of activations that are split; `rope_dim` stays whole, since all heads read the one rotated key.
FEATURE_DIMS = ("embed", "heads", "kv_heads", "mlp", "latent", "q_latent")


class FeatureLinear(eqx.Module):
    """A map of which this device holds a slice of the inputs; it gives a slice of the outputs' first dim, or all."""

    inner: nn.Linear | nn.LoRA
    scatters: bool = eqx.field(static=True)
    overlap: str = eqx.field(static=True, default="none")
    is_branched: bool = eqx.field(static=True, default=False)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Contract the slices, add them up over the devices, and keep this device's outputs."""
        linear = self.inner
        outputs = linear.weight.shape[: len(linear.outputs)]
        if not self.scatters:
            bare = eqx.tree_at(lambda m: m.bias, linear, None, is_leaf=lambda leaf: leaf is None)
            y = send.psum("whole maps of features", bare(x), TENSOR)
        else:
            weight = linear.weight.reshape(math.prod(outputs), -1).astype(x.dtype)
            flat = x.reshape(*x.shape[: x.ndim - len(linear.inputs)], -1)
            kind = {"scatter": "outputs", "overlap": self.overlap, "is_branched": self.is_branched}
            y = matmul_reduce_scatter(flat, weight, TENSOR, name="maps of features", **kind)
            y = y.reshape(*y.shape[:-1], -1, *outputs[1:])
        y = checkpoint_name(y, "product")  # for remat policies that keep it, so that it is not reduced again
        return nn.wide_sum(y, linear.bias)


class FeatureKeyHead(eqx.Module):
    """A map to all key heads, of which the one that this device's query heads share is kept."""

    inner: Callable[[Array], Array]

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "*batch kv_heads head_dim"]:
        """All heads' sums, then this device's head."""
        y = self.inner(x)
        first = jax.lax.axis_index(TENSOR) * y.shape[-2] // jax.lax.axis_size(TENSOR)
        return jax.lax.dynamic_slice_in_dim(y, first, 1, y.ndim - 2)
