"""`generate`: continue a batch of prompts. `stream`: yield the ids of one text while they are generated."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Bool, Float, Int, Key, PyTree

from .._annotation_checks import checked
from .._shapes import Array
from ._decode import decode_until, prefill, ProgramSizes, Rows, SamplingState
from ._model import Model
from ._prompts import explain_full_memory, pad_prompts, PaddedPrompts
from ._speculative import add_draft, draft_counts, DraftCounts, DraftStatistics, make_decode_step, SpeculativeModel
from ._transforms import chain, Transform


ROUND = 16
"""Tokens of each row that are sampled before the host is asked whether a row has ended."""


class Generation(eqx.Module):
    """Prompts with their continuations in one array; the ids of a row are `ids[row, :lengths[row]]`."""

    ids: Int[np.ndarray, "batch seq"]
    prompt_lengths: Int[np.ndarray, "batch"]
    """Number of ids in each row before the first new token."""
    lengths: Int[np.ndarray, "batch"]
    """Number of ids in each row, including the sampled ids."""
    log_probabilities: Float[np.ndarray, "batch seq"] | None
    """Log-probabilities of the sampled ids in nats, or None if the call did not ask for them.

    They are computed before the transforms, or after the transforms if the call asked for `"transformed"`. Prompt and
    padding have 0, so that the sum of a row is the log-probability of its continuation.
    """
    draft: DraftStatistics | None = None
    """Counts of the draft's proposals; None without a draft."""

    def new_ids(self) -> list[list[int]]:
        """Return the ids that were sampled for each prompt, including a sampled end-of-text id."""
        spans = zip(self.ids, self.prompt_lengths, self.lengths)
        return [row[start:stop].tolist() for row, start, stop in spans]


@checked
def generate(
    model: Model,
    prompts: Sequence[object] | Int[Array, "batch seq"],
    *,
    max_new_tokens: int,
    lengths: Sequence[int] | Int[Array, "batch"] | None = None,
    transforms: Sequence[Transform] | Transform = (),
    end_of_text: int | Sequence[int] | None = None,
    log_probabilities: bool | Literal["transformed"] = False,
    examples: Sequence[int] | Int[Array, "batch"] | None = None,
    prefill_chunk: int | None = None,
    cache_dtype: str | None = None,
    draft: Model | str | None = None,
    draft_tokens: int = 4,
    ends_row: Callable[[int, list[int]], bool] | None = None,
    key: Key[jax.Array, ""],
) -> Generation:
    """Continue each prompt by up to `max_new_tokens` tokens, sampled from the model's transformed distribution.

    A row ends with the first id of `end_of_text` that is sampled for it; decoding ends when all rows have ended. A
    row's samples depend on `key`, on the row's number in `examples` and on the positions of its tokens, but not on
    other rows. A model with an encoder (T5) reads the prompts with its encoder; its rows begin with the model's start
    id, which counts as the prompt.

    Without `ends_row`, prefill and decoding are one compiled program. The program is compiled for a number of rows, and
    for sizes that are rounded up to multiples of 64. Calls with other prompts, other numbers of new tokens or other
    temperatures therefore mostly reuse the program.

    Raises a `ValueError` for prompts that are empty or hold unknown ids, for more tokens than learned positions, for a
    draft of another vocabulary, for an unknown value of `log_probabilities`, for transforms that leave a row no token,
    and for NaN logits.

    Args:
        model: The model, which must have a cache.
        prompts: A list of lists of ids, or an integer array whose rows have `lengths` ids each.
        max_new_tokens: Maximum number of tokens to generate for a row.
        lengths: Ids in each row of an array; None: all.
        transforms: Changes of the logits before an id is sampled; `sampling(temperature=0)` is greedy. Without
            transforms, ids are sampled from the model's distribution.
        end_of_text: The id, or ids, that end a row; the sampled end-of-text id stays in the row.
        log_probabilities: Whether to return the model's log-probabilities of the sampled ids; `"transformed"` returns
            the log-probabilities after the transforms, in the distribution that the ids were sampled from.
        examples: A number for each row; `key` and this number determine the row's random samples. None: 0, 1, ... The
            same prompt with the same number and key gets the same samples in any batch.
        prefill_chunk: Number of prompt tokens that the model reads at once. Longer prompts are read in equal chunks, so
            that activations do not grow with the prompt. None: at most 1,024. Results do not depend on the chunk. An
            encoder reads the prompt in one piece.
        cache_dtype: The dtype of keys and values in the cache; None: the compute dtype. `"int8"` and `"fp8"` round keys
            and values, with a scale for each token and head.
        draft: A smaller model of the same vocabulary that proposes several tokens for `model` to check at once, by the
            rule of Leviathan et al. (2023): greedy text stays the same, and samples keep their distribution. `"mtp"` is
            the model's own multi-token predictor.
        draft_tokens: Tokens that the draft proposes at a time.
        ends_row: A function that receives a row's number and its new ids so far, and returns whether the row has ended,
            for example at a string. The function is called after every 16 tokens, so a row may have up to 15 ids after
            its end, and more with a draft. None: rows end at `end_of_text` only, and the host waits until all rows have
            ended.
        key: The key of all random samples.
    """
    if log_probabilities not in (False, True, "transformed"):
        raise ValueError(
            f"generate(log_probabilities={log_probabilities!r}): log_probabilities must be False, True or "
            "'transformed'."
        )
    padded = pad_prompts(model, prompts, lengths, max_new_tokens, prefill_chunk, cache_dtype)
    sampling = make_sampling_state(model, len(padded.ids), transforms, end_of_text, examples, key)
    if log_probabilities == "transformed":
        if draft is not None:
            raise ValueError(
                "generate(log_probabilities='transformed', draft=...): with a draft, log-probabilities are known "
                "before the transforms only; leave out the draft, or pass log_probabilities=True."
            )
        sampling = dataclasses.replace(sampling, scores_transformed=True)
    model = add_draft(model, draft, draft_tokens, int(np.max(padded.lengths)) + max_new_tokens)
    limit, scores = _as_traced_int(max_new_tokens), bool(log_probabilities)
    start = functools.partial(_start_rows, model, padded.ids, padded.lengths, limit, sampling, scores)
    with explain_full_memory("generate", model, padded):
        if ends_row is None:
            rows, counts = start(padded.sizes, None)
        else:
            rows, _ = start(padded.sizes, ROUND)
            rows, counts = _decode_rounds(ends_row, rows, padded.initial_lengths, model, sampling)
        rows, counts = copy_to_host((dataclasses.replace(rows, cache=None), counts))
    check_logits(rows.logits_are_numbers, rows.has_candidates)
    longest = int(np.max(rows.lengths))
    return Generation(
        rows.ids[:, :longest],
        np.asarray(padded.initial_lengths),
        rows.lengths,
        None if rows.log_probabilities is None else rows.log_probabilities[:, :longest],
        None if counts is None else _to_statistics(counts),
    )


