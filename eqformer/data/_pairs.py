"""Pairs of a text to read and a text to write, for models with an encoder."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from .._shapes import Batch


Ids = Sequence[int] | Int[np.ndarray, "_"]


def paired(
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    *,
    start: int,
    seq: int,
    source_seq: int,
    first_example: int = 0,
) -> Batch:
    """A batch whose rows read `sources` and write `targets`: ids with the end of text, if that is to be learned.

    A row is given `start` and its target but the last id, and is to predict the target; what fills a row up counts for
    nothing. Raises a `ValueError` for a text that is empty or too long.

    Args:
        sources: What the encoder reads, a text a row.
        targets: What the decoder is to write.
        start: The id with which it begins, `model.start`.
        seq: The tokens of a row.
        source_seq: Those of a source.
        first_example: The first row's number in the run.
    """
    if len(sources) != len(targets) or not sources:
        raise ValueError(f"paired: {len(sources)} sources and {len(targets)} targets; each source needs a target.")
    for name, texts, most in (("sources", sources, source_seq), ("targets", targets, seq)):
        for number, text in enumerate(texts):
            if not 1 <= len(text) <= most:
                raise ValueError(
                    f"paired({name}): number {number} has {len(text)} ids, and a row holds 1 to {most}; cut the text, "
                    f"or give a larger {'source_seq' if name == 'sources' else 'seq'}."
                )
    rows, places = len(targets), np.arange(source_seq, dtype=np.int32)
    source_ids = np.stack([_filled(text, source_seq) for text in sources])
    wanted = np.stack([_filled(text, seq) for text in targets])
    lengths = np.array([[len(text)] for text in sources])
    return Batch(
        ids=np.concatenate([np.full((rows, 1), start, np.int32), wanted[:, :-1]], axis=1),
        targets=wanted,
        weights=np.stack([np.arange(seq) < len(text) for text in targets]).astype(np.float32),
        examples=np.arange(first_example, first_example + rows, dtype=np.int32),
        source_ids=source_ids,
        source_positions=np.where(places < lengths, places, -1).astype(np.int32),
    )


def _filled(text: Ids, length: int) -> Int[np.ndarray, "_"]:
    return np.pad(np.asarray(text, np.int32), (0, length - len(text)))
