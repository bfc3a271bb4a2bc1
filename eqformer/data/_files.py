"""Documents from files of .txt, .md, .py, .jsonl and .parquet."""

import codecs
import functools
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._extra import load_extra
from .._failures import foreign_call, reason_and_fix
from .._read import check_regular, is_there, open_regular, parse_json
from ._documents import digest, Document, field_of, Source


_PLAIN = (".txt", ".md", ".py")
_ROWS = (".jsonl", ".parquet")
_LONGEST = 1 << 20  # characters of a plain file that are one document
_NAMED = 3  # names in a warning of what is left out
_BLOCK = 1 << 16  # bytes of it that are read at once


def files(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, field: str = "text", piece: int | None = None
) -> Source:
    """The documents of a file, a folder (with its sub-folders), or several of either.

    A .txt, .md or .py file in a folder is one document for each 2^20 characters. A file given by its own path is cut
    into pieces, of at most 1,024 characters at its beginning and up to 65,536 farther on, so that a single file can be
    split into train and validation; `piece` cuts all plain files into pieces of at most that many characters. Cuts are
    at blank lines, line ends or spaces if possible, and do not depend on what follows, so text appended to a file moves
    no earlier text to another split. Each line of a .jsonl file and each row of a .parquet file is a document, with its
    text in `field`. Texts are UTF-8; files are sorted by name. Of a plain file only one document at a time is in
    memory.

    Links to folders are followed, and each folder is read once. Left out are hidden files and folders, files of other
    kinds, empty files and rows, broken links, and links to folders that are read already: a warning counts and names
    them, for rows when they are first read.

    **Raises:** `ValueError` at once if a path does not exist, cannot be listed, or holds no file of these kinds or no
    text; when it is read, `ValueError` if a file is not UTF-8, JSON or Parquet or has no such field, and `ImportError`
    if .parquet needs the absent package `pyarrow`.
    """
    roots = [Path(root) for root in ([path] if isinstance(path, (str, os.PathLike)) else path)]
    call = f"files({', '.join(repr(str(root)) for root in roots)}, field={field!r})"
    if piece is not None and piece < 1:
        raise ValueError(
            f"{call}: piece counts characters and must be at least 1, but is {piece}; pass None for whole files."
        )
    left_out: dict[str, list[str]] = {}
    found = [entry for root in roots for entry in _entries(root, call, left_out)]
    left_out["empty files"] = [entry.name for entry in found if not entry.path.stat().st_size]
    size = sum(entry.path.stat().st_size for entry in found)
    if not size:
        raise ValueError(
            f"{call}: there must be some text in them, but all {len(found)} files are empty; pass files with text."
        )

    _warn_left_out(call, left_out)

    def documents(empty_rows: list[str] | None = None) -> Iterator[Document]:
        for entry in found:
            if entry.kind in _ROWS:
                read = _from_lines if entry.kind == ".jsonl" else _from_parquet
                for document in read(entry, field, call):
                    if document.text:
                        yield document
                    elif empty_rows is not None:
                        empty_rows.append(document.name)
            else:
                yield from _from_text(entry, piece, call)

    def fingerprint() -> str:
        options = [f"field={field} piece={piece} cuts=2"]
        parts = [(entry.name, f"given={entry.is_given}", file_digest(entry.path)) for entry in found]
        return digest(options + [part for its in parts for part in its])

    def check() -> None:
        empty_rows: list[str] = []
        for _ in documents(empty_rows):
            pass
        _warn_left_out(call, {"rows without text": empty_rows})

    return Source(_shown(roots[0].resolve().stem), size, fingerprint, documents, check)


class _Entry(NamedTuple):
    name: str  # relative to the folder that was given, so that a corpus may move
    path: Path
    kind: str
    is_given: bool  # by its own path, not found in a folder

    @property
    def place(self) -> str:
        """The path, for messages."""
        return _shown(self.path)


def _shown(path: str | os.PathLike[str]) -> str:
    """A path as text; bytes that are not UTF-8 are escaped (`\\xe9`)."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")


def _warn_left_out(call: str, left_out: Mapping[str, Sequence[str]]) -> None:
    """Warn of what is left out, by kind: how many there are and the names of the first."""
    counts = [
        f"{kind}: {len(names):,} ({', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''})"
        for kind, names in left_out.items()
        if names
    ]
    if counts:
        warnings.warn(f"{call}: left out are {'; '.join(counts)}", stacklevel=3)


def _entries(root: Path, call: str, left_out: dict[str, list[str]]) -> list[_Entry]:
    """The files of a path that hold text; the others are added to `left_out` by kind."""
    kinds = ", ".join(_PLAIN + _ROWS)
    if root.is_file():
        kind = root.suffix.lower()
        if kind not in _PLAIN + _ROWS:
            raise ValueError(
                f"{call}: a file must be one of {kinds}, but {root} ends in {kind!r}; convert or rename it."
            )
        return [_Entry(_shown(root.name), root, kind, True)]
    if not root.is_dir():
        if is_there(root):
            check_regular(root)
        raise ValueError(f"{call}: the path must exist, but there is no file or folder {root}; correct it.")
    found = _files_below(root, call, left_out)
    if not found:
        raise ValueError(
            f"{call}: a folder must hold files of {kinds}, but there is none in {root}; pass another folder."
        )
    named = [(_shown(path.relative_to(root).as_posix()), path) for path in found]
    return sorted(_Entry(name, path, path.suffix.lower(), False) for name, path in named)


def _files_below(root: Path, call: str, left_out: dict[str, list[str]]) -> list[Path]:
    """The files of the known kinds in a folder and its sub-folders; each folder is read once, by its own path first."""
    found: list[Path] = []
    read: set[str] = set()
    folders, links = [root], list[Path]()
    leave_out = functools.partial(_leave_out, left_out, root)
    while folders or links:
        folder = folders.pop() if folders else links.pop(links.index(min(links)))
        if (real := os.path.realpath(folder)) in read:
            leave_out("links to folders that are read already", folder)
            continue
        read.add(real)
        try:
            with os.scandir(folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            reason, fix = reason_and_fix(error)
            raise ValueError(
                f"{call}: every folder must be readable, but {folder} is not ({reason}); {fix or 'see why'}, or leave "
                "it out."
            ) from error
        for entry in entries:
            path = Path(entry.path)
            if entry.name.startswith("."):
                leave_out("hidden files and folders", path)
            elif path.is_dir():
                (links if entry.is_symlink() else folders).append(path)
            elif not path.is_file():
                leave_out("broken links" if entry.is_symlink() else "special files", path)
            elif path.suffix.lower() not in _PLAIN + _ROWS:
                leave_out("files of other kinds", path)
            else:
                found.append(path)
    return found


def _leave_out(left_out: dict[str, list[str]], root: Path, kind: str, path: Path) -> None:
    left_out.setdefault(kind, []).append(_shown(path.relative_to(root)))


def file_digest(path: Path) -> str:
    """A hash of a file's bytes."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _no_utf8(error: UnicodeDecodeError, place: int, of: str, call: str) -> ValueError:
    return ValueError(
        f"{call}: texts must be UTF-8, but byte {place} of {of} is 0x{error.object[error.start]:02x}; "
        f"convert it (for example `iconv -f latin1 -t utf-8`) or leave it out."
    )


