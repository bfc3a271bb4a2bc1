"""The dtypes of parameters and of computation."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Precision:
    """A policy: the dtype parameters are kept in and the dtype of the residual stream and of products.

    Reductions (norms, softmax, logits, losses) are in float32 at least whatever the policy. `Precision()` is float32
    throughout, `Precision(compute="bfloat16")` mixed precision, `Precision("bfloat16", "bfloat16")` for inference.
    """

    parameters: str = "float32"
    compute: str = "float32"

    def __post_init__(self):
        for name, dtype in (("parameters", self.parameters), ("compute", self.compute)):
            if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
                raise ValueError(
                    f"Precision({name}={dtype!r}): give a floating-point dtype, such as float32 or bfloat16."
                )

    def apply(self, model: Transformer) -> Transformer:
        """The model with its parameters cast and its compute dtype set."""
        return dataclasses.replace(cast(model, self.parameters), compute_dtype=self.compute)


def cast(tree: PyTree, dtype: str) -> PyTree:
    """The tree with its floating-point arrays in `dtype`; other leaves stay."""
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)
