"""`score_tokens`: the probabilities that a model gives to known continuations."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._shapes import next_power_of_two
from ..nn import block_of, dims, right_padded, Source, Tokens, with_source
from ._model import depends_on_length, Model
from ._prompts import BUCKET, check_ids, round_up
from ._transforms import likeliest_ids


CHUNK = 64
"""Tokens of each row whose logits are in memory at once."""
MIN_SHARING_GAIN = 1.5
"""Continuations share the cache of a common prompt if sharing divides the tokens to read by at least this factor."""
Ids = Sequence[int]
Item = TypeVar("Item")
ScoreTables = tuple[
    Float[Array, "batch new"], Bool[Array, "batch new"], Int[Array, "batch new top"], Float[Array, "batch new top"]
]
"""The fields of `TokenScores`, for the rows of a batch."""


class TokenScores(NamedTuple):
    """Scores of each id of a continuation, given the prompt and the ids before it."""

    log_probabilities: Float[np.ndarray, "tokens"]
    """The log-probability of each id, in nats."""
    is_greedy: Bool[np.ndarray, "tokens"]
    """Whether the id has the largest logit, so that greedy decoding would sample it."""
    alternative_ids: Int[np.ndarray, "tokens top"]
    """For each id, the `alternatives` likeliest ids at its position."""
    alternative_log_probabilities: Float[np.ndarray, "tokens top"]


def score_tokens(
    model: Model,
    prompts: Sequence[Ids],
    continuations: Sequence[Ids],
    *,
    batch_size: int | None = None,
    alternatives: int = 0,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[TokenScores]:
    """Return the scores of each id of each continuation, after the prompt and the ids before it.

    Rows of like lengths are read together. A prompt that several continuations share is read once, if this saves a
    third of the tokens, and copies of its cache are continued. Sizes are rounded up to multiples of 64, so that other
    rows mostly reuse the compiled programs. A model with an encoder reads the prompts with its encoder. Raises a
    `ValueError` for a model of block diffusion, for prompts and continuations that are empty or hold unknown ids, for
    more tokens than learned positions, and for numbers that are out of range.

    Args:
        model: The model, which must have a cache.
        prompts: The ids before each continuation.
        continuations: The ids to score.
        batch_size: Maximum number of rows that are read at once; None: all.
        alternatives: Number of likely ids that are reported beside each id.
        progress: A function that is called with the number of scored rows and the number of all rows.
    """
    if block_of(model) is not None:
        raise ValueError(
            "score_tokens(model): with masks of blocks a token sees later tokens, so a model of block diffusion gives "
            "no probability of a token after the tokens before it; call score_blocks, which estimates a bound."
        )
    check_scored_rows("score_tokens", model, prompts, continuations)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"score_tokens(batch_size={batch_size}): a batch must have at least 1 row.")
    if alternatives < 0:
        raise ValueError(f"score_tokens(alternatives={alternatives}): at least 0 likely ids can be reported.")
    alternatives = min(alternatives, model.vocab)
    groups = _group_by_prompt(model, prompts, continuations)
    score_batch = _score_rows if len(groups) == len(prompts) else _score_groups
    scores: dict[int, TokenScores] = {}
    longest_first = sorted(groups, key=lambda group: -_row_length(group, prompts, continuations))
    batches = _split_batches(longest_first, batch_size or len(prompts))
    full_size = batch_size if len(batches) > 1 else None
    for batch in batches:  # A batch is a list of groups, and a group is a list of row numbers.
        prompt_ids = [prompts[group[0]] for group in batch]
        new_ids = [[continuations[row] for row in group] for group in batch]
        scored = score_batch(model, prompt_ids, new_ids, full_size, alternatives)
        scores |= dict(zip(itertools.chain(*batch), scored, strict=True))
        progress(len(scores), len(prompts))
    return [scores[number] for number in range(len(prompts))]


def _group_by_prompt(model: Model, prompts: Sequence[Ids], continuations: Sequence[Ids]) -> list[list[int]]:
    """Return groups of rows with the same prompt, which share the cache of the prompt.

    Each row is a group of its own if sharing would save too little, if the model has an encoder, or if rotary
    frequencies depend on a row's whole length, so that rows of different lengths have different caches.
    """
    apart = [[number] for number in range(len(prompts))]
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(number)
    new_tokens = sum(map(len, continuations))
    total, shared_total = sum(map(len, prompts)) + new_tokens, sum(map(len, groups)) + new_tokens
    if model.start is not None or total < MIN_SHARING_GAIN * shared_total:
        return apart
    longest = max((_row_length(group, prompts, continuations) for group in groups.values()), default=0)
    if depends_on_length(model, longest):
        return apart
    return list(groups.values())


def _row_length(group: Sequence[int], prompts: Sequence[Ids], continuations: Sequence[Ids]) -> int:
    """Return the length of the longest row of a group, whose rows have the same prompt."""
    return len(prompts[group[0]]) + max(len(continuations[row]) for row in group)


def _split_batches(groups: Sequence[Sequence[int]], batch_size: int) -> list[list[Sequence[int]]]:
    """Split groups of rows into batches of at most `batch_size` rows; a larger group is split too."""
    batches: list[list[Sequence[int]]] = []
    free = 0
    for group in groups:
        for start in range(0, len(group), batch_size):
            rows = group[start : start + batch_size]
            if len(rows) > free:
                batches.append([])
                free = batch_size
            batches[-1].append(rows)
            free -= len(rows)
    return batches


def _score_rows(
    model: Model, prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]], full_size: int | None, top: int
) -> list[TokenScores]:
    """Score the only continuation of each prompt in one pass over both; the batch is padded to `full_size` rows."""
    count = len(prompts)
    prompts = repeat_last(prompts, full_size)
    new = repeat_last([continuation for (continuation,) in continuations], full_size)
    starts: Sequence[Ids] = prompts if model.start is None else [[model.start]] * len(prompts)
    # The model does not read the last id, since nothing is predicted after it.
    ids, lengths = _pad([[*start, *row[:-1]] for start, row in zip(starts, new)], model.max_seq)
    source = None if model.start is None else _pad(prompts, None)
    targets, counts = _pad(new, None)
    first = jnp.asarray([len(start) - 1 for start in starts], jnp.int32)
    return _split_scores(_score_pass(model, ids, lengths, source, first, targets, top), counts)[:count]


def _score_groups(
    model: Model, prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]], full_size: int | None, top: int
) -> list[TokenScores]:
    """Score several continuations of each prompt: read the prompts first, then the rows with copies of their caches.

    With `full_size`, the batch is padded to `full_size` rows, and the prompts to a power of two, so that few programs
    are compiled.
    """
    new = [row for rows in continuations for row in rows]
    owner = np.repeat(np.arange(len(prompts)), [len(rows) for rows in continuations]).tolist()
    count = len(new)
    new, owner = repeat_last(new, full_size), repeat_last(owner, full_size)
    prompts = repeat_last(prompts, None if full_size is None else next_power_of_two(len(prompts)))
    ids, lengths = _pad(prompts, model.max_seq)
    targets, counts = _pad(new, None)
    # The model does not read the last id. If each row has one id, the model reads nothing after the prompts.
    inputs, input_lengths = _pad([row[:-1] for row in new], model.max_seq)
    capacity = ids.shape[1] + inputs.shape[1]
    capacity = capacity if model.max_seq is None else min(capacity, model.max_seq)
    scored = _score_after_caches(
        model, ids, lengths, jnp.asarray(owner, jnp.int32), inputs, input_lengths, targets, capacity, top
    )
    return _split_scores(scored, counts)[:count]


def repeat_last(rows: Sequence[Item], size: int | None) -> list[Item]:
    """Return the rows, with the last row repeated until there are `size` rows."""
    return [*rows, *[rows[-1]] * ((size or 0) - len(rows))]


def _split_scores(tables: ScoreTables, counts: Int[Array, "rows"]) -> list[TokenScores]:
    arrays = [np.asarray(table) for table in tables]
    return [TokenScores(*(array[row, :count] for array in arrays)) for row, count in enumerate(np.asarray(counts))]


@eqx.filter_jit
def _score_pass(
    model: Model,
    ids: Int[Array, "batch seq"],
    lengths: Int[Array, "batch"],
    source: tuple[Int[Array, "batch kv_seq"], Int[Array, "batch"]] | None,
    first: Int[Array, "batch"],
    targets: Int[Array, "batch new"],
    top: int,
) -> ScoreTables:
    """Return the scores of the targets, with `top` alternatives.

    The output at index `first` of each row predicts the row's first target.
    """
    batch, seq = ids.shape
    tokens, capacity = right_padded(lengths, seq), seq
    if source is not None:
        source_ids, source_lengths = source
        tokens = with_source(tokens, Source(source_ids, right_padded(source_lengths, source_ids.shape[1])))
        capacity = max(seq, source_ids.shape[1])
    hidden, _, _ = model.encode(ids, tokens, model.init_cache(batch, capacity))
    # Positions beyond a row's last token give scores that the caller drops.
    positions = jnp.minimum(first[:, None] + jnp.arange(targets.shape[1], dtype=jnp.int32), seq - 1)
    return _score_hidden(model, jnp.take_along_axis(hidden, positions[..., None], axis=1), targets, top)


@eqx.filter_jit
def _score_after_caches(
    model: Model,
    ids: Int[Array, "prompts seq"],
    lengths: Int[Array, "prompts"],
    owner: Int[Array, "batch"],
    inputs: Int[Array, "batch new_seq"],
    input_lengths: Int[Array, "batch"],
    targets: Int[Array, "batch new"],
    capacity: int,
    top: int,
) -> ScoreTables:
    """Return the scores of the targets, with `top` alternatives; row `i` continues the prompt `owner[i]`.

    Row `i` reads `input_lengths[i]` ids after the prompt. The output at the prompt's last token predicts the first
    target of the row.
    """
    hidden, cache, _ = model.encode(ids, right_padded(lengths, ids.shape[1]), model.init_cache(len(ids), capacity))
    last_hidden = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[owner]
    if not inputs.shape[1]:
        return _score_hidden(model, jnp.pad(last_hidden, ((0, 0), (0, targets.shape[1] - 1), (0, 0))), targets, top)
    order = jnp.arange(inputs.shape[1], dtype=jnp.int32)
    positions = jnp.where(order < input_lengths[:, None], lengths[owner][:, None] + order, -1)
    hidden, _, _ = model.encode(inputs, Tokens(positions), take_rows_of_cache(cache, owner))
    hidden = jnp.concatenate([last_hidden, hidden], axis=1)[:, : targets.shape[1]]
    missing = targets.shape[1] - hidden.shape[1]
    return _score_hidden(model, jnp.pad(hidden, ((0, 0), (0, missing), (0, 0))), targets, top)


def take_rows_of_cache(cache: PyTree, rows: Int[Array, "rows"]) -> PyTree:
    """Return a cache whose rows are copies of the given rows of `cache`."""

    def take(names: str, x: Array) -> Array:
        return jnp.take(x, rows, axis=names.split().index("batch"))

    return jax.tree.map(take, dims(cache), cache)


def _score_hidden(
    model: Model, hidden: Float[Array, "batch new embed"], targets: Int[Array, "batch new"], top: int
) -> ScoreTables:
    """Return the scores of the targets, by the hidden vectors that predict them."""
    batch = len(targets)

    def score_chunk(chunk: tuple[Float[Array, "batch chunk embed"], Int[Array, "batch chunk"]]) -> ScoreTables:
        hidden, targets = chunk
        logits = model.unembed(hidden.reshape(-1, hidden.shape[-1]))
        # Only some ids need log-probabilities, so no second array of the whole vocabulary is computed.
        log_normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        target_logits = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=-1)
        scores = (target_logits - log_normalizer).reshape(targets.shape)
        is_greedy = likeliest_ids(logits).reshape(targets.shape) == targets
        largest_logits, ids = jax.lax.top_k(logits, top)
        likeliest = largest_logits - log_normalizer
        shape = (*targets.shape, top)
        return scores, is_greedy, ids.reshape(shape), likeliest.reshape(shape)

    split = lambda x: jnp.moveaxis(x.reshape(batch, -1, CHUNK, *x.shape[2:]), 1, 0)
    tables = jax.lax.map(score_chunk, (split(hidden), split(targets)))
    scores, is_greedy, ids, likeliest = (jnp.moveaxis(x, 0, 1).reshape(*targets.shape, *x.shape[3:]) for x in tables)
    return scores, is_greedy, ids, likeliest


def _pad(rows: Sequence[Ids], limit: int | None) -> tuple[Int[Array, "batch seq"], Int[Array, "batch"]]:
    """Return rows of ids as one array, padded to a multiple of `BUCKET` or to the `limit`, and their lengths."""
    lengths = [len(row) for row in rows]
    width = round_up(max(lengths), BUCKET)
    ids = np.zeros((len(rows), width if limit is None else min(width, limit)), np.int32)
    for padded, row in zip(ids, rows):
        padded[: len(row)] = row
    return jnp.asarray(ids), jnp.asarray(lengths, jnp.int32)


def check_scored_rows(
    function: str, model: Model, prompts: Sequence[Ids], continuations: Sequence[Ids], *, reads_last: bool = False
) -> None:
    """Raise a `ValueError`, which names the `function`, for prompts and continuations that the model cannot read.

    `reads_last` says whether the model also reads the last id of a continuation.
    """
    call = f"{function}(model, prompts, continuations)"
    if len(prompts) != len(continuations):
        raise ValueError(
            f"{call}: each prompt has one continuation, but there are {len(prompts)} prompts and {len(continuations)} "
            "continuations; give as many of both."
        )
    for number, (prompt, continuation) in enumerate(zip(prompts, continuations)):
        for name, row in (("prompt", prompt), ("continuation", continuation)):
            if not len(row):
                raise ValueError(f"{call}: {name} {number} has 0 ids; give at least 1.")
            check_ids(f"{call}: {name} {number}", np.asarray(row), model.vocab)
        total = len(continuation) + (len(prompt) if model.start is None else 1)
        if model.max_seq is not None and total - (not reads_last) > model.max_seq:
            raise ValueError(
                f"{call}: row {number} has {total} ids and the model reads all{'' if reads_last else ' but the last'}, "
                f"but the model has only {model.max_seq} learned positions; shorten the prompt."
            )
