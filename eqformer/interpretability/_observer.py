"""The observer of a model's calls, which records and replaces values; wrappers that bring values out of loops.

A key is the path of a value in all layers of a stack, such as `stacks[0].blocks.sublayers[0].input` (see `Point`).
"""

import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from ..kernels import attention_probabilities, AttentionCall, Operation, PiecewiseAttention, weigh_values
from ._points import CORE_HEADS, find_nodes, get_at, join_path, Node, Point


Model = TypeVar("Model", bound=nn.Module)
Patch = tuple[Point, Callable[..., Any]]
"""A value, and the function that returns its replacement."""


class LayerValues(eqx.Module):
    """Values of one layer by their keys, which the layer returns in its aux; a stack puts a `layers` dim in front."""

    values: dict[str, PyTree]


@dataclasses.dataclass
class Frame:
    """Values that are computed at one level of a traced program, such as the body of the loop over layers."""

    layer: Int[Array, ""] | None = None
    """The number of the frame's layer; None outside of the loop over layers."""
    values: dict[str, PyTree] = dataclasses.field(default_factory=dict)
    """Recorded values by their keys."""
    # JAX ignores `convention`; Flax, for which JAX made the function, passes "nnx".
    trace: Any = dataclasses.field(default_factory=lambda: get_opaque_trace_state(convention="nnx"))
    """The level of tracing at which the frame began; values of other levels cannot be brought out."""


@runtime_checkable
class PartConverter(Protocol):
    """Interface of `parallel.DeviceParts`, which converts between a global value and this device's part of the value.

    `dims` names the dims of the global value.
    """

    def gather(self, part: Array, shape: tuple[int, ...], dims: str) -> Array:
        """Return the global value of a shape on each device."""
        ...

    def take_local(self, value: Array, part: Array, dims: str) -> Array:
        """Return this device's part of a global value; `part` is an array of the same shape."""
        ...


@dataclasses.dataclass(frozen=True)
class NamedShapes:
    """Shapes of a global value's arrays, and the names of their dims, in trees like the value."""

    shapes: PyTree
    dims: PyTree


@dataclasses.dataclass(frozen=True)
class DeviceValues:
    """The global values of a pass, by their keys, and the conversions to this device's parts of them."""

    parts: PartConverter
    values: dict[str, NamedShapes]

    def gather(self, key: str, value: PyTree) -> PyTree:
        """Return the global value, from this device's part."""
        named = self.values[key]
        gather = lambda x, shape, dims: self.parts.gather(x, shape.shape, dims)
        return jax.tree.map(gather, value, named.shapes, named.dims)

    def take_local(self, key: str, value: PyTree, part: PyTree) -> PyTree:
        """Return the device's part of a global value."""
        return jax.tree.map(self.parts.take_local, value, part, self.values[key].dims)


