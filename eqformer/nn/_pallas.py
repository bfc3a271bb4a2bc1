"""Kernels that come with JAX: for which platforms they can be compiled here, and their types under `shard_map`."""

import importlib.util
import types
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Shaped


def compilers() -> tuple[str, ...]:
    """The accelerators that this installation can compile for, as `jax.lax.platform_dependent` names them.

    What is made for others need not be traced. On a machine with none of them, that leaves programs as they are.
    """
    plugins = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
    return tuple(name for name, found in plugins.items() if any(importlib.util.find_spec(one) for one in found))


def typed(function: Callable[..., Any], like: Shaped[Array, "..."]) -> Callable[..., Any]:
    """A function of JAX's kernels whose results vary over the mesh axes that `like` varies over.

    Under `shard_map(check_vma=True)` each result of `pallas_call` must say over which axes it varies, which JAX's own
    kernels do not say. So the function runs with a `pallas_call` that says it for them.
    """
    function = getattr(function, "__wrapped__", function)
    pallas, varying = function.__globals__["pl"], jax.typeof(like).manual_axis_type
    say = lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=varying)

    def pallas_call(*args: Any, out_shape: Any, **more: Any) -> Any:
        return pallas.pallas_call(*args, out_shape=jax.tree.map(say, out_shape), **more)

    names = {**function.__globals__, "pl": types.SimpleNamespace(**{**vars(pallas), "pallas_call": pallas_call})}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__

    def call(*args: Any, **more: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # the kernels mix dtypes
            return copy(*args, **more)

    return call
