"""`generate_blocks`: continue prompts with a model of block diffusion, which denoises one block after another."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from .._annotation_checks import checked
from .._shapes import Array as AnyArray
from ..nn import block_of, only_attends, Tokens, with_causal_masks
from ._decode import draw_ids, ProgramSizes, SamplingState
from ._generate import check_logits, copy_to_host, Generation, make_sampling_state
from ._model import Model
from ._prompts import explain_full_memory, pad_prompts, round_up
from ._transforms import History, Transform


BlockOrder = Literal["confidence", "random"]


class DenoisingRule(eqx.Module):
    """The rule by which masked tokens of a block are filled."""

    mask_id: int = eqx.field(static=True)
    """The id of a masked token, which is never sampled."""
    steps: int = eqx.field(static=True)
    """At most this many passes fill a block; the last of these passes fills all tokens that are still masked."""
    order: BlockOrder = eqx.field(static=True)
    """`"confidence"`: the tokens of the highest probability are filled first; `"random"`: tokens in random order."""
    threshold: Float[Array, ""]
    """The probability above which a sampled token is filled at once."""


class BlockRows(eqx.Module):
    """State of the loop over blocks: all ids before `starts` are final, and their keys and values are cached."""

    ids: Int[Array, "batch seq"]
    starts: Int[Array, "batch"]
    """The position of the first token of each row's next block."""
    lengths: Int[Array, "batch"]
    """Number of ids of the prompt and of the text so far."""
    limits: Int[Array, "batch"]
    """The length at which a row ends at the latest."""
    done: Bool[Array, "batch"]
    logits_are_numbers: Bool[Array, "batch"]
    has_candidates: Bool[Array, "batch"]
    cache: PyTree


@checked
def generate_blocks(
    model: Model,
    prompts: Sequence[object] | Int[AnyArray, "batch seq"],
    *,
    max_new_tokens: int,
    mask_id: int,
    steps: int | None = None,
    order: BlockOrder = "confidence",
    threshold: float = 1.0,
    lengths: Sequence[int] | Int[AnyArray, "batch"] | None = None,
    transforms: Sequence[Transform] | Transform = (),
    end_of_text: int | Sequence[int] | None = None,
    examples: Sequence[int] | Int[AnyArray, "batch"] | None = None,
    cache_dtype: str | None = None,
    key: Key[Array, ""],
) -> Generation:
    """Continue each prompt by up to `max_new_tokens` tokens with a model whose masks are `nn.block_causal`.

    Each new block begins with all of its tokens masked. If the prompt's last block is incomplete, it is the first
    block: the prompt's tokens stay, and the rest is masked. In a pass, the model gives every masked token a
    distribution, from which an id is sampled. Some of the masked tokens are then filled with their ids and change no
    more; the others stay masked. With `m` masked tokens and `k` passes left, a pass fills `m / k` tokens (rounded up),
    by default the tokens of the highest probability. It also fills all tokens whose sampled id has a probability above
    `threshold`. Probabilities are computed after the transforms; with a greedy transform, they are the model's own. By
    default this is low-confidence remasking (LLaDA, arXiv:2502.09992); with a threshold below 1, it is SDAR's dynamic
    rule (arXiv:2510.06303). One more pass over a finished block caches its keys and values. A prompt is read in one
    piece.

    A row ends with the first sampled id of `end_of_text` in a finished block, or after `max_new_tokens`. A row's
    samples depend on `key`, on the row's number in `examples`, on positions and on the pass, but not on other rows. The
    result has no log-probabilities. Raises the errors of `generate`, and a `ValueError` for a model without blocks of
    one size, with recurrences or with an encoder, for settings that are out of range, and for a last block beyond the
    model's learned positions.

    Args:
        model: A model of block diffusion, `nn.with_blocks(model, block)`; all blocks must have the same size.
        prompts: A list of lists of ids, or an integer array whose rows have `lengths` ids each.
        max_new_tokens: Maximum number of tokens to generate for a row.
        mask_id: The id of a masked token, with which the model was trained.
        steps: Maximum number of passes that fill a block; None: the number of its tokens. With fewer passes, a pass
            fills several tokens.
        order: `"confidence"` fills the tokens of the highest probability first, `"random"` tokens in random order.
        threshold: The probability above which a sampled token is filled at once; with 1, `steps` alone determines how
            many tokens a pass fills.
        lengths: Ids in each row of an array; None: all.
        transforms: Changes of the logits before an id is sampled; `sampling(temperature=0)` is greedy. Transforms that
            read earlier ids read only the ids before the block.
        end_of_text: The id, or ids, that end a row; the sampled end-of-text id stays in the row.
        examples: A number for each row; `key` and this number determine the row's random samples. None: 0, 1, ...
        cache_dtype: The dtype of keys and values in the cache; None: the compute dtype.
        key: The key of all random samples.
    """
    block = block_of(model)
    if block is None:
        raise ValueError(
            "generate_blocks(model): the masks of the model have no blocks, or blocks of several sizes; pass a model "
            "of block diffusion, or call generate."
        )
    if not only_attends(model):
        raise ValueError(
            "generate_blocks(model): only models whose mixers all attend, without an encoder, fill masked tokens; a "
            "recurrence would keep the masked tokens of each pass in its state; pass another model."
        )
    steps = block if steps is None else steps
    if steps < 1 or not 0 <= mask_id < model.vocab or not 0 < threshold <= 1:
        raise ValueError(
            f"generate_blocks(mask_id={mask_id}, steps={steps}, threshold={threshold}): mask_id must be one of the "
            f"model's {model.vocab} ids, steps must be at least 1, and threshold above 0 and at most 1."
        )
    padded = pad_prompts(model, prompts, lengths, max_new_tokens, None, cache_dtype)
    sampling = make_sampling_state(model, len(padded.ids), transforms, end_of_text, examples, key)
    # The model reads all tokens of the last block, so the cache must have room for whole blocks.
    width = round_up(padded.sizes.width, block)
    if model.max_seq is not None and round_up(int(np.max(padded.lengths)) + max_new_tokens, block) > model.max_seq:
        raise ValueError(
            f"generate_blocks(max_new_tokens={max_new_tokens}): the last block of {block} tokens exceeds the model's "
            f"{model.max_seq} learned positions; ask for fewer tokens."
        )
    rule = DenoisingRule(mask_id, steps, order, jnp.asarray(threshold, jnp.float32))
    sizes = padded.sizes._replace(width=width, capacity=min(width, model.max_seq or width))
    limit = jnp.asarray(max_new_tokens, jnp.int32)
    with explain_full_memory("generate_blocks", model, padded):
        rows = _generate_rows(model, padded.ids, padded.lengths, limit, sampling, rule, block, sizes)
        rows = copy_to_host(dataclasses.replace(rows, cache=None))
    check_logits(rows.logits_are_numbers, rows.has_candidates)
    longest = int(np.max(rows.lengths))
    return Generation(rows.ids[:, :longest], np.asarray(padded.lengths), rows.lengths, None)


