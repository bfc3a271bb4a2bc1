"""Documents from files of .txt, .md, .py, .jsonl and .parquet."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._extra import load_extra
from ._documents import digest, Document, field_of, Source


_PLAIN = (".txt", ".md", ".py")
_ROWS = (".jsonl", ".parquet")


def files(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, field: str = "text", piece: int | None = None
) -> Source:
    """The documents of a file, a folder (with the folders in it), or several of either.

    A .txt, .md or .py file is one document; `piece` cuts it into documents of at most that many characters, at blank
    lines, line ends or spaces where there are any. A corpus that is one such file is cut in any case (into about 256
    pieces of 1,024 to 65,536 characters), since a single document could not be split into train and validation. Each
    line of a .jsonl file and each row of a .parquet file is a document, its text in `field`; empty and null ones are
    left out. Texts are UTF-8; hidden files and folders are left out; the order is that of the sorted names.

    **Raises:** `ValueError`, here where a path does not exist or holds no file of these kinds or no text, and on
    reading where a file is not UTF-8, not JSON or Parquet, or has no such field; `ImportError` where .parquet needs
    the package `pyarrow`.
    """
    roots = [Path(root) for root in ([path] if isinstance(path, (str, os.PathLike)) else path)]
    call = f"files({', '.join(repr(str(root)) for root in roots)}, field={field!r})"
    if piece is not None and piece < 1:
        raise ValueError(
            f"{call}: piece counts characters and must be at least 1, but is {piece}; pass None for whole files."
        )
    found = [entry for root in roots for entry in _entries(root, call)]
    size = sum(entry.path.stat().st_size for entry in found)
    if not size:
        raise ValueError(
            f"{call} must find some text, but all of its {len(found)} files are empty; pass files with text in them."
        )
    if piece is None and len(found) == 1 and found[0].kind in _PLAIN:
        piece = max(1024, min(65536, size // 256))

    def documents() -> Iterator[Document]:
        for entry in found:
            if entry.kind == ".jsonl":
                yield from _from_lines(entry, field, call)
            elif entry.kind == ".parquet":
                yield from _from_parquet(entry, field, call)
            else:
                yield from _from_text(entry, piece, call)

    def fingerprint() -> str:
        options = [f"field={field} piece={piece}"]
        return digest(options + [part for entry in found for part in (entry.name, _file_digest(entry.path))])

    return Source(name=roots[0].resolve().stem, size=size, fingerprint=fingerprint, documents=documents)


class _Entry(NamedTuple):
    name: str  # relative to the folder that was given, so that a corpus may move
    path: Path
    kind: str


def _entries(root: Path, call: str) -> list[_Entry]:
    kinds = ", ".join(_PLAIN + _ROWS)
    if root.is_file():
        kind = root.suffix.lower()
        if kind not in _PLAIN + _ROWS:
            raise ValueError(
                f"{call}: a file must be one of {kinds}, but {root} ends in {kind!r}; convert or rename it."
            )
        return [_Entry(root.name, root, kind)]
    if not root.is_dir():
        raise ValueError(f"{call}: the path must exist, but there is no file or folder {root}; correct it.")
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if path.suffix.lower() in _PLAIN + _ROWS and path.is_file()]
    if not found:
        raise ValueError(
            f"{call}: a folder must hold files of {kinds}, but there is none in {root}; pass another folder."
        )
    return sorted(_Entry(path.relative_to(root).as_posix(), path, path.suffix.lower()) for path in found)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _decode(data: bytes, *, call: str, place: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{call}: texts must be UTF-8, but byte {error.start} of {place} is 0x{data[error.start]:02x}; "
            f"convert it (for example `iconv -f latin1 -t utf-8`) or leave it out."
        ) from error


def _from_text(entry: _Entry, piece: int | None, call: str) -> Iterator[Document]:
    text = _decode(entry.path.read_bytes(), call=call, place=str(entry.path))
    if piece is None or len(text) <= piece:
        yield Document(entry.name, text, len(text.encode()))
        return
    start = number = 0
    while start < len(text):
        stop = _cut(text, start, start + piece)
        yield Document(f"{entry.name}#{number}", text[start:stop], len(text[start:stop].encode()))
        start, number = stop, number + 1


def _cut(text: str, start: int, stop: int) -> int:
    """The best place to cut in the second half of `text[start:stop]`, or `stop` where none is better."""
    if stop >= len(text):
        return len(text)
    for border in ("\n\n", "\n", " "):
        place = text.rfind(border, (start + stop) // 2, stop)
        if place >= 0:
            return place + len(border)
    return stop


def _from_lines(entry: _Entry, field: str, call: str) -> Iterator[Document]:
    with entry.path.open("rb") as file:
        for number, line in enumerate(file):
            place = f"line {number + 1} of {entry.path}"
            written = _decode(line, call=call, place=place)
            if not written.strip():
                continue
            try:
                row = json.loads(written)
            except ValueError as error:
                raise ValueError(
                    f"{call}: {place} must be JSON, but {error}; correct the line or leave it out."
                ) from error
            text = field_of(row, field, call=call, place=place)
            if text:
                yield Document(f"{entry.name}#{number}", text, len(line))


def _from_parquet(entry: _Entry, field: str, call: str) -> Iterator[Document]:
    parquet = load_extra("pyarrow.parquet", extra="data", call=call)
    number = 0
    with entry.path.open("rb") as opened:
        file = _parquet_checked(lambda: parquet.ParquetFile(opened), entry, call)
        names = file.schema_arrow.names
        if field not in names:
            raise ValueError(
                f"{call}: {entry.path} has no field {field!r}; its fields are {sorted(names)}: "
                f"pass one of them as `field`."
            )
        # A row stands for its share of the file, which is compressed, and not for the bytes of its text.
        share = entry.path.stat().st_size // max(1, file.metadata.num_rows)
        batches = file.iter_batches(batch_size=1024, columns=[field])
        while True:
            batch = _parquet_checked(lambda: next(batches, None), entry, call)
            if batch is None:
                return
            for text in batch.column(0).to_pylist():
                kept = field_of({field: text}, field, call=call, place=f"row {number} of {entry.path}")
                if kept:
                    yield Document(f"{entry.name}#{number}", kept, share)
                number += 1


def _parquet_checked(read: Callable[[], Any], entry: _Entry, call: str) -> Any:
    try:
        return read()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these two
        raise ValueError(
            f"{call}: {entry.path} must be a whole Parquet file, but {error}; fetch or write it again."
        ) from error
