"""Losses of tokens (next-token prediction, masked-language modeling), losses of whole rows, and evaluation sums."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from ... import nn
from ..._array_checks import checked
from ..._shapes import Batch
from ...nn import in_float32, packed_in_order, positions_like, Source, token_keys, Tokens, with_source
from ...parallel import sum_rows, vary_like
from . import _cross_entropy
from ._loss_aux import add_aux_losses, CountOrAux, LossFn


@checked
def next_token_loss(
    model: PyTree,
    batch: Batch,
    key: Key[Array, ""] | None = None,
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
    tokens: Tokens | None = None,
    vocabulary: _cross_entropy.Vocabulary | None = None,
) -> tuple[Float[Array, ""], CountOrAux]:
    """Return the sum over a batch of the nats of each target, and the weight of those tokens.

    The targets are the next tokens, as the loaders give them, or masked tokens, see `mask_tokens`.

    The auxiliary losses of routed layers (load balancing, z-loss of the router) are added to the sum, and the weight
    then comes in a `LossAux`, which also holds the layers' `Aux`.

    Args:
        model: An object with `encode(ids, tokens) -> (hidden, cache, aux)` and `unembed(hidden) -> logits`.
        batch: Ids, targets and weights.
        key: The key of dropout and router noise; None: neither of them, and no dropped choices of experts.
        chunk: The number of tokens whose logits exist at once; None: see `chunk_size`.
        z_loss: As in `cross_entropy`.
        tokens: The tokens of the batch; None: `batch_tokens(batch, key)`. A mesh that splits rows passes its own.
        vocabulary: The reader of logits that a mesh splits.
    """
    tokens = batch_tokens(batch, key) if tokens is None else tokens
    hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
    targets, weights = jnp.asarray(batch.targets), jnp.asarray(batch.weights)
    nats = _cross_entropy.token_nats if vocabulary is None else vocabulary.nats
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
    vocabulary: _cross_entropy.Vocabulary | None = None,
) -> dict[str, Float[Array, ""]]:
    """Return `nats`, `correct` (targets with the largest logit) and `count`, summed over a batch, without dropout."""
    tokens = batch_tokens(batch) if tokens is None else tokens
    hidden, _, _ = model.encode(jnp.asarray(batch.ids), tokens)
    flat = (hidden.reshape(-1, hidden.shape[-1]), *(jnp.asarray(x).reshape(-1) for x in (batch.targets, batch.weights)))
    sizes = _cross_entropy.split_tokens(model.unembed, flat[0], chunk)
    unembed = _cross_entropy.cast_tables_once(model.unembed, flat[0][: sizes[1]])

    def chunk_sums(arrays: tuple) -> tuple[dict[str, Array], None]:
        logits = in_float32(unembed(arrays[0]))
        weights = arrays[2].astype(logits.dtype)
        nats, _ = (_cross_entropy.token_nats if vocabulary is None else vocabulary.nats)(logits, arrays[1])
        is_first = (_is_first if vocabulary is None else vocabulary.is_first)(logits, arrays[1])
        per_token = {"nats": nats, "correct": is_first.astype(logits.dtype)}
        sums = {name: jnp.sum(_cross_entropy.apply_weights(values, weights)) for name, values in per_token.items()}
        return sums | {"count": jnp.sum(weights)}, None

    return _cross_entropy.sum_over_chunks(chunk_sums, flat, sizes)[0]


def _is_first(logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]) -> Bool[Array, "tokens"]:
    return jnp.argmax(logits, axis=-1).astype(targets.dtype) == targets


# The tokens of a batch.


@checked
def batch_tokens(batch: Batch, key: Key[Array, ""] | None = None) -> Tokens:
    """Return the `Tokens` that layers read: positions, documents, a source and, given a `key`, a random key per token.

    A token's random key depends on its example and its index in the row, not on its position, since positions restart
    in each packed document.
    """

    def make_keys(shape: tuple[int, ...]) -> Key[Array, "batch seq"] | None:
        row_indices = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        return None if key is None else token_keys(key, jnp.asarray(batch.examples), row_indices)

    tokens = _make_tokens(batch.positions, batch.segments, make_keys(batch.ids.shape), batch.ids.shape, batch.documents)
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

    Each token that is no padding is chosen with `mlm_probability`, independently of the others. The target of a chosen
    token is its own id, and only chosen tokens have weight 1. A chosen token is replaced by `mask_id` with
    `mask_replace_prob`, by a random id with `random_replace_prob`, and otherwise stays as it is. `next_token_loss` of
    this batch is then the sum of `-log p` of the chosen tokens' ids, and their number. The random numbers of a token
    are a function of the key, the row's number in `examples` and the token's index in the row: they are the same in any
    batch and on any mesh. The targets and weights of the given batch, which are those of next tokens, are not read.

    Args:
        batch: Ids, packed or not.
        key: A new key for each step: `jax.random.fold_in(key, step)`.
        mask_id: The id that replaces a masked token.
        vocab: The number of ids among which a random id is drawn.
        mlm_probability: The probability that a token is chosen; ModernBERT's is 0.3, BERT's was 0.15.
        mask_replace_prob: The share of the chosen tokens that `mask_id` replaces.
        random_replace_prob: The share of the chosen tokens that an id drawn evenly from all replaces.
        special_ids: Ids that are never chosen, such as those that begin and end a text.
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

    def draw(key: Array) -> tuple[Array, Array, Array]:
        choice_key, replacement_key, id_key = jax.random.split(key, 3)
        draw_uniform = lambda key: jax.random.uniform(key, (), jnp.float32)
        random_id = jax.random.randint(id_key, (), 0, vocab, ids.dtype)
        return draw_uniform(choice_key), draw_uniform(replacement_key), random_id

    choice, replacement, random_id = jax.vmap(jax.vmap(draw))(token_keys(key, jnp.asarray(batch.examples), row_indices))
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

    It refuses models with an encoder, which reads a second text, models whose tokens attend to later tokens, and models
    with fewer than `seq` learned positions. Recurrent mixers read in order and are never refused.
    """
    if model.start is not None:
        raise ValueError(
            "check_next_token(model): the model's encoder reads a text beside the one that is written; train it on "
            "pairs, by eqformer.data.batch_pairs(sources, targets)."
        )
    for path, mixer in nn.named_modules(model, nn.Mixer):
        attends = mixer.facts().attends
        if attends is not None and not attends.mask.is_causal:
            raise ValueError(
                f"check_next_token(model): in {path} a token attends to later ones, so the model learns nothing from "
                "predicting the next token; train it on masked tokens, by eqformer.training.mask_tokens(batch, ...)."
            )
    if (longest := model.max_seq) is not None and seq > longest:
        raise ValueError(
            f"check_next_token(model, seq={seq}): the model has {longest} learned positions; give it more (max_seq), "
            "or rows of at most as many."
        )


