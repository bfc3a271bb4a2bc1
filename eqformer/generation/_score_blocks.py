"""`score_blocks`: a bound on the log-probability that a model of block diffusion gives to known continuations."""

import math
import zlib
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from ..nn import token_keys, Tokens
from ._blocks import check_block_model, make_rule
from ._decode import log_probabilities_of
from ._denoise import choose_filled, DenoisingRule, rank, read_block, read_whole_blocks
from ._model import Model
from ._prompts import BUCKET, round_up
from ._score_tokens import check_scored_rows, Ids, repeat_last, TokenScores
from ._transforms import likeliest_ids


class _ScoredRows(eqx.Module):
    """Prompts with their continuations, one after another in each row, and the key of their random numbers."""

    ids: Int[Array, "batch seq"]
    prompt_lengths: Int[Array, "batch"]
    lengths: Int[Array, "batch"]
    """Number of ids of the prompt and of the continuation."""
    examples: Int[Array, "batch"]
    """A number for each row, which determines the row's random numbers together with the key."""
    key: Key[Array, ""]


def score_blocks(
    model: Model,
    prompts: Sequence[Ids],
    continuations: Sequence[Ids],
    *,
    mask_id: int,
    samples: int = 32,
    steps: int | None = None,
    threshold: float = 1.0,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[TokenScores]:
    """Return the scores of each id of each continuation by a model of block diffusion.

    The sum of a continuation's log-probabilities is the model's evidence lower bound (ELBO) on the log-probability of
    the continuation after its prompt. The bound is a sum over blocks. If `n` tokens of a block belong to the
    continuation, the term of the block is the mean over `l = 1, ..., n` and over all choices of `l` of these tokens, of
    `n / l` times the log-probabilities of the chosen tokens. The model gives these log-probabilities after it has read
    all earlier blocks and the block with the chosen tokens masked. The softmax includes the mask id, as in training.
    The term equals minus the integral over noise times in BD3-LM (arXiv:2503.09573, equation 8). For a single block it
    is the estimator of LLaDA (arXiv:2502.09992, section 2.4). The log-probability of one id is the id's part of the
    sum. It is not a probability by itself.

    If a block has at most `samples` choices (`2**block - 1`), the model reads every choice, and the bound is exact.
    Otherwise, `samples` random choices estimate the bound without bias, and their `l` are spread evenly over 1 to `n`.
    The random numbers depend only on `seed`, the prompt, the position and the number of the choice, so continuations of
    one prompt are compared under the same choices.

    `is_greedy` says whether greedy denoising fills in the id. Each block is denoised on its own: the continuation's
    tokens of the block are masked, and all tokens before them are those of the given text. Tokens of the highest
    probability are filled first, as by `generate_blocks`; tokens after the end of the continuation do not exist. If the
    model gives NaN logits, the log-probabilities are NaN.

    Raises a `ValueError` for a model that `generate_blocks` refuses, for prompts and continuations that are empty or
    hold unknown ids, for more tokens than learned positions, and for numbers that are out of range.

    Args:
        model: A model of block diffusion, `nn.with_blocks(model, block)`; all blocks must have the same size.
        prompts: The ids before each continuation.
        continuations: The ids to score.
        mask_id: The id of a masked token, with which the model was trained.
        samples: Maximum number of choices of masked tokens that the model reads for each block.
        steps: Maximum number of passes of greedy denoising that fill a block; None: the number of its tokens.
        threshold: The probability above which greedy denoising fills a token at once.
        seed: The seed of all random choices.
        batch_size: Maximum number of rows that are read at once; None: all.
        progress: A function that is called with the number of scored rows and the number of all rows.
    """
    block = check_block_model("score_blocks", model)
    rule = make_rule("score_blocks", model, block, mask_id, steps, "confidence", threshold)
    for name, value in {"samples": samples, "batch_size": batch_size}.items():
        if value is not None and value < 1:
            raise ValueError(f"score_blocks({name}={value}): {name} must be at least 1.")
    check_scored_rows("score_blocks", model, prompts, continuations, reads_last=True)
    lengths = [len(prompt) + len(new) for prompt, new in zip(prompts, continuations)]
    longest_first = sorted(range(len(prompts)), key=lambda row: -lengths[row])
    size = batch_size or max(1, len(prompts))
    # If there are several batches, the last one is padded, so that all have one shape.
    full_size = size if len(prompts) > size else None
    scores: dict[int, TokenScores] = {}
    for start in range(0, len(prompts), size):
        row_indices = longest_first[start : start + size]
        padded = repeat_last(row_indices, full_size)
        rows = _join_rows([prompts[row] for row in padded], [continuations[row] for row in padded], block, seed)
        prompt_width = min(round_up(max(len(prompts[row]) for row in row_indices), BUCKET), rows.ids.shape[1])
        log_probs, is_greedy = map(np.asarray, _score_batch(model, rows, rule, samples, prompt_width))
        for index, row in enumerate(row_indices):
            new = slice(len(prompts[row]), lengths[row])
            no_ids, no_scores = (np.zeros((len(continuations[row]), 0), dtype) for dtype in (np.int32, log_probs.dtype))
            scores[row] = TokenScores(log_probs[index, new], is_greedy[index, new], no_ids, no_scores)
        progress(len(scores), len(prompts))
    return [scores[number] for number in range(len(prompts))]


def _join_rows(prompts: Sequence[Ids], continuations: Sequence[Ids], block: int, seed: int) -> _ScoredRows:
    """Return prompts and continuations as padded rows of complete blocks."""
    prompt_lengths = [len(prompt) for prompt in prompts]
    lengths = [len(prompt) + len(new) for prompt, new in zip(prompts, continuations)]
    ids = np.zeros((len(lengths), round_up(round_up(max(lengths), BUCKET), block)), np.int32)
    for padded, prompt, new in zip(ids, prompts, continuations):
        padded[: len(prompt) + len(new)] = [*prompt, *new]
    # A checksum of the prompt, so that rows with equal prompts have equal random numbers, in any batch.
    examples = [zlib.crc32(np.asarray(prompt, np.int32).tobytes()) & 0x7FFFFFFF for prompt in prompts]
    as_array = lambda numbers: jnp.asarray(numbers, jnp.int32)
    return _ScoredRows(
        jnp.asarray(ids), as_array(prompt_lengths), as_array(lengths), as_array(examples), jax.random.key(seed)
    )


@eqx.filter_jit
def _score_batch(
    model: Model, rows: _ScoredRows, rule: DenoisingRule, samples: int, prompt_width: int
) -> tuple[Float[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """Return each token's part of the bound, and whether greedy denoising fills in the token's id.

    `prompt_width` is the number of tokens of the padded prompts.
    """
    batch, width = rows.ids.shape
    first = read_whole_blocks(
        model,
        rows.ids,
        rows.prompt_lengths,
        rows.lengths,
        rule,
        capacity=min(width, model.max_seq or width),
        dtype=None,
        read=prompt_width,
        is_greedy=jnp.ones(batch, bool),
    )

    def score_next(carry: tuple) -> tuple:
        starts, cache, log_probs, is_greedy = carry
        index = jnp.arange(batch)[:, None], starts[:, None] + jnp.arange(rule.block, dtype=jnp.int32)
        new_log_probs, new_is_greedy, cache = _score_block(model, rows, starts, cache, rule, samples)
        log_probs = log_probs.at[index].add(new_log_probs, mode="drop")
        return starts + rule.block, cache, log_probs, is_greedy.at[index].set(new_is_greedy, mode="drop")

    dtype = eqx.filter_eval_shape(_score_block, model, rows, first.starts, first.cache, rule, samples)[0].dtype
    tables = jnp.zeros((batch, width), dtype), jnp.zeros((batch, width), bool)
    has_tokens = lambda carry: jnp.any(carry[0] < rows.lengths)
    _, _, log_probs, is_greedy = jax.lax.while_loop(has_tokens, score_next, (first.starts, first.cache, *tables))
    return log_probs, is_greedy


def _score_block(
    model: Model, rows: _ScoredRows, starts: Int[Array, "batch"], cache: PyTree, rule: DenoisingRule, samples: int
) -> tuple[Float[Array, "batch block"], Bool[Array, "batch block"], PyTree]:
    """Score the block that begins at `starts` in each row; return the scores, and the cache with the block stored."""
    columns = starts[:, None] + jnp.arange(rule.block, dtype=jnp.int32)
    exists = columns < rows.lengths[:, None]
    ids = rows.ids.at[jnp.arange(len(starts))[:, None], columns].get(mode="fill", fill_value=0)
    is_scored = exists & (columns >= rows.prompt_lengths[:, None])
    tokens = Tokens(jnp.where(exists, columns, -1))

    def score_choice(cache: PyTree, choice: Int[Array, ""]) -> tuple[PyTree, Float[Array, "batch block"]]:
        is_masked, weights = _choose_masked(is_scored, columns, rows, choice, samples)
        logits, cache = read_block(model, jnp.where(is_masked, rule.mask_id, ids), tokens, cache)
        id_logits = jnp.take_along_axis(logits, ids[..., None], axis=-1)
        log_probs = log_probabilities_of(id_logits, logits)[..., 0]
        return cache, jnp.where(is_masked, weights[:, None].astype(log_probs.dtype) * log_probs, 0)

    def fill(carry: tuple) -> tuple:
        ids, masked, cache, pass_index = carry
        logits, cache = read_block(model, ids, tokens, cache)
        logits = jnp.where(jnp.arange(logits.shape[-1]) == rule.mask_id, -jnp.inf, logits)
        probabilities = jnp.exp(jnp.max(logits, axis=-1) - jax.nn.logsumexp(logits, axis=-1))
        is_filled = choose_filled(masked, probabilities, probabilities, pass_index, rule)
        return jnp.where(is_filled, likeliest_ids(logits), ids), masked & ~is_filled, cache, pass_index + 1

    count = min(samples, 2**rule.block - 1)
    cache, log_probs = jax.lax.scan(score_choice, cache, jnp.arange(count, dtype=jnp.int32))
    before_passes = jnp.where(is_scored, rule.mask_id, ids), is_scored, cache, jnp.zeros((), jnp.int32)
    greedy_ids, _, cache, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1]), fill, before_passes)
    # The last pass read masked tokens, so one more pass stores keys and values of the true block.
    _, cache, _ = model.encode(ids, tokens, cache)
    return jnp.sum(log_probs, axis=0), is_scored & (greedy_ids == ids), cache


