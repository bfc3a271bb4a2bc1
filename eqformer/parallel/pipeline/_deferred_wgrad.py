"""Gradients of linear maps' weights put off until later, without running anything twice.

A backward pass through `y = W x` needs `W` alone to go on; the weight's gradient, the product `dy x^T`, can wait if `x`
and `dy` are kept. To that end each `nn.DenseMap` of some blocks is replaced by one whose product has two more inputs,
zeros that it ignores: the "gradients" of those are `x` and `dy`. A scan over layers stacks them like any gradient.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ... import nn
from .._axes import FSDP
from .._vary import vary, vary_like, varying_axes
from ..layouts._devices import Steps
from ..state._fully_sharded import Gathered
from ..state._stand_ins import scatter
from ..tensor._replicated_layers import Sliced


def taps(blocks: PyTree, notes: dict[int, Notes], tokens: int) -> dict[int, tuple]:
    """Which of the blocks' maps can be tapped, by number: shape, dtype and axes of all layers' inputs and outputs.

    They are called once a layer, on at least `tokens` vectors (fewer: inside a loop of a layer's own), and their weight
    is the layer's own: neither gathered, nor one of several under `vmap`, nor read by someone else.
    """
    found = {}
    for number, (linear, dim, _) in enumerate(_sites(blocks)):
        calls = notes[number].calls
        if len(calls) != 1:
            continue
        shape, into, into_axes, out, out_axes = calls[0]
        if shape == _whole_shape(linear, dim)[1:] and math.prod(into.shape[: -len(linear.inputs)]) >= tokens:
            rows = lambda x, layers=linear.weight.shape[0]: jax.ShapeDtypeStruct((layers, *x.shape), x.dtype)
            found[number] = (rows(into), into_axes, rows(out), out_axes)
    return found


def watched(blocks: PyTree) -> tuple[PyTree, dict[int, Notes]]:
    """The blocks with every map noting its calls, for one trace; and the notes by number."""
    linears = _linears(blocks)
    notes = {number: Notes() for number in linears}
    return _replaced(blocks, {number: Seen(linear, notes[number]) for number, linear in linears.items()}), notes


def tapped(blocks: PyTree, wanted: dict[int, tuple]) -> PyTree:
    """The blocks with taps in place of the maps `wanted`."""
    linears = _linears(blocks)

    def tap(
        linear: nn.DenseMap,
        into: jax.ShapeDtypeStruct,
        into_axes: frozenset,
        out: jax.ShapeDtypeStruct,
        out_axes: frozenset,
    ) -> Tapped:
        zeros = lambda like, axes: vary(jnp.zeros(like.shape, like.dtype), axes)
        return Tapped(linear, zeros(into, into_axes), zeros(out, out_axes))

    new = _replaced(blocks, {number: tap(linears[number], *shapes) for number, shapes in wanted.items()})
    return _each_gathered(_not_gathering_taps, new, blocks)


def is_differentiated(blocks: PyTree) -> PyTree:
    """A tree of flags: what the backward pass of blocks differentiates, which is all but tapped weights and the values
    of stand-ins."""

    def flags(node: PyTree) -> PyTree:
        if isinstance(node, Gathered):
            no_values = jax.tree.map(lambda _: False, node.values)
            return dataclasses.replace(node, inner=is_differentiated(node.inner), values=no_values)
        kept = jax.tree.map(eqx.is_inexact_array, node)
        return eqx.tree_at(lambda n: n.inner.weight, kept, False) if isinstance(node, Tapped) else kept

    return jax.tree.map(flags, blocks, is_leaf=lambda node: isinstance(node, Tapped | Gathered))


def differentiable(tree: PyTree) -> PyTree:
    """The arrays that `is_differentiated` marks, and None for all else."""
    return eqx.filter(tree, is_differentiated(tree))


def split_gradients(
    gradients: PyTree, wanted: dict[int, tuple], blocks: PyTree
) -> tuple[PyTree, dict[int, tuple[Array, Array]]]:
    """From gradients of tapped blocks: those of plain blocks, None for tapped weights; and the taps' pairs."""
    taken = {number: node for number, node in _linears(gradients).items() if number in wanted}
    products = {number: (node.into, node.out) for number, node in taken.items()}
    plain = {number: node.inner for number, node in taken.items()}
    nothing = lambda values: jax.tree.map(lambda _: None, values)
    restored = lambda new, old: dataclasses.replace(old, inner=new.inner, values=nothing(old.values))
    return _each_gathered(restored, _replaced(gradients, plain), blocks), products


def weight_gradients(blocks: PyTree, products: dict[int, tuple[Array, Array]]) -> PyTree:
    """A tree like `blocks`: the products put off, layer by layer and summed in float32 at least; None elsewhere.

    Where the weight was gathered for its use, each device keeps its slice of the sum over devices.
    """
    sites = _sites(blocks)

    def multiply(linear: nn.DenseMap, dim: int | None, steps: Steps, into: Array, out: Array) -> nn.DenseMap:
        layers = linear.weight.shape[0]
        into = into.reshape(layers, -1, math.prod(into.shape[into.ndim - len(linear.inputs) :]))
        out = out.reshape(layers, -1, math.prod(out.shape[out.ndim - len(linear.outputs) :]))
        exact = nn.at_least_float32(into.dtype)
        product = jax.vmap(lambda out, into: linear.products.to_weight(out, into, exact))(out, into)
        product = product.reshape(_whole_shape(linear, dim))
        product = product if dim is None else scatter(product, dim + 1, steps)
        nothing = jax.tree.map(lambda _: None, linear)
        return eqx.tree_at(lambda m: m.weight, nothing, product, is_leaf=lambda node: node is None)

    nothing = jax.tree.map(lambda _: None, blocks)
    return _replaced(nothing, {number: multiply(*sites[number], *pair) for number, pair in products.items()})


def _is_node(node: object) -> bool:
    # Taken as one are experts, whose maps run many matrices at once, and what is put together over `tensor`.
    return isinstance(node, nn.DenseMap | nn.Experts | Sliced)


def _is_map(node: object) -> TypeGuard[nn.DenseMap]:
    return isinstance(node, nn.DenseMap)


def _sites(blocks: PyTree) -> list[tuple[nn.DenseMap, int | None, Steps]]:
    """The maps in the tree's order, each with the dim of a layer's weight that is gathered for its use, or None.

    And the steps in which the weight's gradient is scattered.
    """
    found: list[tuple[nn.DenseMap, int | None, Steps]] = []
    for node in jax.tree.leaves(blocks, is_leaf=lambda node: _is_node(node) or isinstance(node, Gathered)):
        if isinstance(node, Gathered):
            for linear, dims in zip(_nodes(node), _by_node(node, node.dims)):
                if isinstance(linear, nn.DenseMap):
                    found.append((linear, dims[_place_of_weight(linear)], node.steps))
        elif _is_map(node):
            found.append((node, None, Steps()))
    return found


def _linears(blocks: PyTree) -> dict[int, Any]:
    return dict(enumerate(filter(_is_map, jax.tree.leaves(blocks, is_leaf=_is_node))))


def _replaced(blocks: PyTree, new: dict[int, Any]) -> PyTree:
    nodes, structure = jax.tree.flatten(blocks, is_leaf=_is_node)
    places = [place for place, node in enumerate(nodes) if _is_map(node)]
    for number, node in new.items():
        nodes[places[number]] = node
    return structure.unflatten(nodes)


def _place_of_weight(linear: nn.DenseMap) -> int:
    arrays = jax.tree.leaves(eqx.filter(linear, eqx.is_array))
    return next(place for place, array in enumerate(arrays) if array is linear.weight)


def _whole_shape(linear: nn.DenseMap, dim: int | None) -> tuple[int, ...]:
    shape = list(linear.weight.shape)
    if dim is not None:
        shape[dim + 1] *= jax.lax.axis_size(FSDP)
    return tuple(shape)


def _each_gathered(change: Callable[[Gathered, Gathered], Gathered], tree: PyTree, like: PyTree) -> PyTree:
    """The tree with `change(node, its counterpart in like)` in the place of each `Gathered`."""
    is_gathered = lambda node: isinstance(node, Gathered)
    olds = iter([node for node in jax.tree.leaves(like, is_leaf=is_gathered) if is_gathered(node)])
    return jax.tree.map(lambda node: change(node, next(olds)) if is_gathered(node) else node, tree, is_leaf=is_gathered)


def _not_gathering_taps(new: Gathered, old: Gathered) -> Gathered:
    def with_taps(values: tuple, tap: str | None) -> tuple:
        counts = [len(jax.tree.leaves(eqx.filter(node, eqx.is_array))) for node in _nodes(new)]
        parts = _by_node(old, values)
        return tuple(x for part, count in zip(parts, counts) for x in (*part, *[tap] * (count - len(part))))

    dims, dtypes = with_taps(old.dims, None), with_taps(old.dtypes, old.dtypes[0])
    values = None if old.values is None else with_taps(old.values, None)
    return dataclasses.replace(old, inner=new.inner, dims=dims, dtypes=dtypes, values=values)


def _nodes(gathered: Gathered) -> list:
    return jax.tree.leaves(gathered.inner, is_leaf=_is_node)


def _by_node(gathered: Gathered, values: tuple) -> list[tuple]:
    """What a `Gathered` says of each array, grouped by map, and by leaf outside of one."""
    rest = iter(values)
    counts = [len(jax.tree.leaves(eqx.filter(node, eqx.is_array))) for node in _nodes(gathered)]
    return [tuple(itertools.islice(rest, count)) for count in counts]


class Notes:
    """What happened to one map in a trace: the shapes of each call."""

    def __init__(self):
        self.calls: list[tuple] = []


class Watched(nn.LinearWrapper, nn.DenseMap):
    """Stands for a `DenseMap` in some blocks of a pipeline."""

    @property
    def weight(self) -> Any:
        """The map's own."""
        return self.inner.weight


class Seen(Watched):
    """Stands for a map and notes what it is called on."""

    notes: Notes = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """The map's own."""
        y = self.inner.product(x, dtype)
        self.notes.calls.append((self.inner.shape, *_typed(vary_like(x, self.inner.weight)), *_typed(y)))
        return y


class Tapped(Watched):
    """Stands for a map whose weight gets no gradient: those of `into` and `out` are its input and its cotangent."""

    into: Float[Array, "..."]
    out: Float[Array, "..."]

    def product(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """The map's own."""
        # `pcast` before the product: its transpose sums the input's gradient over axes that the input is the same on.
        weight, inputs = self.inner.weight, len(self.inputs)
        rows = vary_like(x, weight).reshape(*x.shape[: x.ndim - inputs], -1)
        into, out = self.into.reshape(rows.shape), self.out.reshape(*rows.shape[:-1], -1)
        y = _product(self.products, rows, weight.reshape(-1, rows.shape[-1]).astype(x.dtype), into, out)
        y = y.reshape(*y.shape[:-1], *self.output_shape)
        return y if dtype is None else y.astype(dtype)


def _product_of(products: nn.MatmulPrecision, x: Array, weight: Array, into: Array, out: Array) -> Array:
    return products.forward(x, weight, x.dtype)


def _forward(products: nn.MatmulPrecision, x: Array, weight: Array, into: Array, out: Array) -> tuple[Array, tuple]:
    return products.forward(x, weight, x.dtype), (x, weight)


def _backward(products: nn.MatmulPrecision, kept: tuple, cotangent: Array) -> tuple:
    x, weight = kept
    return products.to_input(cotangent, weight, x.dtype), None, x, cotangent


_product = jax.custom_vjp(_product_of, nondiff_argnums=(0,))
_product.defvjp(_forward, _backward)


def _typed(x: Array) -> tuple[jax.ShapeDtypeStruct, frozenset[str]]:
    return jax.ShapeDtypeStruct(x.shape, x.dtype), varying_axes(x)