def copy_to_host(tree: PyTree) -> PyTree:
    """Copy arrays to the host; an array that this process has only in part is gathered from all processes."""

    def gather(x: jax.Array) -> Array:
        is_complete = x.is_fully_addressable or x.is_fully_replicated
        return x if is_complete else multihost_utils.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(gather, tree))


@eqx.filter_jit
def _start_rows(
    model: Model,
    ids: Int[jax.Array, "batch prompt"],
    lengths: Int[jax.Array, "batch"],
    max_new_tokens: Int[jax.Array, ""],
    sampling: SamplingState,
    log_probabilities: bool,
    sizes: ProgramSizes,
    new_tokens: int | None,
) -> tuple[Rows, DraftCounts | None]:
    """Read the prompts and sample tokens until each row has ended, or has `new_tokens` new tokens.

    Returns the rows, and the draft's counts. Without `new_tokens`, all rows are complete, and are returned without
    caches, because nothing reads the caches any more. With `new_tokens`, the rows keep their caches, and the counts are
    None.
    """
    rows = prefill(model, ids, lengths, max_new_tokens, sampling, log_probabilities=log_probabilities, sizes=sizes)
    step = make_decode_step(model, sampling)
    if new_tokens is None:
        rows = decode_until(step, rows, rows.limits)
        return dataclasses.replace(rows, cache=None), draft_counts(rows)
    return decode_until(step, rows, rows.limits - max_new_tokens + new_tokens), None


def _decode_rounds(
    ends_row: Callable[[int, list[int]], bool],
    rows: Rows,
    initial_lengths: Int[jax.Array, "batch"],
    model: Model,
    sampling: SamplingState,
) -> tuple[Rows, DraftCounts | None]:
    """Sample `ROUND` tokens at a time until each row is done, or `ends_row` has ended the row."""
    starts = np.asarray(initial_lengths)
    while True:
        ids, row_lengths, done = copy_to_host((rows.ids, rows.lengths, rows.done))
        ended = np.array(
            [
                bool(is_done) or ends_row(number, ids[number, start:length].tolist())
                for number, (start, length, is_done) in enumerate(zip(starts, row_lengths, done))
            ]
        )
        if ended.all():
            return rows, draft_counts(rows)
        rows = _continue_rows((model, sampling, jnp.asarray(ended)), rows)


