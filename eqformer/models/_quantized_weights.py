"""Published weights that stay quantized: the maps that hold them, and their codes and scales in the maps' layout."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from .. import nn
from ._published_arrays import PublishedArrays
from ._weight_rules import ResolvedRule
from .formats import Grouped


def maps_by_weight(model: PyTree) -> dict[str, nn.LinearMap]:
    """Return every linear map of a model by the path of its weight; for a quantized map, the path before
    quantization."""
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=nn.is_map)
    return {f"{nn.path_name(path)}.weight": node for path, node in nodes if nn.is_map(node)}


def find_quantized_maps(
    arrays: PublishedArrays, rules: Sequence[ResolvedRule], shapes: nn.Transformer
) -> dict[str, nn.QuantizedLinear]:
    """Return the shapes of the maps that hold the folder's codes, by the path of the plain map's weight in `shapes`.

    Quantized weights outside of linear maps, such as embedding tables, are decoded. Raises a `ValueError` if no weight
    is quantized, if an array has a format that no map holds, and if only some layers of a stack are quantized.
    """
    plain = {path: linear for path, linear in maps_by_weight(shapes).items() if isinstance(linear, nn.DenseMap)}
    quantized: dict[str, nn.QuantizedLinear] = {}
    for rule in rules:
        names = rule.published_names()
        coded = [name for name in names if arrays.is_coded(name)]
        if not coded or not all(path in plain for path in rule.paths):
            continue
        if len(coded) < len(names):
            decoded = next(name for name in names if not arrays.is_coded(name))
            _refuse(
                arrays,
                coded[0],
                f"is stored in fewer bits and {decoded} is not, but all layers of a stack must have one format",
            )
        form = arrays.form(coded[0])
        if not isinstance(form, Grouped):
            _refuse(arrays, coded[0], "is stored in a block format that no linear map supports")
        scales = {arrays.scale_dtype(name) for name in names}
        if len(scales) > 1 and "uint8" in scales:
            _refuse(arrays, coded[0], "and other layers of its stack have scales of two kinds, exponents and floats")
        dtype = scales.pop() if len(scales) == 1 else str(nn.lossless_dtype(*scales))
        for number, path in enumerate(rule.paths):
            axis = rule.axis_of_last_dim(number)
            quantized[path] = _quantized_shapes(arrays, coded[0], form, axis, plain[path], dtype)
    if not quantized:
        raise ValueError(
            f"{arrays.call}: weights='quantized': none of its linear maps is stored in fewer bits; load it with "
            "weights='decoded', and nn.quantize the model."
        )
    return quantized


def with_quantized_maps(shapes: nn.Transformer, quantized: Mapping[str, nn.QuantizedLinear]) -> nn.Transformer:
    """Return the model's shapes with plain maps replaced by quantized maps, which are given by the plain weights'
    paths.

    A quantized map has the bias of the plain map.
    """

    def replace(path: tuple, node: object) -> object:
        return quantized.get(f"{nn.path_name(path)}.weight", node)

    return jax.tree_util.tree_map_with_path(replace, shapes, is_leaf=nn.is_map)


def plain_shapes(model: nn.Transformer) -> nn.Transformer:
    """Return the model with each quantized map replaced by a plain map that has only the shape of its weight."""

    def to_plain(linear: nn.LinearMap) -> nn.LinearMap:
        if not isinstance(linear, nn.QuantizedLinear):
            return linear
        return _with_bias(eqx.filter_eval_shape(nn.dense, linear), linear.bias)

    return nn.map_linears(to_plain, model)


def names_as_stored(
    arrays: PublishedArrays, rules: Sequence[ResolvedRule], model: nn.Transformer, call: str
) -> set[str]:
    """Return the names of the quantized arrays whose codes and scales the model holds.

    Raises a `ValueError` if the model holds other codes, or the decoded array. The rules are those of the model's
    `plain_shapes`.
    """
    maps, stored_names = maps_by_weight(model), set[str]()
    for rule in rules:
        linears = [maps.get(path) for path in rule.paths]
        quantized = [linear for linear in linears if isinstance(linear, nn.QuantizedLinear)]
        for index, name in rule.arrays():
            if not arrays.is_coded(name):
                continue
            stored = arrays.stored_name(name)
            if len(quantized) < len(linears):
                raise ValueError(
                    f"{call}: {stored} is stored in fewer bits, and whole=True would mix it with the model's decoded "
                    "arrays; save the model without whole=True, or load it with weights='quantized'."
                )
            leaves = [leaf for linear in quantized for leaf in code_leaves(linear).values()]
            own_codes = [np.asarray(leaf[index] if index else leaf) for leaf in leaves]
            codes = read_map_codes(arrays, name, None, rule, quantized)
            if len(codes) != len(own_codes) or not all(map(np.array_equal, codes, own_codes)):
                raise ValueError(
                    f"{call}: the model's codes and scales are not those of {stored}; nn.dequantize the model and save "
                    "it without whole=True."
                )
            stored_names.add(name)
    return stored_names


def code_leaves(linear: nn.QuantizedLinear) -> dict[str, Any]:
    """Return the codes, scales and zeros of a map, or their shapes, by field; without `zeros` if the map has none."""
    leaves = {"codes": linear.codes, "scales": linear.scales, "zeros": linear.zeros}
    return {field: leaf for field, leaf in leaves.items() if leaf is not None}


def read_map_codes(
    arrays: PublishedArrays, name: str, index: int | None, rule: ResolvedRule, maps: Sequence[nn.QuantizedLinear]
) -> list[Shaped[np.ndarray, "..."]]:
    """Return the part of each map's `code_leaves` that one published array holds, in the order of the maps.

    `index` selects one entry of the array's first dim; None reads all of them.
    """
    form, sizes = arrays.grouped_form(name), arrays.shape(name)[-2:]
    parts: list[Shaped[np.ndarray, "..."]] = []
    for number, linear in enumerate(maps):
        axis = rule.axis_of_last_dim(number)
        assert axis is not None
        has_one_group = form.groups.members[axis] is None
        unit = [1, 1]
        unit[axis] = sizes[axis] if has_one_group else linear.shape[-1] // linear.scales.shape[-1]
        published = arrays.read_codes(name, index, (unit[0], unit[1]))
        for array, leaves in zip(published, zip(*((m.codes, m.scales, m.zeros) for m in maps)), strict=True):
            if array is not None:
                parts.append(rule.with_shapes([leaf.shape for leaf in leaves]).to_leaf(array, number))
    return parts


def _quantized_shapes(
    arrays: PublishedArrays, name: str, form: Grouped, axis: int | None, linear: nn.DenseMap, dtype: str
) -> nn.QuantizedLinear:
    """Return the shapes of the map that holds an array's codes, to replace a plain map.

    Args:
        arrays: The published arrays.
        name: The array.
        form: The array's format.
        axis: The array's dim, counted from its end, that holds the map's last input dim.
        linear: The plain map.
        dtype: The dtype of the scales.
    """
    groups, shape, inputs = form.groups, linear.weight.shape, linear.inputs
    last, per_byte = shape[-1], nn.codes_in_a_byte(groups.form)
    if last % per_byte:
        _refuse(arrays, name, f"has {last} of {inputs[-1]!r}, and two codes share a byte")
    if axis not in (-1, -2) or (per_byte > 1 and axis != (-2 if form.transposed else -1)):
        _refuse(arrays, name, f"has its {inputs[-1]!r} in another order, or two codes of other dims in a byte")
    if (members := groups.members[axis]) is None:
        scale_inputs = (1,) * len(inputs)
    else:
        scale_inputs = (*shape[len(shape) - len(inputs) : -1], last // math.gcd(members, last))
    scale_shape = (*shape[: len(shape) - len(inputs)], *scale_inputs)

    def make(bias: Array | None) -> nn.QuantizedLinear:
        return nn.QuantizedLinear(
            inputs,
            linear.outputs,
            form=groups.form,
            codes=jnp.zeros((*shape[:-1], last // per_byte), jnp.uint8),
            scales=jnp.zeros(scale_shape, dtype),
            zeros=jnp.zeros(scale_shape, jnp.uint8) if groups.has_zeros else None,
            bias=bias,
        )

    return eqx.filter_eval_shape(make, linear.bias)


def _with_bias(linear: nn.LinearMap, bias: object) -> nn.LinearMap:
    return eqx.tree_at(lambda m: m.bias, linear, bias, is_leaf=lambda leaf: leaf is None)


def _refuse(arrays: PublishedArrays, name: str, why: str) -> NoReturn:
    raise ValueError(
        f"{arrays.call}: weights='quantized': {arrays.stored_name(name)} {why}; load with weights='decoded', and "
        "nn.quantize the model."
    )
