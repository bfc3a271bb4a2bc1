"""Rows of whole texts for text encoders and classifiers."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from .._annotation_checks import add_article, fits
from .._files import parse_json
from .._shapes import Batch, LabelBatch
from ._conversations import describe_fields, EncodedExample, RowEncoder
from ._documents import digest, Document, TextSource
from ._files import files
from ._packing import as_examples, list_rows
from ._token_store import TokenStore
from ._tokenizer import ByteTokenizer, EncodedText, FileTokenizer


def batch_text_groups(
    groups: Sequence[Sequence[str]], tokenizer: ByteTokenizer | FileTokenizer, *, seq: int, first_example: int = 0
) -> Batch:
    """Return a batch of texts that belong together, each text as a row, for `training.contrastive_loss`.

    Raises a `ValueError` for groups of unequal sizes or of fewer than two texts, and for a text without a token.

    Args:
        groups: The texts of each group: an anchor, its positive and any number of hard negatives.
        tokenizer: The tokenizer, which adds special tokens.
        seq: The tokens of a row; a longer text is cut at its end, but keeps its special tokens.
        first_example: The index of the first row among all rows of the run, which decides the row's random keys.
    """
    call, sizes = f"batch_text_groups(groups, tokenizer, seq={seq})", sorted({len(group) for group in groups})
    if len(sizes) != 1 or sizes[0] < 2 or any(isinstance(group, str) for group in groups):
        raise ValueError(
            f"{call}: all groups must have the same number of texts, at least two, but the groups have "
            f"{', '.join(map(str, sizes)) or 'no'} texts; leave out texts or groups."
        )
    texts = [text for group in groups for text in group]
    rows = [row.ids for row in tokenizer.encode_texts(texts, max_length=seq)]
    return Batch(**fill_text_rows(call, rows, seq, first_example), group=sizes[0])


def batch_labelled_texts(
    texts: Sequence[str] | Sequence[tuple[str, str]],
    labels: Sequence[int] | Sequence[float] | Sequence[Sequence[float]] | np.ndarray,
    tokenizer: ByteTokenizer | FileTokenizer,
    *,
    seq: int,
    reads_types: bool = True,
    first_example: int = 0,
) -> LabelBatch:
    """Return a batch of texts, or of pairs of texts, with labels, for `training.classification_loss`.

    Raises a `ValueError` if the numbers of labels and texts differ, and for a text without a token.

    Args:
        texts: The texts, or pairs of texts.
        labels: The index of each text's label. For texts with several labels: a row of numbers for each text, 1 for
            each label that the text has and 0 for all other labels. For a model with one output: a floating-point value
            for each text.
        tokenizer: The tokenizer, which adds special tokens.
        seq: The number of tokens in a row; longer texts are cut at their end, but keep their special tokens.
        reads_types: Whether tokens have the tokenizer's types, by which models such as BERT distinguish the texts of a
            pair; see `nn.Transformer.reads_types`.
        first_example: The index of the first row among all rows of the run, which decides the row's random keys.
    """
    call, array = f"batch_labelled_texts(texts, labels, tokenizer, seq={seq})", np.asarray(labels)
    if len(array) != len(texts) or array.dtype.kind not in "iufb":
        raise ValueError(
            f"{call}: each of the {len(texts)} texts needs a label, but the labels have shape {array.shape} and dtype "
            f"{array.dtype}."
        )
    rows = tokenizer.encode_texts(texts, max_length=seq)
    is_number = array.ndim == 1 and array.dtype.kind in "iub"
    array = array.astype(np.int32 if is_number else np.float32)
    arrays = fill_text_rows(call, [row.ids for row in rows], seq, first_example)
    types = np.zeros_like(arrays["ids"])
    for number, row in enumerate(rows if reads_types else ()):
        types[number, : len(row.types)] = row.types
    return LabelBatch(**arrays, labels=array, types=types if reads_types else None)


def fill_text_rows(call: str, rows: Sequence[np.ndarray], seq: int, first_example: int) -> dict[str, Any]:
    """Return the arrays of a batch in which each row is one text and padding; the targets are zeros.

    `rows` has the ids of each text.
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
    fields, and for a text that is empty or has only spaces.
    """
    fields = dict(row) if isinstance(row, dict) else {}
    negatives = fields.pop("negative", [])
    negatives = negatives if isinstance(negatives, list) else [negatives]
    texts = [fields.pop("anchor", None), fields.pop("positive", None), *negatives]
    if fields or not fits(texts, list[str]):
        raise ValueError(
            f"{location} must have `anchor` and `positive`, two texts, and may have `negative`, a text or a list of "
            f"texts, but has {describe_fields(row)}; rename the fields."
        )
    for name, text in zip(("anchor", "positive", *["negative"] * len(negatives)), texts):
        if not text.strip():
            raise ValueError(f"{location}: `{name}` has no text; leave the row out.")
    return texts


def text_groups(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, group: int = 2) -> TextSource:
    """Return the rows of .jsonl and .parquet files as a source of groups of texts, for a `TextGroupEncoder`.

    Each row is `group` documents with the same name, which are therefore in the same split. Raises a `ValueError` as
    `files` does. The source's `check` raises a `ValueError`, which names the row, for a row that `read_text_group`
    refuses, and for a row whose number of texts is not `group`.
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
    """Encoder of the texts of `text_groups`, with special tokens around each text, for a store of `TextGroupPacking`.

    Args:
        tokenizer: The tokenizer; bytes have no special tokens.
        seq: The tokens of a row; a longer text is cut at its end, but keeps its special tokens.
    """

    def __init__(self, tokenizer: ByteTokenizer | FileTokenizer, *, seq: int):
        self.tokenizer, self.seq = tokenizer, seq
        self.vocab, self.end_of_text = tokenizer.vocab, tokenizer.end_of_text
        self.fingerprint = digest(["text groups 2", tokenizer.fingerprint, str(seq)])

    def encode_documents(self, documents: Sequence[Document]) -> list[EncodedExample]:
        """Encode documents, each of which is a text. Raises a `ValueError` that names a document without a token."""
        rows = self.tokenizer.encode_texts([document.text for document in documents], max_length=self.seq)
        return [_encode_row(document, row, len(document.text.encode())) for document, row in zip(documents, rows)]