class Observer:
    """Observer that records values and applies patches while one call of a model is traced.

    With `devices`, the call runs on each device's part of the values; patches then edit the global values. With
    `names_dims`, the names of the dims of recorded values are recorded too.
    """

    def __init__(
        self,
        keys: Sequence[str],
        patches: Sequence[Patch],
        devices: DeviceValues | None = None,
        *,
        names_dims: bool = False,
    ):
        self.keys, self.devices, self.names_dims = {*keys}, devices, names_dims
        self.patches: dict[str, list[Patch]] = {}
        for point, function in patches:
            self.patches.setdefault(point.key, []).append((point, function))
        # The path of the module whose call runs: empty for the outermost module, None before its call.
        self.path: str | None = None
        self.frame = Frame()
        self.applied: set[Point] = set()
        self.parts: list[str] = []
        """Names of the parts of the outermost module that the call has run."""
        self.dims: dict[str, PyTree] = {}
        """Names of the dims of recorded values, without a dim of layers."""

    def __call__(self, name: str, method: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> PyTree:
        """Run a call; record or replace its input and its output."""
        outer = self.path
        is_named = outer is not None and bool(name)
        self.path = path = join_path(outer, name) if outer is not None else ""
        if outer == "" and name and name not in self.parts:
            self.parts.append(name)
        # A layer is observed by its `NumberedLayer`, inside of the loop over layers.
        is_observed = is_named and method.__name__ in _OBSERVED_METHODS and not _is_numbered(module)
        try:
            if is_observed and args:
                args = (self._observe_input(join_path(path, "input"), args[0], module, method), *args[1:])
            result = method(module, *args, **kwargs)
            if isinstance(module, nn.LayerStack):
                result = self._take_layer_values(result)
            if not is_observed or not self.sees(path):
                return result
            dims = _output_dims(module, method)
            if type(result) is tuple:  # A layer returns its output before its cache and its aux.
                return self.observe(path, result[0], dims), *result[1:]
            return self.observe(path, result, dims)
        finally:
            self.path = outer

    def sees(self, key: str) -> bool:
        """Return whether a value is recorded or replaced."""
        return key in self.keys or key in self.patches

    def observe(self, key: str, value: PyTree, dims: str) -> PyTree:
        """Return a value with its patches applied, and record the result; `dims` names dims as annotations do."""
        if not self.sees(key):
            return value
        self._check_level(key, value)
        for point, function in self.patches.get(key, ()):
            value = self._apply_patch(point, function, value)
            self.applied.add(point)
        if key in self.keys:
            self.frame.values[key] = value
            if self.names_dims:
                self.dims[key] = _name_dims(value, dims)
        return value

    def _observe_input(self, key: str, value: PyTree, module: nn.Module, method: Callable[..., Any]) -> PyTree:
        return self.observe(key, value, _input_dims(module, method)) if self.sees(key) else value

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
        """Raise a `ValueError` unless the patches of all `points` were applied; check this after the call has run.

        If `tokens` have no source, the call reads the source from the cache, where an earlier, patched call may have
        stored it. Values of the source are then not checked.
        """
        has_cached_source = tokens is not None and tokens.source is None
        required = [point for point in points if not (has_cached_source and point.is_of_source)]
        if idle := [point.path for point in required if point not in self.applied]:
            raise ValueError(
                f"patch: this call does not run {', '.join(map(repr, idle))}, so their functions change nothing; "
                f"{call} runs {', '.join(map(repr, self.parts)) or 'no module'}; name modules that the call runs."
            )

    def _take_layer_values(self, result: tuple[Array, PyTree, PyTree]) -> tuple[Array, PyTree, PyTree]:
        """Move the values of a stack's layers from its aux to the frame."""
        match result:
            case x, cache, (aux, LayerValues(values=values)):
                self.frame.values.update(values)
                return x, cache, aux
            case _:
                return result

    def _check_level(self, key: str, value: PyTree) -> None:
        """Raise a `ValueError` for a value inside a vmap, a loop, a derivative rule or a shard_map of its own.

        A value cannot be brought out of a vmap, a loop or a derivative rule. In a shard_map each device has only a part
        of the value.
        """
        if get_opaque_trace_state(convention="nnx") != self.frame.trace:
            raise ValueError(
                f"the value {key!r} is computed inside a vmap, a loop or a custom derivative of its layer, from which "
                "no value can be brought out; name the module around it, such as the mixture that holds an expert."
            )
        is_varying = lambda x: eqx.is_array(x) and bool(jax.typeof(x).manual_axis_type.varying)
        if self.devices is None and any(map(is_varying, jax.tree.leaves(value))):
            raise ValueError(
                f"the value {key!r} is computed inside a shard_map, where each device has only its part; call "
                "capture(model, paths, plan=plan) on the model of plan.shard(model), whose values are global arrays."
            )

    def _apply_patch(self, point: Point, function: Callable[..., Any], value: PyTree) -> PyTree:
        """Return the value that a patch's function returns; a patch of one layer leaves the values of other layers."""
        layer, devices = self.frame.layer, self.devices

        def replace(value: PyTree) -> PyTree:
            old = value if devices is None else devices.gather(point.key, value)
            new = _check_like(point, function(old, layer) if point.is_of_all_layers else function(old), old)
            return new if devices is None else devices.take_local(point.key, new, value)

        if point.layer is None or layer is None:
            return replace(value)
        return jax.lax.cond(layer == point.layer, replace, lambda value: value, value)


def _find_observer() -> Observer | None:
    """Return the observer of the call that is traced; None if no observer of this room sees the call."""
    observer = nn.call_observer()
    return observer if isinstance(observer, Observer) else None


# Callers that sum in another dtype call a linear map's `product` in place of its `__call__`; blocks call `run_branch`.
_OBSERVED_METHODS = {"__call__", "run_branch", "product"}


def _output_dims(module: nn.Module, method: Callable[..., Any]) -> str:
    """Return the names of the dims of a method's result, or of the first array of a tuple."""
    if isinstance(module, nn.LinearMap):
        return f"... {' '.join(module.outputs)}"
    return _annotated_dims(inspect.signature(method).return_annotation)


def _input_dims(module: nn.Module, method: Callable[..., Any]) -> str:
    """Return the names of the dims of a method's first argument."""
    if isinstance(module, nn.LinearMap):
        return f"... {' '.join(module.inputs)}"
    return _annotated_dims(list(inspect.signature(method).parameters.values())[1].annotation)


def _annotated_dims(annotation: object) -> str:
    """Return the dims of the first array shape in an annotation, `"..."` without one."""
    texts = [getattr(option, "dim_str", None) for option in (annotation, *typing.get_args(annotation))]
    return next((text for text in texts if text), "...")


def _name_dims(value: PyTree, dims: str) -> PyTree:
    """Return a tree like a value with a name for each dim of each array, separated by spaces."""
    if isinstance(value, eqx.Module):  # A module, such as a `Routing`, whose annotations name the dims of its fields.
        return nn.dims(value)
    return jax.tree.map(lambda x: _expand_dims(dims.split(), x.ndim), value)


def _expand_dims(names: list[str], ndim: int) -> str:
    """Return one name for each dim; `*batch` and `...` stand for the dims of rows and tokens, and `_` for others."""
    index = next((index for index, name in enumerate(names) if name == "..." or name.startswith("*")), None)
    if index is None or len(names) - 1 > ndim:
        names, index = ([*names, "..."], len(names)) if len(names) <= ndim else (["..."], 0)
    missing = ndim - (len(names) - 1)
    rows = ["batch"] if "seq" in names else ["batch", "seq"]
    expanded = (rows + ["_"] * missing)[:missing]
    names = [*names[:index], *expanded, *names[index + 1 :]]
    return " ".join(name if name.isidentifier() else "_" for name in names)


def _check_like(point: Point, new: PyTree, old: PyTree) -> PyTree:
    """Return a patch's value as arrays; raise a `ValueError` unless its shapes and dtypes equal the old ones."""
    kinds = [[(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)] for tree in (new, old)]
    if jax.tree.structure(new) != jax.tree.structure(old) or kinds[0] != kinds[1]:
        raise ValueError(
            f"patch({point.path!r}): the function returns {eqx.tree_pformat(new)} for {eqx.tree_pformat(old)}; return "
            "a value of the same structure, shapes and dtypes."
        )
    return jax.tree.map(jnp.asarray, new)


_STREAM = "*batch seq embed"


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
        if (observer := _find_observer()) is None:
            return self.inner(x, tokens, cache)
        with observer.layer_frame(self.path, self.number) as values:
            x = observer.observe(join_path(self.path, "input"), x, _STREAM)
            x, cache, aux = self.inner(x, tokens, cache)
            x = observer.observe(self.path, x, _STREAM)
        return x, cache, (aux, LayerValues(values))

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the layer's empty cache."""
        return self.inner.init_cache(batch, capacity, dtype)


def _is_numbered(module: Any) -> bool:
    """Return whether a module is a `NumberedLayer`, alone or in wrappers."""
    while not isinstance(module, NumberedLayer) and hasattr(module, "inner"):
        module = module.inner
    return isinstance(module, NumberedLayer)


_HEADS = "*batch seq heads v_dim"


class ObservedAttention(Operation):
    """An attention's core whose heads, weights and output are observed.

    Kernels do not return weights. Recorded weights are therefore computed separately, by the definition of attention,
    and the output comes from the inner core. If weights are patched, the output is the sum of the values, each times
    its new weight.
    """

    inner: Operation

    def supports(self, call: AttentionCall) -> str | None:
        """Return the reason why the inner core cannot compute the call, or None."""
        return self.inner.supports(call)

    def __call__(self, call: AttentionCall) -> Float[Array, "*batch seq heads v_dim"]:
        """Compute attention, and observe the heads, the weights and the output."""
        if (observer := _find_observer()) is None:
            return self.inner(call)
        path = join_path(observer.path or "", "core")
        key_dim = "seq" if call.kv_tokens is None else "kv_seq"
        dims = {
            "query": "seq heads head_dim",
            "key": f"{key_dim} kv_heads head_dim",
            "value": f"{key_dim} kv_heads v_dim",
        }
        heads = {
            name: observer.observe(join_path(path, name), getattr(call, name), f"*batch {dims[name]}")
            for name in CORE_HEADS
        }
        call = dataclasses.replace(call, **heads)
        key = join_path(path, "weights")
        if observer.sees(key):
            pieces = self.inner if isinstance(self.inner, PiecewiseAttention) else None
            weights = attention_probabilities(call) if pieces is None else pieces.weights(call)
            weights = observer.observe(key, weights, "*batch heads seq kv_seq")
            if key in observer.patches and pieces is None:
                return observer.observe(path, weigh_values(weights, call.value, call.query.dtype), _HEADS)
            if key in observer.patches and pieces is not None:
                return observer.observe(path, pieces.weigh_values(weights, call), _HEADS)
        return observer.observe(path, self.inner(call), _HEADS)


def insert_wrappers(model: Model, keys: Sequence[str]) -> Model:
    """Return the model with the wrappers that bring the values of some keys out of stacks and attentions."""
    return number_layers(observe_attentions(model, keys), keys)


def observe_attentions(model: Model, keys: Sequence[str]) -> Model:
    """Return the model with observed cores of the attentions that compute the values of some keys."""
    cores = [node for node in find_nodes(model) if node.is_core and {*node.value_keys()} & {*keys}]
    observed = [core.module for core in cores]
    wrapped = [core if isinstance(core, ObservedAttention) else ObservedAttention(core) for core in observed]
    return _replace_nodes(model, cores, wrapped)


def number_layers(model: Model, keys: Sequence[str]) -> Model:
    """Return the model with numbered layers in the stacks that compute the values of some keys."""
    stacks = [node for node in find_nodes(model) if any(node.is_stack_of(key) for key in keys)]
    stacks = [node for node in stacks if not isinstance(node.module.blocks, NumberedLayer)]
    return _replace_nodes(
        model, stacks, [_number_layers(stack.module, join_path(stack.path, "blocks")) for stack in stacks]
    )


def remove_wrappers(model: nn.LanguageModel) -> nn.LanguageModel:
    """Return the model without the wrappers of `insert_wrappers`."""
    for wrapper in (NumberedLayer, ObservedAttention):
        model = nn.map_modules(lambda node: node.inner, model, wrapper)
    return model


def _replace_nodes(model: Model, nodes: Sequence[Node], modules: Sequence[Any]) -> Model:
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