@eqx.filter_jit
def _generate_rows(
    model: Model,
    ids: Int[Array, "batch prompt"],
    lengths: Int[Array, "batch"],
    max_new_tokens: Int[Array, ""],
    sampling: SamplingState,
    rule: DenoisingRule,
    block: int,
    sizes: ProgramSizes,
) -> BlockRows:
    """Read the whole blocks of the prompts, then denoise blocks until each row has ended."""
    batch, prompt = ids.shape
    # `init_cache` refuses masks of blocks. With `rollback`, the cache of a window has slots for a block that is
    # written anew.
    cache = with_causal_masks(model).init_cache(batch, sizes.capacity, sizes.cache_dtype, rollback=block)
    starts = lengths // block * block
    indices = jnp.arange(prompt, dtype=jnp.int32)
    positions = jnp.where(indices < starts[:, None], indices, -1)
    _, cache, _ = model.encode(ids, Tokens(positions), cache)
    buffer = jnp.full((batch, sizes.width), rule.mask_id, jnp.int32)
    is_prompt = jnp.arange(sizes.width, dtype=jnp.int32) < lengths[:, None]
    copied = jax.lax.dynamic_update_slice(buffer, ids[:, : sizes.width].astype(jnp.int32), (0, 0))
    flags = jnp.ones(batch, bool)
    new_ids = jnp.where(is_prompt, copied, rule.mask_id)
    rows = BlockRows(new_ids, starts, lengths, lengths + max_new_tokens, ~flags, flags, flags, cache)
    step = lambda rows: denoise_block(model, rows, sampling, rule, block)
    return dataclasses.replace(jax.lax.while_loop(lambda rows: ~jnp.all(rows.done), step, rows), cache=None)


