"""Losses of whole rows: what a row's tokens cost together decides what each of them counts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from ..._array_checks import checked
from ..._shapes import Batch
from ...nn import Tokens
from ...parallel import sum_rows, vary_like
from ._cross_entropy import cross_entropy, nats_of_tokens, token_nats, Vocabulary, weighed
from ._loss_aux import add_aux_losses, LossFn
from ._token_losses import batch_tokens


OfRows = Callable[[Float[Array, "batch"], Any], tuple[Any, Any]]  # (each row's nats, batch) -> (sum, count)


@checked
def row_nats(
    model: PyTree,
    batch: Batch,
    *,
    chunk: int | None = None,
    tokens: Tokens | None = None,
    vocabulary: Vocabulary | None = None,
) -> Float[Array, "batch"]:
    """For each row `-sum_i w_i log p_i[target_i]`, without dropout; no gradients go through it.

    `chunk`, `tokens` and `vocabulary` are those of `next_token_loss`.
    """
    tokens = batch_tokens(batch) if tokens is None else tokens
    hidden, _, _ = model.encode(jnp.asarray(batch.ids), tokens)
    return _row_nats(model, hidden, batch, chunk, vocabulary)[0]


def row_loss(function: OfRows) -> LossFn:
    """A loss, called as `next_token_loss` is, from a function of the nats of whole rows.

    `function(nats, batch)` takes for each row `-sum_i w_i log p_i[target_i]`, over all its tokens wherever these are,
    and the rows' batch, and gives a sum over rows and a count. It is differentiated with respect to the nats. Where it
    compares rows, `batch.group` says how many are never parted.

    The logits of all tokens never exist at once, as in `cross_entropy`: a first pass over chunks gives the nats, and a
    second the gradients, with each token's weight times the slope of the sum at its row's nats. Together they take as
    many products with the table as one pass that is recomputed would.
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
    ) -> tuple[Float[Array, ""], Any]:
        tokens = batch_tokens(batch, key) if tokens is None else tokens
        hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
        nats, devices = _row_nats(model, hidden, batch, chunk, vocabulary)

        def of_rows(nats: Array) -> tuple[Array, Array]:
            total, count = function(nats, batch)
            return vary_like(jnp.asarray(total, nats.dtype), nats), jnp.asarray(count, nats.dtype)

        (value, count), slopes = jax.value_and_grad(of_rows, has_aux=True)(nats)
        weights = jnp.asarray(batch.weights)
        weights = weights.astype(slopes.dtype) * slopes[:, None]
        of_tokens = token_nats if vocabulary is None else vocabulary.nats
        total, _ = cross_entropy(
            model.unembed, hidden, jnp.asarray(batch.targets), weights, chunk=chunk, nats=of_tokens
        )
        # The gradient is that of the tokens here; of the value, each device that has a part of the row has its share.
        total = total + jax.lax.stop_gradient(value.astype(total.dtype) / devices - total)
        return add_aux_losses(total, count / devices, aux)

    return loss_fn


def _row_nats(
    model: PyTree, hidden: Array, batch: Batch, chunk: int | None, vocabulary: Vocabulary | None
) -> tuple[Float[Array, "batch"], int]:
    """Each row's nats, and over how many devices it is cut."""
    targets, weights = jnp.asarray(batch.targets), jnp.asarray(batch.weights)
    of_tokens = token_nats if vocabulary is None else vocabulary.nats
    each = nats_of_tokens(model.unembed, jax.lax.stop_gradient(hidden), targets, chunk=chunk, nats=of_tokens)
    return sum_rows(jax.lax.stop_gradient(weighed(each, weights)))
