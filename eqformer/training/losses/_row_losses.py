"""Losses of whole rows: classification of texts, and contrastive losses of embeddings.

A classified text has one label, several labels, or a number. A contrastive loss trains a model to find the text that
belongs to an anchor among other texts.
"""

import functools
from collections.abc import Sequence
from typing import get_args, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PyTree

from ... import nn
from ..._annotation_checks import checked
from ..._shapes import Batch, LabelBatch
from ...nn import Tokens
from ...parallel import gather_rows, replicate_rows, sum_row_vectors, sum_rows
from ._loss_aux import add_aux_losses, CountOrAux, LossAux, LossFn
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
    in transformers, the labels determine the loss of a text:

    - A whole number, the text's only label: the nats of this label.
    - A number for each of several labels: the mean over labels of the nats of each yes-or-no decision.
    - A number, for a model with one output: the squared difference of output and number.

    The metric `accuracy` is the share of texts, or of yes-or-no decisions, that are right; a model with one output has
    no accuracy. Texts whose weights are all 0 do not count; they fill the last batch of an epoch.

    Loss and gradients are the same in any number of microbatches and on any mesh. A plan that splits the residual
    stream by features supports no classifiers.
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
    counts = _count_rows(batch, losses.dtype)
    # All devices that share a row computed the same loss of the row; divide, so that the row counts once.
    count = jnp.sum(counts) / devices
    metrics = {} if is_right is None else {"accuracy": (jnp.sum(is_right * counts) / devices, count)}
    return add_aux_losses(jnp.sum(losses * counts) / devices, LossAux(count, None, metrics), aux)


def _label_losses(
    logits: Float[Array, "batch labels"], labels: Array
) -> tuple[Float[Array, "batch"], Float[Array, "batch"] | None]:
    """Return the loss of each text, and the share of its decisions that are right; no share for a model with one
    output."""
    outputs = logits.shape[1]
    if jnp.issubdtype(labels.dtype, jnp.integer) and labels.ndim == 1 and outputs > 1:
        nats, _ = token_nats(logits, labels)
        is_right = jnp.argmax(logits, axis=1).astype(labels.dtype) == labels
        return nats, is_right.astype(logits.dtype)
    values = labels.astype(logits.dtype)
    if outputs == 1 and labels.ndim == 1:
        return jnp.square(logits[:, 0] - values), None
    if labels.shape != logits.shape:
        raise ValueError(
            f"classification_loss: a model with {outputs} outputs takes a whole number from 0 to {outputs - 1} for "
            f"each text, or {outputs} numbers, but the labels are {labels.dtype} of shape {labels.shape}."
        )
    # The nats of a yes or no are log(1 + exp(x)) - x y.
    losses = jnp.mean(jax.nn.softplus(logits) - logits * values, axis=1)
    return losses, jnp.mean(((logits > 0) == (values > 0.5)).astype(logits.dtype), axis=1)


VectorSimilarity = Literal["cosine", "dot"]
SUMMED_POOLINGS = tuple(mode for mode in nn.POOLINGS if mode != "max")
"""The modes of `nn.Pooling` that are weighted sums over tokens, which devices that share a row can add up."""


