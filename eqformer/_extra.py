"""Optional packages, loaded when they are first used."""

import importlib
from typing import Any


def load_extra(module: str, *, extra: str, call: str) -> Any:
    """Import an optional module; raise an `ImportError` that names the extra of eqformer that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{call} needs the package {package}, which could not be imported ({error}); "
            f'install it with `pip install "eqformer[{extra}]"` or `pip install {package}`.'
        ) from error