def _encode_row(
    document: Document, row: EncodedText, text_bytes: int, *, label: int | None = None, reads_types: bool = False
) -> EncodedExample:
    """Return the example of a text or of a pair of texts; raise a `ValueError` for an example without a token.

    The example's field `reply_ends` has the indices at which the token type rises from 0 to 1 (if types are read), and
    the end of the row unless the text is cut there.
    """
    if not len(row.ids):
        raise ValueError(f"{document.name}: a text has no token, and the tokenizer adds none; leave the text out.")
    types = row.types.astype(np.int64) if reads_types else np.zeros(len(row.ids), np.int64)
    borders = np.flatnonzero(np.diff(types, prepend=0)) if types.any() else np.zeros(0, np.int64)
    # If the type rises by 1 at each border, a token's type is the number of borders up to the token.
    expected_types = np.searchsorted(borders, np.arange(len(types)), side="right")
    if types[0] or not np.array_equal(expected_types, types):
        raise ValueError(
            f"{document.name}: its tokens have types in the order {types[np.append(0, borders)].tolist()}, but the "
            "first text must have type 0 and the second text type 1; take another tokenizer."
        )
    ends = borders if row.is_cut else np.append(borders, len(row.ids))
    return EncodedExample(row.ids.astype(np.uint32), np.ones(len(row.ids), np.float32), ends, text_bytes, label)


def _check_lengths(call: str, store: TokenStore, seq: int, encoder: type[RowEncoder]) -> None:
    """Raise a `ValueError` if a text of a store of whole texts has more than `seq` tokens."""
    if (longest := int(np.diff(store.offsets).max())) > seq:
        raise ValueError(
            f"{call}: a text has {longest} tokens; make the store by {add_article(encoder.__name__)} with the same seq."
        )


def _count_cut(store: TokenStore) -> tuple[int, str]:
    """Return the number of cut texts in a store of whole texts, and a note about them, empty if no text is cut."""
    assert store.cuts is not None
    cut = int(np.sum(~np.isin(store.offsets[1:], store.cuts)))
    noun = "text is" if cut == 1 else "texts are"
    return cut, f"{cut:,} of {store.documents:,} {noun} cut at the end of a row" if cut else ""


