"""Embedding and loss with a vocabulary that is split over the axis `tensor`, without a gather of the logits."""

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
    """Return the head and the logit bias of a model, or of a tree with its structure; leave out a part that is None."""
    return [part for part in (model.head, model.parts.logit_bias) if part is not None]


class SplitEmbedding(nn.Module):
    """Token embedding with a table whose rows are split over devices.

    `inner` holds this device's rows of a table for `total` ids. All devices hold equally many rows; if the number of
    devices does not divide `total`, the last rows are padding. Each device looks up the ids of its rows, with zeros for
    other ids. The sum over devices is the full lookup, in the form of the stream: replicated, or scattered over tokens
    or features.
    """

    inner: nn.TokenEmbedding
    total: int = eqx.field(static=True)
    stream: ResidualStream = eqx.field(static=True)

    @property
    def weight(self) -> Float[Array, "vocab embed"]:
        """This device's rows of the table."""
        return self.inner.weight

    def __call__(self, ids: Int[Array, "*batch full_seq"]) -> Float[Array, "*batch seq embed"]:
        """Return the tokens' vectors, or this device's part of them if the stream is split."""
        x = lookup_local_rows(self.weight, ids, TENSOR)
        # The vector of an id outside of the full table is NaN, as in `nn.lookup_rows`.
        x = jnp.where(((ids >= 0) & (ids < self.total))[..., None], x, jnp.full_like(x, jnp.nan))
        return self.inner.transform(self.stream.reduce("token embeddings", x))

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return the logits of this device's ids."""
        return nn.unembed(x, self.weight)


def lookup_local_rows(rows: Float[Array, "rows *row"], ids: Int[Array, "*batch seq"], axis: str) -> Float[Array, "..."]:
    """Return the vector of each id whose row this device holds, and zeros for other ids.

    `rows` are this device's rows of a table that is split over a mesh axis, equally many on each device.
    """
    count = len(rows)
    local_ids = ids - jax.lax.axis_index(axis) * count
    is_local = (local_ids >= 0) & (local_ids < count)
    vectors = nn.lookup_rows(rows, jnp.where(is_local, local_ids, 0))
    is_local = jax.lax.expand_dims(is_local, range(is_local.ndim, vectors.ndim))
    return jnp.where(is_local, vectors, jnp.zeros_like(vectors))


class FeatureEmbedding(nn.Module):
    """Token embedding that looks up a slice of the features, and computes the logits of a slice of the ids.

    `inner` has all ids with this device's features. `rows` has this device's ids with all features.
    """

    inner: nn.TokenEmbedding
    rows: Float[Array, "vocab embed"]

    @property
    def weight(self) -> Float[Array, "vocab embed"]:
        """This device's rows of the table, from which the device computes logits."""
        return self.rows

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Return this device's features of each token's vector."""
        return self.inner(ids)

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return the logits of this device's ids."""
        return nn.unembed(x, self.rows)


class HeadInput(nn.Module):
    """Final norm followed by a gather: each device computes logits of its ids from every token's full vector."""

    inner: Callable[[Array], Array]
    stream: ResidualStream = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalize the stream, then gather it; the backward pass reduces the gradient over devices."""
        return self.stream.gather("head input", self.inner(x))


class EncoderOutput(nn.Module):
    """Final norm of an encoder followed by a gather: each device's cross-attention heads read full vectors."""

    inner: Callable[[Array], Array]
    stream: ResidualStream = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalize the stream, then gather it; the backward pass reduces the gradient over devices."""
        return self.stream.gather("column-parallel input", self.inner(x))


def take_local_rows(table: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
    """Return this device's slice, along `dim`, of a replicated table; the end of the dim is padded with zeros."""
    padded = _pad_to_devices(table, dim)
    size = padded.shape[dim] // jax.lax.axis_size(TENSOR)
    return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(TENSOR) * size, size, dim)


def features_to_rows(table: Shaped[Array, "..."], row_dim: int, feature_dim: int) -> Shaped[Array, "..."]:
    """Reshard a table by an all-to-all: from all rows of some features to some rows with all features.

    The rows are padded with zeros at the end to a multiple of the number of devices.
    """
    return send.all_to_all("vocabulary table by ids", _pad_to_devices(table, row_dim), TENSOR, row_dim, feature_dim)


def _pad_to_devices(table: Array, dim: int) -> Array:
    """Pad the end of a dim with zeros to a multiple of the number of devices."""
    widths = [(0, 0)] * table.ndim
    widths[dim] = (0, -table.shape[dim] % jax.lax.axis_size(TENSOR))
    return jnp.pad(table, widths)


