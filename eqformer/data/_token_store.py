"""Token store: documents, tokenized once into files that are memory-mapped."""

import hashlib
import math
import os.path
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, UInt

from .._failures import explain_error, explain_write_error
from .._files import list_paths
from . import _atomic_folder as atomic_folder
from ._conversations import EncodedExample, RowEncoder
from ._documents import digest, Document, TextSource, to_bytes
from ._tokenizer import Tokenizer


Split = Literal["train", "validation"]
SplitBy = Literal["document", "position"]
Progress = Callable[[int, int], object]

_NAMES = "names.bin"  # The names of the documents that a `RowEncoder` encoded, one per line.
_FORMAT = 1  # Version of the files; caches of another version are not used.
_GROUP_CHARACTERS = 1 << 20  # Documents are tokenized in groups of about this many characters.
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class TokenStore:
    """Tokens of one split: document `i` is `tokens[offsets[i]:offsets[i + 1]]`, and ends with the end of text."""

    path: Path
    """The folder of the cache."""
    tokens: UInt[np.ndarray, "tokens"]
    """The ids of all documents."""
    offsets: Int[np.ndarray, "borders"]
    """The index of each document's first token, and the number of tokens."""
    text_bytes: int
    """The number of UTF-8 bytes of all texts."""
    largest: int
    """The largest id that occurs, the end of text included."""
    vocab: int
    """The tokenizer's vocabulary size."""
    end_of_text: int
    """The id after each document."""
    fingerprint: str
    """The tokenizer's fingerprint."""
    weights: Float[np.ndarray, "tokens"] | None = None
    """The loss weight of each token of chat data; None: all tokens are trained on."""
    cuts: Int[np.ndarray, "cuts"] | None = None
    """The token indices at which a long document may be cut, as its `RowEncoder` set `EncodedExample.reply_ends`."""
    labels: Int[np.ndarray, "documents"] | None = None
    """The label that a `RowEncoder` gave each document, -1 for none: the number of a text's label, or whether a
    completion is desirable (1) or undesirable (0)."""

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    @property
    def bytes_per_token(self) -> float:
        """The number of bytes of text per token; ends of text count as tokens.

        Bits per byte are `nats per token / ln 2 / bytes_per_token`.
        """
        return self.text_bytes / len(self.tokens)

    def name_document(self, document: int) -> str:
        """Return a document's name, such as `FILE#ROW`; in a store without names, a name with the document's number."""
        names = self.document_names()
        return names[document] if names else f"document {document}"

    def document_names(self) -> list[str]:
        """Return the name of each document; an empty list for a store of plain text, which keeps no names."""
        try:
            return (self.path / _NAMES).read_bytes().decode("utf-8", "surrogatepass").split("\n")[:-1]
        except OSError:
            return []


class EmptySplitError(ValueError):
    """Error of a split without text."""


