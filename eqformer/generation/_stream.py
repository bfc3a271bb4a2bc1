"""`stream`: one continuation, id by id, while it is drawn."""

from collections.abc import Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Int, Key

from .._shapes import Array
from ._decode import advance, Draws, prefill, Rows, Sizes
from ._drafts import Drafted
from ._generate import check_sound, drafted_of, draws_of, reader_of, whole_number
from ._model import Model
from ._prompts import prepare, Prompts
from ._speculative import Speculative, step_of, tally_of
from ._transforms import Transform


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
) -> "Stream":
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
        draft: A smaller model that proposes tokens for `model` to check; `"mtp"` is its own predictor.
        draft_tokens: How many tokens are proposed at a time.
        stride: How many ids the host reads from the device at a time: few yield more evenly, many run faster.
        key: For all draws.
    """
    prepared = prepare(model, [prompt], None, max_new_tokens, prefill_chunk, cache_dtype)
    if stride < 1:
        raise ValueError(f"stream(stride={stride}): at least 1 token must be drawn at a time.")
    draws = draws_of(model, 1, transforms, end_of_text, [example], key)
    return Stream(
        reader_of(model, draft, draft_tokens, prepared, max_new_tokens), prepared, draws, max_new_tokens, stride
    )


class Stream(Iterator[int]):
    """The ids of one text as they are drawn; `drafted` says how a draft has done so far, None where there is none."""

    drafted: Drafted | None = None

    def __init__(self, model: Model, prepared: Prompts, draws: Draws, max_new_tokens: int, stride: int):
        """Nothing runs before the first id is asked for."""
        self._ids = self._drawn(model, prepared, draws, whole_number(max_new_tokens), stride)

    def __next__(self) -> int:
        return next(self._ids)

    def _drawn(
        self, model: Model, prepared: Prompts, draws: Draws, most: Int[jax.Array, ""], stride: int
    ) -> Iterator[int]:
        ids, lengths, sizes, begun = prepared
        shown = int(begun[0])
        rows, fresh = _begin(model, ids, lengths, most, draws, whole_number(shown + stride), stride, sizes)
        while True:
            # The host reads separate arrays, since the next call donates the rows.
            length, done, sound, left, ids, tally = jax.device_get(fresh)
            check_sound(sound, left)
            self.drafted = None if tally is None else drafted_of(tally)
            yield from ids[: length - shown].tolist()
            if done:
                return
            shown = int(length)
            rows, fresh = _go_on((model, draws, whole_number(shown + stride), stride), rows)


@eqx.filter_jit
def _begin(
    model: Model,
    ids: Int[jax.Array, "batch prompt"],
    lengths: Int[jax.Array, "batch"],
    most: Int[jax.Array, ""],
    draws: Draws,
    until: Int[jax.Array, ""],
    stride: int,
    sizes: Sizes,
) -> tuple[Rows, tuple]:
    rows = prefill(model, ids, lengths, most, draws, log_probabilities=False, sizes=sizes)
    return _with_fresh(advance(step_of(model, draws), rows, until[None]), until - stride, stride, model)


@eqx.filter_jit(donate="all-except-first")
def _go_on(fixed: tuple[Model, Draws, Int[jax.Array, ""], int], rows: Rows) -> tuple[Rows, tuple]:
    model, draws, until, stride = fixed
    return _with_fresh(advance(step_of(model, draws), rows, until[None]), rows.lengths[0], stride, model)


def _with_fresh(rows: Rows, before: Int[jax.Array, ""], stride: int, model: Model) -> tuple[Rows, tuple]:
    """The rows, and what the host reads: row 0's length, whether it is done and sound so far, its new ids, and how
    a draft has done."""
    most = stride + (model.draft.tokens if isinstance(model, Speculative) else 0)
    padded = jnp.pad(rows.ids[0], (0, most))
    ids = jax.lax.dynamic_slice_in_dim(padded, before, most)
    return rows, (rows.lengths[0], rows.done[0], rows.sound, rows.left, ids, tally_of(rows))
