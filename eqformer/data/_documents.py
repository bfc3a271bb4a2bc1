"""Documents and text sources: texts in memory, the standard library, datasets of the Hugging Face hub."""

import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from .._failures import load_extra
from .._files import open_regular


class Document(NamedTuple):
    """Text of a source; a hash of its `name` decides its split, and `size` is its part of the source's bytes."""

    name: str
    text: str
    size: int


def _accept() -> None:
    """Do nothing; this is the default `check` of a `TextSource`."""


@dataclass(frozen=True)
class TextSource:
    """Text source that can be read any number of times, always in the same order.

    `fingerprint()` returns a text that changes whenever the documents change. It is called before anything is
    tokenized, so it should be cheaper than reading the documents. `size` is the sum of the documents' sizes in bytes,
    or 0 if unknown. `check()` raises the errors that reading the documents would raise, so that a user sees the errors
    before any work is done. `check` may read all documents, so it runs only once for a source that passes.
    """

    name: str
    size: int
    fingerprint: Callable[[], str]
    documents: Callable[[], Iterator[Document]]
    check: Callable[[], None] = _accept

    def __post_init__(self):
        # `functools.cache` does not cache a call that raises.
        object.__setattr__(self, "check", functools.cache(self.check))

    def __iter__(self) -> Iterator[Document]:
        return self.documents()


def to_bytes(text: str) -> bytes:
    """Encode a text as UTF-8, including lone surrogates, which JSON and file names can contain."""
    return text.encode("utf-8", errors="surrogatepass")


def digest(parts: Iterable[str | bytes]) -> str:
    """Hash the parts and their lengths; return 32 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = to_bytes(part) if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """Hash a file's bytes; return 32 hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, functools.partial(hashlib.blake2b, digest_size=16)).hexdigest()


def texts(documents: Mapping[str, str], *, name: str = "texts") -> TextSource:
    """Return a source of texts in memory, from a mapping of name to text."""
    stored = [Document(title, text, len(to_bytes(text))) for title, text in documents.items()]
    return TextSource(
        name=name,
        size=sum(document.size for document in stored),
        fingerprint=lambda: digest(part for document in stored for part in (document.name, document.text)),
        documents=lambda: iter(stored),
    )


# Modules whose files differ between distributions of Python, and tests.
_EXCLUDED_MODULES = {
    *("__hello__", "__phello__", "distutils", "ensurepip", "idlelib", "lib2to3", "test", "tkinter", "venv"),
    *("turtle", "turtledemo"),
}
_EXCLUDED_FOLDERS = frozenset(("test", "tests", "macholib", "__pycache__"))


def standard_library() -> TextSource:
    """Return the Python files of the running Python's standard library as a source of about 10 MB.

    Modules that some distributions package separately are excluded, so that the files depend on Python's version and
    hardly on its distribution. A document's name is its path (`asyncio/tasks.py`), so a document is in the same split
    in all versions.

    **Raises:** `ValueError` if Python was installed without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [(name, folder / name) for name in _library_files(folder)]
    size = sum(path.stat().st_size for _, path in paths)
    if size < 1_000_000:
        raise ValueError(
            f"standard_library() must find the sources of Python's standard library (megabytes of .py files), but "
            f"{folder} holds {len(paths)} of them with {size} bytes; pass another text by files(path)."
        )

    def documents() -> Iterator[Document]:
        for name, path in paths:
            data = path.read_bytes()
            yield Document(name, data.decode("utf-8", errors="replace"), len(data))

    return TextSource(
        name="standard library",
        size=size,
        fingerprint=lambda: digest(part for name, path in paths for part in (name, path.read_bytes())),
        documents=documents,
    )


def _library_files(folder: Path) -> list[str]:
    """List the paths of the library's modules relative to its folder, in order."""
    names = []
    for path in folder.rglob("*.py"):
        *folders, file = path.relative_to(folder).parts
        module = folders[0] if folders else file.removesuffix(".py")
        if module in sys.stdlib_module_names - _EXCLUDED_MODULES and _EXCLUDED_FOLDERS.isdisjoint(folders):
            names.append("/".join((*folders, file)))
    return sorted(names)


def read_field(row: object, field: str, *, call: str, location: str) -> str:
    """Return the text in a row's field (empty for null); raise a `ValueError` if the row has no such text."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{call}: {location} must be an object with a field {field!r}, but is {type(row).__name__}.")
    if field not in row:
        raise ValueError(
            f"{call}: {location} has no field {field!r}; its fields are {sorted(map(str, row))}: "
            f"pass one of them as `field`."
        )
    text = row[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(
            f"{call}: the field {field!r} of {location} must hold text, but holds {type(text).__name__}; "
            f"the fields are {sorted(map(str, row))}: pass another of them as `field`."
        )
    return text


def hub(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    field: str = "text",
    revision: str | None = None,
    limit: int | None = None,
) -> TextSource:
    """Return a streamed dataset as a source: from the Hugging Face hub, or from a local folder that `datasets` loads.

    The fingerprint is a hash of these arguments, so a finished cache is found without a network. For a local folder the
    hash includes the names and contents of its files. Rows with an empty or null text are skipped.

    Args:
        name: The dataset's name, or the path of a folder.
        config: The dataset's configuration; None: the default one.
        split: The dataset's split.
        field: The field of a row with the text.
        revision: The version; pass it to pin the dataset.
        limit: The maximum number of rows to read.

    **Raises:** when the source is read: `ImportError` if the package `datasets` is not installed, `ValueError` if the
    dataset cannot be opened or read or its rows have no such field.
    """
    arguments = f"hub({name!r}, config={config!r}, split={split!r}, field={field!r}, revision={revision!r})"

    def documents() -> Iterator[Document]:
        datasets = load_extra("datasets", extra="data", call=arguments)
        load_rows = functools.partial(
            datasets.load_dataset, name, config, split=split, revision=revision, streaming=True
        )
        for number, row in enumerate(_iterate_rows(load_rows, limit, arguments)):
            text = read_field(row, field, call=arguments, location=f"row {number}")
            if text:
                yield Document(f"{split}#{number}", text, len(to_bytes(text)))

    return TextSource(
        name=name,
        size=0,
        fingerprint=lambda: digest((arguments, str(limit), *_names_and_digests(Path(name)))),
        documents=documents,
    )


def _iterate_rows(load_rows: Callable[[], Iterable[object]], limit: int | None, call: str) -> Iterator[object]:
    """Iterate over the rows of a dataset; raises a `ValueError` if the package cannot open or read it."""
    number = 0
    try:
        for row in islice(load_rows(), limit):
            number += 1
            yield row
    except Exception as error:
        # Errors of datasets, pyarrow, pandas and the network have no common class.
        if number:
            rule, fix = f"cannot be read after its first {number} rows", "repair its files, or go online"
        else:
            rule = "cannot be opened"
            fix = "correct the name, config or split or the files, or go online (a complete cache needs no network)"
        raise ValueError(f"{call}: the dataset {rule}: {error}; {fix}.") from error


def _names_and_digests(folder: Path) -> Iterator[str]:
    """Yield the names and digests of all files in a local dataset's folder; nothing for a dataset of the hub."""
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if file.is_file():
            yield file.relative_to(folder).as_posix()
            yield file_digest(file)
