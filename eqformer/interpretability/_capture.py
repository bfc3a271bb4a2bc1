"""`capture`: a model that returns named values of its pass; `patch`: a model that replaces some of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from .._annotation_checks import name_class
from ._observer import (
    DeviceValues,
    insert_wrappers,
    NamedShapes,
    number_layers,
    observe_attentions,
    Observer,
    PartConverter,
    Patch,
    remove_wrappers,
)
from ._points import is_of_predictor, parse_path, Point


class Patches(eqx.Module):
    """The values that a model replaces, each with its function."""

    points: tuple[Point, ...] = eqx.field(static=True, default=())
    functions: tuple[Callable[..., Any], ...] = ()

    @property
    def pairs(self) -> tuple[Patch, ...]:
        """The values and their functions."""
        return tuple(zip(self.points, self.functions, strict=True))


class PatchedModel(nn.LanguageModel):
    """A language model whose calls apply patches; made by `patch`."""

    inner: nn.LanguageModel
    patches: Patches

    # The return type is any pytree, since `equinox.tree_at` reads these properties with placeholders for the modules.
    @property
    def embedding(self) -> PyTree:
        """The model's table of token embeddings."""
        return self.inner.embedding

    @property
    def stacks(self) -> PyTree:
        """The model's layers."""
        return self.inner.stacks

    @property
    def norm(self) -> PyTree:
        """The norm of the last layer's output."""
        return self.inner.norm

    @property
    def head(self) -> PyTree:
        """The map from hidden vectors to logits, or None."""
        return self.inner.head

    @property
    def compute_dtype(self) -> str:
        """The dtype of the residual stream."""
        return self.inner.compute_dtype

    @property
    def max_seq(self) -> int | None:
        """The number of positions that the model knows; None for any number."""
        return self.inner.max_seq

    @property
    def start(self) -> int | None:
        """The id that each text begins with where an encoder reads the prompt; None without an encoder."""
        return self.inner.start

    @property
    def parts(self) -> nn.ModelParts:
        """The optional parts that the model has."""
        return self.inner.parts

    def embed(self, ids: Int[Array, "*batch seq"], tokens: nn.Tokens) -> Float[Array, "*rows _ embed"]:
        """Return the input of the first stack."""
        with nn.observe_calls(Observer((), self.patches.pairs)):
            return self.inner.embed(ids, tokens)

    def encode(
        self, ids: Int[Array, "*batch seq"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Return the final norm's output, the new cache, and the aux of the stacks."""
        observer = Observer((), self.patches.pairs)
        with nn.observe_calls(observer):
            result = self.inner.encode(ids, tokens, cache)
        observer.check_applied("encode", [point for point in self.patches.points if not _is_of_head(point)], tokens)
        return result

    def unembed(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return the logits of hidden vectors from `encode`."""
        observer = Observer((), self.patches.pairs)
        with nn.observe_calls(observer):
            logits = self.inner.unembed(hidden)
        observer.check_applied("unembed", filter(_is_of_head, self.patches.points), None)
        return logits

    def init_cache(
        self, batch: int | Sequence[int], capacity: int, dtype: str | None = None, *, rollback: int = 0
    ) -> PyTree:
        """Return an empty cache of the model; up to `rollback` last tokens of a row may be replaced later."""
        return self.inner.init_cache(batch, capacity, dtype, rollback=rollback)


def _is_of_head(point: Point) -> bool:
    """Return whether `unembed`, rather than `encode`, computes a value."""
    return f"{point.key}.".startswith("head.")


def patch(model: nn.LanguageModel, functions: Mapping[str, Callable[..., Any]]) -> PatchedModel:
    """Return a copy of a model whose calls replace some intermediate values by functions of these values.

    ```python
    patched = eqformer.patch(model, {"stacks[0][3].sublayers[1].layer": jnp.zeros_like})  # without the MLP of layer 3
    logits, _ = patched(ids)
    ```

    The patched model can be used like any model: it generates, and it may be captured, jitted and differentiated.
    Derivatives may be with respect to its weights, and to the arrays of functions that are pytrees
    (`jax.tree_util.Partial`, an `equinox.Module`).

    A call that does not run a patched module raises an error: `unembed` for the head, `encode` for all other modules.
    One case is not checked, because the call cannot tell whether an earlier call was patched: with a cache and without
    a source, values of the encoder and of layers that attend to the encoder's output may come from the cache.

    Args:
        model: A language model, or a patched model, whose earlier patches run first.
        functions: For each path, as `value_paths(model)` lists them, a function of the value that returns another value
            of the same shape and dtype. The function of a path through all layers, `stacks[0].blocks`, is called
            in each layer as `function(value, layer)`, with the layer's number as a traced integer.

    Raises:
        ValueError: For a path that names no value (the message lists the nearest paths), and for a value of the
            predictor, which a patched model does not run. From a call: for a function that returns another shape or
            dtype, and for a module that the call does not run.
    """
    earlier = Patches()
    if isinstance(model, PatchedModel):
        model, earlier = model.inner, model.patches
    points = tuple(parse_path(model, path, "patch(model, functions)") for path in functions)
    if predicted := [point.path for point in points if is_of_predictor(model, point)]:
        raise ValueError(
            f"patch(model, functions): {', '.join(map(repr, predicted))} belongs to the predictor, and a patched model "
            "has no predict; name modules that encode or unembed run."
        )
    # A plain function is part of the tree's structure, so that all leaves of a patched model are arrays.
    is_plain = lambda function: jax.tree_util.all_leaves([function])
    wrapped = [jax.tree_util.Partial(f) if is_plain(f) else f for f in functions.values()]
    inner = insert_wrappers(model, [point.key for point in points])
    return PatchedModel(inner, Patches((*earlier.points, *points), (*earlier.functions, *wrapped)))


class Captured(eqx.Module):
    """The output of a model's call, and values of the pass by their paths: `captured["stacks[0].blocks"]`."""

    output: PyTree
    """The model's output: of a language model, a pair of its logits and its cache."""
    values: dict[str, PyTree]
    """The values by the paths that were given to `capture`."""

    def __getitem__(self, path: str) -> PyTree:
        """Return the value of a path."""
        return self.values[path]


@runtime_checkable
class DevicePlan(Protocol):
    """Interface of a `parallel.Plan` that runs a model on each device's rows, tokens, heads and features."""

    def without_stages(self, model: nn.LanguageModel) -> "tuple[DevicePlan, nn.LanguageModel]":
        """Return a plan without a pipeline, and the sharded model as that plan takes it."""
        ...

    def run_forward(
        self,
        call: Callable[..., tuple[PyTree, PyTree]],
        model: nn.LanguageModel,
        ids: Int[Array, "batch seq"],
        tokens: nn.Tokens,
        cache: Any,
        inputs: PyTree,
        shapes: PyTree,
        dims: PyTree,
    ) -> tuple[PyTree, Any]:
        """Return the results of `call` on all devices as global arrays, and the new cache."""
        ...

    def init_cache(
        self, model: nn.LanguageModel, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0
    ) -> Any:
        """Return an empty cache for `run_forward`."""
        ...


@runtime_checkable
class DeviceCache(Protocol):
    """Interface of the cache that a `DevicePlan` makes."""

    def one_device_shapes(self, model: nn.LanguageModel) -> PyTree:
        """Return the shapes of the same cache on one device."""
        ...


class Capture(eqx.Module):
    """A model that is called like the model itself and returns `Captured`; made by `capture`."""

    model: Callable[..., PyTree]
    points: tuple[Point, ...] = eqx.field(static=True)
    patches: Patches = Patches()
    plan: DevicePlan | None = eqx.field(static=True, default=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Captured:
        """Call the model; return its output and the values.

        Raises a `ValueError` for a value that the call does not compute, or that it computes inside a vmap or a loop of
        a layer, out of which no value can be brought.
        """
        if self.plan is not None:
            return self._run_on_devices(self.plan, *args, **kwargs)
        observer = Observer([point.key for point in self.points], self.patches.pairs)
        with nn.observe_calls(observer):
            output = self.model(*args, **kwargs)
        tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, nn.Tokens)), None)
        observer.check_applied("the model", self.patches.points, tokens)
        self._check_computed(observer.frame.values)
        return self._select(output, observer.frame.values)

    def _select(self, output: PyTree, values: dict[str, PyTree]) -> Captured:
        """Return the output, and the values by their paths."""
        take_layer = lambda point: lambda x: x if point.layer is None else x[point.layer]
        return Captured(output, {p.path: jax.tree.map(take_layer(p), values[p.key]) for p in self.points})

    def _check_computed(self, values: Mapping[str, PyTree]) -> None:
        """Raise a `ValueError` for a value that the call did not compute."""
        if missing := [point.path for point in self.points if point.key not in values]:
            raise ValueError(
                f"capture: this call does not run {', '.join(map(repr, missing))}; leave these paths out, or name "
                "modules that the call runs."
            )

    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        """Return an empty cache of the language model for this call; under a plan, its arrays are sharded.

        Up to `rollback` last tokens of a row may be replaced later.
        """
        if not isinstance(self.model, nn.LanguageModel):
            raise ValueError(
                f"capture(model, paths).init_cache: the model is {name_class(self.model)}, and only a language "
                "model makes the caches of all layers; make the module's own cache."
            )
        if self.plan is None:
            return self.model.init_cache(batch, capacity, dtype, rollback=rollback)
        plan, model = self.plan.without_stages(remove_wrappers(self.model))
        return plan.init_cache(model, batch, capacity, dtype, rollback=rollback)

    def _run_on_devices(
        self, plan: DevicePlan, ids: Int[Array, "batch seq"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> Captured:
        """Run the model on the plan's devices; return its logits, its cache, and the values as global arrays."""
        if cache is not None and not isinstance(cache, DeviceCache):
            raise ValueError(
                "capture(model, paths, plan=plan): each device of a plan holds a part of the cache, and this cache is "
                "not made for a plan; make it by init_cache(batch, capacity) of the object that capture returns."
            )
        assert isinstance(self.model, nn.LanguageModel)
        plan, model = plan.without_stages(remove_wrappers(self.model))
        tokens = nn.tokens_or_default(tokens, ids.shape, cache)
        patched = self.patches.points
        names = name_values(
            model, [*self.points, *patched], ids, tokens, None if cache is None else cache.one_device_shapes(model)
        )
        self._check_computed(names.values)
        keys = [*names.values]
        in_layer = {point.key: _drop_layers(point, names.values[point.key]) for point in patched if point.key in keys}

        def run_local(
            model: nn.LanguageModel,
            ids: Array,
            tokens: nn.Tokens,
            cache: PyTree,
            patches: Patches,
            parts: PartConverter,
        ) -> tuple[PyTree, PyTree]:
            observer = Observer([p.key for p in self.points], patches.pairs, DeviceValues(parts, in_layer))
            with nn.observe_calls(observer):
                logits, cache = observe_attentions(model, keys)(ids, tokens, cache)
            observer.check_applied("the model", patched, tokens)
            return (logits, observer.frame.values), cache

        captured = {p.key: names.values[p.key] for p in self.points}
        named = names.logits, captured
        shapes, dims = jax.tree.map(lambda x: x.shapes, named), jax.tree.map(lambda x: x.dims, named)
        (logits, values), cache = plan.run_forward(
            run_local, number_layers(model, keys), ids, tokens, cache, self.patches, shapes, dims
        )
        return self._select((logits, cache), values)


class NamedPass(NamedTuple):
    """The logits and some values of a pass on one device, as shapes with the names of their dims."""

    logits: NamedShapes
    values: dict[str, NamedShapes]


def name_values(
    model: nn.LanguageModel,
    points: Sequence[Point],
    ids: Int[Array, "batch seq"],
    tokens: nn.Tokens,
    cache: PyTree = None,
) -> NamedPass:
    """Trace the model on one device; return the shapes and dims of its logits and of the values that it computes.

    `cache` has the shapes of the cache on one device.
    """
    keys, dims_by_key = [point.key for point in points], dict[str, PyTree]()

    def run(model: nn.LanguageModel, ids: Array, tokens: nn.Tokens, cache: PyTree) -> tuple[Array, dict[str, PyTree]]:
        observer = Observer(keys, (), names_dims=True)
        with nn.observe_calls(observer):
            logits, _ = insert_wrappers(model, keys)(ids, tokens, cache)
        dims_by_key.update(observer.dims)
        return logits, observer.frame.values

    logits, shapes = eqx.filter_eval_shape(run, model, ids, tokens, cache)
    add_layers = lambda point: lambda dims: f"layers {dims}" if point.is_in_stack else dims
    dims = {p.key: jax.tree.map(add_layers(p), dims_by_key[p.key]) for p in points if p.key in shapes}
    values = {key: NamedShapes(shapes[key], dims[key]) for key in dims}
    return NamedPass(NamedShapes(logits, "batch seq vocab"), values)


def _drop_layers(point: Point, named: NamedShapes) -> NamedShapes:
    """Return the shapes and dims of a value in one layer."""
    if not point.is_in_stack:
        return named
    drop = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return NamedShapes(
        jax.tree.map(drop, named.shapes), jax.tree.map(lambda dims: dims.removeprefix("layers "), named.dims)
    )


def capture(model: nn.Module, paths: Sequence[str], *, plan: DevicePlan | None = None) -> Capture:
    """Return a function that is called like the model, and returns values of the pass beside the model's output.

    ```python
    captured = eqformer.capture(model, ["stacks[0].blocks", "stacks[0][3].sublayers[0].layer.core.weights"])(ids)
    logits, cache = captured.output
    stream = captured["stacks[0].blocks"]  # layers batch seq embed
    ```

    The values of a patched model are recorded after its patches. Gradients flow through them, and the call may be
    jitted, vmapped and differentiated, with a cache or without. The model is not changed. A module that runs several
    times in a call gives its last value.

    Args:
        model: A language model, a patched model, or a single module, such as a block.
        paths: Paths as `value_paths(model)` lists them.
        plan: The plan that sharded the model, which must be a language model. The call takes ids and tokens of all
            rows. Each device computes a part, and the call returns global arrays. It runs as in training or, with a
            cache from the result's `init_cache`, as in generation. None: the call runs where the model's arrays are.

    Raises:
        ValueError: For a path that names no value (the message lists the nearest paths). From the call: for a value
            that the call does not compute.
    """
    if isinstance(paths, str):
        raise ValueError(f"capture(model, {paths!r}): paths is a list of paths; write [{paths!r}].")
    patches = Patches()
    if isinstance(model, PatchedModel):
        model, patches = model.inner, model.patches
    if plan is not None and not isinstance(model, nn.LanguageModel):
        raise ValueError(
            f"capture(model, paths, plan=...): a plan runs a whole language model, and the model is a "
            f"{type(model).__name__}; leave out the plan, or capture the language model around it."
        )
    points = tuple(parse_path(model, path, "capture(model, paths)") for path in paths)
    wrapped = insert_wrappers(model, [point.key for point in points])
    assert callable(wrapped)
    return Capture(wrapped, points, patches, plan)
