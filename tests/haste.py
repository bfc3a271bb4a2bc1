"""How the tests compile: with no care for speed, since each program runs a few times, on any XLA that is installed."""

import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np


# By its path, since eqformer is imported later, with its shapes checked.
_SPEC = importlib.util.spec_from_file_location("xla_flags", Path(__file__).parents[1] / "eqformer" / "_xla_flags.py")
assert _SPEC is not None and _SPEC.loader is not None
_XLA_FLAGS = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_XLA_FLAGS)
known = _XLA_FLAGS.known

# One module of code a program: making and joining 32 takes a fifth of the time.
FAST: dict[str, Any] = known({"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1})
HASTE: dict[str, Any] = FAST | known({"xla_cpu_use_fusion_emitters": False})
FLAGS = _XLA_FLAGS.as_flags(HASTE)


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


def put(x: Any, dtype: Any = None) -> Any:
    """An array of JAX's, cast by numpy and only moved; `jnp.asarray` compiles a program for each shape."""
    import jax  # here, since flags are made before it is first used

    return jax.device_put(np.asarray(x, dtype))
