"""MuonClip (Kimi K2, arXiv 2507.20534): heads whose attention logits grow too large get smaller queries and keys.

While a step computes gradients, a `LogitWatch` wraps the core of each attention. The watch returns the largest logit of
each head and row as the gradient of an array of zeros. Gradients pass through loops, rematerialisation and meshes, so
models need no extra output for the logits. Each row of the batch has its own column in the array, so that sums of
gradients over microbatches and devices do not mix rows.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .. import kernels, nn, parallel
from .._annotation_checks import name_class
from .._shapes import Batch
from .losses._loss_aux import LossFn
from .optimizer._optimizer import is_none, Optimizer, Trained


QUERY_SHARE = 0.5
"""Queries are multiplied by `factor**QUERY_SHARE` of their head, and keys by `factor**(1 - QUERY_SHARE)` (Kimi K2)."""
_CHUNK = 512  # Logits are computed for this many queries and this many keys at a time.


@dataclasses.dataclass(frozen=True)
class LogitClip:
    """The part of a training step that clips attention logits; without a limit, the methods change nothing."""

    limit: float | None
    """The largest logit; None: no clipping."""

    def check_plan(self, plan: parallel.Plan | None) -> None:
        """Raise a `ValueError` for a limit of 0 or less, or for a plan whose devices cannot find the largest logits."""
        if self.limit is None:
            return
        if not self.limit > 0:
            raise ValueError(f"make_step(clip_logits={self.limit}): the limit is positive; Kimi K2 takes 100.")
        if plan is not None and (size := plan.size(parallel.CONTEXT)) > 1:
            raise ValueError(
                f"clip_logits under Plan over context={size}: no device sees all keys of a row, so no device knows the "
                "row's largest logits; split rows or heads instead."
            )
        if plan is not None and plan.spreads_edges:
            raise ValueError(
                "clip_logits under Plan(edges='spread'): a stage does not know which rows of the batch its attention "
                "computes; use edges='ends'."
            )

    def with_row_numbers(self, loss_fn: LossFn) -> LossFn:
        """Return a loss that writes the batch's row numbers into the model's watches, and then calls `loss_fn`."""
        if self.limit is None:
            return loss_fn

        def loss(model: PyTree, batch: PyTree, key: PyTree = None, **views: PyTree) -> PyTree:
            return loss_fn(number_rows(model, batch), batch, key, **views)

        return loss

    def with_zeros(self, trained: Trained) -> Trained:
        """Return a function that picks the parameters of `trained`, and the zeros of all watches, for gradients."""
        if self.limit is None:
            return trained

        def pick(model: PyTree) -> PyTree:
            return eqx.tree_at(_zeros_of_watches, trained(model), _zeros_of_watches(model), is_leaf=is_none)

        return pick

    def watch(self, model: PyTree, batch: PyTree, trained: Trained, *, has_loss_scale: bool) -> tuple[PyTree, PyTree]:
        """Return the model with watched attentions, and the batch with the numbers of its rows."""
        if self.limit is None:
            return model, batch
        check_clipping(model, trained, has_loss_scale=has_loss_scale)
        return _watch_model(model, batch.ids.shape[0]), _with_row_numbers(batch)

    def split(self, gradients: PyTree) -> tuple[PyTree, list[Float[Array, "*layers heads"]]]:
        """Return the gradients of a model without its watches, and the largest logits of each attention's heads."""
        largest = [jnp.max(zeros, axis=-1) for zeros in _zeros_of_watches(gradients)]
        return nn.map_modules(lambda watch: watch.inner, gradients, LogitWatch), largest

    def clip(
        self,
        parameters: PyTree,
        optimizer_state: PyTree,
        largest: Sequence[Float[Array, "*layers heads"]],
        optimizer: Optimizer,
    ) -> tuple[PyTree, PyTree]:
        """Apply `clip_heads` to the parameters, and to the fast weights of a schedule-free optimizer; return both."""
        if self.limit is None:
            return parameters, optimizer_state
        clip = partial(clip_heads, largest=largest, limit=self.limit)
        return clip(parameters), optimizer.map_fast_weights(clip, optimizer_state)

    def metrics(self, largest: Sequence[Float[Array, "*layers heads"]]) -> dict[str, Float[Array, ""]]:
        """Return the largest logit of the step as a metric."""
        if self.limit is None:
            return {}
        return {"largest_logit": jnp.max(jnp.stack([jnp.max(logits) for logits in largest]))}


