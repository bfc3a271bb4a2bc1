"""Documents from files of .txt, .md, .py, .jsonl and .parquet."""

import codecs
import functools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .._failures import explain_error, foreign_call, load_extra
from .._files import check_regular, few_names, is_there, list_paths, open_regular, parse_json
from .._hub import find_repository, Repository
from ._documents import digest, Document, file_digest, read_field, TextSource


Result = TypeVar("Result")
_PLAIN_KINDS = (".txt", ".md", ".py")
_ROW_KINDS = (".jsonl", ".parquet")
_KINDS = _PLAIN_KINDS + _ROW_KINDS
_CARD = "README.md"  # the description of a dataset of the hub, which is not read as text
_MAX_CHARACTERS = 1 << 20  # characters of one document of a plain file in a folder
_MAX_NAMES = 3  # names in a warning of skipped files
_BLOCK_BYTES = 1 << 16  # bytes of a plain file that are read at once


def files(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    field: str | None = "text",
    piece: int | None = None,
) -> TextSource:
    """Return the documents of a file, a folder (with its sub-folders), or several of either, as a source.

    Each line of a .jsonl file and each row of a .parquet file is a document, with its text in `field`. With
    `field=None`, the text is the whole row as JSON, as `ConversationEncoder` reads rows, and plain files are refused.

    A plain file (.txt, .md or .py) in a folder is cut into documents of at most 2^20 characters. A plain file that is
    given by its own path is cut into documents of at most 1,024 characters at its beginning and up to 65,536 farther
    on, so that a single file can be split into train and validation. `piece` cuts all plain files into documents of at
    most `piece` characters. Cuts are at blank lines, line ends or spaces if possible, and do not depend on the text
    after them. Text that is appended to a file therefore moves no earlier text to another split, except the text of the
    file's last document. About 2^20 characters of a plain file are in memory at a time (with `piece`: `piece`
    characters and a block of 64 KiB). Texts are UTF-8; files are sorted by name.

    Links to folders are followed, and each folder is read once. Hidden files and folders, files of other kinds, empty
    files and rows, broken links, and links to folders that are already read are skipped. A warning gives the number of
    skipped items and the first names. The warning about files and folders comes at once. The warning about rows comes
    when the source is checked, which `open_store` does before it tokenizes.

    A path of the form `OWNER/NAME`, `OWNER/NAME@REVISION` (a branch, a tag or a commit) or `OWNER/NAME/FILE` names a
    dataset of the hub if no local file or folder has that path. The dataset's files of these kinds, except for its card
    `README.md`, are downloaded into the hub's own cache; without a network, only the cache is read.

    **Raises:** `ValueError` at once if a path does not exist, cannot be listed, has no file of these kinds, or has no
    text; also if the hub has no such dataset, asks for a login, or cannot be reached. When the source is read,
    `ValueError` if a file is not UTF-8, JSON or Parquet, or has no such field. `ImportError` if a package is missing:
    `huggingface_hub` for the hub, `pyarrow` for .parquet.
    """
    roots = list_paths(path)
    call = f"files({', '.join(repr(str(root)) for root in roots)}, field={field!r})"
    if piece is not None and piece < 1:
        raise ValueError(
            f"{call}: piece is a number of characters, at least 1, but is {piece}; pass None for the usual documents."
        )
    skipped: dict[str, list[str]] = {}
    entries = [entry for root in roots for entry in _list_entries(root, call, skipped)]
    if field is None and (plain := [entry.name for entry in entries if entry.kind in _PLAIN_KINDS]):
        raise ValueError(
            f"{call}: rows are read from {' and '.join(_ROW_KINDS)} files, but {plain[0]} is plain text; leave it out."
        )
    skipped["empty files"] = [entry.name for entry in entries if not entry.path.stat().st_size]
    size = sum(entry.path.stat().st_size for entry in entries)
    if not size:
        raise ValueError(
            f"{call}: the files must contain some text, but all {len(entries)} files are empty; pass files with text."
        )

    _warn_skipped(call, skipped)

    def documents(empty_rows: list[str] | None = None) -> Iterator[Document]:
        for entry in entries:
            if entry.kind in _ROW_KINDS:
                read_rows = _read_lines if entry.kind == ".jsonl" else _read_parquet
                for document in read_rows(entry, field, call):
                    if document.text:
                        yield document
                    elif empty_rows is not None:
                        empty_rows.append(document.name)
            else:
                yield from _read_plain(entry, piece, call)

    def fingerprint() -> str:
        # `cuts` is the version of the rule by which plain files are cut. A new rule needs a new number, so that tokens
        # that were cached under the old rule are not used.
        parts = [f"field={field} piece={piece} cuts=2"]
        for entry in entries:
            parts += (entry.name, f"given={entry.is_given}", file_digest(entry.path))
        return digest(parts)

    def check() -> None:
        empty_rows: list[str] = []
        for _ in documents(empty_rows):
            pass
        _warn_skipped(call, {"rows without text": empty_rows})

    return TextSource(_source_name(roots[0]), size, fingerprint, documents, check)


