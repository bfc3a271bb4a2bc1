"""Facts that kernels need about the program that is traced: its platform, its mesh axes, and the dtypes of sums.

The file also rounds numbers to 8-bit floats, with scales that are powers of two.
"""

import contextlib
import importlib.util
import re
import types
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, runtime_checkable, TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped


if TYPE_CHECKING:

    class Ref(Protocol):
        """A reference to an array in memory, which a kernel reads and writes by indices."""

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> np.dtype: ...
        @property
        def at(self) -> "RefParts": ...
        def transpose(self, dims: tuple[int, ...]) -> "Ref": ...
        def __getitem__(self, index: object) -> Array: ...
        def __setitem__(self, index: object, value: Array) -> None: ...

    class RefParts(Protocol):
        """The `at` of a reference, which gives references to parts of the array."""

        def __getitem__(self, index: object) -> Ref: ...

else:
    # JAX has two classes of references, one of them private, so nothing is checked while programs run.
    Ref = object
Result = TypeVar("Result")
# A context of JAX is part of the key of cached traces, so that a trace for one platform is not reused for another.
_TRACED_FOR = jax.make_user_context(None)


def compilers() -> tuple[str, ...]:
    """Return the accelerators that this installation can compile for, as `jax.lax.platform_dependent` names them.

    Kernels for other platforms need not be traced: without an installed compiler for an accelerator, programs contain
    no kernel. Inside `traced_for(platform)` the platform is the only accelerator; for `"cpu"` there is none.
    """
    if _TRACED_FOR.value is not None:
        return _TRACED_FOR.value
    plugins = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
    return tuple(platform for platform, packages in plugins.items() if any(map(importlib.util.find_spec, packages)))


