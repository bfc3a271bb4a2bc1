"""Small files that are written atomically."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_whole(path: str | Path, content: str | Callable[[Path], Any]) -> None:
    """Write another file beside `path` and rename it to that, so that no reader finds a half; a small file's way.

    `content` is the text, or writes the file that it is given, whose name ends as `path` does. If writing fails, the
    other file is deleted.
    """
    part = Path(path).with_suffix(f".part{Path(path).suffix}")
    try:
        part.write_text(content, encoding="utf-8") if isinstance(content, str) else content(part)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
