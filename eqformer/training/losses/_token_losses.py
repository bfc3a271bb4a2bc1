"""Whether a model learns by predicting the next token of a text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from ... import nn
from ..._array_checks import checked
from ..._shapes import Batch
from ...nn import in_float32, packed_in_order, positions_like, Source, token_keys, Tokens, with_source
from ._chunked_logits import sum_over_chunks
from ._cross_entropy import cast_tables_once, count_chunks, cross_entropy, token_nats, Vocabulary, weighed
from ._loss_aux import add_aux_losses


def check_next_token(model: nn.LanguageModel, *, seq: int) -> None:
    """Raise a `ValueError` if a model (or its shapes) does not learn from predicting the next of `seq` tokens.

    That is one with an encoder, which reads another text, one whose tokens see later ones, and one with fewer learned
    positions. Recurrent mixers read in order, and always learn.
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
                f"check_next_token(model): in {path} a token sees later ones, so nothing is learned by predicting the "
                "next; train it on hidden ones, by eqformer.training.mask_tokens(batch, ...)."
            )
    if (longest := model.max_seq) is not None and seq > longest:
        raise ValueError(
            f"check_next_token(model, seq={seq}): the model has {longest} learned positions; give it more (max_seq), "
            "or rows of at most as many."
        )


@checked
def batch_tokens(batch: Batch, key: Key[Array, ""] | None = None) -> Tokens:
    """The `Tokens` that layers read: positions, documents, a source and, given a `key`, a random key for each token.

    A token's random key depends on its example and its place in the row, not on its position, since positions restart
    in each packed document.
    """

    def keys_of(shape: tuple[int, ...]) -> Key[Array, "batch seq"] | None:
        places = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        return None if key is None else token_keys(key, jnp.asarray(batch.examples), places)

    tokens = _tokens(batch.positions, batch.segments, keys_of(batch.ids.shape), batch.ids.shape, batch.documents)
    if batch.source_ids is None:
        return tokens
    shape = batch.source_ids.shape
    read = _tokens(batch.source_positions, batch.source_segments, keys_of(shape), shape, None)
    return with_source(tokens, Source(jnp.asarray(batch.source_ids), read))


def _tokens(positions: Any, segments: Any, keys: Any, shape: tuple[int, ...], documents: int | None) -> Tokens:
    if positions is None:
        return positions_like(shape, keys)
    positions = jnp.asarray(positions)
    if segments is None:
        return Tokens(positions, None, keys)
    segments = jnp.asarray(segments)
    if documents is None:
        return Tokens(positions, segments, keys)
    return packed_in_order(positions, segments, keys, documents=documents)


