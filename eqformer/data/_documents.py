"""Documents and the sources that yield them: texts in memory, the standard library."""

import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Document(NamedTuple):
    """One text; a hash of `name` decides its split, and `size` is its part of the source's bytes, for progress bars."""

    name: str
    text: str
    size: int


@dataclass(frozen=True)
class Source:
    """A corpus that can be read any number of times, always in the same order.

    `fingerprint()` changes whenever the documents do; it is called before anything is tokenised, so it should be
    cheaper than reading the documents. `size` is the sum of their sizes in bytes, 0 if unknown. `check()` raises the
    errors that reading the documents would raise, so that they show before any work is done. It may read all documents,
    so it runs only once for a source that passes.
    """

    name: str
    size: int
    fingerprint: Callable[[], str]
    documents: Callable[[], Iterator[Document]]
    check: Callable[[], None] = lambda: None

    def __post_init__(self):
        object.__setattr__(self, "check", functools.cache(self.check))  # a call that raises is not cached

    def __iter__(self) -> Iterator[Document]:
        return self.documents()


def to_bytes(text: str) -> bytes:
    """The UTF-8 of a text; lone surrogates, which JSON and file names can hold, are encoded too."""
    return text.encode("utf-8", errors="surrogatepass")


def digest(parts: Iterable[str | bytes]) -> str:
    """A hash of 32 hexadecimal digits over the parts and their lengths."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = to_bytes(part) if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def texts(documents: Mapping[str, str], *, name: str = "texts") -> Source:
    """A source of texts in memory, given as name -> text."""
    held = [Document(title, text, len(to_bytes(text))) for title, text in documents.items()]
    return Source(
        name=name,
        size=sum(document.size for document in held),
        fingerprint=lambda: digest(part for document in held for part in (document.name, document.text)),
        documents=lambda: iter(held),
    )


# Left out, since distributions package these modules separately, trim them or generate them; and tests.
_LEFT_OUT = {"__hello__", "__phello__", "distutils", "ensurepip", "idlelib", "lib2to3", "test", "tkinter", "venv"}
_LEFT_OUT |= {"turtle", "turtledemo"}
_FOLDERS_LEFT_OUT = frozenset(("test", "tests", "macholib", "__pycache__"))


def standard_library() -> Source:
    """The sources of the standard library of the Python that runs this: about 10 MB of text on any machine.

    Modules that distributions package separately are left out, so that the list depends on Python's version and hardly
    on its distribution. Documents are named by their path (`asyncio/tasks.py`), so they keep their split in other
    versions.

    **Raises:** `ValueError` where Python came without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [(name, folder / name) for name in _library_files(folder)]
    size = sum(path.stat().st_size for _, path in paths)
    if size < 1_000_000:
        raise ValueError(
            f"standard_library() must find the sources of Python's own library (megabytes of .py files), but {folder} "
            f"holds {len(paths)} of them with {size} bytes; pass a text of your own with files(path)."
        )

    def documents() -> Iterator[Document]:
        for name, path in paths:
            data = path.read_bytes()
            yield Document(name, data.decode("utf-8", errors="replace"), len(data))

    return Source(
        name="standard library",
        size=size,
        fingerprint=lambda: digest(part for name, path in paths for part in (name, path.read_bytes())),
        documents=documents,
    )


def _library_files(folder: Path) -> list[str]:
    names = []
    for path in folder.rglob("*.py"):
        *folders, file = path.relative_to(folder).parts
        module = folders[0] if folders else file.removesuffix(".py")
        if module in sys.stdlib_module_names - _LEFT_OUT and _FOLDERS_LEFT_OUT.isdisjoint(folders):
            names.append("/".join((*folders, file)))
    return sorted(names)


def field_of(row: object, field: str, *, call: str, place: str) -> str:
    """The text in a row's field, empty for null; raises a `ValueError` that lists the row's fields if there is none."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{call}: {place} must be an object with a field {field!r}, but is {type(row).__name__}.")
    if field not in row:
        raise ValueError(
            f"{call}: {place} has no field {field!r}; its fields are {sorted(map(str, row))}: "
            f"pass one of them as `field`."
        )
    text = row[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(
            f"{call}: the field {field!r} of {place} must hold text, but holds {type(text).__name__}; "
            f"the fields are {sorted(map(str, row))}: pass another of them as `field`."
        )
    return text
