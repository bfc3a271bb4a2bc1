"""Post-training quantization: round the weights of a model's linear maps to 8 or 4 bits, and decode them."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from .._dims import named_modules, path_name
from .._dtype import float_dtype
from .._linear import dense, DenseMap, LinearMap, map_linears
from .._lora import chosen_maps, Where
from ..experts._routing import Router
from ._formats import codes_in_a_byte, LARGEST, round_to_codes
from ._linear import QuantizedLinear


def quantize(model: PyTree, form: str, *, group: int | None = None, where: Where | None = None) -> PyTree:
    """Return the model with the weights of its linear maps rounded to the nearest code of 8 or 4 bits.

    A scale maps the largest magnitude of its group to the largest code: 127 for `"int8"`, 7 for `"int4"`, 448 for
    `"fp8"` (E4M3). Activations, biases, norms and embedding tables stay as they are. Raises a `ValueError` for an
    unknown format, for a group that does not divide the inputs, and for a chosen map that holds no weight to round (a
    quantized map or a `LoRA`).

    Args:
        model: Any tree of modules.
        form: The number format: `"int8"`, `"int4"` or `"fp8"`.
        group: How many consecutive inputs share a scale, within the last input dim of a map (`head_dim` for the output
            projection of attention). A group larger than that dim takes the whole dim. None: one scale per output.
        where: Which maps to quantize, as for `with_lora`; None: all except routers and maps with a `vocab` dim.
    """
    call = f"quantize(model, {form!r}" + (f", group={group})" if group is not None else ")")
    if form not in _FORMS:
        raise ValueError(f"{call}: unknown number format; give one of {', '.join(_FORMS)}.")
    if group is not None and group < 1:
        raise ValueError(f"{call}: a group has at least one input; give None for a scale for each output.")
    chosen = chosen_maps(model, _default_maps(model) if where is None else where, call)

    def quantize_node(path: tuple, node: PyTree) -> PyTree:
        name = path_name(path)
        return _quantize_map(node, form, group, f"{call}: {name or 'the map'}") if name in chosen else node

    return jax.tree_util.tree_map_with_path(quantize_node, model, is_leaf=lambda node: isinstance(node, LinearMap))


def dequantize(model: PyTree, dtype: DTypeLike = "float32") -> PyTree:
    """Replace every `QuantizedLinear` by a plain `Linear` with the decoded weight in `dtype`."""
    weight_dtype = float_dtype(dtype, f"dequantize(dtype={dtype!r})")

    def dequantize_map(linear: LinearMap) -> LinearMap:
        if not isinstance(linear, QuantizedLinear):
            return linear
        return eqx.tree_at(lambda m: m.weight, dense(linear), replace_fn=lambda weight: weight.astype(weight_dtype))

    return map_linears(dequantize_map, model)


_FORMS = ("int8", "int4", "fp8")


def _default_maps(model: PyTree) -> Where:
    """Choose all maps except those of routers and those with a `vocab` dim."""
    routers = tuple(f"{name}." for name, _ in named_modules(model, Router))
    return lambda name, linear: not name.startswith(routers) and "vocab" not in (*linear.outputs, *linear.inputs)


def _quantize_map(linear: LinearMap, form: str, group: int | None, call: str) -> QuantizedLinear:
    if isinstance(linear, QuantizedLinear):
        raise ValueError(f"{call} is quantized already; dequantize the model first, or choose other maps by where=.")
    if not isinstance(linear, DenseMap):
        raise ValueError(
            f"{call} is a {type(linear).__name__}, which holds no weight to round; quantize before with_lora, or "
            "choose other maps by where=."
        )
    weight, inputs = linear.weight, linear.inputs
    width = weight.shape[-1]
    group_size = None if group is None else min(group, width)
    if width % codes_in_a_byte(form):
        raise ValueError(f"{call} has {width} of {inputs[-1]!r}, and two codes share a byte; take int8 or fp8.")
    if group_size is not None and width % group_size:
        raise ValueError(
            f"{call} has {width} of {inputs[-1]!r}, which is no multiple of the group size {group_size}; take a group "
            "that divides it."
        )
    magnitudes = jnp.abs(weight).astype(jnp.float32)
    if group_size is None:
        largest = jnp.max(magnitudes, tuple(range(-len(inputs), 0)), keepdims=True)
    else:
        largest = jnp.max(magnitudes.reshape(*weight.shape[:-1], -1, group_size), -1)
    scales = largest / LARGEST[form]
    codes = round_to_codes(weight, scales, form)
    return QuantizedLinear(inputs, linear.outputs, form=form, codes=codes, scales=scales, bias=linear.bias)
