"""One line on what products of 8 bits are on a chip, where they are asked for."""

import jax
from recipes import Recipe

from eqformer import kernels, nn


def chip_here() -> str:
    """What JAX calls this machine's devices."""
    return jax.devices()[0].device_kind


def products_line(recipe: Recipe, model: nn.Transformer, chip: str) -> str:
    """Which products are of 8 bits on a chip, by its name here or JAX's; "" where none is asked for."""
    compute = recipe.precision.compute
    if recipe.precision.products != "fp8":
        return ""
    if chip == "cpu":
        return f"products: of numbers of 8 bits, multiplied in a wider dtype here: slower than {compute}'s"
    has_experts = any(isinstance(one, nn.Fp8Linear) for one in nn.linear_maps(nn.modules(model, nn.Experts)))
    if not has_experts or kernels.fp8_grouped_matmul(chip):
        return f"products: in 8 bits{', those of experts too' * has_experts}"
    return f"products: in 8 bits, but those of experts in {compute} where they have kernels on {chip}"
