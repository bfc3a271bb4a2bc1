"""The observer of a model's calls, which records and replaces values, and the wrappers that bring them out of loops.

A key is the path of a value in all layers of a stack, such as `stacks[0].blocks.sublayers[0].input` (see `Point`).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from ..kernels import attention_weights, AttentionCall, Operation, weigh_values
from ._points import CORE_HEADS, find_nodes, get_at, join_path, Node, Point


Patch = tuple[Point, Callable[..., Any]]
"""A value, and the function that returns what replaces it."""


class LayerValues(eqx.Module):
    """Values of one layer by their keys, which the layer returns in its aux; a stack puts a `layers` dim in front."""

    values: dict[str, PyTree]


@dataclasses.dataclass
class Frame:
    """Values that are computed at one level of a traced program, such as the body of the loop over layers."""

    layer: Int[Array, ""] | None = None
    """The number of the layer that the frame is of; None outside of the loop over layers."""
    values: dict[str, PyTree] = dataclasses.field(default_factory=dict)
    """Recorded values by their keys."""
    # JAX ignores `convention`; "nnx" is what Flax, for which the function was made, passes.
    trace: Any = dataclasses.field(default_factory=lambda: get_opaque_trace_state(convention="nnx"))
    """The level of tracing at which the frame began; values of other levels cannot be brought out."""


class Observer:
    """Records the values of some keys, and applies patches, while one call of a model is traced."""

    def __init__(self, keys: Sequence[str], patches: Sequence[Patch]):
        self.keys = {*keys}
        self.patches: dict[str, list[Patch]] = {}
        for point, function in patches:
            self.patches.setdefault(point.key, []).append((point, function))
        # The path of the module whose call runs: empty for the outermost module, None before its call.
        self.path: str | None = None
        self.frame = Frame()
        self.applied: set[Point] = set()
        self.parts: list[str] = []
        """Names of the parts of the outermost module that the call has run."""

    def __call__(self, name: str, method: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> PyTree:
        """Run a call; record or replace its input and its output."""
        outer = self.path
        is_named = outer is not None and bool(name)
        self.path = path = join_path(outer, name) if outer is not None else ""
        if outer == "" and name and name not in self.parts:
            self.parts.append(name)
        # A layer is observed by its `NumberedLayer`, inside of the loop over layers.
        is_observed = is_named and method.__name__ in _OBSERVED_METHODS and not isinstance(module, NumberedLayer)
        try:
            if is_observed and args:
                args = (self.observe(join_path(path, "input"), args[0]), *args[1:])
            result = method(module, *args, **kwargs)
            if isinstance(module, nn.LayerStack):
                result = self._take_layer_values(result)
            if not is_observed or not self.sees(path):
                return result
            if type(result) is tuple:  # A layer returns its output before its cache and its aux.
                return self.observe(path, result[0]), *result[1:]
            return self.observe(path, result)
        finally:
            self.path = outer

    def sees(self, key: str) -> bool:
        """Return whether a value is recorded or replaced."""
        return key in self.keys or key in self.patches

    def observe(self, key: str, value: PyTree) -> PyTree:
        """Return a value with its patches applied, and record the result."""
        if not self.sees(key):
            return value
        self._check_level(key, value)
        for point, function in self.patches.get(key, ()):
            value = _apply_patch(point, function, value, self.frame.layer)
            self.applied.add(point)
        if key in self.keys:
            self.frame.values[key] = value
        return value

    @contextlib.contextmanager
    def layer_frame(self, path: str, layer: Int[Array, ""]) -> Iterator[dict[str, PyTree]]:
        """Record values in a frame of one layer, whose path is `path`; yield the frame's values."""
        outer = self.path, self.frame
        self.path, self.frame = path, Frame(layer)
        try:
            yield self.frame.values
        finally:
            self.path, self.frame = outer

    def check_applied(self, call: str, points: Iterable[Point], tokens: nn.Tokens | None) -> None:
        """Raise a `ValueError` unless the patches of some points were applied; to be called after the call has run.

        Tokens without a source have their source in the cache, where an earlier, patched call may have stored it. So
        values of the source are not checked in such a call.
        """
        has_cached_source = tokens is not None and tokens.source is None
        required = [point for point in points if not (has_cached_source and point.is_of_source)]
        if idle := [point.path for point in required if point not in self.applied]:
            raise ValueError(
                f"patch: this call does not run {', '.join(map(repr, idle))}, so that the functions change nothing; "
                f"{call} runs {', '.join(map(repr, self.parts)) or 'no module'}; name modules that the call runs."
            )

    def _take_layer_values(self, result: tuple[Array, PyTree, PyTree]) -> tuple[Array, PyTree, PyTree]:
        """Move the values of a stack's layers from its aux to the frame."""
        x, cache, aux = result
        if isinstance(aux, tuple) and len(aux) == 2 and isinstance(aux[1], LayerValues):
            self.frame.values.update(aux[1].values)
            aux = aux[0]
        return x, cache, aux

    def _check_level(self, key: str, value: PyTree) -> None:
        """Raise a `ValueError` for a value inside a vmap, a loop, a derivative rule or a shard_map of its own.

        A value cannot be brought out of the first three, and in a shard_map each device has only a part of the value.
        """
        if get_opaque_trace_state(convention="nnx") != self.frame.trace:
            raise ValueError(
                f"the value {key!r} is computed inside a vmap, a loop or a custom derivative of its layer, from which "
                "no value can be brought out; name the module around it, such as the mixture that holds an expert."
            )
        if any(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(value) if eqx.is_array(x)):
            raise ValueError(
                f"the value {key!r} is computed inside a shard_map, where each device has only its part; place the "
                "plain model by plan.shard(model), and call its capture or patch under equinox.filter_jit."
            )


