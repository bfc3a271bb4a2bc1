"""Folders of the user's that runs share: one of tokens, one of compiled programs. Either may be deleted at any time."""

import hashlib
import os
import platform
import shutil
from contextlib import suppress
from pathlib import Path


PROGRAMS = "JAX_COMPILATION_CACHE_DIR"  # JAX's own variable: set, it names another folder; empty, none
MOST = 2**30  # the bytes of programs that are kept


def user_folder(name: str) -> Path | None:
    """A folder in `eqformer` in the user's cache, by the XDG base directory specification; None without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = cache if cache.is_absolute() else Path.home() / ".cache"  # the specification ignores relative ones
    except RuntimeError:
        return None
    return cache / "eqformer" / name


def share_programs() -> None:
    """Have JAX keep what it compiles for the user's next runs, unless the user has said where, or there is no room.

    Machines of other processors have folders of their own, since programs for CPUs use what a processor has.
    """
    if PROGRAMS in os.environ or (shared := user_folder("programs")) is None:
        return
    folder = shared / _processor()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > MOST:
            delete_oldest(folder, MOST)
            os.environ[PROGRAMS] = str(folder)
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def delete_oldest(folder: Path, most: int) -> None:
    """Delete the files that were written first, so that the others have no more bytes than `most`."""
    with suppress(OSError):  # another run's files may come and go
        for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True):
            most -= file.stat().st_size
            if most < 0:
                file.unlink(missing_ok=True)


def _processor() -> str:
    """A short name for what programs may ask of the processor."""
    features = platform.processor()
    with suppress(OSError):  # only Linux has the file
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
