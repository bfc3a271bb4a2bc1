"""Recipes in files of one's own: `--recipe path/to/file.py:name`."""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from recipes import Recipe

from eqformer import read_utf8


_LOADED: dict[str, ModuleType] = {}  # by the file's text: a family that it registers is registered once


def file_of(name: str) -> Path | None:
    """The file of a recipe of one's own; None for another name."""
    found = _parts(name)
    return None if found is None else found[0]


def short_name(name: str) -> str:
    """What the folder of a run of this recipe is called by default: `tiny` of `path/to/file.py:tiny`."""
    found = _parts(name)
    if found is None:
        return name
    return found[0].stem if found[1] == "recipe" else found[1]


def own_recipe(name: str) -> Recipe:
    """What the function of that name in the file gives; raises a `ValueError` where there is none."""
    found = _parts(name)
    assert found is not None
    file, function = found
    if not file.is_file():
        raise ValueError(f"--recipe {name}: there is no file {file}; give FILE.py:NAME of a function in one.")
    module = loaded(file)
    make = getattr(module, function, None)
    if not callable(make):
        made = sorted(
            name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        )
        raise ValueError(
            f"--recipe {name}: {file} has no function {function!r}, which would give the recipe; it has "
            f"{', '.join(made) or 'none'}: give {file}:NAME."
        )
    recipe = make()
    if not isinstance(recipe, Recipe):
        raise ValueError(f"--recipe {name}: {function}() gave a {type(recipe).__name__}; return a recipes.Recipe.")
    return recipe


def loaded(file: Path) -> ModuleType:
    """The module of a file, run once in a process for the same text."""
    text = read_utf8(file)
    if text not in _LOADED:
        spec = importlib.util.spec_from_file_location(f"own_recipe_{len(_LOADED)}", file.absolute())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # which dataclasses look up
        spec.loader.exec_module(module)
        _LOADED[text] = module
    return _LOADED[text]


def classes_of(file: Path) -> dict[str, type]:
    """The dataclasses that a file defines, by name, if this process has run the file's code; runs nothing."""
    module = _LOADED.get(read_utf8(file)) if file.is_file() else None
    defined = [] if module is None else [value for value in vars(module).values() if isinstance(value, type)]
    return {
        kind.__name__: kind
        for kind in defined
        if dataclasses.is_dataclass(kind) and module is not None and kind.__module__ == module.__name__
    }


def _parts(name: str) -> tuple[Path, str] | None:
    """The file and the function of `FILE.py:NAME`; the function is `recipe` by default."""
    found = re.fullmatch(r"(.+\.py)(?::(\w+))?", name)
    return None if found is None else (Path(found[1]), found[2] or "recipe")
