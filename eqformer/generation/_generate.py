"""Text from a model: `generate` continues a batch of prompts, `stream` yields one continuation id by id."""

from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Key

from .._shapes import Array
from ._decode import advance, Draws, prefill, Rows, Sizes
from ._model import Model
from ._prompts import prepare, Prompts
from ._transforms import chain, Transform


class Generation(eqx.Module):
    """Prompts with their continuations, in one array; a row's ids are `ids[row, :lengths[row]]`.

    `log_probabilities` are those of the drawn ids by the model's logits before any transform, in nats. They are 0 at
    the prompt and at padding, so that a row's sum is the log-probability of its continuation.
    """

    ids: Int[np.ndarray, "batch seq"]
    prompt_lengths: Int[np.ndarray, "batch"]
    lengths: Int[np.ndarray, "batch"]
    log_probabilities: Float[np.ndarray, "batch seq"] | None

    def new_ids(self) -> list[list[int]]:
        """The ids that were drawn for each prompt, including the end of text if it was drawn."""
        spans = zip(self.ids, self.prompt_lengths, self.lengths)
        return [row[first:last].tolist() for row, first, last in spans]


def generate(
    model: Model,
    prompts: Sequence[Any] | Int[Array, "batch seq"],
    *,
    max_new_tokens: int,
    lengths: Sequence[int] | Int[Array, "batch"] | None = None,
    transforms: Sequence[Transform] | Transform = (),
    end_of_text: int | Sequence[int] | None = None,
    log_probabilities: bool = False,
    examples: Sequence[int] | Int[Array, "batch"] | None = None,
    prefill_chunk: int | None = None,
    cache_dtype: str | None = None,
    key: Key[jax.Array, ""],
) -> Generation:
    """Continue each prompt by up to `max_new_tokens` tokens, each drawn from the model's transformed distribution.

    A row ends with the first id of `end_of_text` that it draws, and decoding when every row has ended. A row's draws
    depend on `key`, on its number in `examples` and on positions, not on the other rows. Prefill and decode are one
    compiled program. Sizes are rounded up to multiples of 64, so other prompts, other counts of new tokens and other
    temperatures mostly run without compiling again; another number of rows does not.

    Args:
        model: What is asked for logits, with a cache.
        prompts: A list of lists of ids, or an integer array whose rows have `lengths` ids each.
        max_new_tokens: How many tokens are drawn at most.
        lengths: The ids in each row of an array; None: all.
        transforms: What is done to the logits before an id is drawn; without any, ids are drawn from the model's
            distribution, and `sampling(temperature=0)` is greedy.
        end_of_text: The id, or ids, that end a row; it is kept.
        log_probabilities: Whether to return those of the drawn ids by the model itself.
        examples: The rows' numbers; None: 0, 1, ...
        prefill_chunk: The tokens of a prompt that are read at once, in equal chunks, so that activations do not grow
            with the prompt; None: at most 1,024. The results are the same.
        cache_dtype: What keys and values are kept in; None: the compute dtype. `"int8"` and `"fp8"` round them, with
            a scale for each token and head.
        key: For all draws.

    Raises a `ValueError` for prompts that are empty or hold unknown ids, for more tokens than learned positions, and if
    the model's logits are NaN.
    """
    prepared = prepare(model, prompts, lengths, max_new_tokens, prefill_chunk, cache_dtype)
    draws = _draws(model, len(prepared.ids), transforms, end_of_text, examples, key)
    rows = _whole(
        model, prepared.ids, prepared.lengths, draws, _count(max_new_tokens), log_probabilities, prepared.sizes
    )
    _check(rows.sound)
    after, kept = np.asarray(rows.lengths), rows.log_probabilities
    longest = int(np.max(after))
    return Generation(
        np.asarray(rows.ids)[:, :longest],
        np.asarray(prepared.lengths),
        after,
        None if kept is None else np.asarray(kept)[:, :longest],
    )


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
    stride: int = 8,
    key: Key[jax.Array, ""],
) -> Iterator[int]:
    """Yield the ids that `generate` draws for one prompt, as they are drawn.

    Raises what `generate` raises, at this call; only NaN logits are found later, while the text is drawn.

    Args:
        model: What is asked for logits, with a cache.
        prompt: The ids.
        max_new_tokens: How many tokens are drawn at most.
        transforms: What is done to the logits before an id is drawn; without any, ids are drawn from the model's
            distribution, and `sampling(temperature=0)` is greedy.
        end_of_text: The id, or ids, that end a row; it is kept.
        example: The prompt's number in `generate`'s `examples`.
        prefill_chunk: The tokens of the prompt that are read at once; None: at most 1,024.
        cache_dtype: What keys and values are kept in; None: the compute dtype.
        stride: How many ids the host reads from the device at a time: few yield more evenly, many run faster.
        key: For all draws.
    """
    prepared = prepare(model, [prompt], None, max_new_tokens, prefill_chunk, cache_dtype)
    if stride < 1:
        raise ValueError(f"stream(stride={stride}): at least 1 token must be drawn at a time.")
    draws = _draws(model, 1, transforms, end_of_text, [example], key)
    return _stream(model, prepared, draws, max_new_tokens, stride)


