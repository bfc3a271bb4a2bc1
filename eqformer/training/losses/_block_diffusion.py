"""Block diffusion (BD3-LM, arXiv:2503.09573): noise for the blocks of a batch, and the loss of the masked tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from ... import nn
from ..._annotation_checks import checked
from ..._shapes import Batch
from ...nn import token_keys, Tokens
from ._loss_aux import CountOrAux, LossAux
from ._token_losses import next_token_loss
from ._vocabulary import Vocabulary


@checked
def noise_blocks(
    batch: Batch,
    key: Key[Array, ""],
    *,
    mask_id: int,
    block: int,
    least_noise: float = 1e-3,
    answers_only: bool = False,
) -> Batch:
    """Return a batch for `block_diffusion_loss`: each row has noisy copies of its tokens, and then the tokens.

    Each block of `block` tokens of a document has its own time `t`, uniform between `least_noise` and 1. In the copies,
    each token of the block is replaced by `mask_id` with probability `t`, independently of other tokens. This is
    absorbing noise with the linear schedule of LLaDA (arXiv:2502.09992). The target of a masked token is its original
    id, with weight `1 / t`; other tokens have weight 0. A copy has its token's position, and the segment `~s` if the
    token's segment is `s` (see `nn.Mask`). The random numbers of a token are a function of the key, the row's number in
    `examples` and the token's index in the row, so they are the same in any batch and on any mesh. The targets of
    `batch` are not read. The weights of `batch` are read only with `answers_only`. In the returned batch, the target of
    a clean token is its id if the loss counts the token, and else -1.

    Args:
        batch: Ids, packed or not.
        key: A new key for each step: `jax.random.fold_in(key, step)`.
        mask_id: The id that replaces a masked token.
        block: Tokens of a block, as in the masks of the model, `nn.block_causal(block)`.
        least_noise: The smallest time `t`; weights are at most `1 / least_noise`.
        answers_only: Whether only the tokens that the batch trains on, such as the answers of conversations, are masked
            and counted: each token whose previous token has a weight above 0. All other copies stay clean.
    """
    if not 0 < least_noise < 1 or block < 1 or mask_id < 0:
        raise ValueError(
            f"noise_blocks(mask_id={mask_id}, block={block}, least_noise={least_noise}): mask_id must be an id, block "
            "counts tokens and must be at least 1, and least_noise must be above 0 and below 1."
        )
    if batch.source_ids is not None:
        raise ValueError("noise_blocks(batch): the batch has a source for an encoder; pass rows of one text each.")
    ids = jnp.asarray(batch.ids)
    indices = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    positions = indices if batch.positions is None else jnp.asarray(batch.positions)
    segments = jnp.zeros_like(indices) if batch.segments is None else jnp.asarray(batch.segments)

    def sample(stream: int, token_indices: Array) -> Float[Array, "batch seq"]:
        keys = token_keys(jax.random.fold_in(key, stream), jnp.asarray(batch.examples), token_indices)
        return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))(keys)

    # `positions % block` is a token's index in its block, so that all tokens of a block draw the random number of the
    # block's first token.
    times = least_noise + (1 - least_noise) * sample(0, indices - positions % block)
    is_counted = jnp.ones(ids.shape, bool)
    if answers_only:
        is_counted = jnp.pad(jnp.asarray(batch.weights)[:, :-1] > 0, [(0, 0), (1, 0)])
    is_masked = (sample(1, indices) < times) & (positions >= 0) & is_counted
    weights = jnp.where(is_masked, 1 / times, 0).astype(jnp.asarray(batch.weights).dtype)
    noisy_ids = jnp.where(is_masked, jnp.asarray(mask_id, ids.dtype), ids)

    def join(copies: Array, tokens: Array) -> Array:
        return jnp.concatenate([copies, tokens], axis=1)

    types = None if batch.types is None else jnp.asarray(batch.types)
    return dataclasses.replace(
        batch,
        ids=join(noisy_ids, ids),
        targets=join(ids, jnp.where(is_counted, ids, -1)),
        weights=join(weights, jnp.zeros_like(weights)),
        positions=join(positions, positions),
        segments=join(~segments, segments),
        documents=None,
        types=None if types is None else join(types, types),
    )


@checked
def block_diffusion_loss(
    model: PyTree,
    batch: Batch,
    key: Key[Array, ""] | None = None,
    *,
    chunk: int | None = None,
    z_loss: float = 0.0,
    tokens: Tokens | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[Float[Array, ""], CountOrAux]:
    """Return the sum of the masked tokens' nats, each divided by its block's time, and the number of tokens.

    The number counts all tokens, masked or not; after `noise_blocks(answers_only=True)`, it counts the tokens of
    answers. The sum divided by the number estimates an upper bound of the nats of a token: the negative ELBO of BD3-LM,
    equation 8. The bias of the estimate vanishes as `least_noise` approaches 0.

    Args:
        model: A model with masks of blocks, as `next_token_loss` takes it.
        batch: A batch of `noise_blocks`.
        key: The key of dropout and router noise; None: no dropout, no router noise, no dropped choices of experts.
        chunk: The number of tokens whose logits exist at once; None: see `chunk_size`.
        z_loss: As in `cross_entropy`.
        tokens: The tokens of the batch; None: `batch_tokens(batch, key)`. A plan passes each device's tokens.
        vocabulary: The reader of logits whose vocabulary a plan splits over devices; None: logits of all ids.
    """
    if batch.segments is None or batch.positions is None:
        raise ValueError("block_diffusion_loss(batch): the batch has no noisy copies; make it by noise_blocks(batch).")
    total, loss_aux = next_token_loss(
        model, batch, key, chunk=chunk, z_loss=z_loss, tokens=tokens, vocabulary=vocabulary
    )
    is_counted = (jnp.asarray(batch.segments) >= 0) & (jnp.asarray(batch.positions) >= 0)
    count = jnp.sum(is_counted & (jnp.asarray(batch.targets) >= 0), dtype=total.dtype)
    if isinstance(loss_aux, LossAux):
        return total, dataclasses.replace(loss_aux, count=count)
    return total, count


def check_block_diffusion(model: nn.LanguageModel) -> int:
    """Return the block size of a model that can learn by block diffusion; raise a `ValueError` for other models."""
    if (block := nn.block_of(model)) is None:
        raise ValueError(
            "check_block_diffusion(model): the masks of the model have no blocks, or blocks of several sizes; give "
            "each attention the mask nn.block_causal(block), as nn.with_blocks(model, block) does."
        )
    if not nn.only_attends(model):
        raise ValueError(
            "check_block_diffusion(model): only models whose mixers all attend, without an encoder, learn by block "
            "diffusion; a recurrence would read the noisy copies as part of the text."
        )
    return block
