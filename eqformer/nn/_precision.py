"""The precision of a model: dtypes of parameters and computation, and linear maps that multiply in 8 bits."""

import dataclasses
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ..kernels import E4M3, E5M2, round_to_fp8
from ._contracts import MatmulPrecision
from ._dtype import at_least_float32, float_dtype
from ._linear import apply_weight, DenseMap, Linear, LinearMap, plain
from ._lora import choose_maps, replace_maps, Where
from ._module import float32_flags, map_modules, named_by, named_modules
from ._transformer import Transformer
from .experts._routing import Router


@dataclasses.dataclass(frozen=True)
class Precision:
    """A precision policy: the dtype of parameters, the dtype of the residual stream, and the precision of products.

    `Precision()` is float32 throughout, `Precision(compute="bfloat16")` is mixed precision, and
    `Precision("bfloat16", "bfloat16")` is meant for inference. `products="fp8"` computes the products of linear maps in
    8 bits (`with_fp8`); by default they are in the compute dtype. Reductions (norms, softmax, logits, losses) are in
    float32 at least in any case. Short names of dtypes (`bf16`) become the full names.
    """

    parameters: str = "float32"
    """The dtype of parameters."""
    compute: str = "float32"
    """The dtype of the residual stream: float32, or bfloat16 for mixed precision; float16 needs a loss scale."""
    products: str = "compute"
    """The precision of linear maps' products: compute (the compute dtype) or fp8."""

    def __post_init__(self):
        if self.products not in ("compute", "fp8"):
            raise ValueError(
                f"Precision(products={self.products!r}): products are in 'compute' (the compute dtype) or 'fp8'."
            )
        for name, dtype in (("parameters", self.parameters), ("compute", self.compute)):
            object.__setattr__(self, name, float_dtype(dtype, f"Precision({name}={dtype!r})"))

    def apply(self, model: Transformer) -> Transformer:
        """Return the model with its parameters cast, and with the policy's compute dtype and precision of products."""
        model = dataclasses.replace(cast(without_fp8(model), self.parameters), compute_dtype=self.compute)
        return with_fp8(model) if self.products == "fp8" else model


def cast(tree: PyTree, dtype: str) -> PyTree:
    """Return the tree with its floating-point arrays cast to `dtype`.

    Fields marked `float32_field` stay float32 or wider.
    """
    name = float_dtype(dtype, f"cast(dtype={dtype!r})")
    wide = at_least_float32(jnp.dtype(name))

    def cast_array(x: PyTree, is_wide: bool) -> PyTree:
        return x.astype(wide if is_wide else name) if eqx.is_inexact_array(x) else x

    return jax.tree.map(cast_array, tree, float32_flags(tree))