def _source_name(root: Path) -> str:
    """Return the name of a source whose first path, `root`, is a file, a folder or a dataset of the hub."""
    return _escape_path(root.resolve().stem if root.exists() else Path(str(root).partition("@")[0]).name)


class _FileEntry(NamedTuple):
    """File of a source."""

    name: str
    """The path relative to the user's folder, so that names and splits stay the same when the folder is moved."""
    path: Path
    kind: str
    """The suffix in lower case."""
    is_given: bool
    """Whether the user named the file itself, and not its folder."""

    @property
    def location(self) -> str:
        """The path, for messages."""
        return _escape_path(self.path)


def _escape_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text, with escapes (`\\xe9`) for bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")


def _warn_skipped(call: str, skipped: Mapping[str, Sequence[str]]) -> None:
    """Warn about skipped files or rows, with the number and the first names of each kind."""
    counts = [
        f"{kind}: {len(names):,} ({', '.join(names[:_MAX_NAMES])}{', ...' if len(names) > _MAX_NAMES else ''})"
        for kind, names in skipped.items()
        if names
    ]
    if counts:
        warnings.warn(f"{call}: skipped {'; '.join(counts)}", stacklevel=3)


def _find_dataset(path: Path, call: str) -> Repository | None:
    """Return the dataset of the hub that a path names; None if the path exists or cannot be a dataset's name."""
    repository = find_repository(path, "dataset", _KINDS, call)
    # `notes/a.txt` names a missing file rather than a dataset of the owner `notes`.
    is_file_name = repository is not None and repository.file is None and repository.name.endswith(_KINDS)
    return None if is_file_name else repository


def _list_dataset(repository: Repository, call: str, skipped: dict[str, list[str]]) -> list[_FileEntry]:
    """Download and list a dataset's files of known kinds; add the paths of all other files to `skipped`."""
    if repository.file is not None:
        return _list_entries(repository.download_file(), call, skipped)
    folder = repository.download([f"*{kind}" for kind in _KINDS], exclude=[_CARD])
    # The cache may hold further files, which other programs have downloaded; a dataset without a file has no folder.
    paths = _list_files(folder, call, {}) if folder.exists() else []
    entries = _make_entries(folder, [path for path in paths if path != folder / _CARD])
    unread = {*repository.list_files()} - {entry.name for entry in entries}
    if not entries:
        raise ValueError(
            f"{call}: a dataset must contain files of {', '.join(_KINDS)}, but {repository.name} has only "
            f"{few_names(unread)}; name another dataset, or stream this one (data.hub, --text.hub)."
        )
    skipped.setdefault("files of other kinds", []).extend(sorted(unread))
    return entries


