"""The record of one grouped product, and what computes such products and their gradients."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .._op import Implementation


class GroupedMatmulCall(eqx.Module):
    """The arguments of `y[i] = weight[group of i] x[i]`: the first `sizes[0]` rows are of group 0, and so on.

    Rows behind the last group give zeros.
    """

    x: Float[Array, "rows inputs"]
    """The rows, sorted by group."""
    weight: Float[Array, "groups outputs inputs"]
    """A matrix for each group."""
    sizes: Int[Array, "groups"]
    """The number of rows of each group."""
    in_fp8: bool = eqx.field(static=True, default=False)
    """Whether factors are rounded to 8 bits where there is a kernel for them."""
    most: int | None = eqx.field(static=True, default=None)
    """No group has more rows than this; None: not known."""
    is_stored: bool = eqx.field(static=True, default=True)
    """Whether the matrices are stored as they are; False: they are decoded, or put together of parts, for the call."""

    operation = "grouped matmul"

    def describe(self) -> str:
        """Return shapes and dtype for an error message."""
        return f"rows {self.x.dtype}{list(self.x.shape)} and matrices {list(self.weight.shape)}"


class GroupedMatmul(Implementation):
    """A kernel of grouped products, forward and for both gradients; sums are in float32."""

    @abc.abstractmethod
    def forward(
        self,
        x: Float[Array, "rows inputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
    ) -> Float[Array, "rows outputs"]:
        """Return each row times its group's matrix, in the dtype of `x`; zeros behind the last group."""

    @abc.abstractmethod
    def input_grad(
        self,
        output_grad: Float[Array, "rows outputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
    ) -> Float[Array, "rows inputs"]:
        """Return the gradients of the rows, in the dtype of `output_grad`."""

    @abc.abstractmethod
    def weight_grad(
        self,
        output_grad: Float[Array, "rows outputs"],
        x: Float[Array, "rows inputs"],
        sizes: Int[Array, "groups"],
        dtype: DTypeLike,
    ) -> Float[Array, "groups outputs inputs"]:
        """Return the gradients of the matrices: float32 sums, rounded to `dtype` once."""

    def run(self, call: GroupedMatmulCall) -> Float[Array, "rows outputs"]:
        """Compute the call."""
        return self.forward(call.x, call.weight, call.sizes)


class XlaGroupedMatmul(Implementation):
    """The definition by XLA, without a kernel.

    XLA computes `jax.lax.ragged_dot` for every group and row on CPUs and GPUs. So `nn.Experts` computes whole modules
    for slots and blocks of rows instead, where no kernel supports its maps.
    """

    def supports(self, call: GroupedMatmulCall) -> str | None:
        """Return None: it computes every call."""
        return None

    def run(self, call: GroupedMatmulCall) -> Float[Array, "rows outputs"]:
        """Compute the call."""
        weight = call.weight.astype(call.x.dtype).swapaxes(1, 2)
        y = jax.lax.ragged_dot(call.x, weight, call.sizes, preferred_element_type=jnp.float32)
        is_real = jnp.arange(len(call.x), dtype=jnp.int32) < jnp.sum(call.sizes, dtype=jnp.int32)
        return jnp.where(is_real[:, None], y, 0).astype(call.x.dtype)