def contrastive_loss(
    *,
    temperature: float = 0.05,
    pooling: str = "mean",
    similarity: VectorSimilarity = "cosine",
    symmetric: bool = False,
    dims: Sequence[int] = (),
) -> LossFn:
    """Return a loss of groups of texts that belong together, which is called like `next_token_loss`.

    The batch's rows are groups of `batch.group` texts, see `data.batch_text_groups`: an anchor, its positive and, in
    larger groups, hard negatives. The candidates of each anchor are the positives and hard negatives of all groups. The
    loss of an anchor is `-log softmax(similarity to each candidate / temperature)` of its own positive. This is InfoNCE
    (van den Oord et al., arXiv:1807.03748, eq. 4), which sentence-transformers calls `MultipleNegativesRankingLoss`,
    with `scale = 1 / temperature`. The loss is a mean over groups.

    Candidates come from all devices that split the batch, so loss and gradients are the same on any mesh. The
    candidates of an anchor are in its microbatch, so with fewer microbatches an anchor has more candidates. The batch's
    targets are not read. Groups whose anchor has no weight do not count, and their texts are no candidates; such groups
    fill the last batch of an epoch.

    The step's metrics are `retrieval_accuracy`, the share of anchors whose own positive is the most similar candidate,
    and `positive_similarity`, the mean similarity of anchors to their own positives. Both compare whole vectors.

    Args:
        temperature: The number by which similarities are divided.
        pooling: How the vectors of a text's tokens become one vector: a name in `nn.POOLINGS` other than "max".
        similarity: "cosine", or "dot" for the plain product of two vectors.
        symmetric: Whether to average this loss with the loss in which anchors and positives are swapped, as in CLIP
            (Radford et al., arXiv:2103.00020, figure 3). The candidates of the swapped loss are the anchors alone.
        dims: Widths in rising order. For each width, vectors are truncated to their first channels, and the losses of
            all widths are added up, so that truncated vectors are useful too (Matryoshka; Kusupati et al.,
            arXiv:2205.13147, eq. 1). The full width counts only if it is one of `dims`. Empty: whole vectors only.
    """
    _check_options(temperature, pooling, similarity, dims)

    @checked
    def loss_fn(
        model: PyTree,
        batch: Batch,
        key: Key[Array, ""] | None = None,
        *,
        tokens: Tokens | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> tuple[Float[Array, ""], CountOrAux]:
        tokens = batch_tokens(batch, key) if tokens is None else tokens
        hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
        _check_batch(batch, hidden.shape[-1], dims)
        vectors, devices = pool_rows(pooling, hidden, tokens)
        groups = vectors.reshape(-1, batch.group, vectors.shape[-1])
        counts = _count_rows(batch, vectors.dtype)[:: batch.group]
        sum_losses = functools.partial(_sum_losses, counts, temperature, similarity, symmetric)
        results = [sum_losses(groups[..., :width]) for width in dims or (None,)]
        total = sum((loss for loss, _ in results[1:]), results[0][0])
        # The metrics compare whole vectors.
        last = results[-1] if not dims or dims[-1] == hidden.shape[-1] else None
        _, metrics = last or sum_losses(groups)
        # All devices that share a row computed the same loss of the row; divide, so that the row counts once.
        count = jnp.sum(counts) / devices
        metrics = {name: (jax.lax.stop_gradient(value) / devices, count) for name, value in metrics.items()}
        return add_aux_losses(total / devices, LossAux(count, None, metrics), aux)

    return loss_fn


def _check_options(temperature: float, pooling: str, similarity: str, dims: Sequence[int]) -> None:
    """Raise a `ValueError` for an option that is out of its range."""
    if not temperature > 0:
        raise ValueError(f"contrastive_loss(temperature={temperature}): the temperature must be above 0.")
    if pooling not in SUMMED_POOLINGS:
        raise ValueError(
            f"contrastive_loss(pooling={pooling!r}): the pooling must be one of {', '.join(SUMMED_POOLINGS)}."
        )
    if similarity not in get_args(VectorSimilarity):
        raise ValueError(f"contrastive_loss(similarity={similarity!r}): the similarity must be 'cosine' or 'dot'.")
    if any(width < 1 for width in dims) or list(dims) != sorted(set(dims)):
        raise ValueError(f"contrastive_loss(dims={tuple(dims)}): give numbers of channels from 1 on, in rising order.")


def _check_batch(batch: Batch, channels: int, dims: Sequence[int]) -> None:
    """Raise a `ValueError` for a batch without groups, and for dims that the vectors do not have."""
    rows = batch.ids.shape[0]
    if batch.group < 2 or rows % batch.group:
        raise ValueError(
            "contrastive_loss: a batch holds groups of at least 2 texts, an anchor and its positive, but this batch "
            f"has group={batch.group} and {rows} rows; use data.batch_text_groups."
        )
    if dims and max(dims) > channels:
        raise ValueError(f"contrastive_loss(dims={tuple(dims)}): vectors have {channels} channels; give smaller dims.")


def _count_rows(batch: Batch, dtype: DTypeLike) -> Float[Array, "batch"]:
    """Return 1 for each row that has a weight above 0, and 0 for other rows; devices that share a row agree."""
    weights, _ = sum_rows(jnp.asarray(batch.weights).astype(dtype))
    return (weights > 0).astype(dtype)


def pool_rows(
    mode: str, hidden: Float[Array, "batch seq embed"], tokens: Tokens
) -> tuple[Float[Array, "batch embed"], int]:
    """Return the vector of each row, as `nn.Pooling` does, and the number of devices over which a row is split.

    This function selects tokens by their positions. `nn.Pooling` selects tokens by their index in a row, which a device
    with a part of the row does not know. Both agree on rows of one text that is followed by padding. They differ on
    packed rows and on rows of only padding (whose vector is 0 here), which batches of texts do not have.
    """
    hidden, positions = nn.in_float32(hidden), tokens.positions
    is_read, order = positions >= 0, (positions + 1).astype(hidden.dtype)
    length = sum_rows(is_read.astype(hidden.dtype))[0][:, None]
    if mode in ("cls", "lasttoken"):
        weights = (order == (1 if mode == "cls" else length)).astype(hidden.dtype)
    elif mode == "weightedmean":  # The number of a padding token, whose position is -1, is 0.
        weights = order / jnp.maximum(sum_rows(order)[0][:, None], 1e-9)
    else:
        divisor = jnp.sqrt(length) if mode == "mean_sqrt_len_tokens" else length
        weights = 1 / jnp.maximum(divisor, 1e-9)
    # A product with zero would keep the NaN of a padding token.
    return sum_row_vectors(jnp.where(is_read[..., None], hidden * weights[..., None], 0))


def _sum_losses(
    counts: Float[Array, "groups"],
    temperature: float,
    similarity: VectorSimilarity,
    symmetric: bool,
    groups: Float[Array, "groups group embed"],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return the sums over this device's groups of the loss and of its metrics.

    `counts` is 0 for groups that do not count, and 1 for all other groups.
    """
    if similarity == "cosine":
        groups = nn.UnitLength()(groups)
    number, size, width = groups.shape
    anchors, local_candidates = groups[:, 0], groups[:, 1:].reshape(-1, width)
    similarities, first = _candidate_similarities(anchors, local_candidates, jnp.repeat(counts, size - 1))
    target = first + (size - 1) * jnp.arange(number, dtype=jnp.int32)
    nats, _ = token_nats(similarities / temperature, target)
    if symmetric:
        back, first_anchor = _candidate_similarities(groups[:, 1], anchors, counts)
        back_nats, _ = token_nats(back / temperature, first_anchor + jnp.arange(number, dtype=jnp.int32))
        nats = (nats + back_nats) / 2
    target_similarity = jnp.take_along_axis(similarities, target[:, None], axis=1)[:, 0]
    is_first = jnp.argmax(similarities, axis=1).astype(target.dtype) == target
    metrics = {
        "retrieval_accuracy": jnp.sum(is_first.astype(nats.dtype) * counts),
        "positive_similarity": jnp.sum(target_similarity * counts),
    }
    return jnp.sum(jnp.where(counts > 0, nats, 0)), metrics


_NO_CANDIDATE = -1e30  # The similarity to a vector that is no candidate: finite, so that its gradient is zero.


def _candidate_similarities(
    vectors: Float[Array, "rows embed"], local_candidates: Float[Array, "_ embed"], counts: Float[Array, "_"]
) -> tuple[Float[Array, "rows candidates"], int | Int[Array, ""]]:
    """Return each vector's similarity to the candidates of all devices, and the index of the first local candidate.

    Candidates whose count is 0 get the similarity `_NO_CANDIDATE`.
    """
    # One all-gather moves both the vectors and the counts.
    gathered, first = gather_rows(jnp.concatenate([local_candidates, counts[:, None]], axis=1))
    similarities = vectors @ gathered[:, :-1].T
    return jnp.where(gathered[:, -1] > 0, similarities, _NO_CANDIDATE), first
