"""Embedding and loss over a vocabulary that is split over devices: logits are never gathered."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ... import nn
from .. import _collectives as send
from .._mesh import TENSOR
from ._residual_stream import ResidualStream


def logits_parts(model: nn.LanguageModel) -> list[PyTree]:
    """Return the head and the logits' bias, as far as a model, or a tree like it, has them."""
    return [part for part in (model.head, model.parts.logit_bias) if part is not None]


class SplitEmbedding(nn.Module):
    """Lookup in the table of `inner`, of which this device holds some rows, padded at the end to divide `total`.

    Each device looks up the ids that it has; the sum over devices is the full lookup, replicated or scattered over
    tokens or features. `unembed` gives this device's part of the logits.
    """

    inner: nn.TokenEmbedding
    total: int = eqx.field(static=True)
    stream: ResidualStream = eqx.field(static=True)

    @property
    def weight(self) -> Float[Array, "vocab embed"]:
        """This device's rows of the table."""
        return self.inner.weight

    def __call__(self, ids: Int[Array, "*batch full_seq"]) -> Float[Array, "*batch seq embed"]:
        """Return this device's part of each token's vector."""
        count = self.weight.shape[0]
        local_ids = ids - jax.lax.axis_index(TENSOR) * count
        is_local = (local_ids >= 0) & (local_ids < count)
        vectors = nn.lookup_rows(self.weight, jnp.where(is_local, local_ids, 0))
        x = jnp.where(is_local[..., None], vectors, jnp.zeros_like(vectors))
        # An id outside of the table gives NaN, as in an unsplit table.
        x = jnp.where(((ids >= 0) & (ids < self.total))[..., None], x, jnp.full_like(x, jnp.nan))
        return self.inner.transform(self.stream.reduce("token embeddings", x))

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return this device's logits."""
        return nn.unembed(x, self.weight)


class FeatureEmbedding(nn.Module):
    """An embedding of all ids and a slice of the features; logits use `rows`, a slice of ids with all features."""

    inner: nn.TokenEmbedding
    rows: Float[Array, "vocab embed"]

    @property
    def weight(self) -> Float[Array, "vocab embed"]:
        """The rows that logits use."""
        return self.rows

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Return this device's features of each token's vector."""
        return self.inner(ids)

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return this device's logits."""
        return nn.unembed(x, self.rows)


class HeadInput(nn.Module):
    """The final norm and a gather, since the split vocabulary needs every token's full vector on every device."""

    inner: Callable[[Array], Array]
    stream: ResidualStream = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalize, then gather the stream; the backward pass reduces the gradient."""
        return self.stream.gather("head input", self.inner(x))


class SourceOutput(nn.Module):
    """An encoder's final norm and a gather of every token's full vector, for cross-attention."""

    inner: Callable[[Array], Array]
    stream: ResidualStream = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalize, then gather the stream; the backward pass reduces the gradient of all heads."""
        return self.stream.gather("column-parallel input", self.inner(x))


def take_local_rows(table: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
    """Return this device's slice, along `dim`, of a replicated table; the last slice is padded with zeros."""
    padded = _pad_to_devices(table, dim)
    size = padded.shape[dim] // jax.lax.axis_size(TENSOR)
    return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(TENSOR) * size, size, dim)


def features_to_rows(table: Shaped[Array, "..."], rows: int, features: int) -> Shaped[Array, "..."]:
    """Convert all rows of a slice of the features to a slice of the rows with all features, by an all-to-all.

    `rows` and `features` are the two dims of the table.
    """
    return send.all_to_all("vocabulary table by ids", _pad_to_devices(table, rows), TENSOR, rows, features)


def _pad_to_devices(table: Array, dim: int) -> Array:
    """Pad a dim with zeros to a multiple of the number of devices."""
    count = jax.lax.axis_size(TENSOR)
    widths = [(0, 0)] * table.ndim
    widths[dim] = (0, -table.shape[dim] % count)
    return jnp.pad(table, widths)