class LogitWatch(kernels.Operation):
    """An attention core that also returns the largest logit of each head and row, as the gradient of `largest`."""

    inner: kernels.Operation
    """The core that computes the attention."""
    largest: Float[Array, "heads _"]
    """A zero for each head and each row of the whole batch; the gradients of the zeros are the largest logits."""
    numbers: Int[Array, "_"]
    """The index in the whole batch of each row of the call; a single 0 until `number_rows` sets the indices."""

    def supports(self, call: kernels.AttentionCall) -> str | None:
        """Return the reason why the inner core cannot compute the call, or None."""
        return self.inner.supports(call)

    def __call__(self, call: kernels.AttentionCall) -> Float[Array, "batch seq heads v_dim"]:
        """Compute the call by the inner core."""
        rows, heads = call.query.shape[0], call.query.shape[-2]
        if (heads, rows) != (self.largest.shape[-2], *self.numbers.shape):
            raise ValueError(
                f"make_step(clip_logits=...): a device computes attention of {heads} heads and {rows} rows at a time, "
                f"but its array of largest logits has {self.largest.shape[-2]} heads and {self.numbers.shape[-1]} "
                "numbered rows, so it cannot assign the logits to heads and rows; make the axis tensor smaller."
            )
        largest = largest_logits(call).astype(self.largest.dtype)
        return _record(self.inner(call), self.largest, largest, self.numbers)


@jax.custom_vjp
def _record(attended: Array, zeros: Array, largest: Array, numbers: Array) -> Array:
    """Return `attended`. Column `numbers[i]` of the gradient of `zeros` has the largest logits of row `i`."""
    return attended


def _record_forward(attended: Array, zeros: Array, largest: Array, numbers: Array) -> tuple[Array, tuple]:
    return attended, (zeros, largest, numbers)


def _record_backward(residuals: tuple, cotangent: Array) -> tuple:
    zeros, largest, numbers = residuals
    columns = parallel.vary_like(jnp.zeros_like(zeros), largest).at[:, numbers].set(largest.T)
    return cotangent, parallel.vary_like(columns, zeros), jnp.zeros_like(largest), None


_record.defvjp(_record_forward, _record_backward)


