"""What must not be compiled for a platform: a core that is asked for by name and runs elsewhere."""

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float


def refused(query: Float[Array, "..."], core: str, platforms: tuple[str, ...]) -> Float[Array, "..."]:
    """The same queries, in a program that cannot be compiled: a `ValueError` then says that `core` runs elsewhere."""
    return _refused_p.bind(query, core=core, platforms=platforms)


def _refuse(query: Any, core: str, platforms: tuple[str, ...], platform: str) -> NoReturn:
    raise ValueError(
        f"{core}: its kernel runs on {' and '.join(platforms)}, but a program with queries {query.dtype}"
        f"{list(query.shape)} is compiled for {platform!r}; pass AutoCore(), which takes what a platform has, or "
        "BlockwiseCore()."
    )


def _lowered(context: Any, _: Any, *, core: str, platforms: tuple[str, ...]) -> Any:
    _refuse(context.avals_in[0], core, platforms, "/".join(context.platforms or context.module_context.platforms))


_refused_p = Primitive("refused")
_refused_p.def_abstract_eval(lambda query, **_: query)
_refused_p.def_impl(lambda query, *, core, platforms: _refuse(query, core, platforms, jax.default_backend()))
mlir.register_lowering(_refused_p, _lowered)