class SplitVocabulary(eqx.Module):
    """The loss's view of logits that are split over devices, of a vocabulary of `total` ids."""

    total: int = eqx.field(static=True)

    def nats(
        self, logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]
    ) -> tuple[Float[Array, "tokens"], Float[Array, "tokens"]]:
        """Return `logsumexp(logits) - logits[target]` per token, and the logsumexp; NaN for a target that is no id."""
        ids, logits = self._ids(logits), self._without_padding(logits)
        peak = self._peak(logits)
        total = send.psum("softmax denominators", jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1), TENSOR)
        log_normaliser = jnp.log(total) + peak
        of_target = jnp.where(ids == targets[:, None], logits, jnp.zeros_like(logits))
        nats = log_normaliser - send.psum("target logits", jnp.sum(of_target, axis=-1), TENSOR)
        return jnp.where((targets >= 0) & (targets < self.total), nats, jnp.nan), log_normaliser

    def is_first(self, logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]) -> Bool[Array, "tokens"]:
        """Return whether the target is the first of the ids with the highest logit."""
        ids, logits = self._ids(logits), self._without_padding(logits)
        peak = jnp.max(logits, axis=-1)
        first = jnp.take_along_axis(ids, jnp.argmax(logits, axis=-1, keepdims=True), axis=1)[:, 0]
        is_peak = peak == send.pmax("argmax logits", peak, TENSOR)
        return send.pmin("argmax ids", jnp.where(is_peak, first, self.total), TENSOR) == targets

    def log_probabilities(self, logits: Float[Array, "tokens vocab"]) -> Float[Array, "tokens vocab"]:
        """Return the logarithm of the probability of each of this device's ids; a very negative number for padding."""
        logits = self._without_padding(logits)
        peak = self._peak(logits)[:, None]
        return logits - peak - jnp.log(self.sum_ids(jnp.exp(logits - peak)))[:, None]

    def sum_ids(self, values: Float[Array, "tokens vocab"]) -> Float[Array, "tokens"]:
        """Return the sum over all ids of a number for each token and id."""
        return send.psum("softmax denominators", jnp.sum(values, axis=-1), TENSOR)

    def take_ids(
        self, values: Float[Array, "tokens vocab"], ids: Int[Array, "tokens ids"]
    ) -> Float[Array, "tokens ids"]:
        """Return the numbers of some ids of each token."""
        local_ids = ids - self._ids(values)[:, :1]
        is_local = (local_ids >= 0) & (local_ids < values.shape[1])
        picked = jnp.take_along_axis(values, jnp.where(is_local, local_ids, 0), axis=-1)
        return send.psum("target logits", jnp.where(is_local, picked, jnp.zeros_like(picked)), TENSOR)

    def drop_ids(
        self, values: Float[Array, "tokens vocab"], ids: Int[Array, "tokens ids"]
    ) -> Float[Array, "tokens vocab"]:
        """Return this device's numbers with a very negative one for some ids of each token."""
        local_ids = ids - self._ids(values)[:, :1]
        outside = jnp.where(local_ids < 0, values.shape[1], local_ids)  # Negative indices would count from the end.
        return values.at[jnp.arange(len(ids))[:, None], outside].set(jnp.finfo(values.dtype).min / 4, mode="drop")

    def top_ids(self, values: Float[Array, "tokens vocab"], count: int) -> Int[Array, "tokens ids"]:
        """Return the ids with the largest numbers of each token, in order."""
        largest, indices = jax.lax.top_k(values, min(count, values.shape[1]))
        local_ids = jnp.take_along_axis(self._ids(values), indices, axis=-1)
        largest, ids = (send.all_gather("target logits", x, TENSOR, -1) for x in (largest, local_ids))
        _, order = jax.lax.top_k(largest, count)
        return send.pmax("replicated values", jnp.take_along_axis(ids, order, axis=-1), TENSOR)

    def _peak(self, logits: Float[Array, "tokens vocab"]) -> Float[Array, "tokens"]:
        """Return each token's largest logit on all devices, without a gradient."""
        return send.pmax("logit maxima", jax.lax.stop_gradient(jnp.max(logits, axis=-1)), TENSOR)

    def _ids(self, logits: Float[Array, "tokens vocab"]) -> Int[Array, "tokens vocab"]:
        local_ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        return local_ids + jax.lax.axis_index(TENSOR) * logits.shape[1]

    def _without_padding(self, logits: Float[Array, "tokens vocab"]) -> Float[Array, "tokens vocab"]:
        if logits.shape[1] * jax.lax.axis_size(TENSOR) == self.total:
            return logits
        return jnp.where(self._ids(logits) < self.total, logits, jnp.finfo(logits.dtype).min / 4)
