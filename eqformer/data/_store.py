"""Documents, tokenised once into files that are memory-mapped."""

import hashlib
import math
import os.path
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, UInt

from .._failures import reason_and_fix, write_failure
from ._cache import Damaged, read, remove, Unwritable, Writer, writing
from ._documents import digest, Document, Source, to_bytes
from ._tokenizer import Tokenizer


Split = Literal["train", "validation"]
SplitBy = Literal["document", "position"]
Progress = Callable[[int, int], Any]

_FORMAT = 1  # the version of the files below; caches of another version are not used
_GROUP = 1 << 20  # characters that are tokenised together
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class TokenStore:
    """The tokens of one split: document `i` is `tokens[offsets[i]:offsets[i + 1]]`, the end of text last."""

    path: Path
    """The folder of the cache."""
    tokens: UInt[np.ndarray, "tokens"]
    """All ids."""
    offsets: Int[np.ndarray, "borders"]
    """Where documents begin, and where the last one ends."""
    text_bytes: int
    """The UTF-8 bytes of the texts."""
    largest: int
    """The largest id that occurs."""
    vocab: int
    """The number of the tokenizer's ids."""
    end_of_text: int
    """The id after each document."""
    fingerprint: str
    """The tokenizer's fingerprint."""

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.offsets) - 1

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token, ends of text counted as tokens: bits per byte are nats per token / ln 2 / this."""
        return self.text_bytes / len(self.tokens)


class EmptySplitError(ValueError):
    """A split that would hold no text."""


def open_store(
    source: Source,
    tokenizer: Tokenizer,
    cache_dir: str | PathLike[str] | Sequence[str | PathLike[str]],
    split: Split = "train",
    *,
    validation: float = 0.05,
    split_by: SplitBy = "document",
    progress: Progress | None = None,
    verify: bool = True,
) -> TokenStore:
    """The tokens of one split of a source, from the cache, or tokenised into it now.

    By default a document belongs to the validation split by the hash of its name and nothing else, so it is the same on
    any machine and however the corpus grows. A source that cannot be read raises before anything is tokenised. Lone
    surrogates, which JSON can spell though they are no characters, are replaced by U+FFFD, and a warning says how many
    documents had some. A damaged cache is written anew, with a warning.

    Args:
        source: The documents.
        tokenizer: What makes ids of their texts.
        cache_dir: The folder of caches, made if it is not there. Of several all are searched, and new tokens are
            written to the first that can be written, with a warning about those before it.
        split: `"train"` or `"validation"`.
        validation: The share of the documents that is held out for validation.
        split_by: "position" holds out the end of each document instead, for sources of few documents: about the share
            `validation` of its characters, from a line's beginning or a word's, see `held_out_from`.
        progress: Called with the bytes done and the bytes in all (0: unknown).
        verify: Whether to compare the checksums of an existing cache (about half a second a gigabyte), not only the
            sizes.

    **Raises:** `ValueError` if the split has no text, a text cannot be tokenised, or the cache cannot be written.
    """
    call = f"open_store({source.name!r}, split={split!r}, validation={validation}, split_by={split_by!r})"
    if split not in ("train", "validation"):
        raise ValueError(f"{call}: split must be 'train' or 'validation', but is {split!r}.")
    if not 0 <= validation < 1:
        raise ValueError(f"{call}: validation is a share of the documents, at least 0 and below 1; 0.05 is usual.")
    if split_by not in ("document", "position"):
        raise ValueError(f"{call}: split_by must be 'document' or 'position'; pass one of them.")
    folders = [cache_dir] if isinstance(cache_dir, (str, PathLike)) else cache_dir
    targets = [Path(folder) / _folder_name(source, tokenizer, split, validation, split_by) for folder in folders]
    damaged = []
    for target in filter(os.path.exists, targets):
        try:
            return _mapped(target, verify=verify)
        except Damaged as damage:
            damaged.append(f"{call}: the cache {target} is damaged: {damage}; it is written anew.")
    for message in damaged:
        warnings.warn(message, stacklevel=2)
    source.check()
    for target, following in zip(targets, [*targets[1:], None]):
        try:
            if os.path.exists(target):  # not `Path.exists`, which raises for what may not be read
                remove(target)
            with writing(target) as writer:
                _tokenise(writer, source, tokenizer, split, validation, split_by, progress, call)
            return _mapped(target, verify=False)
        except (Unwritable, Damaged) as failure:
            if following is None:
                raise _refused(call, target, failure) from failure
            reason = failure if isinstance(failure, Damaged) else reason_and_fix(failure.error)[0]
            place = f"the tokens cannot be written to {target.parent} ({reason}), but to {following.parent}"
            warnings.warn(f"{call}: {place}.", stacklevel=2)
    raise ValueError(f"{call}: cache_dir must name a folder, but is {cache_dir!r}; pass one or several.")


def is_stored(
    source: Source,
    tokenizer: Tokenizer,
    folders: Sequence[Path],
    split: Split,
    *,
    validation: float,
    split_by: SplitBy,
) -> bool:
    """Whether one of the folders holds the tokens of a split; nothing in it is read."""
    name = _folder_name(source, tokenizer, split, validation, split_by)
    return any(os.path.exists(folder / name) for folder in folders)


def _folder_name(source: Source, tokenizer: Tokenizer, split: Split, validation: float, split_by: SplitBy) -> str:
    """The name of a split's folder in a cache: another one for other texts, tokenizers, shares or ways to split."""
    parts = [source.fingerprint(), tokenizer.fingerprint, split, repr(float(validation)), str(_FORMAT)]
    key = digest(parts if split_by == "document" else [*parts, split_by])
    slug = re.sub(r"[^a-z0-9]+", "-", source.name.lower()).strip("-")[:40] or "texts"
    return f"{slug}-{split}-{key[:16]}"


