"""Text from a model: `generate` continues a batch of prompts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Key

from .._shapes import Array
from ._decode import advance, Draws, prefill, Rows, Sizes
from ._drafts import draft_of, Drafted
from ._model import Model
from ._prompts import prepare, Prompts
from ._speculative import Speculative, step_of, Tally, tally_of
from ._transforms import chain, Transform


class Generation(eqx.Module):
    """Prompts with their continuations, in one array; a row's ids are `ids[row, :lengths[row]]`.

    `log_probabilities` are those of the drawn ids by the model's logits before any transform, in nats. They are 0 at
    the prompt and at padding, so that a row's sum is the log-probability of its continuation. `drafted` says how a
    draft has done.
    """

    ids: Int[np.ndarray, "batch seq"]
    prompt_lengths: Int[np.ndarray, "batch"]
    lengths: Int[np.ndarray, "batch"]
    log_probabilities: Float[np.ndarray, "batch seq"] | None
    drafted: Drafted | None = None

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
    draft: Model | str | None = None,
    draft_tokens: int = 4,
    key: Key[jax.Array, ""],
) -> Generation:
    """Continue each prompt by up to `max_new_tokens` tokens, each drawn from the model's transformed distribution.

    A row ends with the first id of `end_of_text` that it draws, and decoding when every row has ended. A row's draws
    depend on `key`, on its number in `examples` and on positions, not on the other rows. Prefill and decode are one
    compiled program. Sizes are rounded up to multiples of 64, so other prompts, other counts of new tokens and other
    temperatures mostly run without compiling again; another number of rows does not. A model with an encoder (T5) reads
    the prompts by that, and what it returns begins with its own first id, which counts as the prompt.

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
            with the prompt; None: at most 1,024. The results are the same. An encoder reads all at once.
        cache_dtype: What keys and values are kept in; None: the compute dtype. `"int8"` and `"fp8"` round them, with
            a scale for each token and head.
        draft: A smaller model of the same vocabulary that proposes tokens for `model` to check, several at once, by
            the rule of Leviathan et al. (2023): greedy text stays the same, and draws keep their distribution. `"mtp"`
            is the model's own predictor of a further token.
        draft_tokens: How many tokens are proposed at a time.
        key: For all draws.

    Raises a `ValueError` for prompts that are empty or hold unknown ids, for more tokens than learned positions, for a
    draft of another vocabulary, for transforms that leave a row no token, and if the model's logits are NaN.
    """
    prepared = prepare(model, prompts, lengths, max_new_tokens, prefill_chunk, cache_dtype)
    draws = draws_of(model, len(prepared.ids), transforms, end_of_text, examples, key)
    reader = reader_of(model, draft, draft_tokens, prepared, max_new_tokens)
    most = whole_number(max_new_tokens)
    rows = _whole(reader, prepared.ids, prepared.lengths, most, draws, log_probabilities, prepared.sizes)
    check_sound(rows.sound, rows.left)
    after, kept = np.asarray(rows.lengths), rows.log_probabilities
    longest = int(np.max(after))
    return Generation(
        np.asarray(rows.ids)[:, :longest],
        np.asarray(prepared.begun),
        after,
        None if kept is None else np.asarray(kept)[:, :longest],
        None if rows.cache is None else drafted_of(rows.cache),
    )


def reader_of(
    model: Model, draft: Model | str | None, draft_tokens: int, prepared: Prompts, max_new_tokens: int
) -> Model:
    """The model, together with its draft where there is one; raises a `ValueError` for a draft that does not fit."""
    if draft is None:
        return model
    if model.start is not None:
        raise ValueError(
            "generate(draft=...): the model has an encoder, and no draft is made for one; leave the draft out."
        )
    total = int(np.max(prepared.lengths)) + max_new_tokens
    return Speculative(model, draft_of(model, draft, draft_tokens, total))


def drafted_of(tally: Tally) -> Drafted:
    """What was counted of a draft, on the host."""
    return Drafted(*map(np.asarray, (tally.steps, tally.proposed, tally.accepted, tally.added)))


@eqx.filter_jit
def _whole(
    model: Model,
    ids: Int[jax.Array, "batch prompt"],
    lengths: Int[jax.Array, "batch"],
    most: Int[jax.Array, ""],
    draws: Draws,
    log_probabilities: bool,
    sizes: Sizes,
) -> Rows:
    rows = prefill(model, ids, lengths, most, draws, log_probabilities=log_probabilities, sizes=sizes)
    rows = advance(step_of(model, draws), rows, rows.limits)
    return dataclasses.replace(rows, cache=tally_of(rows))


def draws_of(
    model: Model,
    batch: int,
    transforms: Sequence[Transform] | Transform,
    end_of_text: int | Sequence[int] | None,
    examples: Sequence[int] | Int[Array, "batch"] | None,
    key: Key[jax.Array, ""],
) -> Draws:
    """The settings of a call, checked against the model; raises a `ValueError` for ids and numbers that do not fit."""
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


def whole_number(number: int) -> Int[jax.Array, ""]:
    """An array, so that another number does not compile again."""
    return jnp.asarray(number, jnp.int32)


def check_sound(sound: Bool[Array, ""], left: Bool[Array, ""]) -> None:
    """Raise a `ValueError` unless the logits were free of NaN, and transforms left each row a token."""
    if not sound:
        raise ValueError(
            "generate: the model gave NaN logits, from which nothing can be drawn; its parameters hold NaN or "
            "infinities, or its activations overflow in their dtype (see Precision)."
        )
    if not left:
        raise ValueError(
            "generate(transforms=...): the transforms left a row no token to draw: they made all of its logits minus "
            "infinity, or one of them NaN; leave at least one, such as an end of text."
        )