def _stream(model: Model, prepared: Prompts, draws: Draws, max_new_tokens: int, stride: int) -> Iterator[int]:
    rows, fresh = _begin(
        model, prepared.ids, prepared.lengths, draws, _count(min(stride, max_new_tokens)), stride, prepared.sizes
    )
    shown = 0
    while True:
        # The host reads separate arrays, since the next call donates the rows.
        steps, done, sound, ids = jax.device_get(fresh)
        _check(sound)
        yield from ids[: steps - shown].tolist()
        shown = int(steps)
        if done or shown >= max_new_tokens:
            return
        until = _count(min(shown + stride, max_new_tokens))
        rows, fresh = _go_on((model, draws, until, stride), rows)


@eqx.filter_jit
def _whole(
    model: Model,
    ids: Int[jax.Array, "batch prompt"],
    lengths: Int[jax.Array, "batch"],
    draws: Draws,
    until: Int[jax.Array, ""],
    log_probabilities: bool,
    sizes: Sizes,
) -> Rows:
    rows = prefill(model, ids, lengths, draws, log_probabilities=log_probabilities, sizes=sizes)
    rows = advance(model, rows, draws, until)
    return eqx.tree_at(lambda r: r.cache, rows, None, is_leaf=lambda x: x is None)


@eqx.filter_jit
def _begin(
    model: Model,
    ids: Int[jax.Array, "batch prompt"],
    lengths: Int[jax.Array, "batch"],
    draws: Draws,
    until: Int[jax.Array, ""],
    stride: int,
    sizes: Sizes,
) -> tuple[Rows, tuple]:
    rows = prefill(model, ids, lengths, draws, log_probabilities=False, sizes=sizes)
    return _with_fresh(advance(model, rows, draws, until), lengths[0], stride)


@eqx.filter_jit(donate="all-except-first")
def _go_on(fixed: tuple[Model, Draws, Int[jax.Array, ""], int], rows: Rows) -> tuple[Rows, tuple]:
    model, draws, until, stride = fixed
    return _with_fresh(advance(model, rows, draws, until), rows.lengths[0], stride)


def _with_fresh(rows: Rows, before: Int[jax.Array, ""], stride: int) -> tuple[Rows, tuple]:
    """The rows, and what the host reads: the steps taken, whether row 0 is done and without NaN so far, and new ids."""
    padded = jnp.pad(rows.ids[0], (0, stride))
    ids = jax.lax.dynamic_slice_in_dim(padded, before, stride)
    return rows, (rows.steps, rows.done[0], rows.sound, ids)


def _draws(
    model: Model,
    batch: int,
    transforms: Sequence[Transform] | Transform,
    end_of_text: int | Sequence[int] | None,
    examples: Sequence[int] | Int[Array, "batch"] | None,
    key: Key[jax.Array, ""],
) -> Draws:
    ends = np.atleast_1d(np.asarray(_NO_ID if end_of_text is None else end_of_text, np.int32))
    if end_of_text is not None and np.any((ends < 0) | (ends >= model.vocab)):
        raise ValueError(
            f"generate(end_of_text={end_of_text}): the model's {model.vocab} ids are 0 to {model.vocab - 1}; pass one "
            "or some of them, or None to draw all tokens."
        )
    numbers = np.arange(batch, dtype=np.int32) if examples is None else np.asarray(examples, np.int32)
    if numbers.shape != (batch,):
        raise ValueError(
            f"generate(examples of shape {numbers.shape}): {batch} prompts need {batch} numbers, one each."
        )
    parts = (transforms,) if callable(transforms) else transforms
    return Draws(chain(*parts), key, jnp.asarray(numbers), jnp.asarray(ends))


_NO_ID = -1  # an end of text that is never drawn, so that calls with and without one run the same program


def _count(number: int) -> Int[jax.Array, ""]:
    return jnp.asarray(number, jnp.int32)


def _check(sound: Bool[Array, ""]) -> None:
    if not sound:
        raise ValueError(
            "generate: the model gave NaN logits, from which nothing can be drawn; its parameters hold NaN or "
            "infinities, or its activations overflow in their dtype (see Precision)."
        )
