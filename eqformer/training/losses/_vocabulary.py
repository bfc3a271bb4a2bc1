"""Functions of logits for losses (nats, log-probabilities, sums, top ids), of the whole vocabulary or of a part."""

from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..._annotation_checks import checked


@runtime_checkable
class Vocabulary(Protocol):
    """Functions of logits (`tokens vocab`) for losses; on a mesh, each device may have the logits of some ids only."""

    def nats(self, logits: Array, targets: Array) -> tuple[Array, Array]:
        """Return each token's nats and log-normalizer, as `token_nats` does."""
        ...

    def is_first(self, logits: Array, targets: Array) -> Array:
        """Return for each token whether its target has the largest logit."""
        ...

    def log_probabilities(self, logits: Array) -> Array:
        """Return the log-softmax, `tokens vocab`; a very negative number for ids that only pad the logits."""
        ...

    def sum_ids(self, values: Array) -> Array:
        """Return the sums of `values` (`tokens vocab`) over all ids, one for each token."""
        ...

    def take_ids(self, values: Array, ids: Array) -> Array:
        """Return, for each token, `values` (`tokens vocab`) at the given `ids` (`tokens ids`)."""
        ...

    def drop_ids(self, values: Array, ids: Array) -> Array:
        """Return `values` (`tokens vocab`), set to a very negative number at the given `ids` (`tokens ids`)."""
        ...

    def top_ids(self, values: Array, count: int) -> Array:
        """Return, for each token, the `count` ids with the largest `values` (`tokens vocab`), in descending order."""
        ...


class WholeVocabulary(eqx.Module):
    """The `Vocabulary` of a device that has the logits of all ids."""

    def nats(self, logits: Array, targets: Array) -> tuple[Array, Array]:
        """Return each token's nats and log-normalizer, by `token_nats`."""
        return token_nats(logits, targets)

    def is_first(self, logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]) -> Bool[Array, "tokens"]:
        """Return whether the target has the largest logit; if several ids share this logit, only the first id does."""
        return jnp.argmax(logits, axis=-1).astype(targets.dtype) == targets

    def log_probabilities(self, logits: Float[Array, "tokens vocab"]) -> Float[Array, "tokens vocab"]:
        """Return the log-softmax."""
        return jax.nn.log_softmax(logits)

    def sum_ids(self, values: Float[Array, "tokens vocab"]) -> Float[Array, "tokens"]:
        """Return the sum over ids."""
        return jnp.sum(values, axis=-1)

    def take_ids(
        self, values: Float[Array, "tokens vocab"], ids: Int[Array, "tokens ids"]
    ) -> Float[Array, "tokens ids"]:
        """Return, for each token, `values` at the given ids."""
        return jnp.take_along_axis(values, ids, axis=-1)

    def drop_ids(
        self, values: Float[Array, "tokens vocab"], ids: Int[Array, "tokens ids"]
    ) -> Float[Array, "tokens vocab"]:
        """Return `values` with a very negative number at the given ids of each token."""
        return values.at[jnp.arange(len(ids))[:, None], ids].set(jnp.finfo(values.dtype).min / 4)

    def top_ids(self, values: Float[Array, "tokens vocab"], count: int) -> Int[Array, "tokens ids"]:
        """Return, for each token, the `count` ids with the largest values, in descending order of the values."""
        return jax.lax.top_k(values, count)[1]


@checked
def token_nats(
    logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]
) -> tuple[Float[Array, "tokens"], Float[Array, "tokens"]]:
    """Return `logsumexp(logits) - logits[target]` of each token in nats, and the logsumexp itself.

    A target that is no id gives NaN, just as the embedding of such an id does; a weight of 0 leaves the token out of
    the loss. The logits are of the whole vocabulary; under a plan that splits the vocabulary, losses use another
    `Vocabulary.nats`.
    """
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    log_normalizer = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1)) + peak[:, 0]
    # A comparison is used instead of a gather, because the gradient of a gather is a scatter, which does not fuse with
    # the gradient of the softmax.
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1) == targets[:, None]
    target_logit = jnp.sum(jnp.where(is_target, logits, jnp.zeros_like(logits)), axis=-1)
    is_id = (targets >= 0) & (targets < logits.shape[1])
    return jnp.where(is_id, log_normalizer - target_logit, jnp.nan), log_normalizer
