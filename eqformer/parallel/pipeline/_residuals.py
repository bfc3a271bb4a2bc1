"""Arrays that stages store between the entries of a schedule: residuals, and operands of deferred weight gradients.

A backward entry is several ticks after its forward entry, and does not run the forward pass again. In the forward
entry, `jax.vjp` returns outputs and a vjp function, which is a tree of arrays. Some of these arrays are arguments of
the stage, which the backward entry has too. Others depend on no argument, so they are the same in every tick. All other
arrays are the residuals, which are stored. (The mesh axes of an array's type do not tell whether the array depends on
an argument: the type of a mixture's token indices does not vary over `pipe`, although their values do.)

The backward pass through `y = W x` needs only `W` to compute `dx`. The weight gradient, the product `dy x^T`, can be
computed in a later entry if `x` and `dy` are stored. For this, each `nn.DenseMap` of the blocks is replaced by a map
with two more inputs, called probes. Probes are zero and do not change the result, but the map's custom backward pass
returns `x` and `dy` as their gradients. A scan over layers stacks these gradients like all others.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, Literal, Var  # pyright: ignore[reportPrivateImportUsage]
from jaxtyping import Array, Float, Int, PyTree

from ... import nn
from ..._shapes import Array as AnyArray
from .._fully_sharded import Gathered, scatter
from .._mesh import FSDP, PIPE, TorusSteps
from .._shard_map import vary, vary_like, zeros
from ..tensor._tensor import Sliced
from ._schedule import IDLE


class ResidualPacker:
    """Conversion between the results of a forward pass and a list of its residuals.

    `run()` returns the results of a pass and all its inputs. `run` is traced once. Results that depend on no input
    are computed and kept. The attribute `shapes` has the shapes of the residuals.
    """

    def __init__(self, run: Callable[[], tuple[PyTree, PyTree]]):
        traces: list[tuple[PyTree, list[tuple[int, int]], list[Hashable | None]]] = []

        def trace() -> list[AnyArray]:
            results, inputs = run()
            sources, computed = _separate_inputs(results, inputs)
            key_impls: list[Hashable | None] = [jax.random.key_impl(x) if _is_key(x) else None for x in computed]
            traces.append((jax.tree.structure(results), sources, key_impls))
            return _as_slot_arrays(computed)

        program, shapes = jax.make_jaxpr(trace, return_shape=True)()
        self.structure, self.sources, self.key_impls = traces[-1]
        constant_programs = [_constant_program(program, index) for index in range(len(shapes))]
        self.constants = [None if constant is None else jaxpr_as_fun(constant)()[0] for constant in constant_programs]
        self.shapes = [shape for shape, constant in zip(shapes, constant_programs, strict=True) if constant is None]

    def pack(self, results: PyTree, inputs: PyTree) -> list[AnyArray]:
        """Return the residuals of a pass; random keys are converted to arrays of integers."""
        computed = _as_slot_arrays(_separate_inputs(results, inputs)[1])
        return [x for x, constant in zip(computed, self.constants, strict=True) if constant is None]

    def unpack(self, residuals: Sequence[AnyArray], inputs: PyTree) -> PyTree:
        """Return the results of a pass from its residuals and its inputs."""
        remaining = iter(residuals)
        computed = [next(remaining) if constant is None else constant for constant in self.constants]
        computed = [x if impl is None else _wrap_key(x, impl) for x, impl in zip(computed, self.key_impls, strict=True)]
        arrays = jax.tree.leaves(inputs), computed
        return self.structure.unflatten([arrays[source][index] for source, index in self.sources])


def _separate_inputs(results: PyTree, inputs: PyTree) -> tuple[list[tuple[int, int]], list[AnyArray]]:
    """Separate the arrays of the results into inputs and computed arrays.

    Return for each array `(0, index)` if it is an input and `(1, index)` if it is computed, and the computed arrays.
    """
    computed: list[AnyArray] = []
    sources = {id(x): (0, index) for index, x in enumerate(jax.tree.leaves(inputs))}
    leaves = jax.tree.leaves(results)
    for x in leaves:
        if id(x) not in sources:
            sources[id(x)] = 1, len(computed)
            computed.append(x)
    return [sources[id(x)] for x in leaves], computed


def _constant_program(program: ClosedJaxpr, index: int) -> ClosedJaxpr | None:
    """Return the program that computes only one result, or None if the result depends on an input."""
    results = program.jaxpr.outvars[index : index + 1]
    needed, equations = _variables(results), []
    for equation in reversed(program.jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            needed |= _variables(equation.invars)
    constants = zip(program.jaxpr.constvars, program.consts, strict=True)
    if any(variable in needed and isinstance(value, Tracer) for variable, value in constants):
        return None
    effects = frozenset().union(*(equation.effects for equation in equations))
    info = program.jaxpr.debug_info._replace(result_paths=None)
    return program.replace(
        jaxpr=program.jaxpr.replace(eqns=equations[::-1], outvars=results, effects=effects, debug_info=info)
    )


def _variables(atoms: Iterable[Var | Literal]) -> set[Var]:
    """Return the variables among the inputs or outputs of an equation."""
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _is_key(x: AnyArray) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_slot_arrays(arrays: Sequence[AnyArray]) -> list[AnyArray]:
    """Convert random keys to arrays of integers, and mark all arrays as varying over stages, like arrays in slots."""
    return [vary(jax.random.key_data(x) if _is_key(x) else jnp.asarray(x), [PIPE]) for x in arrays]


def _wrap_key(key_data: AnyArray, impl: Hashable) -> AnyArray:
    return jax.random.wrap_key_data(jnp.asarray(key_data), impl=impl)


# Slots: trees of arrays with a leading dim of slots, in the carry of the scan over ticks.


def read_slot(slots: PyTree, slot: Int[AnyArray, ""]) -> PyTree:
    """Return the arrays in a slot."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, 0, False), slots)