def largest_logits(call: kernels.AttentionCall, chunk: int = _CHUNK) -> Float[Array, "batch heads"]:
    """Return the largest scaled logit of each row and head among the keys that the queries see; 0 if all are negative.

    Logits are computed in float32 at least, `chunk` queries and keys at a time. There is no gradient.
    """
    query, key = (nn.in_float32(jax.lax.stop_gradient(x)) for x in (call.query, call.key))
    query, group = query * call.scale, query.shape[-2] // key.shape[-2]
    rows, _, heads, _ = query.shape
    query = query.reshape(*query.shape[:2], -1, group, query.shape[-1])
    queries, keys = (
        (kernels.split_blocks(x, 1, min(chunk, x.shape[1])), *_split_tokens(tokens, x.shape[:2], chunk))
        for x, tokens in ((query, call.tokens), (key, call.key_tokens))
    )

    def over_queries(largest: Array, piece: tuple) -> tuple[Array, None]:
        def over_keys(largest: Array, key_piece: tuple) -> tuple[Array, None]:
            (q, *q_tokens), (k, *k_tokens) = piece, key_piece
            visible = call.mask(kernels.TokenPositions(*q_tokens), kernels.TokenPositions(*k_tokens))
            logits = jnp.einsum("bqhgd,bkhd->bhgqk", q, k)
            visible_logits = jnp.where(visible[:, None, None], logits, 0)
            return jnp.maximum(largest, jnp.max(visible_logits, axis=(-2, -1))), None

        return jax.lax.scan(over_keys, largest, keys)

    start = parallel.vary_like(jnp.zeros((rows, heads // group, group), query.dtype), query)
    return jax.lax.scan(over_queries, start, queries)[0].reshape(rows, heads)


def _split_tokens(
    tokens: kernels.TokenPositions, shape: tuple[int, ...], chunk: int
) -> tuple[Int[Array, "n batch chunk"], Int[Array, "n batch chunk"] | None]:
    """Return positions and segments in chunks; the last chunk is filled up with padding tokens."""
    split = lambda x: kernels.split_blocks(jnp.broadcast_to(x, shape), 1, min(chunk, shape[1]), fill=-1)
    return split(tokens.positions), None if tokens.segments is None else split(tokens.segments)


def check_clipping(model: PyTree, trained: Trained, *, has_loss_scale: bool = False) -> None:
    """Raise a `ValueError` for a model whose attention logits cannot be clipped through its weights."""
    call, parameters = "clip_logits", trained(model)
    if has_loss_scale:
        raise ValueError(f"{call}: the loss scale of float16 would multiply the logits; use bfloat16 or float32.")
    mixers = [(path, mixer) for path, mixer in nn.named_modules(model, nn.Mixer) if _is_attention(mixer)]
    if not mixers:
        raise ValueError(f"{call}: the model has no attention, and so no logits to clip; leave out {call}.")
    for (path, mixer), trained_mixer in zip(mixers, _attentions(parameters), strict=True):
        if (reason := _refusal(mixer, trained_mixer)) is not None:
            raise ValueError(f"{call}: {path}: {reason}; leave out {call} for this model.")


def _is_attention(node: object) -> bool:
    """Return whether a node is a mixer whose core computes attention."""
    return isinstance(node, nn.Mixer) and hasattr(node, "core")


def _attentions(tree: PyTree) -> list[Any]:
    """Return the attentions of a model, or of a tree like it, in order."""
    return [node for node in jax.tree.leaves(tree, is_leaf=_is_attention) if _is_attention(node)]


def _map_attentions(change: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Return a model, or a tree like it, with changed attentions."""
    return jax.tree.map(lambda node: change(node) if _is_attention(node) else node, tree, is_leaf=_is_attention)


def _refusal(mixer: Any, parameters: Any) -> str | None:
    """Return the reason why the logits of an attention cannot be clipped, or None."""
    if not hasattr(mixer, "key") and not hasattr(mixer, "key_up"):
        return f"{name_class(mixer)} uses the keys of another layer, for which MuonClip has no rule"
    if any(getattr(mixer, name, None) is not None for name in ("query_norm", "key_norm")):
        return "norms of queries and keys already bound its logits, and cancel any factor of the weights"
    if mixer.scores.softcap is not None:
        return f"a softcap already bounds its logits by {mixer.scores.softcap:g}"
    if getattr(mixer, "value", mixer.query) is None:
        return "its keys are also its values, so smaller keys would change its values"
    if getattr(mixer, "indexer", None) is not None:
        return "an indexer selects its keys, and its core does not see all logits"
    weights = [getattr(part, "weight", None) for part in _scaled_maps(parameters)]
    if not all(isinstance(part, nn.DenseMap) for part in _scaled_maps(mixer)) or any(w is None for w in weights):
        return "its query and key weights are not trained directly, as with LoRA"
    return None


def _scaled_maps(mixer: Any) -> tuple[Any, ...]:
    """Return the maps whose outputs are scaled: of queries, of keys, and of rotary queries."""
    if not hasattr(mixer, "key_up"):
        return mixer.query, mixer.key
    return (mixer.query, mixer.key_up, *(() if mixer.query_rope is None else (mixer.query_rope,)))


def _watch_model(model: PyTree, rows: int) -> PyTree:
    """Return the model with a `LogitWatch` around the core of each attention, for batches of `rows` rows."""

    def watch(mixer: Any) -> Any:
        weight = mixer.query.weight
        ensemble = weight.shape[: weight.ndim - len(mixer.query.outputs) - len(mixer.query.inputs)]
        heads, dtype = mixer.query.output_shape[0], nn.at_least_float32(weight.dtype)

        def make() -> LogitWatch:
            return LogitWatch(mixer.core, jnp.zeros((heads, rows), dtype), jnp.zeros(1, jnp.int32))

        for size in reversed(ensemble):
            make = eqx.filter_vmap(make, axis_size=size)
        return eqx.tree_at(lambda m: m.core, mixer, make())

    return _map_attentions(watch, model)


def number_rows(model: PyTree, batch: PyTree) -> PyTree:
    """Return the model with a batch's row numbers in its watches; a model without watches is returned unchanged.

    The schedule of a pipeline calls this function for its stages, because it runs them without the loss.
    """

    def number(watch: LogitWatch) -> LogitWatch:
        shape = (*watch.numbers.shape[:-1], *batch.row_numbers.shape)
        return eqx.tree_at(lambda w: w.numbers, watch, jnp.broadcast_to(batch.row_numbers, shape))

    return nn.map_modules(number, model, LogitWatch)


def _with_row_numbers(batch: PyTree) -> PyTree:
    """Return the batch with the number of each row; raise a `ValueError` for anything but a `Batch`."""
    if not isinstance(batch, Batch):
        raise ValueError(
            f"make_step(clip_logits=...): the batch must store the numbers of its rows, and {name_class(batch)} "
            "has no field for them; give an eqformer.Batch."
        )
    return dataclasses.replace(batch, row_numbers=jnp.arange(batch.ids.shape[0], dtype=jnp.int32))


def _zeros_of_watches(tree: PyTree) -> list[PyTree]:
    return [watch.largest for watch in nn.modules(tree, LogitWatch)]


def clip_heads(parameters: PyTree, largest: Sequence[Float[Array, "*layers heads"]], limit: float) -> PyTree:
    """Return the parameters with smaller queries and keys in the heads whose largest logit is above the limit.

    A head's logits are multiplied by `limit / largest`. Heads that share a key head are clipped together, by the
    largest logit of any of these heads. In latent attention all heads share the rotary keys, which stay unchanged; the
    rotary queries are multiplied by the whole factor.
    """
    largest_by_mixer = dict(zip(map(id, _attentions(parameters)), largest, strict=True))

    def clip(mixer: Any) -> Any:
        logits = largest_by_mixer[id(mixer)]
        maps = _scaled_maps(mixer)
        key_heads = maps[1].output_shape[0]
        shared = logits.reshape(*logits.shape[:-1], key_heads, -1)
        factor = limit / jnp.maximum(jnp.max(shared, axis=-1), limit)
        of_queries = jnp.repeat(factor, shared.shape[-1], axis=-1)
        factors = of_queries**QUERY_SHARE, factor ** (1 - QUERY_SHARE), of_queries
        scaled = tuple(_scale_heads(part, by) for part, by in zip(maps, factors))
        return eqx.tree_at(_scaled_maps, mixer, scaled)

    return _map_attentions(clip, parameters)


def _scale_heads(part: Any, factors: Float[Array, "*layers heads"]) -> Any:
    """Return a linear map with the outputs of each head multiplied by its factor; heads are the first output dim."""

    def scale(x: Array) -> Array:
        by = factors.reshape(*factors.shape, *(1 for _ in x.shape[factors.ndim :]))
        return (nn.in_float32(x) * by).astype(x.dtype)

    return jax.tree.map(scale, part)