class Fp8Matmul(MatmulPrecision):
    """Products of 8-bit numbers: weights and inputs are rounded to E4M3, gradients to E5M2; float32 sums at least.

    Before rounding, each vector of an input or a gradient, and the whole matrix of a weight, is scaled by a power of
    two. The scale brings the largest magnitude to at least 128 and below 256 (E4M3), or to at least 2^14 and below 2^15
    (E5M2). It is computed where it is used, so nothing is remembered from step to step.

    A power of two changes no digit of a number, so the rounding of a number does not depend on other numbers. The only
    exceptions are numbers below 2^-13 (E4M3) or 2^-28 (E5M2) times the largest number of their vector or matrix. Their
    rounding may differ by up to 2^-17 (E4M3) or 2^-31 (E5M2) times the largest number. Slices of rows, tokens and
    features, on different devices or in different microbatches, therefore give the results of whole arrays, and devices
    need not exchange their maxima.
    """

    operand_bits: ClassVar[int | None] = 8
    E4M3: ClassVar[DTypeLike] = E4M3
    E5M2: ClassVar[DTypeLike] = E5M2

    def forward(
        self, x: Float[Array, "*batch inputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch outputs"]:
        """Return `W x`."""
        codes, vector_scale = round_to_fp8(x, self.E4M3, -1)
        matrix, matrix_scale = round_to_fp8(weight, self.E4M3, None)
        y = _dot(codes, matrix, (codes.ndim - 1,), (1,), dtype)
        return _apply_scales(y, dtype, vector_scale, matrix_scale)

    def input_grad(
        self, gradient: Float[Array, "*batch outputs"], weight: Float[Array, "outputs inputs"], dtype: DTypeLike
    ) -> Float[Array, "*batch inputs"]:
        """Return the input's gradient."""
        codes, vector_scale = round_to_fp8(gradient, self.E5M2, -1)
        matrix, matrix_scale = round_to_fp8(weight, self.E4M3, None)
        # Some accelerators sum 8-bit products with fewer digits than float32 unless a higher precision is requested.
        y = _dot(codes, matrix, (codes.ndim - 1,), (0,), dtype, "highest")
        return _apply_scales(y, dtype, vector_scale, matrix_scale)

    def weight_grad(
        self, gradient: Float[Array, "*batch outputs"], x: Float[Array, "*batch inputs"], dtype: DTypeLike
    ) -> Float[Array, "outputs inputs"]:
        """Return the weight's gradient; the scales of input vectors multiply the output's gradient before rounding."""
        codes, vector_scale = round_to_fp8(x, self.E4M3, -1)
        wide = at_least_float32(gradient.dtype)
        grad_codes, grad_scale = round_to_fp8(gradient.astype(wide) * vector_scale.astype(wide), self.E5M2, None)
        vectors = tuple(range(x.ndim - 1))
        y = _dot(grad_codes, codes, vectors, vectors, dtype, "highest")
        return _apply_scales(y, dtype, grad_scale)


class Fp8Linear(DenseMap):
    """A `Linear` whose products, forward and backward, are in 8 bits (`Fp8Matmul`); `with_fp8` puts it into a model.

    It has the same arrays as the `Linear`, so optimizers, checkpoints and published folders stay the same.
    """

    outputs: tuple[str, ...] = eqx.field(static=True)
    inputs: tuple[str, ...] = eqx.field(static=True)
    weight: Float[Array, "..."] = named_by("weight_dims")
    bias: Float[Array, "..."] | None = named_by("outputs")

    @property
    def products(self) -> MatmulPrecision:
        """Return the precision of 8 bits."""
        return Fp8Matmul()

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `W x` over the trailing dims of `x`."""
        return apply_weight(self, self.weight, x, dtype)


def with_fp8(model: PyTree, where: Where | None = None) -> PyTree:
    """Return the model with each chosen `Linear` replaced by an `Fp8Linear` with the same arrays.

    In a `LoRA`, the fixed map is replaced, and the factors' products stay in the compute dtype. Raises a `ValueError`
    if no map is chosen, if a chosen map is not a `Linear`, and for maps of routers, whose products must not be rounded.

    Args:
        model: A tree of modules.
        where: The chosen maps, as in `with_lora`; None: each `Linear` outside of routers and without a dim `vocab`.
    """
    routers = tuple(f"{name}." for name, _ in named_modules(model, Router))

    def fits(name: str, linear: LinearMap) -> bool:
        return type(linear.base) is Linear and not name.startswith(routers)

    def is_chosen_by_default(name: str, linear: LinearMap) -> bool:
        return fits(name, linear) and "vocab" not in (*linear.outputs, *linear.inputs)

    chosen = choose_maps(model, is_chosen_by_default if where is None else where, "with_fp8(model)")
    if wrong := [name for name, linear in chosen.items() if not fits(name, linear)]:
        raise ValueError(
            f"with_fp8(where={where!r}): {', '.join(wrong)} cannot multiply in 8 bits: a map must be a Linear, with or "
            "without a LoRA, and not part of a router; choose other maps."
        )

    def multiply_in_fp8(_: str, linear: LinearMap) -> LinearMap:
        base = linear.base
        assert isinstance(base, Linear)
        in_fp8 = Fp8Linear(outputs=base.outputs, inputs=base.inputs, weight=base.weight, bias=base.bias)
        return in_fp8 if base is linear else eqx.tree_at(lambda m: m.base, linear, in_fp8)

    return replace_maps(model, chosen, multiply_in_fp8)


def without_fp8(model: PyTree) -> PyTree:
    """Return the model with each `Fp8Linear` replaced by a `Linear` with the same arrays."""

    def to_plain(linear: Fp8Linear) -> Linear:
        return plain(linear, linear.weight)

    return map_modules(to_plain, model, Fp8Linear)


def _dot(
    left: Array, right: Array, left_dims: tuple, right_dims: tuple, dtype: DTypeLike, precision: str | None = None
) -> Array:
    result_dtype = jnp.dtype(dtype)
    # The sums before scaling may exceed the range of float16.
    sum_dtype = jnp.dtype("float32") if result_dtype == jnp.float16 else result_dtype
    dims = ((left_dims, right_dims), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=sum_dtype, precision=precision)


def _apply_scales(y: Array, dtype: DTypeLike, *scales: Array) -> Array:
    wide = at_least_float32(jnp.dtype(dtype))
    product = y.astype(wide)
    for scale in scales:  # One by one, because the product of two small scales may underflow.
        product = product * scale.astype(wide)
    return product.astype(dtype)
