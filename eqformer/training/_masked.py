"""Rows of which some tokens are hidden, for encoders to find."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from .._array_checks import checked
from .._shapes import Batch
from ..nn import token_keys


@checked
def masked_batch(
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
            f"masked_batch(rate={rate}, hidden={hidden}, replaced={replaced}): rate is a probability above 0, and the "
            "parts of the chosen add up to at most 1; give such numbers."
        )
    if not 0 <= mask_id < vocab:
        raise ValueError(f"masked_batch(mask_id={mask_id}, vocab={vocab}): ids are from 0 to {vocab - 1}.")
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