def traced_for(platform: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which programs are traced for `"tpu"`, `"cuda"` or `"cpu"`, whatever is installed.

    A program that is only analyzed is then the same on every machine. Compiling it needs the platform's compiler.
    """
    return _TRACED_FOR(() if platform == "cpu" else (platform,))


def cpu_or(cpu: Callable[..., Result], default: Callable[..., Result], *arguments: PyTree) -> Result:
    """Return `cpu(*arguments)` on CPUs and `default(*arguments)` elsewhere.

    `default` is traced only if the installation can compile for an accelerator.
    """
    return jax.lax.platform_dependent(*arguments, cpu=cpu, default=default) if compilers() else cpu(*arguments)


def type_kernel_results(function: Callable[..., Result], like: Shaped[Array, "..."]) -> Callable[..., Result]:
    """Wrap one of JAX's own kernel functions so that its results vary over the same mesh axes as `like`.

    Under `shard_map(check_vma=True)` each result of `pallas_call` must be typed with the axes that it varies over.
    JAX's own kernels lack these types, so the function runs with a `pallas_call` that adds them.
    """
    function = getattr(function, "__wrapped__", function)
    pallas, varying = function.__globals__["pl"], jax.typeof(like).manual_axis_type

    def add_type(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=varying)

    def pallas_call(*args: object, out_shape: PyTree, **options: object) -> Callable[..., PyTree]:
        return pallas.pallas_call(*args, out_shape=jax.tree.map(add_type, out_shape), **options)

    names = {**function.__globals__, "pl": types.SimpleNamespace(**{**vars(pallas), "pallas_call": pallas_call})}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__

    def call(*args: PyTree, **options: object) -> Result:
        with jax.numpy_dtype_promotion("standard"):  # the kernels mix dtypes
            return copy(*args, **options)

    return call


def varying_zero(arrays: PyTree, dtype: DTypeLike = jnp.float32) -> Float[Array, ""]:
    """Return a zero that varies over every mesh axis over which any of the arrays varies."""
    zeros = (jnp.zeros_like(array, dtype, shape=()) for array in jax.tree.leaves(arrays))
    return sum(zeros, jnp.zeros((), dtype))


def varying_of(arrays: PyTree) -> Any:
    """Return the `manual_axis_type` of the result of a kernel that reads all of these arrays."""
    return jax.typeof(varying_zero(arrays)).manual_axis_type


def varying_as(array: Shaped[Array, "..."], like: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return a kernel's result, typed as varying over the mesh axes of `like`.

    Pallas does not type the results of Mosaic's GPU kernels.
    """
    missing = jax.typeof(like).manual_axis_type.varying - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array


def gpu_capability() -> float:
    """Return the compute capability of the GPUs that a program is traced for, 9.0 for Hopper.

    These are the GPUs of the mesh, or without a mesh the GPU of this machine. If the mesh has GPUs of another kind than
    this machine, their name determines the capability. A program that is traced without any GPU counts as a program for
    Hopper.
    """
    gpu, mesh = _local_gpu(), jax.sharding.get_abstract_mesh().abstract_device
    if gpu is not None:
        return float(gpu.compute_capability)
    name = "" if mesh is None else str(mesh.device_kind)
    return capability_of(name) if "NVIDIA" in name else 9.0


def capability_of(gpu: str) -> float:
    """Return the compute capability of GPUs with a name such as `NVIDIA H100` or `h100`; 8.0 for unknown names."""
    return next((capability for kinds, capability in _KINDS.items() if re.search(kinds, gpu, re.IGNORECASE)), 8.0)


_KINDS = {
    r"\bG?H\d": 9.0,
    r"\bG?B\d": 10.0,
}  # Patterns of GPU names such as GH200 and B200; any other name counts as an older GPU.


def gpu_cores() -> int:
    """Return the number of multiprocessors of the GPU that a program is traced for.

    An H100, with 132 multiprocessors, is assumed if this machine has no such GPU.
    """
    gpu = _local_gpu()
    return 132 if gpu is None else int(gpu.core_count)


@runtime_checkable
class _Gpu(Protocol):
    """A GPU as JAX lists it."""

    @property
    def compute_capability(self) -> str: ...
    @property
    def core_count(self) -> int: ...
    @property
    def device_kind(self) -> str: ...


def _local_gpu() -> _Gpu | None:
    """Return this machine's GPU if there is no mesh or the mesh has GPUs of the same kind; otherwise None."""
    if jax.default_backend() != "gpu":
        return None
    mesh, (gpu, *_) = jax.sharding.get_abstract_mesh().abstract_device, jax.devices()
    return gpu if mesh is None or mesh.device_kind == gpu.device_kind else None


def fail_lowering(query: Float[Array, "..."], required_by: str, platforms: tuple[str, ...]) -> Float[Array, "..."]:
    """Return the queries unchanged, by a primitive that cannot be lowered.

    Lowering the program raises a `ValueError` that names the required kernel.
    """
    return _fail_p.bind(query, required_by=required_by, platforms=platforms)


def _fail(query: Array | ShapedArray, required_by: str, platforms: tuple[str, ...], platform: str) -> NoReturn:
    raise ValueError(
        f"{required_by}: its kernel runs on {' and '.join(platforms)}, but a program with queries {query.dtype}"
        f"{list(query.shape)} is compiled for {platform!r}; pass kernels.ATTENTION, which takes the kernel of each "
        "platform, or kernels.BlockwiseAttention()."
    )


def _fail_while_lowering(
    context: mlir.LoweringRuleContext, _: object, *, required_by: str, platforms: tuple[str, ...]
) -> NoReturn:
    query = context.avals_in[0]
    assert isinstance(query, ShapedArray)
    _fail(query, required_by, platforms, "/".join(context.platforms or context.module_context.platforms))


_fail_p = Primitive("fail_lowering")
_fail_p.def_abstract_eval(lambda query, **_: query)
_fail_p.def_impl(lambda query, *, required_by, platforms: _fail(query, required_by, platforms, jax.default_backend()))
mlir.register_lowering(_fail_p, _fail_while_lowering)


def at_least_float32(dtype: np.dtype) -> np.dtype:
    """Return float32 for a narrower floating-point dtype, and the dtype itself otherwise."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype("float32")


E4M3 = jnp.float8_e4m3fn
"""The 8-bit float with 4 exponent bits, for weights and activations."""
E5M2 = jnp.float8_e5m2
"""The 8-bit float with 5 exponent bits, for gradients."""
# Binary exponents of the largest magnitude after division by the scale: it is below 2^8 in E4M3 and 2^15 in E5M2.
_EXPONENTS: dict[jax.typing.DTypeLike, int] = {E4M3: 7, E5M2: 14}


def round_to_fp8(
    x: Float[Array, "..."], dtype: jax.typing.DTypeLike, dim: int | tuple[int, ...] | None
) -> tuple[Array, Float[Array, "..."]]:
    """Return `x / scale` rounded to an 8-bit dtype, and the scale.

    There is one scale for each slice along `dim`, in an array with as many dims as `x`, or a single scalar if `dim` is
    None. Infinities and NaN do not become finite.
    """
    wide = at_least_float32(x.dtype)
    scale, inverse = fp8_scale(jnp.max(jnp.abs(x), dim, keepdims=dim is not None), dtype)
    return (x.astype(wide) * inverse.astype(wide)).astype(dtype), scale.astype(wide)


def fp8_scale(
    largest: Float[Array, "*dims"], dtype: jax.typing.DTypeLike
) -> tuple[Float[Array, "*dims"], Float[Array, "*dims"]]:
    """Return the scale for rounding arrays of this largest magnitude to an 8-bit dtype, and the inverse of the scale.

    Both are powers of two in float32.
    """
    # A float32 has its exponent plus 127 in the bits above its 23 bits of mantissa.
    exponent = (jax.lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32) >> 23) - _EXPONENTS[dtype]
    exponent = jnp.clip(exponent, 1, 253)  # so that the scale's inverse is a normal number too
    scale, inverse = (jax.lax.bitcast_convert_type(bits << 23, jnp.float32) for bits in (exponent, 254 - exponent))
    return scale, inverse
