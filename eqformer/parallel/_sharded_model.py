"""A model that a plan shards for generation, with the methods of the unsharded model."""

import abc
import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from .. import nn
from .._annotation_checks import checked
from .._shapes import is_shape
from ._mesh import BATCH_AXES, is_spec, PIPE, TENSOR
from ._plan import Plan
from ._shard_map import filter_shard_map, vary
from ._sharded_cache import (
    CacheLayout,
    count_kv_row_shards,
    pad_batch,
    pad_tokens,
    repeat_key_heads,
    run_on_cache_pieces,
)


class DistributedModel(eqx.Module):
    """Base class of models that run over several devices and have the methods of `nn.LanguageModel` for generation."""

    model: eqx.AbstractVar[nn.LanguageModel]

    @abc.abstractmethod
    def encode(self, ids: Int[Array, "batch seq"], tokens: nn.Tokens, cache: PyTree) -> tuple[Array, PyTree, None]:
        """Return the final norm's output, and the cache with these tokens stored."""

    @abc.abstractmethod
    def unembed(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Return the logits for the hidden vectors that `encode` returned."""

    def decode(
        self, ids: Int[Array, "batch seq"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch vocab"], PyTree]:
        """Return the logits of the token that follows each row, and the cache with the tokens stored."""
        hidden, cache, _ = self.encode(ids, tokens, cache)
        return self.unembed(hidden[:, -1]), cache

    @abc.abstractmethod
    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        """Return an empty cache."""

    def __call__(
        self, ids: Int[Array, "batch seq"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "batch seq vocab"], PyTree]:
        """Return the logits of the next token after each token, and the cache with these tokens stored.

        Without a cache, the tokens are stored in a temporary cache, and the second result is None.
        """
        tokens = nn.tokens_or_default(tokens, ids.shape, cache)
        batch, seq = ids.shape
        new_cache = self.init_cache(batch, seq) if cache is None else cache
        hidden, new_cache, _ = self.encode(ids, tokens, new_cache)
        logits = self.unembed(hidden.reshape(-1, hidden.shape[-1]))
        return logits.reshape(batch, seq, logits.shape[-1]), None if cache is None else new_cache

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return self.model.vocab

    @property
    def max_seq(self) -> int | None:
        """Largest number of positions of the model; None if it has no limit."""
        return self.model.max_seq

    @property
    def start(self) -> int | None:
        """Id that begins each decoded text of a model with an encoder; None for other models."""
        return self.model.start

    @property
    def compute_dtype(self) -> str:
        """Dtype of the residual stream."""
        return self.model.compute_dtype


class ShardedModel(DistributedModel):
    """Model sharded by `plan` that encodes tokens, stores caches and returns logits as on one device.

    Inputs and outputs are global arrays. Rows are split over the axes of the batch (with padding), layers and their
    caches over `pipe`, heads and their caches over `tensor`, the vocabulary over `tensor`, experts over `expert`, and
    the slots of every KV cache (one for each cached token) over `context`. Each device attends to its own slots, and
    the results are combined by their logsumexps. With `zero=3`, the weights of a layer are gathered before the layer
    runs. The residual stream is replicated, because the single token of a decode step cannot be split. Raises a
    `ValueError` if the model does not fit the mesh.
    """

    model: nn.LanguageModel
    plan: Plan = eqx.field(static=True)
    kv_row_shards: int = eqx.field(static=True)
    """Number of devices of `tensor` that share each key head and split its cache by rows; 1 if no devices do."""
    predictor_stacks: int = eqx.field(static=True)
    """Number of stacks at the end of `model.stacks` that belong to the predictor (multi-token prediction)."""

    def __init__(self, model: nn.LanguageModel, plan: Plan):
        # The predictor's layers are on the last stages of a pipeline, after the model's own layers.
        predictor = model.parts.predictor
        self.predictor_stacks = 0 if predictor is None else len(predictor.stacks)
        model = _append_predictor_stacks(model)
        self.plan = plan.for_serving()
        self.kv_row_shards = count_kv_row_shards(model, self.plan)
        self.plan.check_serving(model, rows=self._layout.padded_rows(1))
        self.model = _in_pipeline_order(repeat_key_heads(model, self.plan), self.plan)

    @checked
    def encode(
        self, ids: Int[Array, "batch seq"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree, None]:
        """Return the final norm's output, and the cache with these tokens stored."""
        nn.check_cached(tokens, cache)
        return *self._run_with_cache(_encode, ids, (), tokens, cache), None

    @checked
    def decode(
        self, ids: Int[Array, "batch seq"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch vocab"], PyTree]:
        """Return the logits of the token that follows each row, and the cache with the tokens stored.

        Each device encodes and unembeds in one `shard_map`.
        """
        nn.check_cached(tokens, cache)

        def decode_on_device(
            model: nn.LanguageModel, ids: Array, tokens: nn.Tokens, cache: PyTree
        ) -> tuple[Array, PyTree]:
            hidden, cache = _encode(model, ids, tokens, cache)
            return self._unembed_on_device(model, hidden[:, -1]), cache

        out_spec = PartitionSpec(BATCH_AXES, *self._vocab_axes)
        logits, cache = self._run_with_cache(decode_on_device, ids, (), tokens, cache, out_spec)
        return logits[:, : self.vocab], cache

    @checked
    def predict(
        self, ids: Int[Array, "batch seq"], hidden: Float[Array, "batch seq embed"], tokens: nn.Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """Return the results of `Transformer.predict`; `init_predictor_cache` makes the first `cache`."""
        if self.predictor is None:
            raise ValueError("ShardedModel.predict: the model has no predictor; load or build it with predictor=True.")
        return self._run_with_cache(nn.Transformer.predict, ids, (hidden,), tokens, cache)

    @property
    def predictor(self) -> nn.Predictor | None:
        """Module for multi-token prediction, without its layers."""
        return self.model.parts.predictor

    @checked
    def unembed(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Return the logits, in float32 at least, for the hidden vectors that `encode` returned."""
        rows = self._layout.padded_rows(hidden.shape[0])
        x = jnp.pad(hidden, [(0, rows - hidden.shape[0]), (0, 0)])
        run = self._per_device(rows, self._unembed_on_device)
        hidden_spec, logits_spec = PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES, *self._vocab_axes)
        logits = filter_shard_map(run, self.plan.mesh, (self._specs, hidden_spec), logits_spec)(self.model, x)
        # If the axis does not divide the vocabulary, the last columns are padding.
        return logits[: hidden.shape[0], : self.vocab]

    @property
    def _vocab_axes(self) -> list[str]:
        """Mesh axes that split the vocabulary of the logits."""
        return [TENSOR] if self.plan.size(TENSOR) > 1 else []

    def _unembed_on_device(self, model: nn.LanguageModel, hidden: Array) -> Array:
        """Return the logits of this device's ids; `hidden` is replicated over the axes that split the vocabulary."""
        return model.unembed(vary(hidden, self._vocab_axes))

    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        """Return an empty sharded cache for `batch` rows of up to `capacity` tokens."""
        shapes = self._unsharded_caches(batch, capacity, dtype, rollback)
        return self._layout.init(shapes[: len(shapes) - self.predictor_stacks])

    def init_predictor_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        """Return an empty sharded cache for the predictor's layers; for the arguments see `init_cache`."""
        shapes = self._unsharded_caches(batch, capacity, dtype, rollback)
        return self._layout.init(shapes[len(shapes) - self.predictor_stacks :])

    def _unsharded_caches(self, batch: int, capacity: int, dtype: str | None, rollback: int) -> PyTree:
        """Return the shapes of the unsplit caches of all stacks; the predictor's stacks are last."""
        rows = self._layout.padded_rows(batch)
        return eqx.filter_eval_shape(lambda: self.model.init_cache(rows, capacity, dtype, rollback=rollback))

    def put_cache_row(self, cache: PyTree, rows: int, index: Int[Array, ""], single: PyTree) -> PyTree:
        """Return a cache of `rows` rows with the row at `index` replaced by the row of `single`, a cache of one row."""
        return self._layout.put_row(cache, rows, index, single)

    def cache_shapes(self, batch: int, capacity: int, dtype: str | None = None) -> PyTree:
        """Return the shapes and shardings of the cache that `init_cache` returns."""
        arrays, static = eqx.partition(eqx.filter_eval_shape(self.init_cache, batch, capacity, dtype), is_shape)

        def with_sharding(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.plan.mesh, spec))

        return eqx.combine(jax.tree.map(with_sharding, arrays, eqx.filter(self._layout.specs(arrays), is_spec)), static)

    @property
    def _layout(self) -> CacheLayout:
        return CacheLayout(self.plan, self.kv_row_shards)

    @property
    def _specs(self) -> PyTree:
        return self.plan.parameter_specs(self.model)

    def _run_with_cache(
        self,
        method: Callable[..., tuple[Array, PyTree]],
        ids: Array,
        hidden_inputs: tuple[Array, ...],
        tokens: nn.Tokens,
        cache: PyTree,
        out_spec: PartitionSpec = PartitionSpec(BATCH_AXES),
    ) -> tuple[Array, PyTree]:
        """Call a method of the model on every device, with the device's rows; return its output and the new cache.

        `out_spec` is the spec of the output.
        """
        rows, batch = self._layout.padded_rows(ids.shape[0]), ids.shape[0]
        ids, tokens = pad_batch(ids, rows, 0), pad_tokens(tokens, rows)
        hidden_inputs = tuple(jnp.pad(x, [(0, rows - batch), (0, 0), (0, 0)]) for x in hidden_inputs)

        def per_device(model: nn.LanguageModel, *inputs: PyTree) -> tuple[Array, PyTree]:
            return run_on_cache_pieces(
                method, _restore_predictor_stacks(model, self.predictor_stacks), self.plan, *inputs
            )

        split, slots = PartitionSpec(BATCH_AXES), self._layout.specs(cache)
        in_specs = self._specs, split, split, split, slots
        run = filter_shard_map(self._per_device(rows, per_device), self.plan.mesh, in_specs, (out_spec, slots))
        x, cache = run(self.model, ids, hidden_inputs, tokens, cache)
        return x[:batch], cache

    def _per_device(self, rows: int, call: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Return `call` for use inside `filter_shard_map`, with the model wrapped for the device."""
        rows_per_device = rows // self._layout.row_groups
        stages = self.plan.size(PIPE)
        microbatches = max(count for count in range(1, stages + 1) if rows_per_device % count == 0)
        plan = dataclasses.replace(self.plan, microbatches=microbatches)
        device = plan.on_device(self.model, "serve", self.kv_row_shards)
        return lambda model, *inputs: call(device.wrap_forward(model), *inputs)


def _in_pipeline_order(model: nn.LanguageModel, plan: Plan) -> nn.LanguageModel:
    """Put the layers in pipeline order, with padding layers, if stages hold unequal numbers of layers."""
    if all(len(old) == len(new) for old, new in zip(model.stacks, plan.shapes(model).stacks, strict=True)):
        return model
    return plan.shard(model)


def _append_predictor_stacks(model: nn.LanguageModel) -> nn.LanguageModel:
    """Append the predictor's stacks to the model's stacks."""
    predictor = model.parts.predictor
    if predictor is None:
        return model
    stacks = (*model.stacks, *predictor.stacks), ()
    return eqx.tree_at(_stacks_with_predictors, model, stacks)


def _restore_predictor_stacks(model: nn.LanguageModel, count: int) -> nn.LanguageModel:
    """Move the model's last `count` stacks back into its predictor."""
    if not count:
        return model
    stacks, predictor_stacks = model.stacks[:-count], model.stacks[-count:]
    return eqx.tree_at(_stacks_with_predictors, model, (stacks, predictor_stacks))


def _stacks_with_predictors(model: PyTree) -> tuple[PyTree, PyTree]:
    return model.stacks, model.parts.predictor.stacks


def _encode(model: nn.LanguageModel, ids: Array, tokens: nn.Tokens, cache: PyTree) -> tuple[Array, PyTree]:
    """Return the model's hidden vectors and its new cache."""
    hidden, cache, _ = model.encode(ids, tokens, cache)
    return hidden, cache