class TextGroupPacking:
    """Rows of one text each, from a store of `text_groups` made by a `TextGroupEncoder`, for `contrastive_loss`.

    The rows of a group are never separated. `cut` is the number of texts that are cut, and `cut_note` describes this
    number in words. Raises a `ValueError` for a store of other documents, and for texts that are longer than `seq`.
    """

    documents = 1

    def __init__(self, store: TokenStore, *, seq: int):
        names = store.document_names()
        # All documents of a group have one name, so the first group ends where the name changes.
        self.group = next((index for index, name in enumerate(names) if name != names[0]), len(names))
        call = f"TextGroupPacking(store, seq={seq})"
        is_grouped = self.group > 1 and not len(names) % self.group
        if not is_grouped or any(name != names[index - index % self.group] for index, name in enumerate(names)):
            raise ValueError(
                f"{call}: rows must be groups of texts, all with the same number of texts, but {store.path.name} has "
                "other text; make the store from data.text_groups(path) with a TextGroupEncoder."
            )
        _check_lengths(call, store, seq, TextGroupEncoder)
        self.seq, self.rows, self.table_bytes = seq, store.documents // self.group, 0
        self.cut, self.cut_note = _count_cut(store)
        self._tokens, self._offsets = store.tokens, store.offsets

    def __call__(self, rows: Int[np.ndarray, "groups"]) -> Batch:
        """Return the groups with these indices, each as its anchor, its positive and its hard negatives."""
        documents = list_rows(rows, self.group)
        texts = [self._tokens[slice(*self._offsets[document : document + 2])] for document in documents]
        batch = Batch(**fill_text_rows("TextGroupPacking(store)", texts, self.seq, 0), group=self.group)
        return replace(batch, examples=as_examples(documents))


# Labelled texts from files.


class LabelledText(NamedTuple):
    """A row of a file of labelled texts."""

    texts: tuple[str] | tuple[str, str]
    """The text, or the two texts of a pair."""
    label: str | int
    """The name of the label, or the label's index."""


def read_labelled_text(row: object, *, location: str) -> LabelledText:
    """Return the text, or the pair of texts, of a row and its label.

    The fields are `text`, optionally `text_pair`, and `label`, a name or a whole number. Raises a `ValueError` that
    names the location for any other row, for other fields, and for a text that is empty or has only spaces.
    """
    fields = dict(row) if isinstance(row, dict) else {}
    text, pair, label = fields.pop("text", None), fields.pop("text_pair", None), fields.pop("label", None)
    texts = (text,) if pair is None else (text, pair)
    if fields or not fits(label, str | int) or not fits(texts, tuple[str] | tuple[str, str]):
        raise ValueError(
            f"{location} must have `text`, a text, and `label`, a name or a whole number, and may have `text_pair`, "
            f"the second text of a pair, but has {describe_fields(row)}; rename the fields."
        )
    for name, part in zip(("text", "text_pair"), texts):
        if not part.strip():
            raise ValueError(f"{location}: `{name}` has no text; leave the row out.")
    if isinstance(label, str) and not label.strip():
        raise ValueError(f"{location}: `label` has no text; leave the row out.")
    return LabelledText(texts, label)


def list_label_names(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return the names of all labels in the rows of files, ordered by number or by name.

    Raises a `ValueError` as `labelled_texts` does.
    """
    rows = (read_labelled_text(parse_json(text), location=name) for name, text, _ in files(path, field=None))
    labels = {row.label for row in rows}
    numbers = {label for label in labels if isinstance(label, int)}
    if numbers and (numbers != labels or numbers != {*range(len(numbers))}):
        raise ValueError(
            f"labelled_texts({str(path)!r}): the labels are {_list_some(sorted(map(str, labels)))}; give only names, "
            "or only whole numbers from 0 on without gaps, or list the names of the numbers as `labels`."
        )
    return tuple(map(str, sorted(numbers))) or tuple(sorted(map(str, labels)))


def _list_some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _number_label(row: LabelledText, labels: Sequence[str], location: str) -> int:
    """Return the index of a row's label; raise a `ValueError` that names the location for an unknown label."""
    if str(row.label) in labels:
        return labels.index(str(row.label))
    if isinstance(row.label, int) and 0 <= row.label < len(labels):
        return row.label
    raise ValueError(f"{location}: the label {row.label!r} is not one of {_list_some(labels)}; correct it.")


def labelled_texts(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], labels: Sequence[str]
) -> TextSource:
    """Return the rows of .jsonl and .parquet files as a source of labelled texts, for a `LabelledTextEncoder`.

    Raises a `ValueError` as `files` does. The source's `check` raises a `ValueError`, which names the row, for a row
    that `read_labelled_text` refuses and for a label that is not one of `labels`; it also raises a `ValueError` if all
    rows have the same label.
    """
    source, names = files(path, field=None), tuple(labels)

    def check() -> None:
        numbers = set()
        for name, text, _ in source:
            numbers.add(_number_label(read_labelled_text(parse_json(text), location=name), names, name))
        if len(numbers) == 1:
            raise ValueError(
                f"labelled_texts({source.name!r}): all rows have the label {names[numbers.pop()]!r}, so there is "
                "nothing to learn; add rows with other labels."
            )

    return replace(source, check=check)


