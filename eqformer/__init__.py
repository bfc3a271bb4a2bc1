"""An Equinox-based, modular transformer zoo for JAX: one model, any mesh, the same numbers.

Its rooms are `eqformer.nn`, `eqformer.kernels`, `eqformer.models`, `eqformer.data`, `eqformer.parallel`,
`eqformer.training`, `eqformer.generation`, `eqformer.text`, `eqformer.evaluation`, `eqformer.interpretability`,
`eqformer.serving`, `eqformer.program`, `eqformer.planning`, `eqformer.recipes` and `eqformer.systems`; each is imported
at its first use. `eqformer.load` and `eqformer.LLM` come from `eqformer.text`; `eqformer.capture` and `eqformer.patch`
come from `eqformer.interpretability`.
"""

import importlib
import pkgutil
import typing

from ._failures import (
    explain_error as explain_error,
    explain_write_error as explain_write_error,
    is_lost_peer as is_lost_peer,
    requested_bytes as requested_bytes,
)
from ._files import (
    dataclass_differences as dataclass_differences,
    dataclass_from_json as dataclass_from_json,
    dataclass_to_json as dataclass_to_json,
    read_json as read_json,
    read_utf8 as read_utf8,
    UnknownKindError as UnknownKindError,
    write_atomic as write_atomic,
)
from ._prepare import (
    cache_programs as cache_programs,
    delete_oldest as delete_oldest,
    prepare as prepare,
    token_cache as token_cache,
    user_cache as user_cache,
)
from ._shapes import (
    Batch as Batch,
    DistillationBatch as DistillationBatch,
    LabelBatch as LabelBatch,
    LEGEND as LEGEND,
    PolicyBatch as PolicyBatch,
    PreferenceBatch as PreferenceBatch,
)


if typing.TYPE_CHECKING:
    from . import (
        data as data,
        evaluation as evaluation,
        generation as generation,
        interpretability as interpretability,
        models as models,
        nn as nn,
        parallel as parallel,
        planning as planning,
        program as program,
        recipes as recipes,
        serving as serving,
        text as text,
        training as training,
    )
    from .interpretability import capture as capture, patch as patch
    from .text import LLM as LLM, load as load


__version__ = "0.1.0"  # The build reads the version here.


def __getattr__(name: str) -> typing.Any:
    if name in _rooms():
        return importlib.import_module(f".{name}", __name__)
    if (room := _rooms_of_names().get(name)) is not None:
        return getattr(importlib.import_module(f".{room}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_rooms(), *_rooms_of_names()})


def _rooms() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(__path__) if module.ispkg}


def _rooms_of_names() -> dict[str, str]:
    """Return the names that the package offers directly from one of its rooms, each with the room."""
    return {"LLM": "text", "load": "text", "capture": "interpretability", "patch": "interpretability"}
