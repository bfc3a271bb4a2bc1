"""Flags and compiler options that the installed XLA knows; an unknown flag would end the process."""

import functools
import importlib.util
import logging
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def keep_known(options: Mapping[str, Any], library: str = "jaxlib") -> dict[str, Any]:
    """Return the flags or compiler options that the installed XLA knows; drop others, with a warning in the log.

    `library` is `jaxlib`, or `libtpu` for TPUs' flags. This file does not import JAX, since XLA reads its flags only
    once, when the first client is created.
    """
    known_options = {}
    for name, value in options.items():
        if _is_known(name, library):
            known_options[name] = value
        else:
            logging.getLogger("eqformer").warning(
                "the installed %s does not know %s; it is left out", _LIBRARY_NAMES[library], name
            )
    return known_options


def format_flags(options: Mapping[str, Any]) -> list[str]:
    """Format options as words of `XLA_FLAGS` or of libtpu's `LIBTPU_INIT_ARGS`."""
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]


@functools.cache
def _is_known(name: str, library: str) -> bool:
    """Return whether the library contains the name as a zero-terminated string, as its table of flags does.

    Names of removed flags stay in XLA's protocol-buffer descriptions, but without a zero byte at the end.
    """
    spec = importlib.util.find_spec(library)
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [path for folder in folders for path in Path(folder).glob(_LIBRARY_FILES[library]) if path.is_file()]
    return any(_contains(path, b"\0" + name.encode() + b"\0") for path in files)


def _contains(path: Path, text: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


_LIBRARY_NAMES = {"jaxlib": "XLA", "libtpu": "libtpu"}
_LIBRARY_FILES = {"jaxlib": "*jax_common*", "libtpu": "libtpu.so"}