def open_store(
    source: TextSource,
    tokenizer: Tokenizer | RowEncoder,
    cache_dir: str | PathLike[str] | Sequence[str | PathLike[str]],
    split: Split = "train",
    *,
    validation: float = 0.05,
    split_by: SplitBy = "document",
    progress: Progress | None = None,
    verify: bool = True,
) -> TokenStore:
    """Open the tokens of one split of a source; text that is not in the cache is tokenized into it first.

    By default only the hash of a document's name decides its split, so a document's split is the same on any machine,
    and stays the same when the corpus grows. A source that cannot be read raises its error before anything is
    tokenized. Lone surrogates, which JSON can contain although they are no characters, are replaced by U+FFFD, with a
    warning that counts the affected documents. A damaged cache is not used: a warning names the cache, and the text is
    tokenized again.

    Args:
        source: The documents.
        tokenizer: The tokenizer of the texts, or the encoder of conversations, completions or groups of texts.
        cache_dir: One or several folders for caches; a missing folder is created. All folders are searched. New tokens
            are written to the first writable folder, with a warning for each previous folder that is not writable.
        split: `"train"` or `"validation"`.
        validation: The share of the documents that is held out for validation.
        split_by: "document" holds out whole documents. "position", for sources of few documents, holds out the end of
            each document: about the share `validation` of its characters. The held-out part begins at the beginning of
            a line or a word if there is one nearby (see `find_held_out`).
        progress: Called with the bytes done and the total bytes (0: unknown).
        verify: Whether to check the files of an existing cache by checksums (about half a second per gigabyte), or
            only by sizes.

    **Raises:** `ValueError` if the split has no text, a text cannot be tokenized, or the cache cannot be written.
    """
    call = f"open_store({source.name!r}, split={split!r}, validation={validation}, split_by={split_by!r})"
    if split not in ("train", "validation"):
        raise ValueError(f"{call}: split must be 'train' or 'validation', but is {split!r}.")
    if not 0 <= validation < 1:
        raise ValueError(f"{call}: validation is a share of the documents, at least 0 and below 1; 0.05 is usual.")
    if split_by not in ("document", "position"):
        raise ValueError(f"{call}: split_by must be 'document' or 'position'; pass one of them.")
    name = _folder_name(source, tokenizer, split, validation, split_by)
    targets = [folder / name for folder in list_paths(cache_dir)]
    messages = []
    for target in filter(os.path.exists, targets):
        try:
            return _map_store(target, verify=verify)
        except atomic_folder.DamagedFolder as damage:
            messages.append(f"{call}: the cache {target} is damaged: {damage}; the text is tokenized again.")
    for message in messages:
        warnings.warn(message, stacklevel=2)
    source.check()
    for target, following in zip(targets, [*targets[1:], None]):
        try:
            # `os.path.exists`, because `Path.exists` raises for a folder without permission.
            if os.path.exists(target):
                atomic_folder.delete_folder(target)
            with atomic_folder.write_atomic_folder(target) as writer:
                _write_tokens(writer, source, tokenizer, split, validation, split_by, progress, call)
            return _map_store(target, verify=False)
        except (atomic_folder.WriteFailure, atomic_folder.DamagedFolder) as failure:
            if following is None:
                raise _describe_write_failure(call, target, failure) from failure
            reason = failure if isinstance(failure, atomic_folder.DamagedFolder) else explain_error(failure.error)[0]
            message = f"the tokens cannot be written to {target.parent} ({reason}), and go to {following.parent}"
            warnings.warn(f"{call}: {message}.", stacklevel=2)
    raise ValueError(f"{call}: cache_dir must name a folder, but is {cache_dir!r}; pass one or several folders.")


def is_stored(
    source: TextSource,
    tokenizer: Tokenizer | RowEncoder,
    folders: Sequence[Path],
    split: Split,
    *,
    validation: float,
    split_by: SplitBy,
) -> bool:
    """Return whether one of the folders has the tokens of a split, without reading any file."""
    name = _folder_name(source, tokenizer, split, validation, split_by)
    return any(os.path.exists(folder / name) for folder in folders)


def _folder_name(
    source: TextSource,
    tokenizer: Tokenizer | RowEncoder,
    split: Split,
    validation: float,
    split_by: SplitBy,
) -> str:
    """Return a name for a split's folder in a cache, which depends on the texts, the tokenizer and the split."""
    parts = [source.fingerprint(), tokenizer.fingerprint, split, repr(float(validation)), str(_FORMAT)]
    key = digest(parts if split_by == "document" else [*parts, split_by])
    slug = re.sub(r"[^a-z0-9]+", "-", source.name.lower()).strip("-")[:40] or "texts"
    return f"{slug}-{split}-{key[:16]}"


def find_held_out(text: str, share: float) -> int:
    """Return the index of the first held-out character of a text, so that about the last `share` is held out.

    The index is moved back to the beginning of a line, or else of a word, if there is one within `share` of the text's
    characters.
    """
    held_out = math.ceil(len(text) * share)
    start = len(text) - held_out
    for border in ("\n", " "):
        index = text.rfind(border, max(start - held_out, 0), start)
        if index >= 0:
            return index + 1
    return start


def _select_split(document: Document, split: Split, validation: float, split_by: SplitBy) -> Document | None:
    """Return the part of a document that belongs to a split, or None."""
    if split_by == "document":
        return document if is_validation(document.name, validation) == (split == "validation") else None
    start = find_held_out(document.text, validation)
    text = document.text[start:] if split == "validation" else document.text[:start]
    return document._replace(text=text) if text else None


def is_validation(name: str, share: float) -> bool:
    """Return whether a document of this name belongs to the validation split."""
    value = hashlib.blake2b(to_bytes(f"eqformer:{name}"), digest_size=8).digest()
    return int.from_bytes(value, "big") < share * 2**64


def check_vocab(store: TokenStore, vocab: int) -> None:
    """Raise a `ValueError` if the store has a token id that a model of `vocab` token ids does not have."""
    if store.largest >= vocab:
        raise ValueError(
            f"check_vocab(store, vocab={vocab}): the vocabulary must be larger than every token id, but "
            f"{store.path.name} contains the id {store.largest}; build the model with the tokenizer's "
            f"vocab={store.vocab}, or change the tokenizer."
        )


