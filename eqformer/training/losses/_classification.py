"""The loss of classifiers of texts: one label of each text, several labels, or a number."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from ... import nn
from ..._array_checks import checked
from ..._shapes import Batch, LabelBatch
from ...nn import Tokens
from ...parallel import replicate_rows, sum_rows
from ._contrastive import pool_rows, SUMMED_POOLINGS
from ._loss_aux import add_aux_losses, CountOrAux, LossAux
from ._token_losses import batch_tokens
from ._vocabulary import token_nats, Vocabulary


@checked
def classification_loss(
    model: PyTree,
    batch: Batch,
    key: Key[Array, ""] | None = None,
    *,
    tokens: Tokens | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[Float[Array, ""], CountOrAux]:
    """Return the sum over a `LabelBatch` of each text's loss, and the number of texts.

    The model is a `nn.Transformer` with a classifier of texts, as `models.build(config, classifier=...)` builds it. As
    in transformers, the loss of a text with one label, a whole number, is the nats of the label; with a number for each
    of several labels it is the mean over the labels of the nats of a yes or no; and for a model with one output it is
    the squared difference from the number. The metric `accuracy` is the share of texts, or of decisions, that are
    right; numbers have none. Texts without any weight, with which an epoch fills its last batch up, do not count.

    Loss and gradients are the same in any number of microbatches and on any mesh, except that a residual stream split
    by features refuses classifiers.
    """
    head = getattr(model, "classifier", None)
    if head is None or head.pooling is None or len(head.pooling.modes) > 1 or head.pooling.modes[0] == "max":
        raise ValueError(
            "classification_loss(model): the model must have a classifier of texts whose pooling is one of "
            f"{', '.join(SUMMED_POOLINGS)}; build it by models.build(config, classifier=models.Classifier(labels))."
        )
    if not isinstance(batch, LabelBatch) or batch.labels is None:
        raise ValueError("classification_loss(model, batch): the batch has no labels; use data.batch_labelled_texts.")
    tokens = batch_tokens(batch, key) if tokens is None else tokens
    hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
    vectors, devices = pool_rows(head.pooling.modes[0], hidden, tokens)
    logits = replicate_rows(nn.in_float32(head.score(vectors)))
    losses, is_right = _label_losses(logits, jnp.asarray(batch.labels))
    # A row's weights may be split over devices, which all count its text or none.
    row_weights, _ = sum_rows(jnp.asarray(batch.weights).astype(losses.dtype))
    counts = (row_weights > 0).astype(losses.dtype)
    # All devices that share a row have computed its loss.
    count = jnp.sum(counts) / devices
    metrics = {} if is_right is None else {"accuracy": (jnp.sum(is_right * counts) / devices, count)}
    return add_aux_losses(jnp.sum(losses * counts) / devices, LossAux(count, None, metrics), aux)


def _label_losses(
    logits: Float[Array, "batch labels"], labels: Array
) -> tuple[Float[Array, "batch"], Float[Array, "batch"] | None]:
    """Return the loss of each text, and the share of its decisions that are right; None for numbers."""
    outputs = logits.shape[1]
    if jnp.issubdtype(labels.dtype, jnp.integer) and labels.ndim == 1 and outputs > 1:
        return token_nats(logits, labels)[0], (jnp.argmax(logits, axis=1).astype(labels.dtype) == labels).astype(
            logits.dtype
        )
    values = labels.astype(logits.dtype)
    if outputs == 1 and labels.ndim == 1:
        return jnp.square(logits[:, 0] - values), None
    if labels.shape != logits.shape:
        raise ValueError(
            f"classification_loss: a model with {outputs} outputs takes a whole number from 0 to {outputs - 1} for "
            f"each text, or {outputs} numbers, but the labels are {labels.dtype} of shape {labels.shape}."
        )
    # log(1 + exp(x)) - x y, the nats of a yes or no.
    losses = jnp.mean(jax.nn.softplus(logits) - logits * values, axis=1)
    return losses, jnp.mean(((logits > 0) == (values > 0.5)).astype(logits.dtype), axis=1)
