"""Published weights that are kept in fewer bits: which maps hold them, and codes and scales as these have them."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .. import nn
from ._published_arrays import Arrays
from ._weight_rules import Weight
from .formats import Grouped


def kept_maps(arrays: Arrays, rules: list[Weight], shapes: nn.Transformer) -> dict[int, nn.QuantizedLinear]:
    """By the `id` of a weight's shape in a plain model, the shapes of the map that holds its codes.

    Weights that are no linear map's, such as tables, are decoded. Raises a `ValueError` where none is stored in fewer
    bits, and one that names an array in a format that no map holds, or of a stack of which some layers are plain.
    """
    weights = {id(one.weight): one for one in nn.linear_maps(shapes) if isinstance(one, nn.DenseMap)}
    found: dict[int, nn.QuantizedLinear] = {}
    for rule in rules:
        leaves = rule.leaves(shapes)
        names = [name for _, name in rule.places(leaves[0])]
        coded = [name for name in names if arrays.is_coded(name)]
        if not coded or not all(id(leaf) in weights for leaf in leaves):
            continue
        if len(coded) < len(names):
            plain = next(name for name in names if not arrays.is_coded(name))
            _refuse(
                arrays, coded[0], f"is stored in fewer bits and {plain} is not, and a stack's layers are kept alike"
            )
        form = arrays.form(coded[0])
        if not isinstance(form, Grouped):
            _refuse(arrays, coded[0], "is stored in blocks that no map holds")
        scales = {arrays.scale_dtype(name) for name in names}
        if len(scales) > 1 and "uint8" in scales:
            _refuse(arrays, coded[0], "and others of its stack have scales of which some are exponents and some floats")
        dtype = scales.pop() if len(scales) == 1 else str(nn.lossless_dtype(*scales))
        for number, leaf in enumerate(leaves):
            dim = rule.dim_of_last(number)
            found[id(leaf)] = _shapes_of(arrays, coded[0], form, dim, weights[id(leaf)], dtype)
    if not found:
        raise ValueError(
            f"{arrays.call}: weights='kept': no linear map of it is stored in fewer bits; load it without, and "
            "nn.quantize the model."
        )
    return found


def with_kept(shapes: nn.Transformer, kept: dict[int, nn.QuantizedLinear]) -> nn.Transformer:
    """The model's shapes with these maps in the place of their plain ones."""
    one = lambda node: kept.get(id(node.weight), node) if isinstance(node, nn.DenseMap) else node
    return jax.tree.map(one, shapes, is_leaf=nn.is_map)


def plain_shapes(model: nn.Transformer) -> nn.Transformer:
    """The model with plain maps in the place of those that hold codes, with the shapes of their weights alone."""

    def one(node: Any) -> Any:
        if not isinstance(node, nn.QuantizedLinear):
            return node
        return _with_bias(eqx.filter_eval_shape(nn.dense, node), node.bias)

    return jax.tree.map(one, model, is_leaf=nn.is_map)


def names_as_stored(
    arrays: Arrays, rules: list[Weight], plain: nn.Transformer, model: nn.Transformer, call: str
) -> set[str]:
    """The arrays in fewer bits whose codes and scales the model holds; raises a `ValueError` where it has others.

    `plain` are the model's `plain_shapes`.
    """
    maps = dict(zip((id(getattr(one, "weight", None)) for one in nn.linear_maps(plain)), nn.linear_maps(model)))
    found = set[str]()
    for rule in rules:
        leaves = rule.leaves(plain)
        own: list[Any] = [maps.get(id(leaf)) for leaf in leaves]
        for place, name in rule.places(leaves[0]):
            if not arrays.is_coded(name):
                continue
            stored = arrays.stored_name(name)
            if not all(isinstance(one, nn.QuantizedLinear) for one in own):
                raise ValueError(
                    f"{call}: {stored} is stored in fewer bits, and whole=True would mix it with the model's decoded "
                    "arrays; save the model by itself, or load it with weights='kept'."
                )
            held = [np.asarray(leaf[place] if place else leaf) for one in own for leaf in leaves_of(one)]
            its = own_arrays(arrays, name, None, rule, own)
            if len(its) != len(held) or not all(map(np.array_equal, its, held)):
                raise ValueError(
                    f"{call}: the model's codes and scales are not those of {stored}; nn.dequantize the model and save "
                    "it by itself."
                )
            found.add(name)
    return found


def leaves_of(linear: nn.QuantizedLinear) -> list[Any]:
    """What of a map, or of its shapes, codes and scales fill."""
    return [leaf for leaf in (linear.codes, linear.scales, linear.zeros) if leaf is not None]


def own_arrays(
    arrays: Arrays, name: str, piece: int | None, rule: Weight, maps: Sequence[nn.QuantizedLinear]
) -> list[np.ndarray]:
    """What one published array gives to the `leaves_of` each of the maps that hold it, in turn."""
    form, sizes = arrays.form(name), arrays.shape(name)[-2:]
    assert isinstance(form, Grouped)
    made: list[np.ndarray] = []
    for number, linear in enumerate(maps):
        dim = rule.dim_of_last(number)
        assert dim is not None
        is_one = form.groups.members[dim] is None
        unit = [1, 1]
        unit[dim] = sizes[dim] if is_one else linear.shape[-1] // linear.scales.shape[-1]
        found = arrays.numbers(name, piece, (unit[0], unit[1]))
        for its, leaves in zip(found, zip(*((m.codes, m.scales, m.zeros) for m in maps)), strict=True):
            made += [] if its is None else [rule.to_own(its, leaves, number)]
    return made


def _shapes_of(
    arrays: Arrays, name: str, form: Grouped, dim: int | None, linear: nn.DenseMap, dtype: str
) -> nn.QuantizedLinear:
    """`dim` is that of the published array, from its end, along which the last of the inputs lies."""
    groups, shape, inputs = form.groups, linear.weight.shape, linear.inputs
    last, many = shape[-1], nn.codes_in_a_byte(groups.form)
    if last % many:
        _refuse(arrays, name, f"has {last} of {inputs[-1]!r}, and two codes share a byte")
    if dim not in (-1, -2) or (many > 1 and dim != (-2 if form.turned else -1)):
        _refuse(arrays, name, f"has its {inputs[-1]!r} in another order, or two codes of other dims in a byte")
    if (members := groups.members[dim]) is None:
        ends = (1,) * len(inputs)
    else:
        ends = (*shape[len(shape) - len(inputs) : -1], last // math.gcd(members, last))
    of_scales = (*shape[: len(shape) - len(inputs)], *ends)

    def make(bias: Array | None) -> nn.QuantizedLinear:
        return nn.QuantizedLinear(
            inputs,
            linear.outputs,
            form=groups.form,
            codes=jnp.zeros((*shape[:-1], last // many), jnp.uint8),
            scales=jnp.zeros(of_scales, dtype),
            zeros=jnp.zeros(of_scales, jnp.uint8) if groups.has_zeros else None,
            bias=bias,
        )

    return _with_bias(eqx.filter_eval_shape(make, linear.bias), linear.bias)


def _with_bias(linear: nn.LinearMap, bias: Any) -> Any:
    """The map with a bias that other maps have too, by whose identity it is found."""
    return eqx.tree_at(lambda m: m.bias, linear, bias, is_leaf=lambda leaf: leaf is None)


def _refuse(arrays: Arrays, name: str, why: str) -> NoReturn:
    raise ValueError(
        f"{arrays.call}: weights='kept': {arrays.stored_name(name)} {why}; load with weights='decoded', and "
        "nn.quantize the model."
    )