@eqx.filter_jit(donate="all-except-first")
def _continue_rows(fixed: tuple[Model, SamplingState, Bool[jax.Array, "batch"]], rows: Rows) -> Rows:
    """Sample up to `ROUND` more tokens for each row that has not ended; the rows are donated."""
    model, sampling, ended = fixed
    rows = dataclasses.replace(rows, done=rows.done | ended)
    return decode_until(make_decode_step(model, sampling), rows, rows.lengths + ROUND)


def _to_statistics(counts: DraftCounts) -> DraftStatistics:
    """Copy the counts of a draft to the host."""
    return DraftStatistics(*map(np.asarray, (counts.steps, counts.proposed, counts.accepted, counts.added)))


def make_sampling_state(
    model: Model,
    batch: int,
    transforms: Sequence[Transform] | Transform,
    end_of_text: int | Sequence[int] | None,
    examples: Sequence[int] | Int[Array, "batch"] | None,
    key: Key[jax.Array, ""],
) -> SamplingState:
    """Check the sampling arguments of a call against the model and collect them."""
    ends = np.atleast_1d(np.asarray(_NO_ID if end_of_text is None else end_of_text, np.int32))
    if end_of_text is not None and np.any((ends < 0) | (ends >= model.vocab)):
        raise ValueError(
            f"generate(end_of_text={end_of_text}): the model's {model.vocab} ids are 0 to {model.vocab - 1}; pass one "
            "or several of these ids, or None if no id ends a row."
        )
    numbers = np.arange(batch, dtype=np.int32) if examples is None else np.asarray(examples, np.int32)
    if numbers.shape != (batch,):
        raise ValueError(
            f"generate(examples of shape {numbers.shape}): {batch} prompts need {batch} numbers, one each."
        )
    parts = (transforms,) if callable(transforms) else transforms
    end_ids = jnp.broadcast_to(jnp.asarray(ends), (batch, len(ends)))
    return SamplingState(chain(*parts), jnp.broadcast_to(key, (batch,)), jnp.asarray(numbers), end_ids)


_NO_ID = -1
"""An end-of-text id that is never sampled. Calls without an end of text use it, and so run the same program as calls
with one end-of-text id."""


def _as_traced_int(number: int) -> Int[jax.Array, ""]:
    """Return the number as an array, which `jit` traces, so that another number reuses the compiled program."""
    return jnp.asarray(number, jnp.int32)


def check_logits(are_numbers: Bool[Array, "batch"], have_candidates: Bool[Array, "batch"]) -> None:
    """Raise a `ValueError` if logits of a row were NaN, or if the transforms left a row no token to sample."""
    if not np.all(are_numbers):
        raise ValueError(
            "generate: the model gave NaN logits, from which nothing can be sampled; its parameters hold NaN or "
            "infinities, or its activations overflow in their dtype (see Precision)."
        )
    if not np.all(have_candidates):
        raise ValueError(
            "generate(transforms=...): the transforms left a row no token to sample: they set all of the row's logits "
            "to minus infinity, or a logit to NaN; leave at least one token a finite logit, such as an end of text."
        )