def _choose_masked(
    is_scored: Bool[Array, "batch block"],
    columns: Int[Array, "batch block"],
    rows: _ScoredRows,
    choice: Int[Array, ""],
    samples: int,
) -> tuple[Bool[Array, "batch block"], Float[Array, "batch"]]:
    """Return the tokens that the choice of this number masks, and the weight of each masked token's log-probability."""
    block = is_scored.shape[1]
    count = jnp.sum(is_scored, axis=1, dtype=jnp.int32)
    if 2**block - 1 <= samples:
        # Bit `i` of `choice + 1` says whether the `i`-th scored token is masked. A block with fewer scored tokens has
        # fewer choices.
        bits = (choice + 1) >> jnp.maximum(jnp.cumsum(is_scored, axis=1, dtype=jnp.int32) - 1, 0)
        is_masked = is_scored & (bits % 2 == 1) & (choice + 1 < 2**count)[:, None]
        masked_count = jnp.sum(is_masked, axis=1, dtype=jnp.int32)
        sizes = range(block + 1)
        weights = [[1 / max(1, chosen * math.comb(scored, chosen)) for chosen in sizes] for scored in sizes]
        return is_masked, jnp.asarray(weights)[count, masked_count]

    def draw(stream: int | Array, indices: Int[Array, "batch choices"]) -> Float[Array, "batch choices"]:
        keys = token_keys(jax.random.fold_in(rows.key, stream), rows.examples, indices)
        return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))(keys)

    # Choices are spread evenly over the interval from 0 to 1, from a random offset on, so that few choices suffice.
    shares = (draw(0, columns[:, :1])[:, 0] + choice.astype(jnp.float32) / samples) % 1
    masked_count = jnp.clip(1 + (shares * count.astype(shares.dtype)).astype(jnp.int32), 1, jnp.maximum(count, 1))
    ranks = rank(jnp.where(is_scored, -draw(choice + 1, columns), -2.0))
    return is_scored & (ranks < masked_count[:, None]), count / masked_count / samples
