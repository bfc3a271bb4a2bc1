"""Dtypes of parameters and computation, and linear maps that multiply in 8 bits."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ._dims import float32_flags, named_by, named_modules, path_name
from ._dtype import at_least_float32, float_dtype
from ._linear import apply_weight, DenseMap, Linear, LinearMap, plain
from ._lora import chosen_maps, LoRA, Where
from ._matmul_precision import Fp8Matmul, MatmulPrecision
from ._transformer import Transformer
from .experts._routing import Router


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


class Fp8Linear(DenseMap):
    """A `Linear` whose products, forward and backward, are of numbers of 8 bits (`Fp8Matmul`); `with_fp8` puts it
    there.

    Its arrays are the `Linear`'s, so that optimizers, checkpoints and published folders are the same with it.
    """

    outputs: tuple[str, ...] = eqx.field(static=True)
    inputs: tuple[str, ...] = eqx.field(static=True)
    weight: Float[Array, "..."] = named_by("weight_dims")
    bias: Float[Array, "..."] | None = named_by("outputs")

    @property
    def products(self) -> MatmulPrecision:
        """Those of 8 bits."""
        return Fp8Matmul()

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """`W x`, of the trailing dims of `x`."""
        return apply_weight(self, self.weight, x, dtype)


def with_fp8(model: PyTree, where: Where | None = None) -> PyTree:
    """The model with an `Fp8Linear` in the place of each chosen `Linear`, of the same arrays.

    Of a `LoRA` it is the map that stays; the factors' products stay in the compute dtype. Raises a `ValueError` where
    nothing is chosen, where a chosen map is no `Linear`, and for routers' maps, whose products stay there too.

    Args:
        model: Any tree of modules.
        where: Which maps, as for `with_lora`; None: all `Linear`s but routers' and those of the vocabulary.
    """
    apart = [name for name, _ in named_modules(model, Router)]
    is_apart = lambda name: any(name.startswith(f"{one}.") for one in apart)
    fits = lambda name, linear: type(_base(linear)) is Linear and not is_apart(name)
    usual: Where = lambda name, linear: fits(name, linear) and "vocab" not in (*linear.outputs, *linear.inputs)
    chosen = chosen_maps(model, usual if where is None else where, "with_fp8(model)")
    if wrong := [name for name, linear in chosen.items() if not fits(name, linear)]:
        raise ValueError(
            f"with_fp8(where={where!r}): {', '.join(wrong)} cannot multiply in 8 bits: a map must be a Linear, with or "
            "without a LoRA, and no router's; choose others."
        )

    def one(path: tuple, node: PyTree) -> PyTree:
        if path_name(path) not in chosen:
            return node
        base = _base(node)
        made = Fp8Linear(base.outputs, base.inputs, base.weight, base.bias)
        return made if base is node else eqx.tree_at(lambda lora: lora.linear, node, made)

    return jax.tree_util.tree_map_with_path(one, model, is_leaf=lambda node: isinstance(node, LinearMap))


def _base(linear: LinearMap) -> Any:
    return linear.linear if isinstance(linear, LoRA) else linear


def without_fp8(model: PyTree) -> PyTree:
    """The model with a `Linear` in the place of each `Fp8Linear`, of the same arrays."""

    def one(node: PyTree) -> PyTree:
        return plain(node, node.weight) if isinstance(node, Fp8Linear) else node

    return jax.tree.map(one, model, is_leaf=lambda node: isinstance(node, Fp8Linear))
