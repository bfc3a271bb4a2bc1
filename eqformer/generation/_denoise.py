"""Reading prompts and denoising blocks as pure functions of arrays, which `generate_blocks` and engines compile."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..nn import Tokens, with_causal_masks
from ._decode import draw_ids, RowState, SamplingState
from ._model import Model
from ._transforms import History


BlockOrder = Literal["confidence", "random"]


class DenoisingRule(eqx.Module):
    """The rule by which masked tokens of a block are filled."""

    mask_id: int = eqx.field(static=True)
    """The id of a masked token, which is never sampled."""
    steps: int = eqx.field(static=True)
    """At most this many passes fill a block; the last of these passes fills all tokens that are still masked."""
    block: int = eqx.field(static=True)
    """The number of tokens of a block."""
    order: BlockOrder = eqx.field(static=True)
    """`"confidence"`: the tokens of the highest probability are filled first; `"random"`: tokens in random order."""
    threshold: Float[Array, ""]
    """The probability above which a sampled token is filled at once."""


class BlockRows(RowState):
    """State of the loop over blocks: all ids before `starts` are final, and their keys and values are cached."""

    starts: Int[Array, "batch"]
    """The position of the first token of each row's next block."""
    is_greedy: Bool[Array, "batch"]
    """Whether the row's transforms leave the likeliest id only, so that probabilities are the model's own."""


def read_whole_blocks(
    model: Model,
    ids: Int[Array, "batch seq"],
    lengths: Int[Array, "batch"],
    limits: Int[Array, "batch"],
    rule: DenoisingRule,
    *,
    capacity: int,
    dtype: str | None,
    read: int,
    is_greedy: Bool[Array, "batch"],
) -> BlockRows:
    """Read the complete blocks among each row's first `lengths` ids, and return the rows.

    The model reads the first `read` tokens of all rows in one piece. The caches have room for `capacity` tokens. Ids
    from `lengths` on are replaced by the mask id.
    """
    batch, width = ids.shape
    starts = lengths // rule.block * rule.block
    indices = jnp.arange(min(read, width), dtype=jnp.int32)
    positions = jnp.where(indices < starts[:, None], indices, -1)
    cache = init_block_cache(model, batch, capacity, dtype, rule.block)
    _, cache, _ = model.encode(ids[:, : len(indices)], Tokens(positions), cache)
    masked_ids = jnp.where(jnp.arange(width, dtype=jnp.int32) < lengths[:, None], ids, rule.mask_id)
    return BlockRows(
        ids=masked_ids,
        starts=starts,
        lengths=lengths,
        limits=limits,
        done=jnp.zeros(batch, bool),
        is_greedy=is_greedy,
        logits_are_numbers=jnp.ones(batch, bool),
        has_candidates=jnp.ones(batch, bool),
        cache=cache,
    )


def init_block_cache(model: Model, batch: int, capacity: int, dtype: str | None, block: int) -> PyTree:
    """Return an empty cache for a model whose masks have blocks, which `init_cache` refuses.

    Each pass over a block overwrites the keys and values of the pass before, so the cache of a sliding window has room
    for one more block (`rollback`).
    """
    return with_causal_masks(model).init_cache(batch, capacity, dtype, rollback=block)


def denoise_block(model: Model, rows: BlockRows, sampling: SamplingState, rule: DenoisingRule) -> BlockRows:
    """Fill the next block of each row that is not done, and store its keys and values."""
    block = rule.block
    columns = rows.starts[:, None] + jnp.arange(block, dtype=jnp.int32)
    index = (jnp.arange(len(columns))[:, None], columns)
    # Rows that are done count as padding, which is not written to the cache.
    tokens = Tokens(jnp.where(rows.done[:, None], -1, columns))
    ids = rows.ids.at[index].get(mode="fill", fill_value=rule.mask_id)
    history = History(rows.ids, rows.starts)
    masked = (columns >= rows.lengths[:, None]) & ~rows.done[:, None]

    def fill(carry: tuple) -> tuple:
        ids, masked, cache, pass_index, are_numbers, have_candidates = carry
        # A pass stores keys and values of masked tokens, too; the next pass overwrites these keys and values.
        logits, cache = read_block(model, ids, tokens, cache)
        new_ids, probabilities, priorities = _sample(
            logits, columns, pass_index, history, sampling, rule, rows.is_greedy
        )
        is_filled = choose_filled(masked, priorities, probabilities, pass_index, rule)
        are_numbers &= ~jnp.any(jnp.isnan(logits) & masked[..., None], axis=(1, 2))
        have_candidates &= ~jnp.any((new_ids < 0) & masked, axis=1)
        ids = jnp.where(is_filled, jnp.maximum(new_ids, 0), ids)
        return ids, masked & ~is_filled, cache, pass_index + 1, are_numbers, have_candidates

    def can_fill(carry: tuple) -> Bool[Array, ""]:
        """Return whether any row has masked tokens, logits that are numbers, and ids that can be sampled."""
        _, masked, _, _, are_numbers, have_candidates = carry
        return jnp.any(masked & (are_numbers & have_candidates)[:, None])

    before_passes = ids, masked, rows.cache, jnp.zeros((), jnp.int32), rows.logits_are_numbers, rows.has_candidates
    new_ids, _, cache, _, are_numbers, have_candidates = jax.lax.while_loop(can_fill, fill, before_passes)
    # The last pass stored keys and values of tokens that were still masked, so one more pass reads the filled block.
    _, cache, _ = model.encode(new_ids, tokens, cache)
    is_end_of_text = jnp.any(new_ids[..., None] == sampling.end_of_text[:, None], axis=-1) & masked
    has_end = jnp.any(is_end_of_text, axis=1)
    stop = jnp.where(has_end, rows.starts + jnp.argmax(is_end_of_text, axis=1) + 1, rows.starts + block)
    lengths = jnp.where(rows.done, rows.lengths, jnp.minimum(stop, rows.limits)).astype(jnp.int32)
    return BlockRows(
        ids=rows.ids.at[index].set(jnp.where(rows.done[:, None], ids, new_ids), mode="drop"),
        starts=jnp.where(rows.done, rows.starts, rows.starts + block),
        lengths=lengths,
        limits=rows.limits,
        is_greedy=rows.is_greedy,
        done=rows.done | has_end | (lengths >= rows.limits) | ~are_numbers | ~have_candidates,
        logits_are_numbers=are_numbers,
        has_candidates=have_candidates,
        cache=cache,
    )


