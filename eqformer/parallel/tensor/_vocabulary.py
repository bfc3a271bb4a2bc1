"""Embedding and loss over a vocabulary of which each device holds a part: no logits are ever gathered."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ... import nn
from .. import _collectives as send
from .._axes import TENSOR
from ._residual_stream import ResidualStream


class SplitEmbedding(nn.Module):
    """Lookup in a table of which this device holds `rows`, padded at the end where the axis does not divide `total`.

    Each device looks up the ids that it has; the sum over devices is the whole lookup, kept whole or scattered over
    tokens or features. `unembed` gives this device's part of the logits.
    """

    weight: Float[Array, "vocab embed"]
    scale: float | None = eqx.field(static=True)
    total: int = eqx.field(static=True)
    stream: ResidualStream = eqx.field(static=True)

    def __call__(self, ids: Int[Array, "*batch full_seq"]) -> Float[Array, "*batch seq embed"]:
        """What this device holds of each token's vector."""
        count = self.weight.shape[0]
        own = ids - jax.lax.axis_index(TENSOR) * count
        is_here = (own >= 0) & (own < count)
        found = nn.lookup_rows(self.weight, jnp.where(is_here, own, 0))
        x = jnp.where(is_here[..., None], found, jnp.zeros_like(found))
        # As in the whole table, an id outside it gives NaN.
        x = jnp.where(((ids >= 0) & (ids < self.total))[..., None], x, jnp.full_like(x, jnp.nan))
        x = self.stream.summed("looked-up vectors", x)
        return x if self.scale is None else x * jnp.asarray(self.scale, x.dtype)

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """This device's logits."""
        return nn.unembed(x, self.weight)


class FeatureEmbedding(nn.Module):
    """An embedding of which this device holds all ids and a slice of the features; logits by `rows`, a slice of ids."""

    inner: nn.Embedding
    rows: Float[Array, "vocab embed"]

    @property
    def weight(self) -> Float[Array, "vocab embed"]:
        """The rows that give logits."""
        return self.rows

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """This device's features of each token's vector."""
        return self.inner(ids)

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """This device's logits."""
        return nn.unembed(x, self.rows)


class HeadInput(nn.Module):
    """The final norm, and then what the split vocabulary needs: every token's whole vector on every device."""

    inner: Callable[[Array], Array]
    stream: ResidualStream = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalise, then gather what is split; the gradient is reduced on the way back."""
        return self.stream.whole("stream for the head", self.inner(x))


class SourceOutput(nn.Module):
    """An encoder's final norm, and then every token's whole vector on every device, for cross-attention."""

    inner: Callable[[Array], Array]
    stream: ResidualStream = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalise, then gather what is split; the gradient of all heads is reduced on the way back."""
        return self.stream.whole("maps from the stream", self.inner(x))


def own_rows(table: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
    """This device's part, along `dim`, of a table that every device holds whole, the last one filled up with zeros."""
    padded = _filled(table, dim)
    size = padded.shape[dim] // jax.lax.axis_size(TENSOR)
    return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(TENSOR) * size, size, dim)


def rows_of_features(table: Shaped[Array, "..."], rows: int, features: int) -> Shaped[Array, "..."]:
    """From all rows of a slice of the features to a slice of the rows with all features, by an all-to-all."""
    return send.all_to_all("table from features to ids", _filled(table, rows), TENSOR, rows, features)


def _filled(table: Array, dim: int) -> Array:
    count = jax.lax.axis_size(TENSOR)
    widths = [(0, 0)] * table.ndim
    widths[dim] = (0, -table.shape[dim] % count)
    return jnp.pad(table, widths)


class SplitVocabulary(eqx.Module):
    """The loss's view of logits of which each device holds a part of `total`."""

    total: int = eqx.field(static=True)

    def nats(
        self, logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]
    ) -> tuple[Float[Array, "tokens"], Float[Array, "tokens"]]:
        """Per token `logsumexp(logits) - logits[target]`, NaN where that is no id, and the logsumexp, of all ids."""
        ids, logits = self._ids(logits), self._without_padding(logits)
        peak = send.pmax("highest logits", jax.lax.stop_gradient(jnp.max(logits, axis=-1)), TENSOR)
        total = send.psum("normalisers", jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1), TENSOR)
        log_normaliser = jnp.log(total) + peak
        of_target = jnp.where(ids == targets[:, None], logits, jnp.zeros_like(logits))
        nats = log_normaliser - send.psum("logits of targets", jnp.sum(of_target, axis=-1), TENSOR)
        return jnp.where((targets >= 0) & (targets < self.total), nats, jnp.nan), log_normaliser

    def is_first(self, logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]) -> Bool[Array, "tokens"]:
        """Whether the target is the first of the ids with the highest logit."""
        ids, logits = self._ids(logits), self._without_padding(logits)
        peak = jnp.max(logits, axis=-1)
        first = jnp.take_along_axis(ids, jnp.argmax(logits, axis=-1, keepdims=True), axis=1)[:, 0]
        is_peak = peak == send.pmax("highest logits of all ids", peak, TENSOR)
        return send.pmin("first of the highest", jnp.where(is_peak, first, self.total), TENSOR) == targets

    def _ids(self, logits: Float[Array, "tokens vocab"]) -> Int[Array, "tokens vocab"]:
        own = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        return own + jax.lax.axis_index(TENSOR) * logits.shape[1]

    def _without_padding(self, logits: Float[Array, "tokens vocab"]) -> Float[Array, "tokens vocab"]:
        if logits.shape[1] * jax.lax.axis_size(TENSOR) == self.total:
            return logits
        return jnp.where(self._ids(logits) < self.total, logits, jnp.finfo(logits.dtype).min / 4)