def _write_tokens(
    writer: atomic_folder.FolderWriter,
    source: TextSource,
    tokenizer: Tokenizer | RowEncoder,
    split: Split,
    validation: float,
    split_by: SplitBy,
    progress: Progress | None,
    call: str,
) -> None:
    """Tokenize one split of a source into the files of a folder."""
    vocab = max(tokenizer.vocab, tokenizer.end_of_text + 1)  # The end of text may be an id beyond the vocabulary.
    dtype = np.min_scalar_type(vocab - 1).newbyteorder("<")
    lengths: list[int] = []
    done = largest_id = text_bytes = excluded = cuts = tokens = 0
    is_weighted = isinstance(tokenizer, RowEncoder)
    documents_with_surrogates: list[str] = []
    for group in _group_documents(source):
        done += sum(document.size for document in group)
        parts = (_select_split(document, split, validation, split_by) for document in group)
        selected = [part for part in parts if part is not None]
        excluded += len(group) - len(selected)
        selected = [_replace_surrogates(document, documents_with_surrogates) for document in selected if document.text]
        for document, example in _encode_documents(tokenizer, selected, call):
            text_bytes += example.text_bytes
            largest_id = max(largest_id, int(example.ids.max()))
            assert largest_id < vocab, "a tokenizer's ids must be below its vocab"
            writer.append("tokens.bin", example.ids.astype(dtype))
            if is_weighted:
                writer.append("weights.bin", example.weights.astype("<f4"))
                writer.append("cuts.bin", (tokens + example.reply_ends).astype("<i8"))
                label = -1 if example.label is None else example.label
                writer.append("labels.bin", np.array([label], tokenizer.label_dtype))
                writer.append(_NAMES, np.frombuffer(to_bytes(f"{document.name}\n"), np.uint8))
                cuts += len(example.reply_ends)
            lengths.append(len(example.ids))
            tokens += len(example.ids)
        if progress is not None:
            progress(min(done, source.size) if source.size else done, source.size)
    if not lengths:
        raise _empty_split_error(call, split, excluded)
    if documents_with_surrogates:
        _warn_of_surrogates(call, documents_with_surrogates)
    writer.append("offsets.bin", np.cumsum([0, *lengths]).astype("<i8"))
    writer.finish(
        {
            "format": _FORMAT,
            "source": source.name,
            "split": split,
            "validation": validation,
            "split_by": split_by,
            "tokenizer": tokenizer.fingerprint,
            "vocab": tokenizer.vocab,
            "end_of_text": tokenizer.end_of_text,
            "dtype": dtype.name,
            "tokens": tokens,
            "documents": len(lengths),
            "text_bytes": text_bytes,
            "largest": max(largest_id, tokenizer.end_of_text),
            **({"cuts": cuts, "label_dtype": tokenizer.label_dtype} if is_weighted else {}),
        }
    )
    if progress is not None:
        progress(source.size or done, source.size or done)


def _empty_split_error(call: str, split: Split, other_documents: int) -> EmptySplitError:
    return EmptySplitError(
        f"{call}: the {split} split must have a document with text, but it has none, and the other split has "
        f"{other_documents}; pass more documents, another `validation` share, or split_by='position', which holds out "
        f"the end of each document. A folder of a few long files has few documents: pass the paths of the files, or "
        f"files(folder, piece=...), which cuts each file into many documents."
    )


def _warn_of_surrogates(call: str, documents: Sequence[str]) -> None:
    """Warn about the number of documents with lone surrogates, and name the first of them.

    `call`, the text of the call of `open_store`, begins the warning.
    """
    count = len(documents)
    warnings.warn(
        f"{call}: lone surrogates, which are not characters, were replaced by U+FFFD in {count} "
        f"document{'s' * (count > 1)}, the first of them {documents[0]}.",
        stacklevel=4,
    )


def _replace_surrogates(document: Document, names: list[str]) -> Document:
    """Replace lone surrogates by U+FFFD; if there are any, append the document's name to `names`."""
    if document.text.isascii() or not _SURROGATE.search(document.text):
        return document
    names.append(document.name)
    # Decoding UTF-16 joins the two halves of a surrogate pair into one character.
    encoded = document.text.encode("utf-16-le", errors="surrogatepass")
    return document._replace(text=encoded.decode("utf-16-le", errors="replace"))