class SplitVocabulary(eqx.Module):
    """Functions of logits for losses, such as the cross-entropy, if each device has the logits of a slice of the ids.

    The vocabulary has `total` ids. The logits after the last id are padding. A result with a value per token is
    replicated. A result with a value per token and id is split like the logits.
    """

    total: int = eqx.field(static=True)

    def nats(
        self, logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]
    ) -> tuple[Float[Array, "tokens"], Float[Array, "tokens"]]:
        """Return for each token `logsumexp(logits) - logits[target]`, in nats, and the logsumexp.

        The first result is NaN for a target outside of the vocabulary.
        """
        ids, logits = self._ids(logits), self._without_padding(logits)
        peak = self._peak(logits)
        total = send.psum("softmax denominators", jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1), TENSOR)
        log_normalizer = jnp.log(total) + peak
        target_logits = jnp.where(ids == targets[:, None], logits, jnp.zeros_like(logits))
        nats = log_normalizer - send.psum("target logits", jnp.sum(target_logits, axis=-1), TENSOR)
        return jnp.where((targets >= 0) & (targets < self.total), nats, jnp.nan), log_normalizer

    def is_first(self, logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]) -> Bool[Array, "tokens"]:
        """Return whether each target is the argmax: the smallest of the ids with the largest logit."""
        ids, logits = self._ids(logits), self._without_padding(logits)
        local_peak = jnp.max(logits, axis=-1)
        local_argmax = jnp.take_along_axis(ids, jnp.argmax(logits, axis=-1, keepdims=True), axis=1)[:, 0]
        has_peak = local_peak == send.pmax("argmax logits", local_peak, TENSOR)
        return send.pmin("argmax ids", jnp.where(has_peak, local_argmax, self.total), TENSOR) == targets

    def log_probabilities(self, logits: Float[Array, "tokens vocab"]) -> Float[Array, "tokens vocab"]:
        """Return the log-probabilities of this device's ids; a very negative number for padding."""
        logits = self._without_padding(logits)
        peak = self._peak(logits)[:, None]
        return logits - peak - jnp.log(self.sum_ids(jnp.exp(logits - peak)))[:, None]

    def sum_ids(self, values: Float[Array, "tokens vocab"]) -> Float[Array, "tokens"]:
        """Return, for each token, the sum of `values` over all ids."""
        return send.psum("softmax denominators", jnp.sum(values, axis=-1), TENSOR)

    def take_ids(
        self, values: Float[Array, "tokens vocab"], ids: Int[Array, "tokens ids"]
    ) -> Float[Array, "tokens ids"]:
        """Return, for each token, `values` at the given ids."""
        local_ids = ids - self._ids(values)[:, :1]
        is_local = (local_ids >= 0) & (local_ids < values.shape[1])
        picked = jnp.take_along_axis(values, jnp.where(is_local, local_ids, 0), axis=-1)
        return send.psum("target logits", jnp.where(is_local, picked, jnp.zeros_like(picked)), TENSOR)

    def drop_ids(
        self, values: Float[Array, "tokens vocab"], ids: Int[Array, "tokens ids"]
    ) -> Float[Array, "tokens vocab"]:
        """Return `values` with a very negative number at the given ids of each token."""
        local_ids = ids - self._ids(values)[:, :1]
        # `mode="drop"` ignores indices behind the end. A negative index would count from the end, so replace it by an
        # index behind the end.
        indices = jnp.where(local_ids < 0, values.shape[1], local_ids)
        return values.at[jnp.arange(len(ids))[:, None], indices].set(jnp.finfo(values.dtype).min / 4, mode="drop")

    def top_ids(self, values: Float[Array, "tokens vocab"], count: int) -> Int[Array, "tokens ids"]:
        """Return, for each token, the `count` ids with the largest values, in descending order of the values."""
        largest, indices = jax.lax.top_k(values, min(count, values.shape[1]))
        local_ids = jnp.take_along_axis(self._ids(values), indices, axis=-1)
        largest, ids = (send.all_gather("target logits", x, TENSOR, -1) for x in (largest, local_ids))
        _, order = jax.lax.top_k(largest, count)
        # All devices have the same ids. The maximum marks them as replicated.
        return send.pmax("replicated values", jnp.take_along_axis(ids, order, axis=-1), TENSOR)

    def _peak(self, logits: Float[Array, "tokens vocab"]) -> Float[Array, "tokens"]:
        """Return each token's largest logit over all devices, without a gradient."""
        return send.pmax("logit maxima", jax.lax.stop_gradient(jnp.max(logits, axis=-1)), TENSOR)

    def _ids(self, logits: Float[Array, "tokens vocab"]) -> Int[Array, "tokens vocab"]:
        """Return the id of each of this device's logits."""
        local_ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        return local_ids + jax.lax.axis_index(TENSOR) * logits.shape[1]

    def _without_padding(self, logits: Float[Array, "tokens vocab"]) -> Float[Array, "tokens vocab"]:
        """Return the logits with a very negative number in place of padding."""
        if logits.shape[1] * jax.lax.axis_size(TENSOR) == self.total:
            return logits
        return jnp.where(self._ids(logits) < self.total, logits, jnp.finfo(logits.dtype).min / 4)