# Callers that sum in another dtype call a linear map's `product` in place of its `__call__`; blocks call `branch`.
_OBSERVED_METHODS = {"__call__", "branch", "product"}


def _apply_patch(point: Point, function: Callable[..., Any], value: PyTree, layer: Int[Array, ""] | None) -> PyTree:
    """Return the value that a patch's function returns; a patch of one layer leaves the values of other layers."""

    def replace(value: PyTree) -> PyTree:
        return _check_like(point, function(value, layer) if point.is_of_all_layers else function(value), value)

    if point.layer is None or layer is None:
        return replace(value)
    return jax.lax.cond(layer == point.layer, replace, lambda value: value, value)


def _check_like(point: Point, new: PyTree, old: PyTree) -> PyTree:
    """Return a patch's value as arrays; raise a `ValueError` unless its shapes and dtypes are those of the old one."""
    kinds = [[(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)] for tree in (new, old)]
    if jax.tree.structure(new) != jax.tree.structure(old) or kinds[0] != kinds[1]:
        raise ValueError(
            f"patch({point.path!r}): the function returns {eqx.tree_pformat(new)} for {eqx.tree_pformat(old)}; return "
            "a value of the same structure, shapes and dtypes."
        )
    return jax.tree.map(jnp.asarray, new)


class NumberedLayer(nn.Layer):
    """A stack's layer with its number in the stack, which returns recorded values in its aux.

    Without an observer it is the layer itself.
    """

    inner: nn.Layer
    number: Int[Array, ""]
    path: str = eqx.field(static=True)

    @property
    def members(self) -> tuple[nn.Layer, ...]:
        """The layers that the layer runs one after another."""
        return self.inner.members

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run the layer; under an observer, the aux is a pair of the layer's own aux and its `LayerValues`."""
        observer = nn.call_observer()
        if not isinstance(observer, Observer):
            return self.inner(x, tokens, cache)
        with observer.layer_frame(self.path, self.number) as values:
            x = observer.observe(join_path(self.path, "input"), x)
            x, cache, aux = self.inner(x, tokens, cache)
            x = observer.observe(self.path, x)
        return x, cache, (aux, LayerValues(values))

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the layer's empty cache."""
        return self.inner.init_cache(batch, capacity, dtype)


class ObservedAttention(Operation):
    """An attention's core whose heads, weights and output are observed.

    Kernels do not return weights. Recorded weights are therefore computed apart, by the definition of attention, and
    the output comes from the inner core. If weights are patched, the output is the sum of values by the new weights.
    """

    inner: Operation

    def supports(self, call: AttentionCall) -> str | None:
        """Return the reason why the inner core cannot compute the call, or None."""
        return self.inner.supports(call)

    def __call__(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Compute the call."""
        observer = nn.call_observer()
        if not isinstance(observer, Observer):
            return self.inner(call)
        path = join_path(observer.path or "", "core")
        heads = {name: observer.observe(join_path(path, name), getattr(call, name)) for name in CORE_HEADS}
        call = dataclasses.replace(call, **heads)
        weights, key = None, join_path(path, "weights")
        if observer.sees(key):
            weights = observer.observe(key, attention_weights(call))
        if weights is not None and key in observer.patches:
            output = weigh_values(weights, call.value, call.query.dtype)
        else:
            output = self.inner(call)
        return observer.observe(path, output)


def insert_wrappers(model: nn.Module, keys: Sequence[str]) -> nn.Module:
    """Return the model with the wrappers that bring the values of some keys out of stacks and attentions."""
    cores = [node for node in find_nodes(model) if node.is_core and {*node.value_keys()} & {*keys}]
    observed = [core.module for core in cores]
    wrapped = [core if isinstance(core, ObservedAttention) else ObservedAttention(core) for core in observed]
    model = _replace_nodes(model, cores, wrapped)
    stacks = [node for node in find_nodes(model) if any(node.is_stack_of(key) for key in keys)]
    stacks = [node for node in stacks if not isinstance(node.module.blocks, NumberedLayer)]
    return _replace_nodes(
        model, stacks, [_number_layers(stack.module, join_path(stack.path, "blocks")) for stack in stacks]
    )


def _replace_nodes(model: nn.Module, nodes: Sequence[Node], modules: Sequence[Any]) -> nn.Module:
    if not nodes:
        return model
    return eqx.tree_at(
        lambda m: [get_at(m, node.accessor) for node in nodes], model, list(modules), is_leaf=lambda x: x is None
    )


def _number_layers(stack: nn.LayerStack, path: str) -> nn.LayerStack:
    """Return the stack with numbered layers."""
    number_layer = lambda layer, number: NumberedLayer(layer, number, path)
    blocks = eqx.filter_vmap(number_layer)(stack.blocks, jnp.arange(len(stack), dtype=jnp.int32))
    return eqx.tree_at(lambda s: s.blocks, stack, blocks)