def _group_documents(source: TextSource) -> Iterator[list[Document]]:
    """Group the documents of a source; the tokenizer encodes one group at a time, on all cores."""
    group: list[Document] = []
    characters = 0
    for document in source:
        group.append(document)
        characters += len(document.text)
        if characters >= _GROUP_CHARACTERS or len(group) >= 4096:
            yield group
            group, characters = [], 0
    yield group


def _encode_documents(
    tokenizer: Tokenizer | RowEncoder, documents: list[Document], call: str
) -> list[tuple[Document, EncodedExample]]:
    """Return each document, encoded with its end of text; documents without ids are left out."""
    if isinstance(tokenizer, RowEncoder):  # Errors of a RowEncoder already name the document.
        return [*zip(documents, tokenizer.encode_documents(documents), strict=True)]
    encoded = zip(documents, _encode_texts(tokenizer, documents, call), strict=True)
    return [(document, _end_text(ids, tokenizer.end_of_text, document.text)) for document, ids in encoded if len(ids)]


def _end_text(ids: UInt[np.ndarray, "seq"], end_of_text: int, text: str) -> EncodedExample:
    """Return the example of a plain text: its ids and the end of text, which are all trained on."""
    ended = np.append(ids, np.uint32(end_of_text))
    return EncodedExample(ended, np.ones(len(ended), np.float32), np.array([len(ended)]), len(text.encode()))


def _encode_texts(tokenizer: Tokenizer, documents: list[Document], call: str) -> list[np.ndarray]:
    try:
        return tokenizer.encode_batch([document.text for document in documents])
    except ValueError:
        # Encode one by one to name the document that failed.
        for document in documents:
            try:
                tokenizer.encode(document.text)
            except ValueError as error:
                raise ValueError(f"{call}: {document.name} cannot be tokenized: {error}") from error
        raise


def _map_store(target: Path, *, verify: bool) -> TokenStore:
    """Map the files of a finished folder into memory. Raises `DamagedFolder`."""
    meta = atomic_folder.read_description(target, verify=verify)
    try:
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        tokens = np.memmap(target / "tokens.bin", dtype, "r").view(np.ndarray)
        offsets = np.fromfile(target / "offsets.bin", "<i8")
        store = TokenStore(
            path=target,
            tokens=tokens,
            offsets=offsets,
            text_bytes=meta["text_bytes"],
            largest=meta["largest"],
            vocab=meta["vocab"],
            end_of_text=meta["end_of_text"],
            fingerprint=meta["tokenizer"],
            weights=np.memmap(target / "weights.bin", "<f4", "r").view(np.ndarray) if "cuts" in meta else None,
            cuts=np.fromfile(target / "cuts.bin", "<i8") if "cuts" in meta else None,
            labels=_read_labels(target, meta),
        )
        counts = (len(tokens), len(offsets) - 1)
        expected = (meta["tokens"], meta["documents"])
        if store.weights is not None and store.cuts is not None:
            counts += (len(store.weights), len(store.cuts))
            expected += (meta["tokens"], meta["cuts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise atomic_folder.DamagedFolder(f"meta.json does not describe the files ({error})") from error
    # `_write_tokens` leaves out documents without ids, and puts the end of text after the ids of a tokenizer.
    shortest = 2 if store.weights is None else 1
    if counts != expected or offsets[0] != 0 or offsets[-1] != len(tokens) or np.any(np.diff(offsets) < shortest):
        raise atomic_folder.DamagedFolder(
            f"the files have {counts} tokens, documents, weights and cuts, but meta.json states {expected}, or the "
            "offsets do not fit"
        )
    return store


def _read_labels(target: Path, meta: Mapping[str, Any]) -> Int[np.ndarray, "documents"] | None:
    """Return the labels of a store's documents; None for plain text, and for chat data of an older version."""
    if "labels.bin" not in meta["files"]:
        return None
    return np.fromfile(target / "labels.bin", meta.get("label_dtype", "i1"))


def _describe_write_failure(
    call: str, target: Path, failure: atomic_folder.WriteFailure | atomic_folder.DamagedFolder
) -> ValueError:
    """Return the error of a cache that cannot be written, with the reason and the fix."""
    if isinstance(failure, atomic_folder.DamagedFolder):
        # Another process has deleted or created the folder at the same time, or the disk is faulty.
        return ValueError(f"{call}: the cache {target} is damaged just after it was written: {failure}; delete it.")
    reason, fix = explain_write_error(target.parent, failure.error)
    return ValueError(
        f"{call}: the tokens must be written to {target.parent}, but the system says {reason}; no part of the "
        f"cache was left behind; {fix or 'find the cause'}, or pass another `cache_dir`."
    )
