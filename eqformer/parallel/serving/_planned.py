"""A whole model under a plan, called like a model: for generating text."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from ... import nn
from ..._array_checks import checked
from ..._shapes import ArrayOrShape, is_shape
from .._axes import BATCH_AXES, CONTEXT, PIPE, TENSOR
from .._plan import Plan
from .._shard_map import filter_shard_map
from .._vary import vary, vary_like
from .._wrap import replace
from ..context._context_attention import ContextAttention
from ..layouts._layout import is_spec, shardings
from ..tensor._replicated_layers import replicated_layers
from ..tensor._tensor import TensorParallelMixer
from ._cache_core import CacheCore
from ._served import filled, filled_tokens, multiple, Served
from ._shared_heads import sharers, with_own_key_heads


class Planned(Served):
    """A model laid out by `plan`, that encodes tokens, keeps caches and gives logits as one device would.

    Inputs and outputs are global arrays. Rows are split over the axes of the batch (padded if there are too few),
    layers with their caches over `pipe`, heads with their caches and the vocabulary over `tensor`, experts over
    `expert`, and the slots of every cache over `context`: each device attends to those it has, and results are combined
    by their logsumexps. With `zero=3` each layer's weights are gathered before it runs. The residual stream is
    replicated, since a single token cannot be split. Where `sharers` devices share a key head, each has it, and its
    cache for some of the rows. The last `further` stacks are those of a predictor of a further token. Raises a
    `ValueError` if the model does not fit the mesh.
    """

    model: nn.Transformer
    plan: Plan = eqx.field(static=True)
    sharers: int = eqx.field(static=True)
    further: int = eqx.field(static=True)

    def __init__(self, model: nn.Transformer, plan: Plan):
        # A pipeline of all layers has the predictor's on its last stages.
        self.further = 0 if model.predictor is None else len(model.predictor.stacks)
        model = _joined(model)
        zero = 3 if plan.zero == 3 else 0
        self.plan = Plan(
            plan.mesh,
            zero=zero,
            expert_method=plan.expert_method,
            expert_factor=plan.expert_factor,
            smallest=plan.smallest,
        )
        self.sharers = sharers(model, self.plan)
        self.plan.check(model, rows=self._rows(1), seq=2 * self.plan.size(CONTEXT))
        if self.plan.size(TENSOR) > 1:
            _check_whole(model)
        self.model = _in_pipeline_order(with_own_key_heads(model, self.plan), self.plan)

    @checked
    def encode(
        self, ids: Int[Array, "batch seq"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree, None]:
        """The final norm's output, and the cache with these tokens stored."""
        nn.check_cached(tokens, cache)
        encode = lambda model, ids, tokens, cache: model.encode(ids, tokens, cache)[:2]
        return *self._read(encode, ids, (), tokens, cache), None

    @checked
    def predict(
        self, ids: Int[Array, "batch seq"], hidden: Float[Array, "batch seq embed"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """What `Transformer.predict` gives; the cache is that of `init_predictor_cache`."""
        if self.predictor is None:
            raise ValueError("Planned.predict: the model has no predictor; load or build it with predictor=True.")
        return self._read(nn.Transformer.predict, ids, (hidden,), tokens, cache)

    @property
    def predictor(self) -> nn.Predictor | None:
        """The model's predictor of a further token, but for its layers."""
        return self.model.predictor

    @checked
    def unembed(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Logits, in float32 at least, of what `encode` gave."""
        rows = self._rows(hidden.shape[0])
        x = jnp.pad(hidden, [(0, rows - hidden.shape[0]), (0, 0)])
        over = [TENSOR] if self.plan.size(TENSOR) > 1 else []
        run = self._run(rows, lambda model, x: model.unembed(vary(x, over)))
        given, given_back = PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES, *over)
        logits = filter_shard_map(run, self.plan.mesh, (self._specs, given), given_back)(self.model, x)
        return logits[: hidden.shape[0], : self.vocab]  # without the padding where the axis does not divide it

    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        """An empty cache for `batch` rows of up to `capacity` tokens, in parts where the plan keeps them."""
        shapes = self._whole_caches(batch, capacity, dtype, rollback)
        return self._empty(shapes[: len(shapes) - self.further])

    def init_predictor_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        """The same for the predictor's layers."""
        shapes = self._whole_caches(batch, capacity, dtype, rollback)
        return self._empty(shapes[len(shapes) - self.further :])

    def _whole_caches(self, batch: int, capacity: int, dtype: str | None, rollback: int) -> PyTree:
        """Shapes of caches that no device splits, for each of the stacks."""
        rows = self._rows(batch)
        return eqx.filter_eval_shape(lambda: self.model.init_cache(rows, capacity, dtype, rollback=rollback))

    def _empty(self, shapes: PyTree) -> PyTree:
        pieces, tensor = self.plan.size(CONTEXT), self.plan.size(TENSOR)

        def resized(names: str, x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
            sizes = dict(zip(_dims(names), x.shape, strict=True))
            if "kv_seq" in sizes:
                sizes["kv_seq"] = multiple(sizes["kv_seq"], pieces)
            if "kv_heads" in sizes:
                sizes["kv_heads"] = max(sizes["kv_heads"], tensor)  # that of a layer that has none of its own, too
            if "kv_heads" in sizes or self._is_of_sharers(x):
                sizes["batch"] //= self.sharers
            if _is_whole(names, x) or self._is_of_sharers(x):
                sizes["batch"] *= tensor
            return tuple(sizes.values())

        def empty(spec: PartitionSpec, names: str, x: jax.ShapeDtypeStruct) -> Array:
            value = (
                -1 if nn.is_position_array(x) and _dims(names)[-1] == "kv_seq" else 0
            )  # position -1 marks an empty slot
            made = jnp.full(resized(names, x), value, x.dtype)
            return jax.lax.with_sharding_constraint(made, NamedSharding(self.plan.mesh, spec))

        return jax.tree.map(empty, self._cache_specs(shapes), nn.dims(shapes), shapes, is_leaf=is_spec)

    def cache_shapes(self, batch: int, capacity: int, dtype: str | None = None) -> PyTree:
        """The shapes of what `init_cache` gives, each with where the plan keeps it."""
        arrays, rest = eqx.partition(eqx.filter_eval_shape(self.init_cache, batch, capacity, dtype), is_shape)
        at = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.plan.mesh, spec))
        return eqx.combine(jax.tree.map(at, arrays, eqx.filter(self._cache_specs(arrays), is_spec)), rest)

    @property
    def _specs(self) -> PyTree:
        return self.plan.parameter_specs(self.model)

    def _rows(self, batch: int) -> int:
        """`batch` rounded up to a multiple of the devices that rows, or their caches, are split over."""
        return multiple(batch, math.prod(self.plan.size(axis) for axis in BATCH_AXES) * self.sharers)

    def _is_of_sharers(self, x: ArrayOrShape) -> bool:
        """Whether an array of a cache has positions of the rows whose caches a device has."""
        return self.sharers > 1 and nn.is_position_array(x)

    def _cache_specs(self, cache: PyTree) -> PyTree:
        axis_of = {"layers": PIPE, "kv_seq": CONTEXT} | dict.fromkeys(_SLICED, TENSOR)
        used = {name: axis for name, axis in axis_of.items() if self.plan.size(axis) > 1}

        def spec(names: str, x: ArrayOrShape) -> PartitionSpec:
            axes: dict[str, Any] = {name: used.get(name) for name in _dims(names)} | {"batch": BATCH_AXES}
            if "heads" in used and (_is_whole(names, x) or self._is_of_sharers(x)):
                axes["batch"] = (*BATCH_AXES, TENSOR)
            return PartitionSpec(*axes.values())

        return jax.tree.map(spec, nn.dims(cache), cache)

    def _read(
        self, read: Callable[..., Any], ids: Array, beside: tuple[Array, ...], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Array, PyTree]:
        """Vectors that a method of the model gives, on each device for its own rows, and the cache."""
        rows, batch = self._rows(ids.shape[0]), ids.shape[0]
        ids, tokens = filled(ids, rows, 0), filled_tokens(tokens, rows)
        beside = tuple(jnp.pad(x, [(0, rows - batch), (0, 0), (0, 0)]) for x in beside)

        def per_device(model: nn.Transformer, *given: PyTree) -> tuple[Array, PyTree]:
            return _over_pieces(read, _apart(model, self.further), self.plan, *given)

        split, slots = PartitionSpec(BATCH_AXES), self._cache_specs(cache)
        given = self._specs, split, split, split, slots
        run = filter_shard_map(self._run(rows, per_device), self.plan.mesh, given, (split, slots))
        x, cache = run(self.model, ids, beside, tokens, cache)
        return x[:batch], cache

    def _run(self, rows: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` on one device, with the model as it is there."""
        own = rows // math.prod(self.plan.size(axis) for axis in BATCH_AXES)
        stages = self.plan.size(PIPE)
        pieces = max(number for number in range(1, stages + 1) if own % number == 0)
        plan = dataclasses.replace(self.plan, microbatches=pieces)
        device = plan.on_device(self.model)

        def per_device(model: nn.Transformer, *given: PyTree) -> PyTree:
            wrapped = device.wrap_forward(model)
            wrapped = replace(wrapped, ContextAttention, lambda core: CacheCore(core.inner))
            if self.sharers > 1:
                among = lambda mixer: TensorParallelMixer(dataclasses.replace(mixer.inner, sharers=self.sharers))
                wrapped = replace(wrapped, TensorParallelMixer, among)
            return call(wrapped, *given)

        return per_device


def _in_pipeline_order(model: nn.Transformer, plan: Plan) -> nn.Transformer:
    """Return the model in pipeline order, with rows of padding, if stages hold unequal numbers of layers."""
    if all(len(old) == len(new) for old, new in zip(model.stacks, plan.shapes(model).stacks, strict=True)):
        return model
    arrays, rest = eqx.partition(plan.to_pipeline_order(model), eqx.is_array)
    return eqx.combine(jax.device_put(arrays, shardings(plan.parameter_specs(arrays), plan.mesh)), rest)


def _check_whole(model: nn.Transformer) -> None:
    """Refuse caches split by their heads of mixers that every device runs whole."""
    for path, mixer in replicated_layers(model):
        if not isinstance(mixer, nn.Mixer):
            continue
        names = jax.tree.leaves(nn.dims(eqx.filter_eval_shape(lambda mixer=mixer: mixer.init_cache((1,), 2))))
        if found := {"heads", "kv_heads"} & set(" ".join(map(str, names)).split()):
            raise ValueError(
                f"Planned over {TENSOR}: {path} says of no heads to split, and its cache has {' and '.join(found)}, "
                "which are split; say so in its facts(), or name the cache's dims otherwise."
            )


def _joined(model: nn.Transformer) -> nn.Transformer:
    """The model with its predictor's stacks behind its own."""
    its = model.predictor
    if its is None:
        return model
    return dataclasses.replace(
        model, stacks=(*model.stacks, *its.stacks), predictor=dataclasses.replace(its, stacks=())
    )


def _apart(model: nn.Transformer, further: int) -> nn.Transformer:
    """The model with the last of its stacks in its predictor."""
    if not further:
        return model
    own, its = model.stacks[:-further], model.stacks[-further:]
    return eqx.tree_at(lambda m: (m.stacks, m.predictor.stacks), model, (own, its))


def _over_pieces(
    read: Callable[..., Any],
    model: nn.Transformer,
    plan: Plan,
    ids: Int[Array, "batch seq"],
    beside: tuple[Array, ...],
    tokens: nn.Tokens,
    cache: PyTree,
) -> tuple[Float[Array, "batch seq embed"], PyTree]:
    """What `read(model, ids, *beside, tokens, cache)` gives on a device that has a piece of each cache."""
    if plan.size(TENSOR) > 1:  # the norm alone: logits are computed from values typed as varying
        model = eqx.tree_at(lambda m: m.norm, model, model.norm.inner)  # type: ignore[attr-defined]
    pieces = plan.size(CONTEXT)
    if pieces > 1:
        lengths = jnp.broadcast_to(nn.document_lengths(tokens), ids.shape)  # not known from a piece of a row
        tokens = dataclasses.replace(tokens, lengths=lengths)
        cache = _each_cache(cache, lambda one: _piece(one, pieces))
    x, cache = read(model, ids, *beside, tokens, cache)
    return x, _each_cache(cache, lambda one: dataclasses.replace(one, first=None, capacity=None))


def _piece(cache: nn.SlotCache, pieces: int) -> nn.SlotCache:
    *outer, size = cache.positions.shape
    first = jnp.broadcast_to(jax.lax.axis_index(CONTEXT) * size, outer).astype(jnp.int32)
    return dataclasses.replace(cache, first=vary_like(first, cache.positions), capacity=size * pieces)


def _each_cache(tree: PyTree, change: Callable[[Any], Any]) -> PyTree:
    is_cache = lambda node: isinstance(node, nn.SlotCache)
    return jax.tree.map(lambda node: change(node) if is_cache(node) else node, tree, is_leaf=is_cache)


def _dims(names: str) -> list[str]:
    """The names of a cache's dims; in front are those of layers and of rows."""
    return ["layers", *names.split()[1:]]


def _is_whole(names: str, x: ArrayOrShape) -> bool:
    """Whether an array of a cache has no heads or channels to split, so that each device of `tensor` has its own."""
    return not nn.is_position_array(x) and not {*_SLICED} & {*_dims(names)}


_SLICED = "heads", "kv_heads", "mlp"  # dims of caches that `tensor` splits