def held_out_from(text: str, share: float) -> int:
    """Return the index of the first held-out character: that of the last `share` of a text, or somewhat before.

    It is moved back to the nearest beginning of a line or else of a word, by no more characters than `share` counts.
    """
    held_out = math.ceil(len(text) * share)
    start = len(text) - held_out
    for border in ("\n", " "):
        place = text.rfind(border, max(start - held_out, 0), start)
        if place >= 0:
            return place + 1
    return start


def _in_split(document: Document, split: Split, validation: float, split_by: SplitBy) -> Document | None:
    """The document's part of a split; None if it has none."""
    if split_by == "document":
        return document if is_validation(document.name, validation) == (split == "validation") else None
    start = held_out_from(document.text, validation)
    text = document.text[start:] if split == "validation" else document.text[:start]
    return document._replace(text=text) if text else None


def is_validation(name: str, share: float) -> bool:
    """Whether a document of this name belongs to the validation split."""
    value = hashlib.blake2b(to_bytes(f"eqformer:{name}"), digest_size=8).digest()
    return int.from_bytes(value, "big") < share * 2**64


def check_vocab(store: TokenStore, vocab: int) -> None:
    """Raise `ValueError` where a model of `vocab` token ids could not read every token of the store."""
    if store.largest >= vocab:
        raise ValueError(
            f"check_vocab(store, vocab={vocab}): the vocabulary must be larger than every token id, but "
            f"{store.path.name} holds the id {store.largest}; build the model with "
            f"vocab={store.vocab} (the tokenizer's), or change the tokenizer."
        )


