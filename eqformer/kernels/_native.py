"""A C++ kernel for CPUs, which the user's compiler builds: products of vectors with a quantized matrix."""

import ctypes
import functools
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from .._files import read_bytes
from .._prepare import chosen_compiler, kernel_cache, processor_name
from ._op import Implementation
from ._platform import varying_as, varying_zero
from ._quantized_matmul import codes_in_a_byte, QuantizedMatmulCall


def build_native(compiler: str | None = None) -> Path:
    """Compile the kernels for this machine's processor, unless the library exists, and return the library's file.

    This takes a few seconds, once for each version of eqformer and of jaxlib. The library is stored in the user's
    cache, or in the folder `EQFORMER_KERNELS`, and later processes load it from there when they trace their first
    product. Programs that were traced before do not change. `eqformer.load(..., throughput=True)` calls this for a
    model with quantized weights.

    Raises a `RuntimeError` if there is no compiler, if the compiler fails, or if no folder for the library can be
    written.

    Args:
        compiler: A C++17 compiler that has the options of GCC; None: the variable `CXX`, or the first of `c++`, `g++`
            and `clang++` that exists.
    """
    file, call = _library_file(), f"build_native({'' if compiler is None else repr(compiler)})"
    if file is None:
        raise RuntimeError(f"{call}: it needs Linux or macOS, and a writable folder; set EQFORMER_KERNELS to a folder.")
    if not file.exists():
        if (path := find_compiler(compiler)) is None:
            raise RuntimeError(
                f"{call}: no C++ compiler was found; install g++ or clang++, or set CXX to a compiler. Without the "
                "kernels, XLA computes the products, more slowly."
            )
        try:
            _compile(call, path, file)
        except OSError as error:
            raise RuntimeError(
                f"{call}: the compiler or its folder {file.parent} cannot be used ({error}); set EQFORMER_KERNELS to "
                "another folder, or CXX to another compiler."
            ) from error
    _load_library.cache_clear()
    if _load_library() is None:
        raise RuntimeError(f"{call}: {file} cannot be loaded, or belongs to another user; delete it and try again.")
    return file


def find_compiler(name: str | None = None) -> str | None:
    """Return the path of a C++ compiler: `name`, by default `CXX` or the first of the usual names; else None."""
    chosen = name or chosen_compiler()
    names = [chosen] if chosen else ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def _compile(call: str, compiler: str, file: Path) -> None:
    """Compile the kernels to `file`, which appears only when it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        output = Path(folder, file.name)
        include = ["-isystem", jax.ffi.include_dir()]
        command = [compiler, *_OPTIONS, *include, str(_SOURCE), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if result.returncode != 0:
            errors = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
            raise RuntimeError(
                f"{call}: {compiler} failed: {errors[0] if errors else result.returncode}; choose a compiler for "
                "C++17 by CXX. Without the kernels, XLA computes the products, more slowly."
            )
        output.replace(file)


def _library_file() -> Path | None:
    """Return the file of the library for this source, version of jaxlib and processor; None if there can be none."""
    if os.name != "posix" or (folder := kernel_cache()) is None:
        return None
    versions = f"{version('jaxlib')} {processor_name()} {_OPTIONS}"
    digest = hashlib.sha256(read_bytes(_SOURCE) + versions.encode()).hexdigest()
    return folder / f"native-{digest[:16]}.so"


@functools.cache
def _load_library() -> str | None:
    """Load the library, if it was built and belongs to the user; return the name of its function for JAX, or None."""
    file = _library_file()
    try:
        if file is None or file.stat().st_uid != os.getuid():
            return None
        library = ctypes.CDLL(str(file))
    except OSError:
        return None
    # The name has the library's hash, so that a stored program is not used with another library.
    target = f"eqformer_quantized_matmul_{file.stem.removeprefix('native-')}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(library.quantized_matmul), platform="cpu")
    return target


class NativeQuantizedMatmul(Implementation[QuantizedMatmulCall, Array]):
    """The product by a kernel in C++, which decodes codes into the processor's cache on all cores, for CPUs.

    The decoded matrix equals `DecodedMatmul`'s, but sums in float32 have another order. `build_native` compiles
    the kernel once.
    """

    def supports(self, call: QuantizedMatmulCall) -> str | None:
        """Return the reason why the kernel cannot compute the call, or None."""
        if call.x.dtype != jnp.float32:
            return f"it computes in float32, not {call.x.dtype}"
        if (vectors := math.prod(call.x.shape[:-1])) > _MAX_VECTORS:
            return f"it takes up to {_MAX_VECTORS} vectors, not {vectors}"
        if (size := call.codes.shape[1] // call.scales.shape[1]) % _LANES:
            return f"it takes groups of a multiple of {_LANES} bytes of codes, not of {size}"
        if _load_library() is None:
            return "eqformer.kernels.build_native() has not compiled it on this machine"
        return None

    def run(self, call: QuantizedMatmulCall) -> Float[Array, "*batch outputs"]:
        """Compute the call."""
        target, parts = _load_library(), codes_in_a_byte(call.form)
        assert target is not None
        # First the inputs of the low codes, then the inputs of the high codes.
        vectors = jnp.swapaxes(call.x.reshape(-1, call.codes.shape[1], parts), 1, 2)
        zeros = jnp.zeros((0, 0), jnp.float32) if call.zeros is None else _readable(call.zeros, "uint8")
        arrays = vectors, call.codes, _readable(call.scales, "uint8", "float16", "bfloat16"), zeros
        like = varying_zero(arrays)
        result = jax.ShapeDtypeStruct((len(vectors), call.codes.shape[0]), jnp.float32)
        multiply = jax.ffi.ffi_call(target, result, vmap_method="sequential")
        # JAX types the result with the mesh axes that all arguments vary over.
        y = multiply(*(varying_as(array, like) for array in arrays), form=call.form)
        return y.reshape(*call.x.shape[:-1], -1)


def _readable(array: Shaped[Array, "..."], *dtypes: str) -> Shaped[Array, "..."]:
    """Return the array if it has one of the dtypes that the kernel reads, else in float32."""
    return array if str(array.dtype) in dtypes else array.astype(jnp.float32)


_SOURCE = Path(__file__).with_suffix(".cc")
_OPTIONS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-w")
_LANES = 16  # Codes are decoded 16 at a time.
_MAX_VECTORS = 4  # For more vectors, XLA's products of decoded blocks are faster.