# Losses of whole rows: the nats of all tokens of a row together determine the weight of each token.

RowFunction = Callable[[Float[Array, "batch"], Batch], tuple[Array | float, Array | float]]
"""(each row's nats, batch) -> (sum, count)"""


@checked
def row_nats(
    model: PyTree,
    batch: Batch,
    *,
    chunk: int | None = None,
    tokens: Tokens | None = None,
    vocabulary: _cross_entropy.Vocabulary | None = None,
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
        vocabulary: _cross_entropy.Vocabulary | None = None,
    ) -> tuple[Float[Array, ""], CountOrAux]:
        tokens = batch_tokens(batch, key) if tokens is None else tokens
        hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
        nats, devices = _sum_row_nats(model, hidden, batch, chunk, vocabulary)

        def apply_function(nats: Array) -> tuple[Array, Array]:
            total, count = function(nats, batch)
            return vary_like(jnp.asarray(total, nats.dtype), nats), jnp.asarray(count, nats.dtype)

        (value, count), slopes = jax.value_and_grad(apply_function, has_aux=True)(nats)
        weights = jnp.asarray(batch.weights)
        weights = weights.astype(slopes.dtype) * slopes[:, None]
        nats_fn = _cross_entropy.token_nats if vocabulary is None else vocabulary.nats
        total, _ = _cross_entropy.cross_entropy(
            model.unembed, hidden, jnp.asarray(batch.targets), weights, chunk=chunk, nats=nats_fn
        )
        # The gradient is that of this device's tokens; the value is divided among the devices that share a row.
        total = total + jax.lax.stop_gradient(value.astype(total.dtype) / devices - total)
        return add_aux_losses(total, count / devices, aux)

    return loss_fn


def _sum_row_nats(
    model: PyTree, hidden: Array, batch: Batch, chunk: int | None, vocabulary: _cross_entropy.Vocabulary | None
) -> tuple[Float[Array, "batch"], int]:
    """Return each row's nats, and the number of devices over which a row is split."""
    targets, weights = jnp.asarray(batch.targets), jnp.asarray(batch.weights)
    nats_fn = _cross_entropy.token_nats if vocabulary is None else vocabulary.nats
    nats = _cross_entropy.chunked_token_nats(
        model.unembed, jax.lax.stop_gradient(hidden), targets, chunk=chunk, nats=nats_fn
    )
    return sum_rows(jax.lax.stop_gradient(_cross_entropy.apply_weights(nats, weights)))