def _sample(
    logits: Float[Array, "batch block vocab"],
    columns: Int[Array, "batch block"],
    pass_index: Int[Array, ""],
    history: History,
    sampling: SamplingState,
    rule: DenoisingRule,
    is_greedy: Bool[Array, "batch"],
) -> tuple[Int[Array, "batch block"], Float[Array, "batch block"], Float[Array, "batch block"]]:
    """Sample an id for each token; return the ids, their probabilities, and the priorities by which tokens are filled.

    The id is -1 if no id can be sampled. The probabilities are computed after the transforms; with a greedy transform,
    they are the model's own probabilities, without the mask id.
    """
    logits = jnp.where(jnp.arange(logits.shape[-1]) == rule.mask_id, -jnp.inf, logits)
    transformed = jax.vmap(lambda logits: sampling.transforms(logits, history), 1, 1)(logits)
    keys = sampling.fold_in(pass_index).token_keys(columns)
    new_ids = draw_ids(transformed, None if sampling.transforms.is_greedy else keys)
    # After a greedy transform, the probability of the only id left would always be 1.
    scored = jnp.where(is_greedy[:, None, None], logits, transformed)
    indices = jnp.maximum(new_ids, 0)[..., None]
    chosen_logits = jnp.take_along_axis(scored, indices, axis=-1)
    probabilities = jnp.exp(chosen_logits - jax.nn.logsumexp(scored, axis=-1, keepdims=True))[..., 0]
    if rule.order == "confidence":
        return new_ids, probabilities, probabilities
    draw_priority = lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (), probabilities.dtype)
    return new_ids, probabilities, jax.vmap(jax.vmap(draw_priority))(keys)


def read_block(
    model: Model, ids: Int[Array, "batch block"], tokens: Tokens, cache: PyTree
) -> tuple[Float[Array, "batch block vocab"], PyTree]:
    """Return the logits of a block, and the cache with the block's keys and values.

    They overwrite the block's keys and values of an earlier pass.
    """
    hidden, cache, _ = model.encode(ids, tokens, cache)
    return model.unembed(hidden.reshape(-1, hidden.shape[-1])).reshape(*ids.shape, -1), cache


def choose_filled(
    masked: Bool[Array, "batch block"],
    priorities: Float[Array, "batch block"],
    probabilities: Float[Array, "batch block"],
    pass_index: Int[Array, ""],
    rule: DenoisingRule,
) -> Bool[Array, "batch block"]:
    """Return which masked tokens a pass fills: an equal share of those left for each remaining pass, and likely tokens.

    The share has the tokens of highest priority. Tokens whose probability is above the threshold are filled, too. A
    priority that is NaN counts as 0, so that NaN logits do not leave tokens masked for ever.
    """
    count = -(-jnp.sum(masked, axis=1, dtype=jnp.int32) // (rule.steps - pass_index))
    priorities = jnp.where(jnp.isnan(priorities), 0, priorities)
    is_first = rank(jnp.where(masked, priorities, -1.0)) < count[:, None]
    return masked & (is_first | (probabilities > rule.threshold.astype(probabilities.dtype)))


def rank(priorities: Float[Array, "batch block"]) -> Int[Array, "batch block"]:
    """Return each token's place by falling priority; of tokens with equal priority, the first comes first."""
    return jnp.argsort(jnp.argsort(-priorities, axis=1, stable=True), axis=1).astype(jnp.int32)
