"""The dtypes of parameters and of computation."""

import dataclasses

import equinox as eqx
import jax
from jaxtyping import PyTree

from ._dtype import float_dtype
from ._transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Precision:
    """A policy: the dtype parameters are kept in and the dtype of the residual stream and of products.

    Reductions (norms, softmax, logits, losses) are in float32 at least whatever the policy. `Precision()` is float32
    throughout, `Precision(compute="bfloat16")` mixed precision, `Precision("bfloat16", "bfloat16")` for inference.
    Dtypes go by their names, also short ones (`bf16`), which become the full ones.
    """

    parameters: str = "float32"
    compute: str = "float32"

    def __post_init__(self):
        for name, dtype in (("parameters", self.parameters), ("compute", self.compute)):
            object.__setattr__(self, name, float_dtype(dtype, f"Precision({name}={dtype!r})"))

    def apply(self, model: Transformer) -> Transformer:
        """The model with its parameters cast and its compute dtype set."""
        return dataclasses.replace(cast(model, self.parameters), compute_dtype=self.compute)


def cast(tree: PyTree, dtype: str) -> PyTree:
    """The tree with its floating-point arrays in `dtype`; other leaves stay."""
    name = float_dtype(dtype, f"cast(dtype={dtype!r})")
    return jax.tree.map(lambda x: x.astype(name) if eqx.is_inexact_array(x) else x, tree)
