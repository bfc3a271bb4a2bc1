"""The flags and compiler options that the installed XLA knows; an unknown one would end the process."""

import functools
import importlib.util
import logging
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def known(options: Mapping[str, Any], library: str = "jaxlib") -> dict[str, Any]:
    """The flags or compiler options that the installed XLA knows; others are left out, with a warning in the log.

    TPUs have a `library` with flags of its own, `libtpu`. JAX is not imported here, since XLA reads its flags only
    once, when the first client is made.
    """
    found = {}
    for name, value in options.items():
        if _is_known(name, library):
            found[name] = value
        else:
            logging.getLogger("eqformer").warning(
                "the installed %s does not know %s; it is left out", _CALLED[library], name
            )
    return found


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """The options as words of `XLA_FLAGS` or of libtpu's `LIBTPU_INIT_ARGS`."""
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]


@functools.cache
def _is_known(name: str, library: str) -> bool:
    """Whether the library holds the name as a zero-terminated string, as its table of flags does.

    Names of removed flags stay in XLA's protocol-buffer descriptions, but without a zero byte at the end.
    """
    spec = importlib.util.find_spec(library)
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [path for folder in folders for path in Path(folder).glob(_FILES[library]) if path.is_file()]
    return any(_holds(path, b"\0" + name.encode() + b"\0") for path in files)


def _holds(path: Path, text: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


_CALLED = {"jaxlib": "XLA", "libtpu": "libtpu"}
_FILES = {"jaxlib": "*jax_common*", "libtpu": "libtpu.so"}
