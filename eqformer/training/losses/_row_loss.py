"""Losses of whole rows: the nats of all tokens of a row together determine the weight of each token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from ..._array_checks import checked
from ..._shapes import Batch
from ...nn import Tokens
from ...parallel import sum_rows, vary_like
from ._cross_entropy import apply_weights, chunked_token_nats, cross_entropy, token_nats, Vocabulary
from ._loss_aux import add_aux_losses, Count, LossFn
from ._token_losses import batch_tokens


RowFunction = Callable[[Float[Array, "batch"], Batch], tuple[Array | float, Array | float]]
"""(each row's nats, batch) -> (sum, count)"""


@checked
def row_nats(
    model: PyTree,
    batch: Batch,
    *,
    chunk: int | None = None,
    tokens: Tokens | None = None,
    vocabulary: Vocabulary | None = None,
) -> Float[Array, "batch"]:
    """Return `-sum_i w_i log p_i[target_i]` of each row, without dropout; no gradients go through the result.

    `chunk`, `tokens` and `vocabulary` are those of `next_token_loss`.
    """
    tokens = batch_tokens(batch) if tokens is None else tokens
    hidden, _, _ = model.encode(jnp.asarray(batch.ids), tokens)
    return _sum_row_nats(model, hidden, batch, chunk, vocabulary)[0]


def row_loss(function: RowFunction) -> LossFn:
    """Return a loss, called like `next_token_loss`, from a function of the nats of whole rows.

    `function(nats, batch)` takes `-sum_i w_i log p_i[target_i]` of each row, over all tokens of the row even if a mesh
    splits it, and the rows' batch; it returns a sum over rows and a count. It is differentiated with respect to the
    nats. If it compares rows, `batch.group` is the number of rows that are never separated.

    The logits of all tokens never exist at once, as in `cross_entropy`: a first pass over chunks computes the nats, and
    a second pass the gradients, with each token's weight times the slope of the sum at its row's nats. Both together
    take as many matrix products with the table as one pass that is recomputed.
    """

    @checked
    def loss_fn(
        model: PyTree,
        batch: Batch,
        key: Key[Array, ""] | None = None,
        *,
        chunk: int | None = None,
        tokens: Tokens | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> tuple[Float[Array, ""], Count]:
        tokens = batch_tokens(batch, key) if tokens is None else tokens
        hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
        nats, devices = _sum_row_nats(model, hidden, batch, chunk, vocabulary)

        def apply_function(nats: Array) -> tuple[Array, Array]:
            total, count = function(nats, batch)
            return vary_like(jnp.asarray(total, nats.dtype), nats), jnp.asarray(count, nats.dtype)

        (value, count), slopes = jax.value_and_grad(apply_function, has_aux=True)(nats)
        weights = jnp.asarray(batch.weights)
        weights = weights.astype(slopes.dtype) * slopes[:, None]
        nats_fn = token_nats if vocabulary is None else vocabulary.nats
        total, _ = cross_entropy(model.unembed, hidden, jnp.asarray(batch.targets), weights, chunk=chunk, nats=nats_fn)
        # The gradient is that of this device's tokens; the value is divided among the devices that share a row.
        total = total + jax.lax.stop_gradient(value.astype(total.dtype) / devices - total)
        return add_aux_losses(total, count / devices, aux)

    return loss_fn


def _sum_row_nats(
    model: PyTree, hidden: Array, batch: Batch, chunk: int | None, vocabulary: Vocabulary | None
) -> tuple[Float[Array, "batch"], int]:
    """Return each row's nats, and the number of devices over which a row is split."""
    targets, weights = jnp.asarray(batch.targets), jnp.asarray(batch.weights)
    nats_fn = token_nats if vocabulary is None else vocabulary.nats
    nats = chunked_token_nats(model.unembed, jax.lax.stop_gradient(hidden), targets, chunk=chunk, nats=nats_fn)
    return sum_rows(jax.lax.stop_gradient(apply_weights(nats, weights)))