@checked
def stream(
    model: Model,
    prompt: Sequence[int] | Int[Array, "seq"],
    *,
    max_new_tokens: int,
    transforms: Sequence[Transform] | Transform = (),
    end_of_text: int | Sequence[int] | None = None,
    example: int = 0,
    prefill_chunk: int | None = None,
    cache_dtype: str | None = None,
    draft: Model | str | None = None,
    draft_tokens: int = 4,
    stride: int = 8,
    key: Key[jax.Array, ""],
) -> "TokenStream":
    """Yield the ids that `generate` samples for one prompt, while they are generated.

    This call raises the errors of `generate`. Only two errors come later, while the text is generated: for NaN logits,
    and for transforms that leave no token to sample.

    Args:
        model: The model, which must have a cache.
        prompt: The ids.
        max_new_tokens: Maximum number of tokens to generate.
        transforms: Changes of the logits before an id is sampled; `sampling(temperature=0)` is greedy.
        end_of_text: The id, or ids, that end the text; the sampled end-of-text id is yielded, too.
        example: The number that determines the random samples together with `key`, as in `generate`'s `examples`.
        prefill_chunk: Number of prompt tokens that the model reads at once; None: at most 1,024.
        cache_dtype: The dtype of keys and values in the cache; None: the compute dtype.
        draft: A smaller model that proposes tokens for `model` to check; `"mtp"` is the model's own predictor.
        draft_tokens: Tokens that the draft proposes at a time.
        stride: Number of ids that the host reads from the device at a time. A small stride yields ids more evenly; a
            large stride is faster.
        key: The key of all random samples.
    """
    padded = pad_prompts(model, [prompt], None, max_new_tokens, prefill_chunk, cache_dtype)
    if stride < 1:
        raise ValueError(f"stream(stride={stride}): at least 1 token must be generated at a time.")
    sampling = make_sampling_state(model, 1, transforms, end_of_text, [example], key)
    model = add_draft(model, draft, draft_tokens, int(np.max(padded.lengths)) + max_new_tokens)
    return TokenStream(model, padded, sampling, max_new_tokens, stride)


class TokenStream(Iterator[int]):
    """Iterator over the ids of one text while they are generated."""

    draft: DraftStatistics | None = None
    """Counts of the draft's proposals so far; None without a draft."""

    def __init__(self, model: Model, padded: PaddedPrompts, sampling: SamplingState, max_new_tokens: int, stride: int):
        """Prepare the stream; nothing runs before the first id is requested."""
        self._ids = self._decode(model, padded, sampling, _as_traced_int(max_new_tokens), stride)

    def __next__(self) -> int:
        return next(self._ids)

    def _decode(
        self,
        model: Model,
        padded: PaddedPrompts,
        sampling: SamplingState,
        max_new_tokens: Int[jax.Array, ""],
        stride: int,
    ) -> Iterator[int]:
        ids, lengths, sizes, initial_lengths = padded
        yielded = int(initial_lengths[0])
        target = _as_traced_int(yielded + stride)
        with explain_full_memory("stream", model, padded):
            rows, progress = _start(model, ids, lengths, max_new_tokens, sampling, target, stride, sizes)
            jax.block_until_ready(progress)
        while True:
            # The host reads separate arrays, since the next call donates the rows.
            length, done, are_numbers, have_candidates, new_ids, counts = jax.device_get(progress)
            check_logits(are_numbers, have_candidates)
            self.draft = None if counts is None else _to_statistics(counts)
            yield from new_ids[: length - yielded].tolist()
            if done:
                return
            yielded = int(length)
            rows, progress = _continue((model, sampling, _as_traced_int(yielded + stride), stride), rows)


@eqx.filter_jit
def _start(
    model: Model,
    ids: Int[jax.Array, "batch prompt"],
    lengths: Int[jax.Array, "batch"],
    max_new_tokens: Int[jax.Array, ""],
    sampling: SamplingState,
    target: Int[jax.Array, ""],
    stride: int,
    sizes: ProgramSizes,
) -> tuple[Rows, tuple]:
    """Read the prompt and sample ids until row 0 has `target` ids or is done."""
    rows = prefill(model, ids, lengths, max_new_tokens, sampling, log_probabilities=False, sizes=sizes)
    rows = decode_until(make_decode_step(model, sampling), rows, target[None])
    return _with_progress(rows, target - stride, stride, model)


@eqx.filter_jit(donate="all-except-first")
def _continue(fixed: tuple[Model, SamplingState, Int[jax.Array, ""], int], rows: Rows) -> tuple[Rows, tuple]:
    """Sample ids until row 0 has `target` ids or is done; the rows are donated."""
    model, sampling, target, stride = fixed
    start = rows.lengths[0]
    return _with_progress(decode_until(make_decode_step(model, sampling), rows, target[None]), start, stride, model)


def _with_progress(rows: Rows, start: Int[jax.Array, ""], stride: int, model: Model) -> tuple[Rows, tuple]:
    """Return the rows, and arrays for the host: row 0's length, flags, new ids from `start` on, and draft counts."""
    max_new = stride + (model.draft.tokens if isinstance(model, SpeculativeModel) else 0)
    padded = jnp.pad(rows.ids[0], (0, max_new))
    new_ids = jax.lax.dynamic_slice_in_dim(padded, start, max_new)
    progress = (
        rows.lengths[0],
        rows.done[0],
        rows.logits_are_numbers,
        rows.has_candidates,
        new_ids,
        draft_counts(rows),
    )
    return rows, progress