@checked
def mask_tokens(
    batch: Batch,
    key: Key[Array, ""],
    *,
    mask_id: int,
    vocab: int,
    rate: float = 0.3,
    hidden: float = 0.8,
    replaced: float = 0.1,
    spared: Sequence[int] = (),
) -> Batch:
    """A batch of masked-language modelling (Devlin et al. 2018, arXiv:1810.04805, section 3.1) from one of whole texts.

    Each token that is no padding is chosen with the probability `rate`, by itself: its target is the id that stood
    there, and it alone has weight 1. Of the chosen, a part is `hidden`, one is `replaced`, and the rest stays as it is.
    `next_token_loss` of this batch is then the sum of `-log p` of the chosen tokens' own ids, and their number. What is
    drawn for a token is a function of the key, its row's number in `examples` and its place in the row: the same in any
    batch and on any mesh. The batch's own targets and weights, which are of next tokens, are not read.

    Args:
        batch: Ids, packed or not.
        key: A new one for each step: `jax.random.fold_in(key, step)`.
        mask_id: The id that hides a token.
        vocab: How many ids there are, of which one takes the place of a token that is replaced.
        rate: The probability that a token is chosen; ModernBERT's is 0.3, BERT's was 0.15.
        hidden: The part of the chosen that `mask_id` hides.
        replaced: The part that any id, drawn evenly, takes the place of.
        spared: Ids that are never chosen, such as those that begin and end a text.
    """
    if not 0 < rate <= 1 or min(hidden, replaced) < 0 or hidden + replaced > 1:
        raise ValueError(
            f"mask_tokens(rate={rate}, hidden={hidden}, replaced={replaced}): rate is a probability above 0, and the "
            "parts of the chosen add up to at most 1; give such numbers."
        )
    if not 0 <= mask_id < vocab:
        raise ValueError(f"mask_tokens(mask_id={mask_id}, vocab={vocab}): ids are from 0 to {vocab - 1}.")
    ids = jnp.asarray(batch.ids)
    places = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)

    def draw(key: Array) -> tuple[Array, Array, Array]:
        chance, what, other = jax.random.split(key, 3)
        of_unit = lambda key: jax.random.uniform(key, (), jnp.float32)
        return of_unit(chance), of_unit(what), jax.random.randint(other, (), 0, vocab, ids.dtype)

    chance, what, other = jax.vmap(jax.vmap(draw))(token_keys(key, jnp.asarray(batch.examples), places))
    is_chosen = (chance < rate) & ~jnp.isin(ids, jnp.asarray(spared, ids.dtype))
    if batch.positions is not None:
        is_chosen &= jnp.asarray(batch.positions) >= 0
    given = jnp.where(what < hidden, jnp.asarray(mask_id, ids.dtype), jnp.where(what < hidden + replaced, other, ids))
    weights = is_chosen.astype(jnp.asarray(batch.weights).dtype)
    return dataclasses.replace(batch, ids=jnp.where(is_chosen, given, ids), targets=ids, weights=weights)


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
) -> tuple[Float[Array, ""], Any]:
    """The sum over a batch of the nats of each target, and the weight of those tokens.

    Targets are next tokens, as the loaders' are, or hidden ones (`mask_tokens`).

    The auxiliary losses of routed layers (load balancing, z-loss of the router) are added to the sum, and the weight is
    then a `LossAux`, which holds the layers' `Aux` too.

    Args:
        model: Has `encode(ids, tokens) -> (hidden, cache, aux)` and `unembed(hidden) -> logits`.
        batch: Ids, targets and weights.
        key: For dropout and routers; None is inference: no dropout, no router noise, no dropped choices of experts.
        chunk: The tokens whose logits are there at once; None: see `chunk_size`.
        z_loss: As in `cross_entropy`.
        tokens: Replaces what `batch_tokens` makes of the batch; a mesh that splits rows passes its own.
        vocabulary: Reads logits that a mesh splits.
    """
    tokens = batch_tokens(batch, key) if tokens is None else tokens
    hidden, _, aux = model.encode(jnp.asarray(batch.ids), tokens)
    targets, weights = jnp.asarray(batch.targets), jnp.asarray(batch.weights)
    nats = token_nats if vocabulary is None else vocabulary.nats
    total, count = cross_entropy(model.unembed, hidden, targets, weights, chunk=chunk, z_loss=z_loss, nats=nats)
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
    """`nats`, `correct` (targets with the largest logit) and `count`, each summed over a batch, without dropout."""
    tokens = batch_tokens(batch) if tokens is None else tokens
    hidden, _, _ = model.encode(jnp.asarray(batch.ids), tokens)
    flat = (hidden.reshape(-1, hidden.shape[-1]), *(jnp.asarray(x).reshape(-1) for x in (batch.targets, batch.weights)))
    sizes = count_chunks(model.unembed, flat[0], chunk)
    unembed = cast_tables_once(model.unembed, flat[0][: sizes[1]])

    def of_chunk(piece):
        logits = in_float32(unembed(piece[0]))
        weights = piece[2].astype(logits.dtype)
        nats, _ = (token_nats if vocabulary is None else vocabulary.nats)(logits, piece[1])
        is_first = (_is_first if vocabulary is None else vocabulary.is_first)(logits, piece[1])
        sums = {"nats": nats, "correct": is_first.astype(logits.dtype)}
        found = {name: jnp.sum(weighed(each, weights)) for name, each in sums.items()}
        return found | {"count": jnp.sum(weights)}, None

    return sum_over_chunks(of_chunk, flat, sizes)[0]


def _is_first(logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]) -> Bool[Array, "tokens"]:
    return jnp.argmax(logits, axis=-1).astype(targets.dtype) == targets
