"""The grouped matmul op: the definition by XLA, and the kernels in the order of preference."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._op import Implementation, Op
from ._call import GroupedMatmulCall
from ._hopper import HopperGroupedMatmul
from ._hopper_fp8 import HopperFp8GroupedMatmul
from ._tpu import TpuGroupedMatmul


class XlaGroupedMatmul(Implementation[GroupedMatmulCall, Array]):
    """The definition of a grouped product, by `jax.lax.ragged_dot`, without a kernel.

    On CPUs and GPUs, XLA multiplies every row by the matrix of every group for a `ragged_dot`. So `nn.Experts` does not
    use this definition if no kernel supports its linear maps; it then runs whole experts on slots or blocks of rows.
    """

    def supports(self, call: GroupedMatmulCall) -> str | None:
        """Return None: it computes every call."""
        return None

    def run(self, call: GroupedMatmulCall) -> Float[Array, "rows outputs"]:
        """Compute the call."""
        weight = call.weight.astype(call.x.dtype).swapaxes(1, 2)
        y = jax.lax.ragged_dot(call.x, weight, call.sizes, preferred_element_type=jnp.float32)
        is_in_group = jnp.arange(len(call.x), dtype=jnp.int32) < jnp.sum(call.sizes, dtype=jnp.int32)
        return jnp.where(is_in_group[:, None], y, 0).astype(call.x.dtype)


GROUPED_MATMUL = Op(
    XlaGroupedMatmul(),
    (("cuda", HopperFp8GroupedMatmul()), ("cuda", HopperGroupedMatmul()), ("tpu", TpuGroupedMatmul())),
)
"""Products of rows, sorted by group, with the matrices of their groups."""
