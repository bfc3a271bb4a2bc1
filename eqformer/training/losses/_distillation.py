"""Distillation: a loss that learns from a teacher's probabilities of the next token, of all ids or of the top ids."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, get_args, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from ..._annotation_checks import checked
from ..._shapes import Batch, DistillationBatch
from ...nn import Tokens
from ...parallel import vary_like
from . import _cross_entropy
from ._loss_aux import add_aux_losses, CountOrAux, LossAux, LossFn
from ._token_losses import batch_tokens
from ._vocabulary import Vocabulary, WholeVocabulary


Divergence = Literal["forward-kl", "reverse-kl", "jsd"]
ReadTeacher = Callable[[Vocabulary, tuple, PyTree], tuple[Array, Array | None]]
"""(vocabulary, a chunk of the teacher's arrays, constants) -> (log-probabilities, their ids or None for all)"""


def distillation_loss(
    divergence: Divergence = "forward-kl", *, temperature: float = 1.0, weight: float = 0.5, beta: float = 0.5
) -> LossFn:
    """Return a loss of the rows of a `DistillationBatch`, which is called like `next_token_loss`.

    Each token's loss is `weight * temperature^2 * D + (1 - weight) * nats`, where `nats` is the next-token loss and `D`
    the divergence between the probabilities `softmax(logits / temperature)` of the teacher, `p`, and of the model, `q`.
    The factor `temperature^2` keeps gradients at one size at all temperatures (Hinton et al., arXiv:1503.02531).

    - "forward-kl": `sum_v p_v log(p_v / q_v)`.
    - "reverse-kl": `sum_v q_v log(q_v / p_v)`.
    - "jsd": `beta KL(p, m) + (1 - beta) KL(q, m)` with `m = beta p + (1 - beta) q`, the generalized Jensen-Shannon
      divergence (Agarwal et al., arXiv:2306.13649, eq. 1).

    The logits of both models exist for one chunk of tokens at a time, as in `cross_entropy`. If the batch has a
    teacher's `top_ids` and not the teacher, the sums are over these ids and one bucket, whose probability is the sum
    over all other ids. Such a divergence is at most as large as the divergence over all ids. The step's metrics are
    `next_token_loss` and `divergence`, both per token.

    Args:
        divergence: The name of the divergence `D`.
        temperature: A number above 0 by which both models' logits are divided.
        weight: The share of the divergence, from 0 to 1; the rest is the next-token loss.
        beta: The share of the teacher in "jsd", between 0 and 1.
    """
    call = f"distillation_loss({divergence!r}, temperature={temperature}, weight={weight}, beta={beta})"
    if divergence not in get_args(Divergence):
        raise ValueError(f"{call}: the divergences are {', '.join(get_args(Divergence))}; pass one.")
    if not (0 < temperature < math.inf and 0 <= weight <= 1 and 0 < beta < 1):
        raise ValueError(
            f"{call}: temperature must be above 0 and finite, weight at least 0 and at most 1, and beta above 0 and "
            "below 1; change the number that breaks its rule."
        )
    token_losses = functools.partial(_chunk_losses, divergence, temperature, weight, beta)

    @checked
    def loss_fn(
        model: PyTree,
        batch: DistillationBatch,
        key: Key[Array, ""] | None = None,
        *,
        chunk: int | None = None,
        tokens: Tokens | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> tuple[Float[Array, ""], CountOrAux]:
        tokens = batch_tokens(batch, key) if tokens is None else tokens
        hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
        flatten = lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:])
        weights = jax.lax.stop_gradient(flatten(batch.weights))
        teacher_arrays, constants, read_teacher = _teacher_of(batch, call, temperature, flatten(hidden))
        token_arrays = (flatten(hidden), flatten(batch.targets), weights, *teacher_arrays)
        view = WholeVocabulary() if vocabulary is None else vocabulary
        read = functools.partial(token_losses, view, read_teacher)
        total, sums = _cross_entropy.sum_token_losses(
            model.unembed, token_arrays, read, chunk=chunk, constants=constants
        )
        count = jnp.sum(weights.astype(total.dtype))
        names = "next_token_loss", "divergence"
        metrics = {name: (jax.lax.stop_gradient(x), count) for name, x in zip(names, sums, strict=True)}
        return add_aux_losses(total, LossAux(count, None, metrics), aux)

    return loss_fn


def _teacher_of(
    batch: DistillationBatch, call: str, temperature: float, hidden: Float[Array, "tokens embed"]
) -> tuple[tuple, PyTree, ReadTeacher]:
    """Return the teacher's arrays with one row per token, its constants, and the function that reads both.

    The teacher's hidden states are marked as varying over the same mesh axes as the model's `hidden`.
    """
    flatten = lambda x: jax.lax.stop_gradient(jnp.asarray(x)).reshape(-1, x.shape[-1])
    if batch.teacher is not None and batch.teacher_hidden is not None:
        teacher_hidden = vary_like(flatten(batch.teacher_hidden), hidden)
        unembed, constants = _cross_entropy.frozen_unembed(batch.teacher.unembed, teacher_hidden[:1])

        def read(view: Vocabulary, arrays: tuple, constants: PyTree) -> tuple[Array, None]:
            return view.log_probabilities(unembed(arrays[0], constants) / temperature), None

        return (teacher_hidden,), constants, read
    if batch.top_ids is None or batch.top_nats is None:
        raise ValueError(
            f"{call}: the batch needs a teacher with its hidden states, or top_ids with top_nats; make it by "
            "training.add_teacher, or by Loader.with_row_arrays."
        )
    if batch.temperature != temperature:
        raise ValueError(
            f"{call}: the teacher's stored probabilities have the temperature {batch.temperature}, and a bucket of "
            "other ids cannot be converted to another temperature; pass the stored temperature, or store the "
            "probabilities anew."
        )
    return (flatten(batch.top_ids), flatten(batch.top_nats)), (), lambda view, arrays, _: (-arrays[1], arrays[0])


