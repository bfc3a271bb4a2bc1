"""Rows of whole texts for text encoders and classifiers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._shapes import Batch, LabelBatch
from ._packing import as_examples
from ._tokenizer import EncodedText, FileTokenizer


def batch_text_groups(
    groups: Sequence[Sequence[str]], tokenizer: FileTokenizer, *, seq: int, first_example: int = 0
) -> Batch:
    """Return a batch of texts that belong together, each text as a row, for `training.contrastive_loss`.

    Raises a `ValueError` for groups of unequal sizes or of fewer than two texts, and for a text without a token.

    Args:
        groups: The texts of each group: an anchor, its positive and any number of hard negatives.
        tokenizer: The tokenizer, which adds special tokens.
        seq: The tokens of a row; a longer text is cut at its end, within its special tokens.
        first_example: The first row's number in the run.
    """
    call, sizes = f"batch_text_groups(groups, tokenizer, seq={seq})", sorted({len(group) for group in groups})
    if len(sizes) != 1 or sizes[0] < 2 or any(isinstance(group, str) for group in groups):
        raise ValueError(
            f"{call}: groups are of one size, at least two texts each, but their sizes are "
            f"{', '.join(map(str, sizes)) or 'of no group'}; leave texts out, or groups."
        )
    texts = [text for group in groups for text in group]
    rows = tokenizer.encode_texts(texts, max_length=seq)
    return Batch(**fill_text_rows(call, rows, seq, first_example), group=sizes[0])


def batch_labelled_texts(
    texts: Sequence[str] | Sequence[tuple[str, str]],
    labels: Sequence[int] | Sequence[float] | Sequence[Sequence[float]] | np.ndarray,
    tokenizer: FileTokenizer,
    *,
    seq: int,
    first_example: int = 0,
) -> LabelBatch:
    """Return a batch of texts, or of pairs of texts, with labels, for `training.classification_loss`.

    A batch has no token types, so the texts of a pair have the same type. Raises a `ValueError` for another number of
    labels than texts, and for a text without a token.

    Args:
        texts: The texts, or pairs of texts.
        labels: The number of each text's label; or a row of numbers for each text, 1 for each label that it has and 0
            for the others; or a value of each text with a fraction, which a model with one output learns.
        tokenizer: The tokenizer, which adds special tokens.
        seq: The tokens of a row; longer texts are cut at their end, within their special tokens.
        first_example: The first row's number in the run.
    """
    call, array = f"batch_labelled_texts(texts, labels, tokenizer, seq={seq})", np.asarray(labels)
    if len(array) != len(texts) or array.dtype.kind not in "iufb":
        raise ValueError(f"{call}: each of the {len(texts)} texts needs a label, but labels are {array.shape} numbers.")
    rows = tokenizer.encode_texts(texts, max_length=seq)
    is_number = array.ndim == 1 and array.dtype.kind in "iub"
    array = array.astype(np.int32 if is_number else np.float32)
    return LabelBatch(**fill_text_rows(call, rows, seq, first_example), labels=array)


def fill_text_rows(call: str, rows: Sequence[EncodedText], seq: int, first_example: int) -> dict[str, Any]:
    """Return the arrays of a batch whose rows are one text each, with padding after it, whose targets do not count."""
    if empty := [number for number, row in enumerate(rows) if not len(row.ids)]:
        raise ValueError(f"{call}: text {empty[0]} has no token, and the tokenizer adds none; leave the text out.")
    ids = np.zeros((len(rows), seq), np.int32)
    positions = np.full(ids.shape, -1, np.int32)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)], positions[number, : len(row.ids)] = row.ids, np.arange(len(row.ids))
    arrays = {"ids": ids, "targets": np.zeros_like(ids), "weights": (positions >= 0).astype(np.float32)}
    arrays |= {"positions": positions, "segments": np.where(positions < 0, -1, 0).astype(np.int32)}
    return arrays | {"documents": 1, "examples": as_examples(np.arange(first_example, first_example + len(rows)))}
