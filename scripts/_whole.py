"""Small files that are there whole or not at all."""

from contextlib import suppress
from pathlib import Path


def part_of(path: Path) -> Path:
    """Where a file is while it is written."""
    return path.with_suffix(".part")


def write_whole(path: Path, text: str) -> None:
    """Write a file by way of another, of which nothing stays where it cannot be written."""
    part = part_of(path)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