def write_slot(slots: PyTree, slot: Int[AnyArray, ""], tree: PyTree) -> PyTree:
    """Return the slots after writing `tree` into one of them; unchanged if `slot` is `IDLE`."""

    def write(x: AnyArray, y: AnyArray) -> AnyArray:
        index = jnp.maximum(slot, 0)
        old = jax.lax.dynamic_index_in_dim(x, index, 0, False)
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(slot == IDLE, old, y), index, 0)

    return jax.tree.map(write, slots, tree)


def accumulate(sums: PyTree, terms: PyTree) -> PyTree:
    """Add terms to sums, in the dtypes of the sums; a term of None adds nothing."""

    def add(x: AnyArray | None, y: AnyArray | None) -> AnyArray | None:
        return x if x is None or y is None else x + y.astype(x.dtype)

    return jax.tree.map(add, sums, terms, is_leaf=_is_none)


def accumulate_group(sums: PyTree, group: Int[AnyArray, ""], terms: PyTree) -> PyTree:
    """Add terms to one group of rows of each sum, as `accumulate` does; all groups have as many rows as the terms."""

    def add(x: AnyArray | None, y: AnyArray | None) -> AnyArray | None:
        if x is None or y is None:
            return x
        start = group * y.shape[0]
        rows = jax.lax.dynamic_slice_in_dim(x, start, y.shape[0]) + y.astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(x, rows, start, 0)

    return jax.tree.map(add, sums, terms, is_leaf=_is_none)


def _is_none(node: object) -> bool:
    return node is None


# Deferred weight gradients.


class MapCall(NamedTuple):
    """Shapes in a call of a linear map, for one layer."""

    weight: tuple[int, ...]
    inputs: jax.ShapeDtypeStruct
    outputs: jax.ShapeDtypeStruct


class ProbeShapes(NamedTuple):
    """Shapes of a map's inputs and outputs for one layer, and the number of layers."""

    layers: int
    inputs: jax.ShapeDtypeStruct
    outputs: jax.ShapeDtypeStruct

    def zeros(self, *slots: int) -> tuple[Array, Array]:
        """Return zeros for the inputs and outputs of all layers, with `slots` in front."""
        return zeros((self.inputs, self.outputs), *slots, self.layers)