def _chunk_losses(
    divergence: str,
    temperature: float,
    weight: float,
    beta: float,
    view: Vocabulary,
    read_teacher: ReadTeacher,
    logits: Float[Array, "tokens vocab"],
    arrays: tuple,
    constants: PyTree,
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, ""]]]:
    """Return three sums over a chunk of tokens: of the loss, of the next-token loss, and of the divergence."""
    targets, weights, *teacher_arrays = arrays
    nats, _ = view.nats(logits, targets)
    log_q = view.log_probabilities(logits / temperature)
    log_p, top_ids = read_teacher(view, tuple(teacher_arrays), constants)
    sum_ids = view.sum_ids
    if top_ids is not None:
        log_q, sum_ids = bucket_log_probabilities(view, log_q, top_ids), functools.partial(jnp.sum, axis=-1)
    log_p = jax.lax.stop_gradient(log_p).astype(log_q.dtype)
    distances = _divergences(divergence, beta, log_p, log_q, sum_ids)
    losses = weight * temperature**2 * distances + (1 - weight) * nats
    sums = [jnp.sum(_cross_entropy.apply_weights(x, weights)) for x in (losses, nats, distances)]
    return sums[0], (sums[1], sums[2])


def bucket_log_probabilities(
    view: Vocabulary, log_probabilities: Float[Array, "tokens vocab"], top_ids: Int[Array, "tokens top"]
) -> Float[Array, "tokens buckets"]:
    """Return the log-probabilities of `top_ids` for each token and, last, of all other ids together."""
    other_mass = view.sum_ids(jnp.exp(view.drop_ids(log_probabilities, top_ids)))
    # If `top_ids` holds all ids, the other ids have no mass. The bound keeps its logarithm finite: -87 in float32.
    log_others = jnp.log(jnp.maximum(other_mass, jnp.finfo(other_mass.dtype).tiny))
    return jnp.concatenate([view.take_ids(log_probabilities, top_ids), log_others[:, None]], axis=-1)


def _divergences(
    divergence: str,
    beta: float,
    log_p: Float[Array, "tokens ids"],
    log_q: Float[Array, "tokens ids"],
    sum_ids: Callable[[Array], Array],
) -> Float[Array, "tokens"]:
    """Return each token's divergence between the teacher's probabilities p and the model's q."""
    if divergence == "forward-kl":
        return sum_ids(jnp.exp(log_p) * (log_p - log_q))
    if divergence == "reverse-kl":
        return sum_ids(jnp.exp(log_q) * (log_q - log_p))
    log_m = jnp.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return sum_ids(beta * jnp.exp(log_p) * (log_p - log_m) + (1 - beta) * jnp.exp(log_q) * (log_q - log_m))


def check_teacher(model: PyTree, teacher: PyTree) -> None:
    """Raise a `ValueError` for models (or shapes) with different numbers of token ids.

    `data.check_same_ids` compares the texts of the ids.
    """
    if model.vocab != teacher.vocab:
        raise ValueError(
            f"check_teacher(model, teacher): both models must have the same token ids, but the model has {model.vocab} "
            f"ids and the teacher {teacher.vocab}; take a teacher with the model's tokenizer and table size."
        )


@checked
def teacher_top_nats(
    model: PyTree,
    batch: Batch,
    *,
    top: int,
    temperature: float,
    tokens: Tokens | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[Int[Array, "batch seq top"], Float[Array, "batch seq buckets"]]:
    """Return each token's `top` most probable next ids, and `-log p` of these ids and, last, of all other ids together.

    Args:
        model: The teacher.
        batch: The rows.
        top: The number of ids of each token.
        temperature: The number by which the logits are divided.
        tokens: As in `next_token_loss`.
        vocabulary: As in `next_token_loss`.
    """
    tokens = batch_tokens(batch) if tokens is None else tokens
    hidden, _, _ = model.encode(jnp.asarray(batch.ids), tokens)
    view = WholeVocabulary() if vocabulary is None else vocabulary

    def read_top(logits: Array, _: tuple[()]) -> tuple[tuple[()], tuple[Array, Array]]:
        log_p = view.log_probabilities(logits / temperature)
        ids = view.top_ids(log_p, top)
        return (), (ids, -bucket_log_probabilities(view, log_p, ids))

    flat = hidden.reshape(-1, hidden.shape[-1])
    results = _cross_entropy.read_over_chunks(model.unembed, (flat,), read_top, None)[1]
    ids, nats = (x.reshape(*batch.ids.shape, -1) for x in results)
    return ids, nats


def detach_teacher(batch: PyTree) -> tuple[PyTree, PyTree]:
    """Return the batch without its teacher, and the teacher (None if the batch has none).

    The teacher's arrays have no dim of rows, and therefore cannot be split like the batch.
    """
    if not isinstance(batch, DistillationBatch) or batch.teacher is None:
        return batch, None
    return dataclasses.replace(batch, teacher=None), batch.teacher


def give_teacher(loss_fn: LossFn, teacher: PyTree) -> LossFn:
    """Return a loss that adds the teacher to its batches again; the same loss if `teacher` is None."""
    if teacher is None:
        return loss_fn

    @functools.wraps(loss_fn)
    def loss(model: PyTree, batch: DistillationBatch, *args: Any, **options: Any) -> PyTree:
        return loss_fn(model, dataclasses.replace(batch, teacher=teacher), *args, **options)

    return loss
