"""Rows of whole texts for text encoders and classifiers."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from .._files import parse_json
from .._shapes import Batch, LabelBatch
from ._conversations import EncodedExample, RowEncoder
from ._documents import digest, Document, TextSource
from ._files import files
from ._packing import as_examples, list_rows
from ._token_store import TokenStore
from ._tokenizer import ByteTokenizer, FileTokenizer


def batch_text_groups(
    groups: Sequence[Sequence[str]], tokenizer: ByteTokenizer | FileTokenizer, *, seq: int, first_example: int = 0
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
    rows = [row.ids for row in tokenizer.encode_texts(texts, max_length=seq)]
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

    A batch has no token types, so the texts of a pair have the same type. Raises a `ValueError` if the numbers of
    labels and texts differ, and for a text without a token.

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
    rows = [row.ids for row in tokenizer.encode_texts(texts, max_length=seq)]
    is_number = array.ndim == 1 and array.dtype.kind in "iub"
    array = array.astype(np.int32 if is_number else np.float32)
    return LabelBatch(**fill_text_rows(call, rows, seq, first_example), labels=array)


def fill_text_rows(call: str, rows: Sequence[np.ndarray], seq: int, first_example: int) -> dict[str, Any]:
    """Return the arrays of a batch in which each row is one text and padding; the targets are not used.

    `rows` are the ids of each text.
    """
    if empty := [number for number, row in enumerate(rows) if not len(row)]:
        raise ValueError(f"{call}: text {empty[0]} has no token, and the tokenizer adds none; leave the text out.")
    ids = np.zeros((len(rows), seq), np.int32)
    positions = np.full(ids.shape, -1, np.int32)
    for number, row in enumerate(rows):
        ids[number, : len(row)], positions[number, : len(row)] = row, np.arange(len(row))
    arrays = {"ids": ids, "targets": np.zeros_like(ids), "weights": (positions >= 0).astype(np.float32)}
    arrays |= {"positions": positions, "segments": np.where(positions < 0, -1, 0).astype(np.int32)}
    return arrays | {"documents": 1, "examples": as_examples(np.arange(first_example, first_example + len(rows)))}


# Groups of texts from files.


def read_text_group(row: object, *, location: str) -> list[str]:
    """Return the texts of a row: its `anchor`, its `positive` and its hard negatives, if it has any.

    `negative` is a text or a list of texts. Raises a `ValueError` that names the location for any other row, for other
    fields, and for a text of spaces alone.
    """
    fields = dict(row) if isinstance(row, dict) else {}
    negatives = fields.pop("negative", [])
    negatives = negatives if isinstance(negatives, list) else [negatives]
    texts = [fields.pop("anchor", None), fields.pop("positive", None), *negatives]
    if fields or not all(isinstance(text, str) for text in texts):
        names = (
            ", ".join(f"{name} ({type(value).__name__})" for name, value in dict(row).items())
            if isinstance(row, dict)
            else type(row).__name__
        )
        raise ValueError(
            f"{location} must have `anchor` and `positive`, two texts, and may have `negative`, a text or a list of "
            f"texts, but has {names or 'no field'}; rename the fields."
        )
    for name, text in zip(("anchor", "positive", *["negative"] * len(negatives)), texts):
        if not text.strip():
            raise ValueError(f"{location}: `{name}` has no text; leave the row out.")
    return texts


def text_groups(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, group: int = 2) -> TextSource:
    """Return the rows of .jsonl and .parquet files as a source of groups of texts, for a `TextGroupEncoder`.

    Each row is `group` documents of the same name, and so in the same split. Raises a `ValueError` as `files` does; the
    source's `check` raises one that names the row for a row that `read_text_group` refuses, and for a row whose number
    of texts is not `group`.
    """
    source = files(path, field=None)

    def read(name: str, text: str) -> list[str]:
        texts = read_text_group(parse_json(text), location=name)
        if len(texts) != group:
            raise ValueError(
                f"text_groups({source.name!r}, group={group}): {name} has {len(texts)} texts, and each row must have "
                f"{group}: an anchor, its positive and {group - 2} hard negatives; correct the row, or give group="
                f"{len(texts)}."
            )
        return texts

    def documents() -> Iterator[Document]:
        for name, text, size in source:
            for number, part in enumerate(read(name, text)):
                yield Document(name, part, 0 if number else size)

    def check() -> None:
        for name, text, _ in source:
            read(name, text)

    fingerprint = source.fingerprint
    return replace(source, documents=documents, check=check, fingerprint=lambda: f"groups {group} {fingerprint()}")


class TextGroupEncoder(RowEncoder):
    """Encoder of the texts of `text_groups`, each with the special tokens around it, for a store of `TextGroupPacking`.

    Args:
        tokenizer: The tokenizer; bytes have no special tokens.
        seq: The tokens of a row; a longer text is cut at its end, within its special tokens.
    """

    def __init__(self, tokenizer: ByteTokenizer | FileTokenizer, *, seq: int):
        self.tokenizer, self.seq = tokenizer, seq
        self.vocab, self.end_of_text = tokenizer.vocab, tokenizer.end_of_text
        self.fingerprint = digest(["text groups 1", tokenizer.fingerprint, str(seq)])

    def encode_documents(self, documents: Sequence[Document]) -> list[EncodedExample]:
        """Encode documents, each a text. Raises a `ValueError` that names a document without a token."""
        texts = [document.text for document in documents]
        rows = [row.ids for row in self.tokenizer.encode_texts(texts, max_length=self.seq)]
        examples = []
        for document, ids in zip(documents, rows, strict=True):
            if not len(ids):
                raise ValueError(f"{document.name}: a text has no token, and the tokenizer adds none; leave it out.")
            weights, ends = np.ones(len(ids), np.float32), np.array([len(ids)])
            examples.append(EncodedExample(ids.astype(np.uint32), weights, ends, len(document.text.encode())))
        return examples


class TextGroupPacking:
    """Rows of one text each, from a store of `text_groups` made by a `TextGroupEncoder`, for `contrastive_loss`.

    The rows of a group are never separated. Raises a `ValueError` for a store of other documents, and for texts that
    are longer than `seq`.
    """

    documents = 1
    cut_note = ""

    def __init__(self, store: TokenStore, *, seq: int):
        names = store.document_names()
        self.group = next((number for number, name in enumerate(names) if name != names[0]), len(names))
        call = f"TextGroupPacking(store, seq={seq})"
        is_grouped = self.group > 1 and not len(names) % self.group
        if not is_grouped or any(len({*names[n : n + self.group]}) > 1 for n in range(0, len(names), self.group)):
            raise ValueError(
                f"{call}: rows are groups of texts of one size, but {store.path.name} has other text; make the store "
                "of data.text_groups(path) by a TextGroupEncoder."
            )
        if (longest := int(np.diff(store.offsets).max())) > seq:
            raise ValueError(f"{call}: a text has {longest} tokens; make the store by a TextGroupEncoder of this seq.")
        self.seq, self.rows, self.table_bytes = seq, store.documents // self.group, 0
        self._tokens, self._offsets = store.tokens, store.offsets

    def __call__(self, rows: Int[np.ndarray, "groups"]) -> Batch:
        """Return the groups with these numbers, each as its anchor, its positive and its hard negatives."""
        documents = list_rows(rows, self.group)
        texts = [self._tokens[slice(*self._offsets[document : document + 2])] for document in documents]
        batch = Batch(**fill_text_rows("TextGroupPacking(store)", texts, self.seq, 0), group=self.group)
        return replace(batch, examples=as_examples(documents))