def _list_entries(root: Path, call: str, skipped: dict[str, list[str]]) -> list[_FileEntry]:
    """List the files at a path that are read; add the paths of all other files to `skipped`, by kind."""
    kinds = ", ".join(_KINDS)
    if root.is_file():
        kind = root.suffix.lower()
        if kind not in _KINDS:
            raise ValueError(
                f"{call}: a file must end in one of {kinds}, but {root} ends in {kind!r}; convert or rename it."
            )
        return [_FileEntry(_escape_path(root.name), root, kind, True)]
    if not root.is_dir():
        if is_there(root):
            check_regular(root)
        if (dataset := _find_dataset(root, call)) is not None:
            return _list_dataset(dataset, call, skipped)
        raise ValueError(f"{call}: the path must exist, but there is no file or folder {root}; correct it.")
    paths = _list_files(root, call, skipped)
    if not paths:
        raise ValueError(
            f"{call}: a folder must contain files of {kinds}, but there is none in {root}; pass another folder."
        )
    return _make_entries(root, paths)


def _make_entries(root: Path, paths: Sequence[Path]) -> list[_FileEntry]:
    """Return the entries of files in a folder, sorted by name."""
    named = [(_escape_path(path.relative_to(root).as_posix()), path) for path in paths]
    return sorted(_FileEntry(name, path, path.suffix.lower(), False) for name, path in named)


