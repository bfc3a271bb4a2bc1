"""How the tests compile: with no care for speed, since each program runs a few times, on any XLA that is installed."""

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from beartype import beartype


# By its path, since eqformer is imported later, with its shapes checked.
_SPEC = importlib.util.spec_from_file_location("prepare", Path(__file__).parents[1] / "eqformer" / "_prepare.py")
assert _SPEC is not None and _SPEC.loader is not None
_PREPARE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_PREPARE)
keep_known = _PREPARE.keep_known

# One module of code a program: making and joining 32 takes a fifth of the time.
FAST: dict[str, Any] = keep_known({"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1})
HASTE: dict[str, Any] = FAST | keep_known({"xla_cpu_use_fusion_emitters": False})
FLAGS = _PREPARE.format_flags(HASTE)


def share_contexts(programs: int = 64) -> None:
    """Have JAX lower so many programs of a thread in one context of MLIR's: to make and leave one takes 5 ms each time.

    It is JAX's own affair, so nothing is done where the function that makes one has another name.
    """
    from jax._src.interpreters import mlir  # here, since flags are made before JAX is first used

    make, own = getattr(mlir, "make_ir_context", None), threading.local()
    if make is None:
        return

    def context() -> Any:
        number = getattr(own, "number", 0)
        if number % programs == 0:
            own.context = make()
        own.number = number + 1
        return own.context

    mlir.make_ir_context = context


CHECKED: dict[tuple, Callable] = {}


def checked(function: Callable) -> Callable:
    """beartype's check, written once for a function inside of another, which is made again at every call of that.

    What jaxtyping has checked is a function of its own with the same signature, which does nothing but give back an
    argument: two of one place and of the same annotations are the same, unless they have defaults.
    """
    if "<locals>" not in function.__qualname__ or function.__defaults__ or function.__kwdefaults__:
        return beartype(function)
    names = function.__code__.co_varnames
    key = function.__module__, function.__qualname__, names, tuple(function.__annotations__.items())
    try:
        if key not in CHECKED:
            CHECKED[key] = beartype(function)
    except TypeError:  # annotations of which one has no hash
        return beartype(function)
    return CHECKED[key]


def put(x: Any, dtype: Any = None) -> Any:
    """An array of JAX's, cast by numpy and only moved; `jnp.asarray` compiles a program for each shape."""
    import jax  # here, since flags are made before it is first used

    return jax.device_put(np.asarray(x, dtype))
