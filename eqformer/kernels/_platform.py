"""Platforms that a program is traced for, their capabilities, and the types of kernels under `shard_map`."""

import contextlib
import importlib.util
import re
import types
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float, PyTree, Shaped


_CHOSEN = jax.make_user_context(None)  # of traces that are kept, too


def compilers() -> tuple[str, ...]:
    """The accelerators that this installation can compile for, as `jax.lax.platform_dependent` names them.

    What is made for others need not be traced. On a machine with none of them, that leaves programs as they are. Inside
    `traced_for` it is the platform that is given there.
    """
    if _CHOSEN.value is not None:
        return _CHOSEN.value
    plugins = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
    return tuple(name for name, found in plugins.items() if any(importlib.util.find_spec(one) for one in found))


def traced_for(platform: str) -> contextlib.AbstractContextManager[None]:
    """Within it programs are traced for a platform, `"tpu"`, `"cuda"` or `"cpu"`, whatever is installed here.

    So a program that is only looked at is the same on each machine. To compile it takes the platform's compiler.
    """
    return _CHOSEN(() if platform == "cpu" else (platform,))


def cpu_or(cpu: Callable[..., Any], default: Callable[..., Any], *given: PyTree) -> Any:
    """What `cpu` gives on CPUs and `default` elsewhere, which is traced where something else can be compiled for."""
    return jax.lax.platform_dependent(*given, cpu=cpu, default=default) if compilers() else cpu(*given)


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


def varying_of(arrays: PyTree) -> Any:
    """Over which mesh axes a kernel's result varies that reads all of these arrays."""
    return jax.typeof(sum(jnp.zeros_like(x, jnp.float32, shape=()) for x in jax.tree.leaves(arrays))).manual_axis_type


def varying_as(array: Shaped[Array, "..."], like: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """A kernel's result, said to vary over the mesh axes that `like` varies over: Mosaic's for GPUs say nothing."""
    more = jax.typeof(like).manual_axis_type.varying - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(more), to="varying") if more else array


def gpu_capability() -> float:
    """The compute capability of the GPUs that a program is traced for, 9.0 for Hopper's.

    It is that of the mesh's GPUs: of this machine's, or of absent ones by their name. Without a mesh it is that of this
    machine's; where there is none either, the program is taken to be for Hopper's.
    """
    own, mesh = _own_gpu(), jax.sharding.get_abstract_mesh().abstract_device
    if own is not None:
        return float(own.compute_capability)
    name = "" if mesh is None else str(mesh.device_kind)
    return capability_of(name) if "NVIDIA" in name else 9.0  # the mesh of a test, or none


def capability_of(gpu: str) -> float:
    """The compute capability of GPUs of a name, such as `NVIDIA H100` or `h100`; 8.0 where it is not known."""
    return next((capability for kinds, capability in _KINDS.items() if re.search(kinds, gpu, re.IGNORECASE)), 8.0)


_KINDS = {
    r"\bG?H\d": 9.0,
    r"\bG?B\d": 10.0,
}  # in GPUs' names, as in GH200 and B200; others are taken for older


def gpu_cores() -> int:
    """Multiprocessors of these GPUs, as for `gpu_capability`: by default 132, an H100's."""
    own = _own_gpu()
    return 132 if own is None else int(own.core_count)


def _own_gpu() -> Any:
    """This machine's GPU, where a program is traced for it: without a mesh, or with one of its kind; else None."""
    if jax.default_backend() != "gpu":
        return None
    mesh, (own, *_) = jax.sharding.get_abstract_mesh().abstract_device, jax.devices()
    return own if mesh is None or mesh.device_kind == own.device_kind else None


def fail_lowering(query: Float[Array, "..."], required_by: str, platforms: tuple[str, ...]) -> Float[Array, "..."]:
    """Return the same queries, in a program that cannot be lowered: a `ValueError` then names the required kernel."""
    return _fail_p.bind(query, required_by=required_by, platforms=platforms)


def _fail(query: Any, required_by: str, platforms: tuple[str, ...], platform: str) -> NoReturn:
    raise ValueError(
        f"{required_by}: its kernel runs on {' and '.join(platforms)}, but a program with queries {query.dtype}"
        f"{list(query.shape)} is compiled for {platform!r}; pass kernels.ATTENTION, which takes the kernel of each "
        "platform, or kernels.BlockwiseAttention()."
    )


def _fail_while_lowering(context: Any, _: Any, *, required_by: str, platforms: tuple[str, ...]) -> Any:
    _fail(context.avals_in[0], required_by, platforms, "/".join(context.platforms or context.module_context.platforms))


_fail_p = Primitive("fail_lowering")
_fail_p.def_abstract_eval(lambda query, **_: query)
_fail_p.def_impl(lambda query, *, required_by, platforms: _fail(query, required_by, platforms, jax.default_backend()))
mlir.register_lowering(_fail_p, _fail_while_lowering)
