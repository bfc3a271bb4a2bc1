"""Small files that are written atomically."""

from contextlib import suppress
from pathlib import Path


def part_of(path: Path) -> Path:
    """The path under which a file is written before it is renamed."""
    return path.with_suffix(".part")


def write_whole(path: Path, text: str) -> None:
    """Write another file and rename it to `path`; if writing fails, the other file is deleted."""
    part = part_of(path)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