class CallRecord:
    """Calls of one map during a trace."""

    def __init__(self):
        self.calls: list[MapCall] = []


class MapWrapper(nn.LinearWrapper, nn.DenseMap):
    """Base class of wrappers of a `DenseMap` in a pipeline's blocks."""

    @property
    def weight(self) -> PyTree:  # an array, or the leaf that `tree_at` puts in its place
        """Weight of the inner map."""
        return self.inner.weight


class RecordingMap(MapWrapper):
    """Wrapper of a map that records the shapes of its calls."""

    record: CallRecord = eqx.field(static=True)

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the inner map's product."""
        y = self.inner.product(x, dtype)
        inputs, outputs = jax.eval_shape(lambda: (vary_like(x, self.inner.weight), y))
        self.record.calls.append(MapCall(self.inner.shape, inputs, outputs))
        return y


class DeferredMap(MapWrapper):
    """Wrapper of a map whose weight gets no gradient; its probes get the map's input and the output's cotangent."""

    input_probe: Float[Array, "..."]
    output_probe: Float[Array, "..."]

    def product(self, x: Float[Array, "..."], dtype: jax.typing.DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the inner map's product."""
        # Mark the input as varying before the product, so that the transpose sums the input's gradient over mesh axes.
        weight, inputs = self.inner.weight, len(self.inputs)
        rows = vary_like(x, weight).reshape(*x.shape[: x.ndim - inputs], -1)
        input_probe = self.input_probe.reshape(rows.shape)
        output_probe = self.output_probe.reshape(*rows.shape[:-1], -1)
        matrix = weight.reshape(-1, rows.shape[-1]).astype(x.dtype)
        y = _multiply(self.products, rows, matrix, input_probe, output_probe)
        y = y.reshape(*y.shape[:-1], *self.output_shape)
        return y if dtype is None else y.astype(dtype)


def _multiply_ignoring_probes(
    products: nn.MatmulPrecision, x: Array, weight: Array, input_probe: Array, output_probe: Array
) -> Array:
    return products.forward(x, weight, x.dtype)


def _multiply_forward(
    products: nn.MatmulPrecision, x: Array, weight: Array, input_probe: Array, output_probe: Array
) -> tuple[Array, tuple[Array, Array]]:
    return products.forward(x, weight, x.dtype), (x, weight)


def _multiply_backward(
    products: nn.MatmulPrecision, residuals: tuple[Array, Array], cotangent: Array
) -> tuple[Array, None, Array, Array]:
    x, weight = residuals
    return products.input_grad(cotangent, weight, x.dtype), None, x, cotangent


_multiply = jax.custom_vjp(_multiply_ignoring_probes, nondiff_argnums=(0,))
_multiply.defvjp(_multiply_forward, _multiply_backward)


def record_calls(blocks: PyTree) -> tuple[PyTree, dict[int, CallRecord]]:
    """Wrap every map in a `RecordingMap`; return the wrapped blocks, and the record of each map by its index."""
    maps = _maps_by_index(blocks)
    records = {index: CallRecord() for index in maps}
    recording = {index: RecordingMap(linear, records[index]) for index, linear in maps.items()}
    return _replace_maps(blocks, recording), records


def find_deferrable(blocks: PyTree, records: dict[int, CallRecord], tokens: int) -> dict[int, ProbeShapes]:
    """Return, by map index, the shapes of the probes of each map whose weight gradient can be deferred.

    `records` are the calls in one layer. A map must be called once, on at least `tokens` vectors: a call on fewer
    vectors is inside a loop, which calls it repeatedly. The weight in the call must have the shape of the layer's
    weight: a weight under `vmap`, or one that is gathered over `tensor`, has another shape.
    """
    deferrable = {}
    for index, (linear, dim, _) in enumerate(_map_sites(blocks)):
        calls = records[index].calls
        if len(calls) != 1:
            continue
        call = calls[0]
        has_layer_weight = call.weight == _gathered_shape(linear, dim)[1:]
        if has_layer_weight and math.prod(call.inputs.shape[: -len(linear.inputs)]) >= tokens:
            deferrable[index] = ProbeShapes(linear.weight.shape[0], call.inputs, call.outputs)
    return deferrable


def defer_maps(blocks: PyTree, deferrable: dict[int, ProbeShapes]) -> PyTree:
    """Replace the maps of `deferrable` by `DeferredMap`s with probes of zeros."""
    maps = _maps_by_index(blocks)
    deferred = {index: DeferredMap(maps[index], *shapes.zeros()) for index, shapes in deferrable.items()}
    return _update_gathered(_without_gathered_probes, _replace_maps(blocks, deferred), blocks)


def flag_differentiated(blocks: PyTree) -> PyTree:
    """Flag the leaves for which a backward pass computes gradients.

    These are all floating-point arrays except the weights of `DeferredMap`s and the values of gradient proxies.
    """

    def unflag(flags: DeferredMap | Gathered) -> PyTree:
        if isinstance(flags, Gathered):
            no_values = _replace_leaves(flags.values, False)
            return dataclasses.replace(flags, inner=unflag_all(flags.inner), values=no_values)
        return eqx.tree_at(lambda m: m.inner.weight, flags, False)

    def unflag_all(flags: PyTree) -> PyTree:
        return nn.map_modules(unflag, flags, (DeferredMap, Gathered))

    return unflag_all(jax.tree.map(eqx.is_inexact_array, blocks))


def select_differentiable(tree: PyTree) -> PyTree:
    """Return the arrays that `flag_differentiated` flags, and None for all other leaves."""
    return eqx.filter(tree, flag_differentiated(tree))


def split_gradients(gradients: PyTree, blocks: PyTree) -> tuple[PyTree, dict[int, tuple[Array, Array]]]:
    """Split the gradients of the result of `defer_maps` into gradients of the plain `blocks`, and operands.

    The gradients of deferred weights are None. The operands are, by map index, pairs of a map's input and the
    cotangent of its output.
    """
    deferred = {index: node for index, node in _maps_by_index(gradients).items() if isinstance(node, DeferredMap)}
    operands = {index: (node.input_probe, node.output_probe) for index, node in deferred.items()}
    plain = {index: node.inner for index, node in deferred.items()}

    def restore(new: Gathered, old: Gathered) -> Gathered:
        return dataclasses.replace(old, inner=new.inner, values=_replace_leaves(old.values, None))

    return _update_gathered(restore, _replace_maps(gradients, plain), blocks), operands


def weight_gradients(blocks: PyTree, operands: dict[int, tuple[Array, Array]]) -> PyTree:
    """Return the deferred weight gradients in a tree like `blocks`, with None for all other arrays.

    The products of each layer accumulate in float32 at least. If a weight is gathered over `fsdp` for its use, the
    gradient is reduce-scattered.
    """
    sites = _map_sites(blocks)

    def multiply(
        linear: nn.DenseMap, dim: int | None, steps: TorusSteps, inputs: Array, cotangents: Array
    ) -> nn.DenseMap:
        layers = linear.weight.shape[0]
        inputs = inputs.reshape(layers, -1, math.prod(inputs.shape[inputs.ndim - len(linear.inputs) :]))
        cotangents = cotangents.reshape(
            layers, -1, math.prod(cotangents.shape[cotangents.ndim - len(linear.outputs) :])
        )
        multiply_in_layer = functools.partial(linear.products.weight_grad, dtype=nn.at_least_float32(inputs.dtype))
        product = jax.vmap(multiply_in_layer)(cotangents, inputs)
        product = product.reshape(_gathered_shape(linear, dim))
        product = product if dim is None else scatter(product, dim + 1, steps)
        return eqx.tree_at(lambda m: m.weight, _replace_leaves(linear, None), product, is_leaf=_is_none)

    products = {index: multiply(*sites[index], *pair) for index, pair in operands.items()}
    return _replace_maps(_replace_leaves(blocks, None), products)


def _replace_leaves(tree: PyTree, value: object) -> PyTree:
    return jax.tree.map(lambda _: value, tree)


# Maps inside of experts and of modules gathered over `tensor` are not deferred, so these modules count as one node.
_NODES = (nn.DenseMap, nn.Experts, Sliced)


def _is_node(node: object) -> bool:
    return isinstance(node, _NODES)


def _is_map(node: object) -> TypeGuard[nn.DenseMap]:
    return isinstance(node, nn.DenseMap)


def _map_sites(blocks: PyTree) -> list[tuple[nn.DenseMap, int | None, TorusSteps]]:
    """Return all maps in the order of the tree, each with the dim and the steps of its weight's gather over `fsdp`.

    The dim is a dim of one layer's weight, or None if the weight is not gathered.
    """
    sites: list[tuple[nn.DenseMap, int | None, TorusSteps]] = []
    for node in nn.modules(blocks, (*_NODES, Gathered)):
        if isinstance(node, Gathered):
            for linear, dims in zip(_nodes(node), _group_by_node(node, node.dims)):
                if _is_map(linear):
                    sites.append((linear, dims[_weight_index(linear)], node.steps))
        elif _is_map(node):
            sites.append((node, None, TorusSteps()))
    return sites


def _maps_by_index(blocks: PyTree) -> dict[int, nn.DenseMap]:
    """Return all maps by their index in the order of the tree."""
    return dict(enumerate(filter(_is_map, jax.tree.leaves(blocks, is_leaf=_is_node))))


def _replace_maps(blocks: PyTree, replacements: Mapping[int, PyTree]) -> PyTree:
    """Replace the maps at the indices that `replacements` has, in the order of `_maps_by_index`."""
    nodes, structure = jax.tree.flatten(blocks, is_leaf=_is_node)
    indices = [index for index, node in enumerate(nodes) if _is_map(node)]
    for index, node in replacements.items():
        nodes[indices[index]] = node
    return structure.unflatten(nodes)


def _weight_index(linear: nn.DenseMap) -> int:
    """Return the index of the weight among the map's arrays."""
    arrays = jax.tree.leaves(eqx.filter(linear, eqx.is_array))
    return next(index for index, array in enumerate(arrays) if array is linear.weight)


def _gathered_shape(linear: nn.DenseMap, dim: int | None) -> tuple[int, ...]:
    """Return the shape of all layers' weights with `dim` of a layer's weight gathered over `fsdp`."""
    shape = list(linear.weight.shape)
    if dim is not None:
        shape[dim + 1] *= jax.lax.axis_size(FSDP)
    return tuple(shape)


def _update_gathered(update: Callable[[Gathered, Gathered], Gathered], tree: PyTree, like: PyTree) -> PyTree:
    """Replace each `Gathered` of the tree by `update(node, its counterpart in like)`."""
    counterparts = iter(nn.modules(like, Gathered))
    return nn.map_modules(lambda node: update(node, next(counterparts)), tree, Gathered)


def _without_gathered_probes(new: Gathered, old: Gathered) -> Gathered:
    """Return `old` around the maps of `new`, whose probes are not gathered.

    The fields `dims`, `dtypes` and `values` have an entry for each array, so entries for the probes are added.
    """

    def add_probes(values: tuple, of_probe: str | None) -> tuple:
        counts = [len(jax.tree.leaves(eqx.filter(node, eqx.is_array))) for node in _nodes(new)]
        groups = zip(_group_by_node(old, values), counts)
        return tuple(x for group, count in groups for x in (*group, *[of_probe] * (count - len(group))))

    dims, dtypes = add_probes(old.dims, None), add_probes(old.dtypes, old.dtypes[0])
    values = None if old.values is None else add_probes(old.values, None)
    return dataclasses.replace(old, inner=new.inner, dims=dims, dtypes=dtypes, values=values)


def _nodes(gathered: Gathered) -> list[PyTree]:
    return jax.tree.leaves(gathered.inner, is_leaf=_is_node)


def _group_by_node(gathered: Gathered, values: tuple) -> list[tuple]:
    """Group `values`, which has an item for each array of `gathered`, into one list item for each of its `_nodes`."""
    items = iter(values)
    counts = [len(jax.tree.leaves(eqx.filter(node, eqx.is_array))) for node in _nodes(gathered)]
    return [tuple(itertools.islice(items, count)) for count in counts]