class LabelledTextEncoder(RowEncoder):
    """Encoder of the rows of `labelled_texts`, with the special tokens around them, for a `LabelledTextPacking`.

    Args:
        tokenizer: The tokenizer; bytes have no special tokens, and no pairs of texts.
        seq: The tokens of a row; a longer text is cut at its end, but keeps its special tokens.
        labels: The names of the labels.
        reads_types: Whether tokens have the tokenizer's types, which distinguish the texts of a pair.
    """

    label_dtype = "<i4"

    def __init__(
        self, tokenizer: ByteTokenizer | FileTokenizer, *, seq: int, labels: Sequence[str], reads_types: bool = True
    ):
        self.tokenizer, self.seq, self.labels, self.reads_types = tokenizer, seq, tuple(labels), reads_types
        self.vocab, self.end_of_text = tokenizer.vocab, tokenizer.end_of_text
        parts = ["labelled texts 1", tokenizer.fingerprint, str(seq), str(reads_types), *self.labels]
        self.fingerprint = digest(parts)

    def encode_documents(self, documents: Sequence[Document]) -> list[EncodedExample]:
        """Encode documents, each of which is a row as JSON. Raises a `ValueError` that names a row it cannot encode."""
        rows = [read_labelled_text(parse_json(text), location=name) for name, text, _ in documents]
        pairs = [document.name for document, row in zip(documents, rows) if len(row.texts) == 2]
        if pairs and not self.tokenizer.reads_pairs:
            raise ValueError(f"{pairs[0]}: bytes have no token between the texts of a pair; give a tokenizer.")
        texts: list[Any] = [row.texts if len(row.texts) == 2 else row.texts[0] for row in rows]
        encoded = self.tokenizer.encode_texts(texts, max_length=self.seq)
        return [
            _encode_row(
                document,
                tokens,
                sum(len(text.encode()) for text in row.texts),
                label=_number_label(row, self.labels, document.name),
                reads_types=self.reads_types,
            )
            for document, row, tokens in zip(documents, rows, encoded, strict=True)
        ]


class LabelledTextPacking:
    """Rows of one text or pair of texts with its label, from a store of `labelled_texts`, for `classification_loss`.

    `cut` is the number of texts that are cut, and `cut_note` describes this number in words. Raises a `ValueError` for
    a store of other documents, and for texts that are longer than `seq`.
    """

    documents = 1
    group = 1

    def __init__(self, store: TokenStore, *, seq: int):
        call = f"LabelledTextPacking(store, seq={seq})"
        if store.cuts is None or store.labels is None or np.any(store.labels < 0):
            raise ValueError(
                f"{call}: each row must have a label, but {store.path.name} has other text; make the store from "
                "data.labelled_texts(path, labels) with a LabelledTextEncoder."
            )
        _check_lengths(call, store, seq, LabelledTextEncoder)
        self.seq, self.rows, self.table_bytes = seq, store.documents, 0
        self.cut, self.cut_note = _count_cut(store)
        self._tokens, self._offsets, self._labels = store.tokens, store.offsets, store.labels
        self._borders = np.setdiff1d(store.cuts, store.offsets[1:])

    def __call__(self, rows: Int[np.ndarray, "batch"]) -> LabelBatch:
        """Return the rows with these indices."""
        spans = [slice(*self._offsets[row : row + 2]) for row in rows]
        arrays = fill_text_rows("LabelledTextPacking(store)", [self._tokens[span] for span in spans], self.seq, 0)
        types = np.zeros_like(arrays["ids"])
        for number, span in enumerate(spans):
            first, last = np.searchsorted(self._borders, [span.start, span.stop])
            for border in self._borders[first:last]:
                types[number, border - span.start : span.stop - span.start] += 1
        arrays["examples"] = as_examples(rows)
        return LabelBatch(**arrays, labels=self._labels[rows].astype(np.int32), types=types)
