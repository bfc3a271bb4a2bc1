"""Documents from the Hugging Face hub, by the package `datasets`."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from .._extra import load_extra
from ._documents import digest, Document, field_of, Source, to_bytes
from ._files import file_digest


def hub(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    field: str = "text",
    revision: str | None = None,
    limit: int | None = None,
) -> Source:
    """A dataset of the Hugging Face hub by name, or in a local folder that `datasets` can load, streamed.

    The fingerprint is a hash of these arguments, so a finished cache is found without a network; of a local folder also
    of its files' names and contents. Rows whose text is empty or null are left out.

    Args:
        name: The dataset's name, or the path of a folder.
        config: Which of its configurations; None: its default.
        split: Its split.
        field: The field of a row that holds the text.
        revision: The version; pass it to pin the dataset.
        limit: The number of rows to read at most.

    **Raises:** when it is read: `ImportError` if the package `datasets` is absent, `ValueError` if the dataset cannot
    be opened or read or its rows have no such field.
    """
    arguments = f"hub({name!r}, config={config!r}, split={split!r}, field={field!r}, revision={revision!r})"

    def documents() -> Iterator[Document]:
        datasets = load_extra("datasets", extra="data", call=arguments)
        load = lambda: datasets.load_dataset(name, config, split=split, revision=revision, streaming=True)
        for number, row in enumerate(_rows(load, limit, arguments)):
            text = field_of(row, field, call=arguments, place=f"row {number}")
            if text:
                yield Document(f"{split}#{number}", text, len(to_bytes(text)))

    return Source(
        name=name,
        size=0,
        fingerprint=lambda: digest((arguments, str(limit), *_contents(Path(name)))),
        documents=documents,
    )


def _rows(load: Any, limit: int | None, call: str) -> Iterator[Any]:
    """The rows of what `load` gives; raises a `ValueError` where the package cannot open or read them."""
    number = 0
    try:
        for row in islice(load(), limit):
            number += 1
            yield row
    except Exception as error:  # its own errors and those of pyarrow, pandas and the network have no class in common
        if number:
            rule, fix = f"cannot be read after its first {number} rows", "mend its files, or go online"
        else:
            rule = "cannot be opened"
            fix = "correct the name, config or split or the files, or go online (a complete cache needs no network)"
        raise ValueError(f"{call}: the dataset {rule}: {error}; {fix}.") from error


def _contents(folder: Path) -> Iterator[str]:
    """Names and digests of all files in a local dataset's folder; none for a dataset of the hub."""
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if file.is_file():
            yield file.relative_to(folder).as_posix()
            yield file_digest(file)
