"""Losses of tokens (next-token prediction, masked-language modeling), losses of whole rows, and evaluation sums."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from ... import nn
from ..._annotation_checks import checked
from ..._shapes import Batch, PreferenceBatch
from ...nn import packed_in_order, positions_like, Source, token_keys, Tokens, with_source
from ...parallel import sum_rows, vary_like
from . import _cross_entropy
from ._loss_aux import add_aux_losses, CountOrAux, LossAux, LossFn
from ._vocabulary import token_nats, Vocabulary, WholeVocabulary


@checked
def next_token_loss(
    model: PyTree,
    batch: Batch,
    key: Key[Array, ""] | None = None,
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
    tokens: Tokens | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[Float[Array, ""], CountOrAux]:
    """Return the weighted sum over a batch of the nats of each target, and the sum of the weights.

    The targets are the next tokens, which loaders give, or the original ids of masked tokens, see `mask_tokens`.

    If the model has routed layers, their auxiliary losses (load balancing, z-loss of the router) are added to the sum.
    The second result is then a `LossAux`, which holds the sum of the weights and the layers' `Aux`.

    Args:
        model: An object with `encode(ids, tokens) -> (hidden, cache, aux)` and `unembed(hidden) -> logits`.
        batch: Ids, targets and weights.
        key: The key of dropout and router noise; None: no dropout, no router noise, no dropped choices of experts.
        chunk: The number of tokens whose logits exist at once; None: see `chunk_size`.
        z_loss: As in `cross_entropy`.
        tokens: The tokens of the batch; None: `batch_tokens(batch, key)`. A plan passes each device's tokens.
        vocabulary: The reader of logits whose vocabulary a plan splits over devices; None: logits of all ids.
    """
    tokens = batch_tokens(batch, key) if tokens is None else tokens
    hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
    targets, weights = jnp.asarray(batch.targets), jnp.asarray(batch.weights)
    nats = token_nats if vocabulary is None else vocabulary.nats
    total, count = _cross_entropy.cross_entropy(
        model.unembed, hidden, targets, weights, chunk=chunk, z_loss=z_loss, nats=nats
    )
    return add_aux_losses(total, count, aux)


@checked
def evaluation_sums(
    model: PyTree,
    batch: Batch,
    *,
    chunk: int | None = None,
    tokens: Tokens | None = None,
    vocabulary: Vocabulary | None = None,
) -> dict[str, Float[Array, ""]]:
    """Return sums over a batch, without dropout: `nats`, `correct` (targets with the largest logit) and `count`."""
    tokens = batch_tokens(batch) if tokens is None else tokens
    hidden, _, _ = model.encode(jnp.asarray(batch.ids), tokens)
    flat = (hidden.reshape(-1, hidden.shape[-1]), *(jnp.asarray(x).reshape(-1) for x in (batch.targets, batch.weights)))
    view = WholeVocabulary() if vocabulary is None else vocabulary

    def read_sums(logits: Array, arrays: tuple) -> tuple[dict[str, Array], None]:
        targets, weights = arrays[0], arrays[1].astype(logits.dtype)
        nats, _ = view.nats(logits, targets)
        is_first = view.is_first(logits, targets)
        per_token = {"nats": nats, "correct": is_first.astype(logits.dtype)}
        sums = {name: jnp.sum(_cross_entropy.apply_weights(values, weights)) for name, values in per_token.items()}
        return sums | {"count": jnp.sum(weights)}, None

    return _cross_entropy.read_over_chunks(model.unembed, flat, read_sums, chunk)[0]


# The tokens of a batch.


@checked
def batch_tokens(batch: Batch, key: Key[Array, ""] | None = None) -> Tokens:
    """Return the `Tokens` that layers read: positions, documents, an encoder's source and, with `key`, random keys.

    A token's random key depends on its example and its index in the row, not on its position, since positions restart
    in each packed document.
    """

    def make_keys(shape: tuple[int, ...]) -> Key[Array, "batch seq"] | None:
        row_indices = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        return None if key is None else token_keys(key, jnp.asarray(batch.examples), row_indices)

    tokens = _make_tokens(batch.positions, batch.segments, make_keys(batch.ids.shape), batch.ids.shape, batch.documents)
    tokens = tokens if batch.types is None else tokens.replace(types=jnp.asarray(batch.types))
    if batch.source_ids is None:
        return tokens
    shape = batch.source_ids.shape
    source_tokens = _make_tokens(batch.source_positions, batch.source_segments, make_keys(shape), shape, None)
    return with_source(tokens, Source(jnp.asarray(batch.source_ids), source_tokens))


def _make_tokens(
    positions: Int[Array | np.ndarray, "batch seq"] | None,
    segments: Int[Array | np.ndarray, "batch seq"] | None,
    keys: Key[Array, "batch seq"] | None,
    shape: tuple[int, ...],
    documents: int | None,
) -> Tokens:
    if positions is None:
        return positions_like(shape, keys)
    positions = jnp.asarray(positions)
    if segments is None:
        return Tokens(positions, None, keys)
    segments = jnp.asarray(segments)
    if documents is None:
        return Tokens(positions, segments, keys)
    return packed_in_order(positions, segments, keys, documents=documents)


# Masked-language modeling.


@checked
def mask_tokens(
    batch: Batch,
    key: Key[Array, ""],
    *,
    mask_id: int,
    vocab: int,
    mlm_probability: float = 0.3,
    mask_replace_prob: float = 0.8,
    random_replace_prob: float = 0.1,
    special_ids: Sequence[int] = (),
) -> Batch:
    """Return a batch for masked-language modeling (Devlin et al. 2018, arXiv:1810.04805, section 3.1).

    Each token except padding is chosen with the probability `mlm_probability`, independently of other tokens. The
    target of a chosen token is its own id, with weight 1; all other tokens have weight 0. A chosen token is replaced by
    `mask_id` with the probability `mask_replace_prob`, or by a random id with the probability `random_replace_prob`;
    otherwise its id stays. `next_token_loss` of the new batch is then the sum of `-log p` of the chosen tokens' ids,
    and the number of chosen tokens.

    The random numbers of a token are a function of the key, the row's number in `examples` and the token's index in the
    row, so they are the same in any batch and on any mesh. The targets of the given batch, which are next tokens, are
    replaced.

    Args:
        batch: Ids, packed or not.
        key: A new key for each step: `jax.random.fold_in(key, step)`.
        mask_id: The id that replaces a masked token.
        vocab: The number of ids among which a random id is sampled.
        mlm_probability: The probability that a token is chosen: 0.3 in ModernBERT, 0.15 in BERT.
        mask_replace_prob: The share of the chosen tokens that are replaced by `mask_id`.
        random_replace_prob: The share of the chosen tokens that are replaced by an id sampled evenly from all ids.
        special_ids: Ids that are never chosen, such as the ids that begin and end a text.
    """
    has_shares = min(mask_replace_prob, random_replace_prob) >= 0 and mask_replace_prob + random_replace_prob <= 1
    if not 0 < mlm_probability <= 1 or not has_shares:
        raise ValueError(
            f"mask_tokens(mlm_probability={mlm_probability}, mask_replace_prob={mask_replace_prob}, "
            f"random_replace_prob={random_replace_prob}): mlm_probability must be above 0 and at most 1, and the two "
            "shares must be at least 0 and add up to at most 1."
        )
    if not 0 <= mask_id < vocab:
        raise ValueError(f"mask_tokens(mask_id={mask_id}, vocab={vocab}): ids are from 0 to {vocab - 1}.")
    ids = jnp.asarray(batch.ids)
    row_indices = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)

    def sample(key: Array) -> tuple[Array, Array, Array]:
        choice_key, replacement_key, id_key = jax.random.split(key, 3)
        sample_uniform = lambda key: jax.random.uniform(key, (), jnp.float32)
        random_id = jax.random.randint(id_key, (), 0, vocab, ids.dtype)
        return sample_uniform(choice_key), sample_uniform(replacement_key), random_id

    keys = token_keys(key, jnp.asarray(batch.examples), row_indices)
    choice, replacement, random_id = jax.vmap(jax.vmap(sample))(keys)
    is_chosen = (choice < mlm_probability) & ~jnp.isin(ids, jnp.asarray(special_ids, ids.dtype))
    if batch.positions is not None:
        is_chosen &= jnp.asarray(batch.positions) >= 0
    is_masked = replacement < mask_replace_prob
    mask = jnp.asarray(mask_id, ids.dtype)
    is_replaced = replacement < mask_replace_prob + random_replace_prob
    new_ids = jnp.where(is_masked, mask, jnp.where(is_replaced, random_id, ids))
    weights = is_chosen.astype(jnp.asarray(batch.weights).dtype)
    return dataclasses.replace(batch, ids=jnp.where(is_chosen, new_ids, ids), targets=ids, weights=weights)


def check_next_token(model: nn.LanguageModel, *, seq: int) -> None:
    """Raise a `ValueError` for a model (or its shapes) that cannot learn from predicting the next of `seq` tokens.

    The check refuses models with an encoder, models whose tokens attend to later tokens, and models with fewer than
    `seq` learned positions. Recurrent mixers read tokens in order, and are never refused.
    """
    if model.start is not None:
        raise ValueError(
            "check_next_token(model): the model has an encoder, which reads a second text, the source; train the model "
            "on pairs, by eqformer.data.batch_pairs(sources, targets)."
        )
    for path, mixer in nn.named_modules(model, nn.Mixer):
        attends = mixer.facts().attends
        if attends is not None and not attends.mask.is_causal:
            raise ValueError(
                f"check_next_token(model): in {path} a token attends to later tokens, so the model learns nothing from "
                "predicting the next token; train it on masked tokens, by eqformer.training.mask_tokens(batch, ...)."
            )
    if (longest := model.max_seq) is not None and seq > longest:
        raise ValueError(
            f"check_next_token(model, seq={seq}): the model has {longest} learned positions; give the model more "
            f"positions (max_seq), or give rows of at most {longest} tokens."
        )


# Losses that are functions of the nats of whole rows.

RowMetrics = Mapping[str, tuple[Array, Array]]
RowFunction = Callable[[Float[Array, "batch"], Any], tuple[Any, ...]]
"""(each row's nats, batch) -> (sum, count), or (sum, count, metrics) with each metric's sum and weight by name"""


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

    `chunk`, `tokens` and `vocabulary` are as in `next_token_loss`.
    """
    tokens = batch_tokens(batch) if tokens is None else tokens
    hidden, _, _ = model.encode(jnp.asarray(batch.ids), tokens)
    return _sum_row_nats(model, hidden, batch, chunk, vocabulary)[0]


def row_loss(function: RowFunction) -> LossFn:
    """Turn a function of the nats of whole rows into a loss, which is called like `next_token_loss`.

    `function(nats, batch)` gets the nats of each row, `-sum_i w_i log p_i[target_i]`, and the batch of these rows. The
    nats are over all tokens of a row, even if a mesh splits the row. The function returns a sum over rows and a count,
    and is differentiated with respect to the nats. It may also return metrics, `{name: (sum, weight)}`; the step
    reports each sum over the whole batch, divided by its weight. If the function compares rows, `batch.group` is the
    number of rows that are never separated.

    As in `cross_entropy`, the logits of all tokens never exist at once. A first pass over chunks computes the nats. A
    second pass computes the gradients: the weight of a token is multiplied by the derivative of the sum with respect to
    the nats of its row. There are four matrix products with the table.
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
    ) -> tuple[Float[Array, ""], CountOrAux]:
        tokens = batch_tokens(batch, key) if tokens is None else tokens
        hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
        nats, devices = _sum_row_nats(model, hidden, batch, chunk, vocabulary)

        def apply_function(nats: Array) -> tuple[Array, tuple[Array, RowMetrics]]:
            total, count, *metrics = function(nats, batch)
            as_number = lambda x: jnp.asarray(x, nats.dtype)
            return vary_like(as_number(total), nats), jax.tree.map(as_number, (count, metrics[0] if metrics else {}))

        (value, (count, metrics)), slopes = jax.value_and_grad(apply_function, has_aux=True)(nats)
        weights = jnp.asarray(batch.weights)
        weights = weights.astype(slopes.dtype) * slopes[:, None]
        nats_fn = token_nats if vocabulary is None else vocabulary.nats
        total, _ = _cross_entropy.cross_entropy(
            model.unembed, hidden, jnp.asarray(batch.targets), weights, chunk=chunk, nats=nats_fn
        )
        # The gradients cover only this device's tokens; the value is divided by the number of devices that share a row.
        total = total + jax.lax.stop_gradient(value.astype(total.dtype) / devices - total)
        count, metrics = jax.tree.map(lambda x: jax.lax.stop_gradient(x / devices), (count, metrics))
        return add_aux_losses(total, LossAux(count, None, metrics) if metrics else count, aux)

    return loss_fn


def _sum_row_nats(
    model: PyTree, hidden: Array, batch: Batch, chunk: int | None, vocabulary: Vocabulary | None
) -> tuple[Float[Array, "batch"], int]:
    """Return each row's nats, and the number of devices over which a row is split."""
    targets, weights = jnp.asarray(batch.targets), jnp.asarray(batch.weights)
    nats_fn = token_nats if vocabulary is None else vocabulary.nats
    nats = _cross_entropy.chunked_token_nats(
        model.unembed, jax.lax.stop_gradient(hidden), targets, chunk=chunk, nats=nats_fn
    )
    return sum_rows(jax.lax.stop_gradient(_cross_entropy.apply_weights(nats, weights)))


# Losses of preferences, for completions that are compared in pairs, or labelled.

PreferenceLoss = Literal["dpo", "ipo", "orpo", "kto"]


def preference_loss(
    name: PreferenceLoss, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> LossFn:
    """Return a loss of the rows of a `PreferenceBatch`, which is called like `next_token_loss`.

    A row's nats are the `-log p` of its completion. The reward of a row is `beta log (p / p_reference)`; the batch's
    `reference_nats` are `-log p_reference`.

    - "dpo": `-log sigmoid(chosen reward - rejected reward)` of each pair (Rafailov et al., arXiv:2305.18290, eq. 7).
    - "ipo": `(chosen - rejected - 1 / (2 beta))^2` of each pair, where `chosen` and `rejected` are `reward / beta` per
      token, as in TRL (Azar et al., arXiv:2310.12036, eq. 17).
    - "orpo": the nats per token of the chosen completion, minus `beta log sigmoid(log odds ratio)`. The odds are
      `p / (1 - p)`, where `log p` is the mean over a completion's tokens (Hong et al., arXiv:2403.07691, eq. 6 and 7).
      There is no reference, and the reward is `beta` times this mean.
    - "kto": `1 - sigmoid(reward - beta baseline)` of each desirable row and `1 - sigmoid(beta baseline - reward)` of
      each other row, times the weights (Ethayarajh et al., arXiv:2402.01306, eq. 8), with the batch's `baseline`.

    The loss is a mean over pairs; for KTO, over rows. The step's metrics are `rewards_chosen` and `rewards_rejected`;
    for KTO these are the rewards of desirable and of other rows. Pairs add `reward_margin`, the difference of the two
    rewards, and `reward_accuracy`, the share of pairs whose chosen row has the larger reward. Pairs are never split
    (`group=2`), so the loss is the same on any mesh, in any number of microbatches.

    Args:
        name: The name of the loss.
        beta: A factor of the rewards: a larger beta keeps the model closer to the reference. For ORPO, the weight of
            the odds ratio.
        desirable_weight: The weight of KTO's desirable rows.
        undesirable_weight: The weight of KTO's other rows.
    """
    if name not in get_args(PreferenceLoss):
        raise ValueError(f"preference_loss({name!r}): the losses are {', '.join(get_args(PreferenceLoss))}; pass one.")
    if not min(beta, desirable_weight, undesirable_weight) > 0:
        raise ValueError(
            f"preference_loss(beta={beta}, desirable_weight={desirable_weight}, undesirable_weight="
            f"{undesirable_weight}): each must be above 0; pass positive numbers."
        )
    if name == "kto":
        return row_loss(functools.partial(_kto_sums, beta, desirable_weight, undesirable_weight))
    return row_loss(functools.partial(_pair_sums, name, beta))


@checked
def kto_baseline(
    nats: Float[Array | np.ndarray, "batch"], reference_nats: Float[Array | np.ndarray, "batch"]
) -> Float[Array, ""]:
    """Return KTO's reference point: the mean of `log (p / p_reference)` over mismatched rows, or 0 if it is negative.

    Mismatched rows have completions of other prompts. `nats` and `reference_nats` are the nats of these rows under the
    model and under the reference, as `make_row_nats` computes them before a step.
    """
    return jnp.maximum(jnp.mean(jnp.asarray(reference_nats) - jnp.asarray(nats)), 0)


def _pair_sums(
    name: str, beta: float, nats: Float[Array, "batch"], batch: PreferenceBatch
) -> tuple[Array, int, RowMetrics]:
    """Return the sum of a loss over pairs, the number of pairs, and the metrics of pairs."""
    if batch.group % 2 or len(nats) % 2:
        raise ValueError(
            f"preference_loss({name!r}): each chosen row stands before its rejected row, so a batch has group=2 and an "
            f"even number of rows, but this batch has group={batch.group} and {len(nats)} rows; use "
            "data.batch_preferences."
        )
    rewards = pair_rewards(name, beta, nats, batch)
    if name == "orpo":
        means = -nats / _row_weights(batch)
        # A probability of 1 has no finite odds.
        means = jnp.minimum(means, -jnp.finfo(nats.dtype).eps)
        log_odds = means - jnp.where(means > -math.log(2), jnp.log(-jnp.expm1(means)), jnp.log1p(-jnp.exp(means)))
        losses = -means[::2] - beta * jax.nn.log_sigmoid(log_odds[::2] - log_odds[1::2])
    else:
        if name == "dpo":
            losses = -jax.nn.log_sigmoid(rewards[::2] - rewards[1::2])
        else:
            per_token = _log_ratios(name, nats, batch) / _row_weights(batch)
            losses = jnp.square(per_token[::2] - per_token[1::2] - 1 / (2 * beta))
    pairs = jnp.full((), len(losses), nats.dtype)
    chosen, rejected = rewards[::2], rewards[1::2]
    margins = chosen - rejected
    values = {
        "rewards_chosen": chosen,
        "rewards_rejected": rejected,
        "reward_margin": margins,
        "reward_accuracy": margins > 0,
    }
    metrics = {metric: (jnp.sum(x, dtype=nats.dtype), pairs) for metric, x in values.items()}
    return jnp.sum(losses), len(losses), metrics


def pair_rewards(name: str, beta: float, nats: Float[Array, "batch"], batch: PreferenceBatch) -> Float[Array, "batch"]:
    """Return the reward of each row of a batch of pairs, as `preference_loss` defines it."""
    return beta * (-nats / _row_weights(batch) if name == "orpo" else _log_ratios(name, nats, batch))


def _kto_sums(
    beta: float, desirable_weight: float, undesirable_weight: float, nats: Float[Array, "batch"], batch: PreferenceBatch
) -> tuple[Array, int, RowMetrics]:
    """Return the sum of KTO's loss over rows, the number of rows, and the metrics of rows."""
    if batch.labels is None or batch.baseline is None:
        missing = "labels" if batch.labels is None else "baseline"
        raise ValueError(
            f"preference_loss('kto'): a batch needs labels and a baseline, but has no {missing}; use "
            "data.batch_labelled, and training.kto_baseline before each step."
        )
    rewards, labels = beta * _log_ratios("kto", nats, batch), jnp.asarray(batch.labels).astype(nats.dtype)
    baseline = beta * jnp.asarray(batch.baseline).astype(nats.dtype)
    weights = jnp.where(labels > 0, desirable_weight, undesirable_weight).astype(nats.dtype)
    losses = weights * jax.nn.sigmoid(jnp.where(labels > 0, baseline - rewards, rewards - baseline))
    metrics = {
        "rewards_chosen": (jnp.sum(rewards * labels), jnp.sum(labels)),
        "rewards_rejected": (jnp.sum(rewards * (1 - labels)), jnp.sum(1 - labels)),
    }
    return jnp.sum(losses), len(losses), metrics


def _log_ratios(name: str, nats: Float[Array, "batch"], batch: PreferenceBatch) -> Float[Array, "batch"]:
    """Return `log (p / p_reference)` of each row."""
    if batch.reference_nats is None:
        raise ValueError(
            f"preference_loss({name!r}): the batch needs the nats of each row under a reference model; give "
            "dataclasses.replace(batch, reference_nats=training.make_row_nats(plan)(reference, batch))."
        )
    return jnp.asarray(batch.reference_nats).astype(nats.dtype) - nats


def _row_weights(batch: Batch) -> Float[Array, "batch"]:
    """Return the sum of each row's weights over all devices that share the row; 1 for a row without weight."""
    weights, _ = sum_rows(jnp.asarray(batch.weights))
    return jnp.where(weights == 0, 1, weights)