def _list_files(root: Path, call: str, skipped: dict[str, list[str]]) -> list[Path]:
    """List the files of the known kinds in a folder and its sub-folders.

    Each folder is read once, even if links lead to it: by its real path if that is below `root`, else by the first
    link.
    """
    paths: list[Path] = []
    read_folders: set[str] = set()
    folders, links = [root], list[Path]()
    skip = functools.partial(_skip_path, skipped, root)
    while folders or links:
        folder = folders.pop() if folders else links.pop(links.index(min(links)))
        if (real := os.path.realpath(folder)) in read_folders:
            skip("links to folders that are already read", folder)
            continue
        read_folders.add(real)
        try:
            with os.scandir(folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            reason, fix = explain_error(error)
            raise ValueError(
                f"{call}: every folder must be readable, but {folder} is not ({reason}); {fix or 'find the cause'}, or "
                "leave this folder out."
            ) from error
        for entry in entries:
            path = Path(entry.path)
            if entry.name.startswith("."):
                skip("hidden files and folders", path)
            elif path.is_dir():
                (links if entry.is_symlink() else folders).append(path)
            elif not path.is_file():
                skip("broken links" if entry.is_symlink() else "special files", path)
            elif path.suffix.lower() not in _KINDS:
                skip("files of other kinds", path)
            else:
                paths.append(path)
    return paths


def _skip_path(skipped: dict[str, list[str]], root: Path, kind: str, path: Path) -> None:
    skipped.setdefault(kind, []).append(_escape_path(path.relative_to(root)))


def _utf8_error(error: UnicodeDecodeError, index: int, location: str, call: str) -> ValueError:
    """Return the error for a byte that is not UTF-8; `index` is its index in the file or the line."""
    return ValueError(
        f"{call}: texts must be UTF-8, but byte {index} of {location} is 0x{error.object[error.start]:02x}; "
        f"convert it (for example `iconv -f latin1 -t utf-8`) or delete it."
    )


def _read_blocks(entry: _FileEntry, call: str) -> Iterator[str]:
    """Yield a file's text in blocks of about `_BLOCK_BYTES` bytes."""
    decoder, bytes_read = codecs.getincrementaldecoder("utf-8-sig")(), 0
    with open_regular(entry.path) as file:
        is_last = False
        while not is_last:
            block = file.read(_BLOCK_BYTES)
            bytes_read, is_last = bytes_read + len(block), not block
            try:
                yield decoder.decode(block, final=is_last)
            except UnicodeDecodeError as error:
                index = bytes_read - len(error.object) + error.start
                raise _utf8_error(error, index, entry.location, call) from error


def _read_plain(entry: _FileEntry, piece: int | None, call: str) -> Iterator[Document]:
    """Yield the documents of a plain file.

    Text is buffered until there are `piece` characters (by default 2^20); at most one more block is in memory.
    """
    done = number = 0

    def split_documents(text: str, is_complete: bool) -> Iterator[Document]:
        """Yield the documents of `text`; if more text follows, stop before a document that may not be complete."""
        nonlocal done, number
        start = 0
        while start < len(text):
            size = piece or (max(1024, min(65536, done // 64)) if entry.is_given else _MAX_CHARACTERS)
            if not is_complete and len(text) - start < size:
                break
            stop = _find_cut(text, start, size)
            document = text[start:stop]
            yield Document(f"{entry.name}#{number}" if number else entry.name, document, len(document.encode()))
            done, number, start = done + stop - start, number + 1, stop

    pending, length = list[str](), 0
    for block in _read_blocks(entry, call):
        pending.append(block)
        length += len(block)
        if length >= (piece or _MAX_CHARACTERS):
            text, start = "".join(pending), done
            yield from split_documents(text, False)
            pending = [text[done - start :]]
            length = len(pending[0])
    yield from split_documents("".join(pending), True)


def _find_cut(text: str, start: int, size: int) -> int:
    """Return the end of the document from `start`, of at most `size` characters.

    The document ends at the earliest of three borders: the first blank line in the second half of `size` characters,
    the first line end in the last quarter, and the first space in the last eighth. A document without such a border has
    `size` characters. The end does not depend on the text after it, except for the last document of the text.
    """
    stop = min(start + size, len(text))
    for border, least in (("\n\n", size / 2), ("\n", size * 3 / 4), (" ", size * 7 / 8)):
        index = text.find(border, start + max(math.ceil(least) - len(border), 0), stop)
        stop = stop if index < 0 else index + len(border)
    return stop


def _read_lines(entry: _FileEntry, field: str | None, call: str) -> Iterator[Document]:
    """Yield a document for each line of JSON; its text is empty if the line has no text."""
    with open_regular(entry.path) as file:
        for number, line in enumerate(file):
            location = f"line {number + 1} of {entry.location}"
            try:
                text = line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise _utf8_error(error, error.start, location, call) from error
            if not text.strip():
                continue
            try:
                row = parse_json(text, unique=False)
            except ValueError as error:
                raise ValueError(
                    f"{call}: {location} must be JSON, but {error}; correct the line or delete it."
                ) from error
            content = text if field is None else read_field(row, field, call=call, location=location)
            yield Document(f"{entry.name}#{number}", content, len(line))


def _read_parquet(entry: _FileEntry, field: str | None, call: str) -> Iterator[Document]:
    """Yield a document for each row; its text is empty if the row has no text."""
    parquet = load_extra("pyarrow.parquet", extra="data", call=call)
    number = 0
    with open_regular(entry.path) as opened:
        file = _call_parquet(functools.partial(parquet.ParquetFile, opened), entry, call)
        names = file.schema_arrow.names
        if field is not None and field not in names:
            raise ValueError(
                f"{call}: {entry.location} has no field {field!r}; its fields are {sorted(names)}: "
                f"pass one of them as `field`."
            )
        # Sizes only show progress, so each row counts as an equal share of the (compressed) file.
        share = entry.path.stat().st_size // max(1, file.metadata.num_rows)
        batches = file.iter_batches(batch_size=1024, columns=None if field is None else [field])
        while True:
            batch = _call_parquet(functools.partial(next, batches, None), entry, call)
            if batch is None:
                return
            for row in batch.to_pylist():
                location = f"row {number} of {entry.location}"
                if field is None:
                    content = json.dumps(_drop_nulls(row), ensure_ascii=False, default=str)
                else:
                    content = read_field(row, field, call=call, location=location)
                yield Document(f"{entry.name}#{number}", content, share)
                number += 1


def _drop_nulls(value: Any) -> Any:
    """Return a row without the fields that are null, except for `content`.

    In a Parquet column, each object has the fields of all objects, for example the parameters of every tool. Fields
    that an object did not set are null.
    """
    match value:
        case dict():
            return {name: _drop_nulls(field) for name, field in value.items() if field is not None or name == "content"}
        case list():
            return [_drop_nulls(item) for item in value]
        case _:
            return value


def _call_parquet(read: Callable[[], Result], entry: _FileEntry, call: str) -> Result:
    """Call a function of pyarrow; turn its failures into a `ValueError` that names the file."""
    with foreign_call(
        lambda reason: (
            f"{call}: {entry.location} must be a complete Parquet file, but {reason}; fetch or write it again."
        )
    ):
        return read()
