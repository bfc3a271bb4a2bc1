"""`stream`: one continuation, id by id, while it is drawn."""

from collections.abc import Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Int, Key

from .._array_checks import checked
from .._shapes import Array
from ._decode import decode_until, prefill, ProgramSizes, Rows, SamplingState
from ._generate import add_draft, as_traced_int, check_logits, make_sampling_state, to_statistics
from ._model import Model
from ._prompts import pad_prompts, PaddedPrompts
from ._speculative import draft_counts, DraftStatistics, make_decode_step, SpeculativeModel
from ._transforms import Transform


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
    """Yield the ids that `generate` draws for one prompt, while they are drawn.

    Raises the errors of `generate` at this call; only those for NaN logits and for transforms that leave no token come
    later, while the text is drawn.

    Args:
        model: The model, which must have a cache.
        prompt: The ids.
        max_new_tokens: Most tokens to draw.
        transforms: Changes of the logits before an id is drawn; `sampling(temperature=0)` is greedy.
        end_of_text: The id, or ids, that end the text; it is yielded.
        example: The row's number, as in `generate`'s `examples`.
        prefill_chunk: Tokens of the prompt that are read at once; None: at most 1,024.
        cache_dtype: The dtype of keys and values in the cache; None: the compute dtype.
        draft: A smaller model that proposes tokens for `model` to check; `"mtp"` is the model's own predictor.
        draft_tokens: Tokens that the draft proposes at a time.
        stride: Ids that the host reads from the device at a time: a small stride yields evenly, a large one is faster.
        key: The key of all random draws.
    """
    padded = pad_prompts(model, [prompt], None, max_new_tokens, prefill_chunk, cache_dtype)
    if stride < 1:
        raise ValueError(f"stream(stride={stride}): at least 1 token must be drawn at a time.")
    sampling = make_sampling_state(model, 1, transforms, end_of_text, [example], key)
    model = add_draft(model, draft, draft_tokens, padded, max_new_tokens)
    return TokenStream(model, padded, sampling, max_new_tokens, stride)


class TokenStream(Iterator[int]):
    """Iterator over the ids of one text while they are drawn."""

    draft: DraftStatistics | None = None
    """Counts of the draft's proposals so far; None without a draft."""

    def __init__(self, model: Model, padded: PaddedPrompts, sampling: SamplingState, max_new_tokens: int, stride: int):
        """Prepare the stream; nothing runs before the first id is requested."""
        self._ids = self._draw(model, padded, sampling, as_traced_int(max_new_tokens), stride)

    def __next__(self) -> int:
        return next(self._ids)

    def _draw(
        self,
        model: Model,
        padded: PaddedPrompts,
        sampling: SamplingState,
        max_new_tokens: Int[jax.Array, ""],
        stride: int,
    ) -> Iterator[int]:
        ids, lengths, sizes, initial_lengths = padded
        yielded = int(initial_lengths[0])
        target = as_traced_int(yielded + stride)
        rows, progress = _start(model, ids, lengths, max_new_tokens, sampling, target, stride, sizes)
        while True:
            # The host reads separate arrays, since the next call donates the rows.
            length, done, are_numbers, have_candidates, new_ids, counts = jax.device_get(progress)
            check_logits(are_numbers, have_candidates)
            self.draft = None if counts is None else to_statistics(counts)
            yield from new_ids[: length - yielded].tolist()
            if done:
                return
            yielded = int(length)
            rows, progress = _continue((model, sampling, as_traced_int(yielded + stride), stride), rows)


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
    """Read the prompt and draw ids until row 0 has `target` ids or is done."""
    rows = prefill(model, ids, lengths, max_new_tokens, sampling, log_probabilities=False, sizes=sizes)
    rows = decode_until(make_decode_step(model, sampling), rows, target[None])
    return _with_progress(rows, target - stride, stride, model)


@eqx.filter_jit(donate="all-except-first")
def _continue(fixed: tuple[Model, SamplingState, Int[jax.Array, ""], int], rows: Rows) -> tuple[Rows, tuple]:
    """Draw ids until row 0 has `target` ids or is done; the rows are donated."""
    model, sampling, target, stride = fixed
    start = rows.lengths[0]
    return _with_progress(decode_until(make_decode_step(model, sampling), rows, target[None]), start, stride, model)


def _with_progress(rows: Rows, start: Int[jax.Array, ""], stride: int, model: Model) -> tuple[Rows, tuple]:
    """Return the rows, and for the host row 0's length, flags, new ids from `start` on, and counts of the draft."""
    most = stride + (model.draft.tokens if isinstance(model, SpeculativeModel) else 0)
    padded = jnp.pad(rows.ids[0], (0, most))
    new_ids = jax.lax.dynamic_slice_in_dim(padded, start, most)
    progress = (
        rows.lengths[0],
        rows.done[0],
        rows.logits_are_numbers,
        rows.has_candidates,
        new_ids,
        draft_counts(rows),
    )
    return rows, progress
