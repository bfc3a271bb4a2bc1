"""`generate_blocks`, `stream_blocks`: continue prompts with a model of block diffusion, which denoises blocks."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from .._annotation_checks import checked
from .._shapes import Array as AnyArray
from ..nn import block_of, only_attends
from ._decode import ProgramSizes, SamplingState
from ._denoise import BlockOrder, BlockRows, denoise_block, DenoisingRule, read_whole_blocks
from ._generate import check_logits, copy_to_host, Generation, make_sampling_state
from ._model import Model
from ._prompts import explain_full_memory, pad_prompts, PaddedPrompts, round_up
from ._speculative import DraftStatistics
from ._transforms import Transform


class _Inputs(eqx.Module):
    """Arrays and settings that the compiled programs of `generate_blocks` and `stream_blocks` read."""

    model: Model
    ids: Int[Array, "batch prompt"]
    """The padded prompts."""
    lengths: Int[Array, "batch"]
    max_new_tokens: Int[Array, ""]
    sampling: SamplingState
    rule: DenoisingRule


class _Start(NamedTuple):
    """Prompts and settings that have been checked."""

    padded: PaddedPrompts
    inputs: _Inputs


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
    ends_row: Callable[[int, list[int]], bool] | None = None,
    key: Key[Array, ""],
) -> Generation:
    """Continue each prompt by up to `max_new_tokens` tokens with a model whose masks are `nn.block_causal`.

    Blocks are filled one after another. All tokens of a block are masked at first, except for the prompt's own tokens
    if the prompt ends inside the block. In a pass, the model gives every masked token a distribution, from which an id
    is sampled. Some of the masked tokens are then filled with their ids and change no more; the others stay masked.
    With `m` masked tokens and `k` passes left, a pass fills `m / k` tokens (rounded up), by default the tokens of the
    highest probability. It also fills all tokens whose sampled id has a probability above `threshold`. Probabilities
    are computed after the transforms; with a greedy transform, they are the model's own. By default this is
    low-confidence remasking (LLaDA, arXiv:2502.09992); with a threshold below 1, it is SDAR's dynamic rule
    (arXiv:2510.06303). One more pass over a finished block caches its keys and values. A prompt is read in one piece.

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
        ends_row: A function that receives a row's number and its new ids so far, and returns whether the row has ended,
            for example at a string. The function is called after every block. None: the host waits until all rows have
            ended.
        key: The key of all random samples.
    """
    start = _prepare(
        "generate_blocks",
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        mask_id=mask_id,
        steps=steps,
        order=order,
        threshold=threshold,
        lengths=lengths,
        transforms=transforms,
        end_of_text=end_of_text,
        examples=examples,
        cache_dtype=cache_dtype,
        key=key,
    )
    with explain_full_memory("generate_blocks", model, start.padded):
        if ends_row is None:
            rows = _generate_rows(start.inputs, start.padded.sizes)
        else:
            rows = _generate_until(ends_row, start)
        rows = copy_to_host(dataclasses.replace(rows, cache=None))
    check_logits(rows.logits_are_numbers, rows.has_candidates)
    longest = int(np.max(rows.lengths))
    return Generation(rows.ids[:, :longest], np.asarray(start.padded.lengths), rows.lengths, None)


@checked
def stream_blocks(
    model: Model,
    prompt: Sequence[int] | Int[AnyArray, "seq"],
    *,
    max_new_tokens: int,
    mask_id: int,
    steps: int | None = None,
    order: BlockOrder = "confidence",
    threshold: float = 1.0,
    transforms: Sequence[Transform] | Transform = (),
    end_of_text: int | Sequence[int] | None = None,
    example: int = 0,
    cache_dtype: str | None = None,
    key: Key[Array, ""],
) -> "BlockStream":
    """Yield the ids that `generate_blocks` samples for one prompt, as soon as their block is finished.

    This call raises the errors of `generate_blocks`. Only two errors come later, while the text is generated: for NaN
    logits, and for transforms that leave no token to sample.

    Args:
        model: A model of block diffusion.
        prompt: The ids.
        max_new_tokens: Maximum number of tokens to generate.
        mask_id: The id of a masked token.
        steps: Maximum number of passes that fill a block; None: the number of its tokens.
        order: `"confidence"` fills the tokens of the highest probability first, `"random"` tokens in random order.
        threshold: The probability above which a sampled token is filled at once.
        transforms: Changes of the logits before an id is sampled; `sampling(temperature=0)` is greedy.
        end_of_text: The id, or ids, that end the text; the sampled end-of-text id is yielded, too.
        example: The number that determines the random samples together with `key`, as in `examples`.
        cache_dtype: The dtype of keys and values in the cache; None: the compute dtype.
        key: The key of all random samples.
    """
    start = _prepare(
        "stream_blocks",
        model,
        [prompt],
        max_new_tokens=max_new_tokens,
        mask_id=mask_id,
        steps=steps,
        order=order,
        threshold=threshold,
        lengths=None,
        transforms=transforms,
        end_of_text=end_of_text,
        examples=[example],
        cache_dtype=cache_dtype,
        key=key,
    )
    return BlockStream(start)


class BlockStream(Iterator[int]):
    """Iterator over the ids of one text, which is generated block by block."""

    draft: DraftStatistics | None = None
    """None, because block diffusion has no draft."""

    def __init__(self, start: _Start):
        """Prepare the stream; nothing runs before the first id is requested."""
        self._ids = self._denoise(start)

    def __next__(self) -> int:
        return next(self._ids)

    @staticmethod
    def _denoise(start: _Start) -> Iterator[int]:
        yielded = int(start.padded.lengths[0])
        with explain_full_memory("stream_blocks", start.inputs.model, start.padded):
            rows = _start_rows(start.inputs, start.padded.sizes)
        is_done = False
        nothing_ended = jnp.zeros(1, bool)
        while not is_done:
            rows = _continue_rows((start.inputs, nothing_ended), rows)
            ids, lengths, done, are_numbers, have_candidates = copy_to_host(
                (rows.ids, rows.lengths, rows.done, rows.logits_are_numbers, rows.has_candidates)
            )
            check_logits(are_numbers, have_candidates)
            yield from ids[0, yielded : lengths[0]].tolist()
            yielded, is_done = int(lengths[0]), bool(done[0])


def _prepare(
    call: str,
    model: Model,
    prompts: Sequence[object] | Int[AnyArray, "batch seq"],
    *,
    max_new_tokens: int,
    mask_id: int,
    steps: int | None,
    order: BlockOrder,
    threshold: float,
    lengths: Sequence[int] | Int[AnyArray, "batch"] | None,
    transforms: Sequence[Transform] | Transform,
    end_of_text: int | Sequence[int] | None,
    examples: Sequence[int] | Int[AnyArray, "batch"] | None,
    cache_dtype: str | None,
    key: Key[Array, ""],
) -> _Start:
    """Check the arguments of `generate_blocks`, and pad the prompts; errors begin with the name of the `call`."""
    block = check_block_model(call, model)
    rule = make_rule(call, model, block, mask_id, steps, order, threshold)
    padded = pad_prompts(model, prompts, lengths, max_new_tokens, None, cache_dtype)
    sampling = make_sampling_state(model, len(padded.ids), transforms, end_of_text, examples, key)
    # The model reads all tokens of the last block, so the cache must have room for complete blocks.
    width = round_up(padded.sizes.width, block)
    if model.max_seq is not None and round_up(int(np.max(padded.lengths)) + max_new_tokens, block) > model.max_seq:
        raise ValueError(
            f"{call}(max_new_tokens={max_new_tokens}): the last block of {block} tokens exceeds the model's "
            f"{model.max_seq} learned positions; ask for fewer tokens."
        )
    sizes = padded.sizes._replace(width=width, capacity=min(width, model.max_seq or width))
    inputs = _Inputs(model, padded.ids, padded.lengths, jnp.asarray(max_new_tokens, jnp.int32), sampling, rule)
    return _Start(padded._replace(sizes=sizes), inputs)


def check_block_model(call: str, model: Model) -> int:
    """Return the block size of a model; raise a `ValueError` that begins with `call` if it cannot denoise blocks."""
    block = block_of(model)
    if block is None:
        raise ValueError(
            f"{call}(model): the masks of the model have no blocks, or blocks of several sizes; pass a model of block "
            "diffusion, or call generate."
        )
    if not only_attends(model):
        raise ValueError(
            f"{call}(model): only models whose mixers all attend, without an encoder, fill masked tokens; a recurrence "
            "would keep the masked tokens of each pass in its state; pass another model."
        )
    return block


def make_rule(
    call: str, model: Model, block: int, mask_id: int, steps: int | None, order: BlockOrder, threshold: float
) -> DenoisingRule:
    """Return the rule of these settings; raise a `ValueError` that begins with `call` if one is out of range."""
    steps = block if steps is None else steps
    if steps < 1 or not 0 <= mask_id < model.vocab or not 0 < threshold <= 1:
        raise ValueError(
            f"{call}(mask_id={mask_id}, steps={steps}, threshold={threshold}): mask_id must be one of the model's "
            f"{model.vocab} ids, steps must be at least 1, and threshold above 0 and at most 1."
        )
    return DenoisingRule(mask_id, steps, block, order, jnp.asarray(threshold, jnp.float32))


@eqx.filter_jit
def _generate_rows(inputs: _Inputs, sizes: ProgramSizes) -> BlockRows:
    """Read the complete blocks of the prompts, then denoise blocks until each row has ended."""
    rows = _read_prompts(inputs, sizes)
    step = lambda rows: denoise_block(inputs.model, rows, inputs.sampling, inputs.rule)
    return dataclasses.replace(jax.lax.while_loop(lambda rows: ~jnp.all(rows.done), step, rows), cache=None)


def _generate_until(ends_row: Callable[[int, list[int]], bool], start: _Start) -> BlockRows:
    """Denoise one block at a time until each row has ended, or `ends_row` has ended the row."""
    rows = _start_rows(start.inputs, start.padded.sizes)
    first = np.asarray(start.padded.lengths)
    while True:
        ids, lengths, done = copy_to_host((rows.ids, rows.lengths, rows.done))
        ended = np.array(
            [
                bool(is_done) or ends_row(number, ids[number, begin:length].tolist())
                for number, (begin, length, is_done) in enumerate(zip(first, lengths, done))
            ]
        )
        if ended.all():
            return rows
        rows = _continue_rows((start.inputs, jnp.asarray(ended)), rows)


@eqx.filter_jit
def _start_rows(inputs: _Inputs, sizes: ProgramSizes) -> BlockRows:
    """Read the complete blocks of the prompts."""
    return _read_prompts(inputs, sizes)


@eqx.filter_jit(donate="all-except-first")
def _continue_rows(fixed: tuple[_Inputs, Bool[Array, "batch"]], rows: BlockRows) -> BlockRows:
    """Denoise the next block of each row that has not ended; the rows are donated."""
    inputs, ended = fixed
    return denoise_block(inputs.model, dataclasses.replace(rows, done=rows.done | ended), inputs.sampling, inputs.rule)


def _read_prompts(inputs: _Inputs, sizes: ProgramSizes) -> BlockRows:
    """Return the rows after the model has read the complete blocks of the prompts."""
    batch, prompt = inputs.ids.shape
    buffer = jnp.full((batch, sizes.width), inputs.rule.mask_id, jnp.int32)
    ids = jax.lax.dynamic_update_slice(buffer, inputs.ids[:, : sizes.width].astype(jnp.int32), (0, 0))
    return read_whole_blocks(
        inputs.model,
        ids,
        inputs.lengths,
        inputs.lengths + inputs.max_new_tokens,
        inputs.rule,
        capacity=sizes.capacity,
        dtype=sizes.cache_dtype,
        read=prompt,
        is_greedy=jnp.full(batch, inputs.sampling.transforms.is_greedy),
    )
