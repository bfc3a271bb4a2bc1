"""The arguments of grouped matrix products, and the base class of kernels for these products and their gradients.

A grouped product multiplies each row by the matrix of its group, for example each token by the weight of its expert.
"""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .._op import Call, Implementation


class GroupedMatmulCall(Call):
    """The arguments of `y[i] = weight[group of i] x[i]`: the first `sizes[0]` rows are of group 0, and so on.

    Rows after the last group give zeros.
    """

    x: Float[Array, "rows inputs"]
    """The rows, sorted by group."""
    weight: Float[Array, "groups outputs inputs"]
    """A matrix for each group."""
    sizes: Int[Array, "groups"]
    """The number of rows of each group."""
    in_fp8: bool = eqx.field(static=True, default=False)
    """Whether both factors are rounded to 8-bit floats, if the platform has a kernel for 8-bit factors."""
    max_group_rows: int | None = eqx.field(static=True, default=None)
    """A bound on the rows of a group; None: no bound is known."""
    is_stored: bool = eqx.field(static=True, default=True)
    """Whether the matrices are parameters; False: they are decoded or assembled from several arrays for the call."""

    operation = "grouped matmul"

    def describe(self) -> str:
        """Return shapes and dtype for an error message."""
        return f"rows {self.x.dtype}{list(self.x.shape)} and matrices {list(self.weight.shape)}"


class GroupedMatmul(Implementation[GroupedMatmulCall, Array]):
    """A kernel of grouped products, for the forward pass and for both gradients; sums are in float32.

    A subclass defines two products, `multiply_rows` and `sum_outer_products`. The forward pass and both gradients call
    these two.
    """

    @abc.abstractmethod
    def multiply_rows(
        self,
        rows: Float[Array, "rows _"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
        *,
        transpose: bool,
    ) -> Float[Array, "rows _"]:
        """Return each row times its group's matrix, in the dtype of the rows; zeros after the last group.

        Args:
            rows: The rows, sorted by group.
            weight: The matrices.
            sizes: The number of rows of each group.
            transpose: True for `row W^T`, from inputs to outputs (the forward pass); False for `row W`, from outputs
                to inputs (the gradient of the rows).
        """

    @abc.abstractmethod
    def sum_outer_products(
        self,
        output_grad: Float[Array, "rows outputs"],
        x: Float[Array, "rows inputs"],
        sizes: Int[Array, "groups"],
        dtype: DTypeLike,
    ) -> Float[Array, "groups outputs inputs"]:
        """Return the sum of `output_grad[i] x[i]^T` over the rows of each group: float32 sums, rounded once."""

    def forward(
        self,
        x: Float[Array, "rows inputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
    ) -> Float[Array, "rows outputs"]:
        """Return each row times its group's matrix, in the dtype of `x`; zeros after the last group."""
        return self.multiply_rows(x, weight, sizes, transpose=True)

    def input_grad(
        self,
        output_grad: Float[Array, "rows outputs"],
        weight: Float[Array, "groups outputs inputs"],
        sizes: Int[Array, "groups"],
    ) -> Float[Array, "rows inputs"]:
        """Return the gradients of the rows, in the dtype of `output_grad`."""
        return self.multiply_rows(output_grad, weight, sizes, transpose=False)

    def weight_grad(
        self,
        output_grad: Float[Array, "rows outputs"],
        x: Float[Array, "rows inputs"],
        sizes: Int[Array, "groups"],
        dtype: DTypeLike,
    ) -> Float[Array, "groups outputs inputs"]:
        """Return the gradients of the matrices: float32 sums, rounded to `dtype` once."""
        return self.sum_outer_products(output_grad, x, sizes, dtype)

    def run(self, call: GroupedMatmulCall) -> Float[Array, "rows outputs"]:
        """Compute the call."""
        return self.forward(call.x, call.weight, call.sizes)


class XlaGroupedMatmul(Implementation[GroupedMatmulCall, Array]):
    """The definition of a grouped product, by `jax.lax.ragged_dot`, without a kernel.

    For a `ragged_dot` on CPUs and GPUs, XLA multiplies every row by the matrices of all groups. So `nn.Experts` does
    not use this definition: if no kernel supports the products, `nn.Experts` runs each expert as a whole, on slots or
    on blocks of rows.
    """

    def supports(self, call: GroupedMatmulCall) -> str | None:
        """Return None: every call is supported."""
        return None

    def run(self, call: GroupedMatmulCall) -> Float[Array, "rows outputs"]:
        """Compute the call."""
        weight = call.weight.astype(call.x.dtype).swapaxes(1, 2)
        y = jax.lax.ragged_dot(call.x, weight, call.sizes, preferred_element_type=jnp.float32)
        is_in_group = jnp.arange(len(call.x), dtype=jnp.int32) < jnp.sum(call.sizes, dtype=jnp.int32)
        return jnp.where(is_in_group[:, None], y, 0).astype(call.x.dtype)
