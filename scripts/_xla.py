"""Which flags and compiler options the installed XLA knows; XLA ends the process at one that it does not."""

import functools
import importlib.util
import logging
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the flags or compiler options, by name, that the installed XLA knows; others are told in the log.

    JAX is not imported and no client is made, since XLA reads its flags but once, when the first client is.
    """
    found = {}
    for name, value in options.items():
        if _is_known(name):
            found[name] = value
        else:
            logging.getLogger("eqformer").warning("the installed XLA does not know %s; it is left out", name)
    return found


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """The options as words of `XLA_FLAGS`."""
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]


@functools.cache
def _is_known(name: str) -> bool:
    """Whether the library holds the name as a string of its own, as the table of flags does.

    The names of flags that are gone stay in XLA's protocol description, but there no zero byte ends them.
    """
    spec = importlib.util.find_spec("jaxlib")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [path for folder in folders for path in Path(folder).glob("*jax_common*") if path.is_file()]
    return any(_holds(path, b"\0" + name.encode() + b"\0") for path in files)


def _holds(path: Path, text: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0