def _blocks(entry: _Entry, call: str) -> Iterator[str]:
    """A file's text in blocks of about `_BLOCK` bytes."""
    decoder, read = codecs.getincrementaldecoder("utf-8-sig")(), 0
    with open_regular(entry.path) as file:
        is_last = False
        while not is_last:
            block = file.read(_BLOCK)
            read, is_last = read + len(block), not block
            try:
                yield decoder.decode(block, final=is_last)
            except UnicodeDecodeError as error:
                raise _no_utf8(error, read - len(error.object) + error.start, entry.place, call) from error


def _from_text(entry: _Entry, piece: int | None, call: str) -> Iterator[Document]:
    done = number = 0

    def documents(text: str, is_all: bool) -> Iterator[Document]:
        """The documents at the beginning of `text` that more text behind it could not change."""
        nonlocal done, number
        start = 0
        while start < len(text):
            size = piece or (max(1024, min(65536, done // 64)) if entry.is_given else _LONGEST)
            if not is_all and len(text) - start < size:
                break
            stop = _cut(text, start, size)
            own = text[start:stop]
            yield Document(f"{entry.name}#{number}" if number else entry.name, own, len(own.encode()))
            done, number, start = done + stop - start, number + 1, stop

    held, length = list[str](), 0
    for block in _blocks(entry, call):
        held.append(block)
        length += len(block)
        if length >= (piece or _LONGEST):
            whole, before = "".join(held), done
            yield from documents(whole, False)
            held = [whole[done - before :]]
            length = len(held[0])
    yield from documents("".join(held), True)


def _cut(text: str, start: int, size: int) -> int:
    """The end of the document from `start`, of at most `size` characters: a blank line in its second half, or else a
    line end in its last quarter, or a space in its last eighth. It does not depend on the text behind the cut.
    """
    stop = min(start + size, len(text))
    for border, least in (("\n\n", size / 2), ("\n", size * 3 / 4), (" ", size * 7 / 8)):
        place = text.find(border, start + max(math.ceil(least) - len(border), 0), stop)
        stop = stop if place < 0 else place + len(border)
    return stop


def _from_lines(entry: _Entry, field: str, call: str) -> Iterator[Document]:
    """A document for each line of JSON; its text is empty where the line has none."""
    with open_regular(entry.path) as file:
        for number, line in enumerate(file):
            place = f"line {number + 1} of {entry.place}"
            try:
                written = line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise _no_utf8(error, error.start, place, call) from error
            if not written.strip():
                continue
            try:
                row = parse_json(written, unique=False)
            except ValueError as error:
                raise ValueError(
                    f"{call}: {place} must be JSON, but {error}; correct the line or leave it out."
                ) from error
            yield Document(f"{entry.name}#{number}", field_of(row, field, call=call, place=place), len(line))


def _from_parquet(entry: _Entry, field: str, call: str) -> Iterator[Document]:
    """A document for each row; its text is empty where the row has none."""
    parquet = load_extra("pyarrow.parquet", extra="data", call=call)
    number = 0
    with open_regular(entry.path) as opened:
        file = _parquet_checked(lambda: parquet.ParquetFile(opened), entry, call)
        names = file.schema_arrow.names
        if field not in names:
            raise ValueError(
                f"{call}: {entry.place} has no field {field!r}; its fields are {sorted(names)}: "
                f"pass one of them as `field`."
            )
        # Sizes are for progress: each row counts for an equal share of the (compressed) file.
        share = entry.path.stat().st_size // max(1, file.metadata.num_rows)
        batches = file.iter_batches(batch_size=1024, columns=[field])
        while True:
            batch = _parquet_checked(lambda: next(batches, None), entry, call)
            if batch is None:
                return
            for text in batch.column(0).to_pylist():
                place = f"row {number} of {entry.place}"
                yield Document(f"{entry.name}#{number}", field_of({field: text}, field, call=call, place=place), share)
                number += 1


def _parquet_checked(read: Callable[[], Any], entry: _Entry, call: str) -> Any:
    with foreign_call(
        lambda reason: f"{call}: {entry.place} must be a whole Parquet file, but {reason}; fetch or write it again."
    ):
        return read()