def _tokenise(
    writer: Writer,
    source: Source,
    tokenizer: Tokenizer,
    split: Split,
    validation: float,
    split_by: SplitBy,
    progress: Progress | None,
    call: str,
) -> None:
    dtype = np.min_scalar_type(max(tokenizer.vocab, tokenizer.end_of_text + 1) - 1).newbyteorder("<")
    end = np.full(1, tokenizer.end_of_text, dtype)
    lengths: list[int] = []
    done = largest = text_bytes = others = 0
    mended: list[str] = []
    for group in _groups(source):
        done += sum(document.size for document in group)
        parts = (_in_split(document, split, validation, split_by) for document in group)
        chosen = [part for part in parts if part is not None]
        others += len(group) - len(chosen)
        chosen = [_mended(document, mended) for document in chosen if document.text]
        for document, ids in zip(chosen, _encoded(tokenizer, chosen, call), strict=True):
            if not len(ids):
                continue
            lengths.append(len(ids) + 1)
            text_bytes += len(document.text.encode())
            largest = max(largest, int(ids.max()))
            assert largest < tokenizer.vocab, "a tokenizer's ids must be below its vocab"
            writer.append("tokens.bin", ids.astype(dtype))
            writer.append("tokens.bin", end)
        if progress is not None:
            progress(min(done, source.size) if source.size else done, source.size)
    if not lengths:
        raise EmptySplitError(
            f"{call}: the {split} split must have a document with text, but it has none and the other split {others}; "
            f"pass more documents, another `validation` share, split_by='position' to hold out the end of each "
            f"document, or, of a folder of few long files, the files themselves, which are cut (as by "
            f"files(folder, piece=...))."
        )
    if mended:
        warnings.warn(
            f"{call}: lone surrogates, which are no characters, were replaced by U+FFFD in {len(mended)} "
            f"document{'s' * (len(mended) > 1)}, the first of them {mended[0]}.",
            stacklevel=3,
        )
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
            "tokens": sum(lengths),
            "documents": len(lengths),
            "text_bytes": text_bytes,
            "largest": max(largest, tokenizer.end_of_text),
        }
    )
    if progress is not None:
        progress(source.size or done, source.size or done)


def _mended(document: Document, mended: list[str]) -> Document:
    """The document with U+FFFD for lone surrogates; if it had any, its name is appended to `mended`."""
    if document.text.isascii() or not _SURROGATE.search(document.text):
        return document
    mended.append(document.name)
    wide = document.text.encode("utf-16-le", errors="surrogatepass")  # two halves side by side become one character
    return document._replace(text=wide.decode("utf-16-le", errors="replace"))


def _groups(source: Source) -> Iterator[list[Document]]:
    group: list[Document] = []
    characters = 0
    for document in source:
        group.append(document)
        characters += len(document.text)
        if characters >= _GROUP or len(group) >= 4096:
            yield group
            group, characters = [], 0
    yield group


def _encoded(tokenizer: Tokenizer, documents: list[Document], call: str) -> list[np.ndarray]:
    try:
        return tokenizer.encode_each([document.text for document in documents])
    except ValueError:
        for document in documents:  # which of them was it?
            try:
                tokenizer.encode(document.text)
            except ValueError as error:
                raise ValueError(f"{call}: {document.name} cannot be tokenised: {error}") from error
        raise


def _mapped(target: Path, *, verify: bool) -> TokenStore:
    meta = read(target, verify=verify)
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
        )
        counts = (len(tokens), len(offsets) - 1)
        expected = (meta["tokens"], meta["documents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"meta.json does not describe the files ({error})") from error
    if counts != expected or offsets[0] != 0 or offsets[-1] != len(tokens) or np.any(np.diff(offsets) < 2):
        raise Damaged(
            f"the files hold (tokens, documents) {counts}, which do not fit meta.json's {expected} and the offsets"
        )
    return store


def _refused(call: str, target: Path, failure: Unwritable | Damaged) -> ValueError:
    if isinstance(failure, Damaged):  # another process has removed it or made it at the same time, or a faulty disk
        return ValueError(f"{call}: the cache {target} is damaged just after it was written: {failure}; remove it.")
    reason, fix = write_failure(target.parent, failure.error)
    return ValueError(
        f"{call}: the tokens must be written to {target.parent}, but the system says {reason}; nothing of the cache "
        f"was left behind; {fix or 'see why'}, or pass another `cache_dir`."
    )
