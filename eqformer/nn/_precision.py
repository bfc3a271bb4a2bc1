"""The dtypes of parameters and of computation."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._dims import float32_flags
from ._dtype import at_least_float32, float_dtype
from ._fp8 import with_fp8, without_fp8
from ._transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Precision:
    """A policy: the dtype parameters are kept in, the dtype of the residual stream, and what products are of.

    `products="fp8"` computes those of linear maps in 8 bits (`with_fp8`); by default they are in the compute dtype.
    Reductions (norms, softmax, logits, losses) are in float32 at least whatever the policy. `Precision()` is float32
    throughout, `Precision(compute="bfloat16")` mixed precision, `Precision("bfloat16", "bfloat16")` for inference.
    Dtypes go by their names, also short ones (`bf16`), which become the full ones.
    """

    parameters: str = "float32"
    """What parameters are kept in."""
    compute: str = "float32"
    """float32, or bfloat16 for mixed precision; float16 too, with a scale of the loss."""
    products: str = "compute"
    """What products of linear maps are of: compute (that dtype) or fp8."""

    def __post_init__(self):
        if self.products not in ("compute", "fp8"):
            raise ValueError(f"Precision(products={self.products!r}): products are in 'compute' (its dtype) or 'fp8'.")
        for name, dtype in (("parameters", self.parameters), ("compute", self.compute)):
            object.__setattr__(self, name, float_dtype(dtype, f"Precision({name}={dtype!r})"))

    def apply(self, model: Transformer) -> Transformer:
        """The model with its parameters cast, its compute dtype set and its products chosen."""
        model = dataclasses.replace(cast(without_fp8(model), self.parameters), compute_dtype=self.compute)
        return with_fp8(model) if self.products == "fp8" else model


def cast(tree: PyTree, dtype: str) -> PyTree:
    """The tree with its floating-point arrays cast to `dtype`; fields marked `float32_at_least` are no narrower."""
    name = float_dtype(dtype, f"cast(dtype={dtype!r})")
    wide = at_least_float32(jnp.dtype(name))

    def one(x: Any, is_wide: bool) -> Any:
        return x.astype(wide if is_wide else name) if eqx.is_inexact_array(x) else x

    return jax.tree.map(one, tree, float32_flags(tree))