def denoise_block(model: Model, rows: BlockRows, sampling: SamplingState, rule: DenoisingRule, block: int) -> BlockRows:
    """Fill the next block of each row that is not done, and store its keys and values."""
    columns = rows.starts[:, None] + jnp.arange(block, dtype=jnp.int32)
    index = (jnp.arange(len(columns))[:, None], columns)
    # Rows that are done count as padding, which is not written to the cache.
    tokens = Tokens(jnp.where(rows.done[:, None], -1, columns))
    ids = rows.ids.at[index].get(mode="fill", fill_value=rule.mask_id)
    history = History(rows.ids, rows.starts)
    masked = (columns >= rows.lengths[:, None]) & ~rows.done[:, None]

    def fill(carry: tuple) -> tuple:
        ids, masked, cache, number, are_numbers, have_candidates = carry
        # A pass writes keys and values of masked tokens, too; the next pass overwrites them.
        hidden, cache, _ = model.encode(ids, tokens, cache)
        logits = model.unembed(hidden)
        new_ids, probabilities, priorities = _sample(logits, columns, number, history, sampling, rule)
        count = -(-jnp.sum(masked, axis=1) // (rule.steps - number))
        is_filled = masked & (_rank(jnp.where(masked, priorities, -1.0)) < count[:, None])
        is_filled |= masked & (probabilities > rule.threshold)
        are_numbers &= ~jnp.any(jnp.isnan(logits) & masked[..., None], axis=(1, 2))
        have_candidates &= ~jnp.any((new_ids < 0) & masked, axis=1)
        ids = jnp.where(is_filled, jnp.maximum(new_ids, 0), ids)
        return ids, masked & ~is_filled, cache, number + 1, are_numbers, have_candidates

    first = ids, masked, rows.cache, jnp.zeros((), jnp.int32), rows.logits_are_numbers, rows.has_candidates

    def is_masked(carry: tuple) -> Bool[Array, ""]:
        """Whether a row has masked tokens that can be filled: its logits are numbers, and some ids are possible."""
        _, masked, _, _, are_numbers, have_candidates = carry
        return jnp.any(masked & (are_numbers & have_candidates)[:, None])

    filled = jax.lax.while_loop(is_masked, fill, first)
    new_ids, _, cache, _, are_numbers, have_candidates = filled
    _, cache, _ = model.encode(new_ids, tokens, cache)
    ends = jnp.any(new_ids[..., None] == sampling.end_of_text[:, None], axis=-1) & masked
    has_end = jnp.any(ends, axis=1)
    stop = jnp.where(has_end, rows.starts + jnp.argmax(ends, axis=1) + 1, rows.starts + block)
    lengths = jnp.where(rows.done, rows.lengths, jnp.minimum(stop, rows.limits)).astype(jnp.int32)
    return BlockRows(
        ids=rows.ids.at[index].set(jnp.where(rows.done[:, None], ids, new_ids), mode="drop"),
        starts=jnp.where(rows.done, rows.starts, rows.starts + block),
        lengths=lengths,
        limits=rows.limits,
        done=rows.done | has_end | (lengths >= rows.limits) | ~are_numbers | ~have_candidates,
        logits_are_numbers=are_numbers,
        has_candidates=have_candidates,
        cache=cache,
    )


def _sample(
    logits: Float[Array, "batch block vocab"],
    columns: Int[Array, "batch block"],
    number: Int[Array, ""],
    history: History,
    sampling: SamplingState,
    rule: DenoisingRule,
) -> tuple[Int[Array, "batch block"], Float[Array, "batch block"], Float[Array, "batch block"]]:
    """Sample an id for each token; return the ids, their probabilities, and the priorities by which tokens are filled.

    The id is -1 if no id can be sampled. The probabilities are computed after the transforms; with a greedy transform,
    they are the model's own probabilities, without the mask id.
    """
    logits = jnp.where(jnp.arange(logits.shape[-1]) == rule.mask_id, -jnp.inf, logits)
    transformed = jax.vmap(lambda logits: sampling.transforms(logits, history), 1, 1)(logits)
    keys = sampling.fold_in(number).token_keys(columns)
    new_ids = draw_ids(transformed, None if sampling.transforms.is_greedy else keys)
    # After a greedy transform, the probability of the only id left would always be 1.
    scored = logits if sampling.transforms.is_greedy else transformed
    indices = jnp.maximum(new_ids, 0)[..., None]
    probabilities = jnp.take_along_axis(jax.nn.softmax(scored, axis=-1), indices, axis=-1)[..., 0]
    if rule.order == "confidence":
        return new_ids, probabilities, probabilities
    draw_priority = lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (), probabilities.dtype)
    return new_ids, probabilities, jax.vmap(jax.vmap(draw_priority))(keys)


def _rank(priorities: Float[Array, "batch block"]) -> Int[Array, "batch block"]:
    """Return each token's place by falling priority; of tokens with equal priority, the first comes first."""
    return jnp.argsort(jnp.argsort(-priorities, axis=1, stable=True), axis=1)
