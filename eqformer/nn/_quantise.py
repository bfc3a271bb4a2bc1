"""Rounds the weights of a model's linear maps to 8 or 4 bits, and back."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ._codes import codes_in_a_byte, LARGEST, rounded
from ._dims import named_modules, path_name
from ._dtype import float_dtype
from ._linear import dense
from ._linear_map import DenseMap, is_map, LinearMap
from ._lora import chosen_maps, Where
from ._quantised_linear import QuantisedLinear
from .experts._contract import Router


def quantise(model: PyTree, form: str, *, group: int | None = None, where: Where | None = None) -> PyTree:
    """The model with the weights of its linear maps in 8 or 4 bits, each rounded to the nearest code.

    A scale makes the largest magnitude that it is for the largest code: 127 of `"int8"`, 7 of `"int4"`, 448 of `"fp8"`
    (E4M3). Activations, biases, norms and tables stay as they are. Raises a `ValueError` for another form, where a
    group does not divide the inputs, and where a chosen map holds no weight: one that is quantised, or a `LoRA`.

    Args:
        model: Any tree of modules.
        form: How numbers are held: `"int8"`, `"int4"` or `"fp8"`.
        group: How many inputs share a scale, within the last dim of a map's inputs (of an attention's output a head's
            channels), or all of that dim where it is smaller; None: one scale for each output.
        where: Which maps, as for `with_lora`; None: all but routers' and those of the vocabulary.
    """
    call = f"quantise(model, {form!r}" + (f", group={group})" if group is not None else ")")
    if form not in _FORMS:
        raise ValueError(f"{call}: no such form of numbers; give one of {', '.join(_FORMS)}.")
    if group is not None and group < 1:
        raise ValueError(f"{call}: a group has at least one input; give None for a scale for each output.")
    chosen = chosen_maps(model, _usual(model) if where is None else where, call)

    def one(path: tuple, node: PyTree) -> PyTree:
        name = path_name(path)
        return _quantised(node, form, group, f"{call}: {name or 'the map'}") if name in chosen else node

    return jax.tree_util.tree_map_with_path(one, model, is_leaf=lambda node: isinstance(node, LinearMap))


def dequantise(model: PyTree, dtype: DTypeLike = "float32") -> PyTree:
    """The model with plain `Linear`s of the decoded weights, in `dtype`, in the place of all that `quantise` made."""
    full = float_dtype(dtype, f"dequantise(dtype={dtype!r})")

    def one(node: PyTree) -> PyTree:
        if not isinstance(node, QuantisedLinear):
            return node
        return eqx.tree_at(lambda m: m.weight, dense(node), replace_fn=lambda weight: weight.astype(full))

    return jax.tree.map(one, model, is_leaf=is_map)


_FORMS = ("int8", "int4", "fp8")


def _usual(model: PyTree) -> Where:
    """All maps but those of routers and of the vocabulary."""
    routers = [name for name, _ in named_modules(model, Router)]
    is_routers = lambda name: any(name.startswith(f"{router}.") for router in routers)
    return lambda name, linear: not is_routers(name) and "vocab" not in (*linear.outputs, *linear.inputs)


def _quantised(linear: LinearMap, form: str, group: int | None, call: str) -> QuantisedLinear:
    if isinstance(linear, QuantisedLinear):
        raise ValueError(f"{call} is quantised already; dequantise the model first, or choose others by where=.")
    if not isinstance(linear, DenseMap):
        raise ValueError(
            f"{call} is a {type(linear).__name__}, which holds no weight to round; quantise before with_lora, or "
            "choose others by where=."
        )
    weight, inputs = linear.weight, linear.inputs
    width = weight.shape[-1]
    members = None if group is None else min(group, width)
    if width % codes_in_a_byte(form):
        raise ValueError(f"{call} has {width} of {inputs[-1]!r}, and two codes share a byte; take int8 or fp8.")
    if members is not None and width % members:
        raise ValueError(
            f"{call} has {width} of {inputs[-1]!r}, which is no multiple of the group; take a group that divides it."
        )
    wide = jnp.abs(weight).astype(jnp.float32)
    if members is None:
        largest = jnp.max(wide, tuple(range(-len(inputs), 0)), keepdims=True)
    else:
        largest = jnp.max(wide.reshape(*wide.shape[:-1], -1, members), -1)
    scales = largest / LARGEST[form]
    codes = rounded(weight, scales, form)
    return QuantisedLinear(inputs, linear.outputs, form=form, codes=codes, scales=scales, bias=linear.bias)
