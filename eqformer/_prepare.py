"""Process settings that JAX and XLA read when they start: XLA's flags, a GPU's memory share, malloc's parameters.

This file does not import JAX, since XLA reads its flags only once, when JAX creates its first client.
"""

import ctypes
import functools
import hashlib
import importlib.util
import logging
import mmap
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any


# The value of a flag or a compiler option: a boolean, an integer or a text. JAX's annotations leave out integers.
Option = Any


def prepare(*, devices: int | None = None, compilers: bool = False, gradients: bool = True) -> None:
    """Set flags of XLA and libtpu, the share of a GPU's memory that JAX takes and malloc's parameters for CPUs.

    Call `prepare` before JAX creates its first array or looks for devices, because XLA reads the flags only once. The
    user's settings stay, and no other part of eqformer sets these flags. On CPUs training is about twice as fast with
    the flags. Generation and forward passes are up to a fifth faster with the flags of `gradients=False`.
    docs/benchmarks.md and docs/accelerators-memory.md give the effect of each flag. Flags that the installed libraries
    do not know are left out, with a line in the log.

    With `devices` JAX simulates this number of CPU devices and uses no other platform. With `compilers` libtpu and CUDA
    compile for accelerators that this machine does not have, as `planning.compilation_of` needs. Raises a `ValueError`
    if JAX has started without these flags.
    """
    if devices is not None and devices < 1:
        raise ValueError(
            f"prepare(devices={devices}): the number of devices must be at least 1; pass None for this machine's "
            "devices."
        )
    flags = _flags(devices, compilers, gradients)
    variables = _memory_share() | _tpu_flags()
    if variables or flags != os.environ.get("XLA_FLAGS", "").split():
        if _has_started():
            raise ValueError(
                "prepare(): JAX has started already, and XLA reads its flags only at the start; call prepare before "
                "the first array is created and before jax.devices()."
            )
        os.environ.update({"XLA_FLAGS": " ".join(flags)} | variables)
    if devices is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # An imported JAX has already read the variable.
        if (jax := sys.modules.get("jax")) is not None:
            jax.config.update("jax_platforms", "cpu")
    if compilers:
        for name, value in _COMPILER_VARIABLES.items():
            os.environ.setdefault(name, value)
    if platform.libc_ver()[0] == "glibc" and os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        keep_freed_memory(ctypes.CDLL(None))


def cache_programs() -> None:
    """Make JAX store compiled programs for the user's later processes; a folder that the user has chosen stays.

    Call this before the first program is compiled. Nothing is stored if the folder cannot be written or its disk has
    less than a gibibyte free. Each kind of processor has a folder of its own, because compiled CPU programs use the
    processor's instructions.
    """
    if PROGRAMS in os.environ or (shared := user_cache("programs")) is None:
        return
    folder = shared / processor_name()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > _MAX_PROGRAM_BYTES:
            delete_oldest(folder, _MAX_PROGRAM_BYTES)
            os.environ[PROGRAMS] = str(folder)
            os.environ.setdefault(_LEAST_COMPILE_TIME, "0.2")
            if (jax := sys.modules.get("jax")) is not None:  # An imported JAX has already read the variables.
                jax.config.update(PROGRAMS.lower(), str(folder))
                jax.config.update(_LEAST_COMPILE_TIME.lower(), float(os.environ[_LEAST_COMPILE_TIME]))


def user_cache(name: str) -> Path | None:
    """Return a folder that the user's processes share, such as for tokens, in the user's cache; None without a home.

    The cache is found by the XDG base directory specification. The folder may be deleted at any time.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = cache if cache.is_absolute() else Path.home() / ".cache"  # The specification ignores relative paths.
    except RuntimeError:
        return None
    return cache / "eqformer" / name


def token_cache() -> Path | None:
    """Return the folder of tokens that a user's runs share: `EQFORMER_TOKENS`, or one in the user's cache."""
    return Path(path) if (path := os.environ.get("EQFORMER_TOKENS")) else user_cache("tokens")


def kernel_cache() -> Path | None:
    """Return the folder of compiled kernels: `EQFORMER_KERNELS`, or one in the user's cache."""
    return Path(path) if (path := os.environ.get("EQFORMER_KERNELS")) else user_cache("kernels")


def chosen_compiler() -> str | None:
    """Return the C++ compiler that the user has chosen, the variable `CXX`; None: no choice."""
    return os.environ.get("CXX") or None


def delete_oldest(folder: Path, max_bytes: int) -> None:
    """Delete the oldest files of a folder, until the remaining files have at most `max_bytes`."""
    with suppress(OSError):  # Other processes' files may come and go.
        for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True):
            max_bytes -= file.stat().st_size
            if max_bytes < 0:
                file.unlink(missing_ok=True)


def processor_name() -> str:
    """Return a short name of the processor's instruction set, with its extensions."""
    features = platform.processor()
    with suppress(OSError):  # Only Linux has the file.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def last_level_cache() -> int | None:
    """Return the bytes of the processor's largest cache; None if it is unknown, as on other systems than Linux."""
    sizes: list[int] = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(file.read_text(encoding="utf-8").strip().removesuffix("K")) * 2**10)
    return max(sizes, default=None)


def _flags(devices: int | None, compilers: bool, gradients: bool) -> list[str]:
    """Return the words of `XLA_FLAGS`: the user's, and our flags that XLA knows."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    options = platform_flags() | ({"xla_gpu_autotune_level": 0} if compilers else {})
    options |= {} if gradients else _FORWARD_FLAGS | (_GPU_FORWARD_FLAGS if _has_gpus() else {})
    flags += format_flags(keep_known(drop_user_options(options)))
    if devices is not None:
        flags = [flag for flag in flags if flag.partition("=")[0] != _SIMULATED] + [f"{_SIMULATED}={devices}"]
    return flags


def drop_user_options(options: Mapping[str, Option], variable: str = "XLA_FLAGS") -> dict[str, Option]:
    """Return the options without those that the user has set in an environment variable."""
    user_flags = {flag.partition("=")[0].lstrip("-") for flag in os.environ.get(variable, "").split()}
    return {name: value for name, value in options.items() if name not in user_flags}


def _tpu_flags() -> dict[str, str]:
    """Return libtpu's variable with our flags that libtpu knows; nothing without libtpu or without such flags."""
    if importlib.util.find_spec("libtpu") is None:
        return {}
    flags = format_flags(keep_known(drop_user_options(_TPU_FLAGS, _TPU_VARIABLE), "libtpu"))
    return {_TPU_VARIABLE: " ".join([*os.environ.get(_TPU_VARIABLE, "").split(), *flags])} if flags else {}


def compiler_flags() -> str:
    """Return all compiler flags in the environment; with other flags, the compiled programs differ."""
    return " ".join(filter(None, (os.environ.get(name) for name in ("XLA_FLAGS", _TPU_VARIABLE))))


def single_run_options(platform: str) -> dict[str, Option]:
    """Return XLA's options for a program that initializes random weights and runs once; the user's flags stay."""
    if platform != "cpu":
        return {}
    has_our_flag = format_flags(_CPU_FLAGS)[0] in os.environ.get("XLA_FLAGS", "").split()
    return drop_user_options(_SINGLE_RUN_FLAGS) | (_RANDOM_FLAGS if has_our_flag else {})


def _has_started() -> bool:
    """Return whether JAX has created a client, and so XLA has read its flags."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(getattr(bridge, "_backends", None))


def platform_flags() -> dict[str, Option]:
    """Return XLA's flags for CPUs and, if JAX can compile for them, for GPUs; planning compiles with the same flags."""
    return _CPU_FLAGS | (_GPU_FLAGS if _has_gpus() else {})


def _memory_share() -> dict[str, str]:
    """Return the variable of JAX's share of a GPU's memory; nothing if the user has set the present or former one."""
    is_set = any(os.environ.get(name) for name in _MEMORY_VARIABLES)
    return {_MEMORY_VARIABLES[0]: str(GPU_SHARE)} if _has_gpus() and not is_set else {}


def _has_gpus() -> bool:
    """Return whether JAX can compile for GPUs."""
    return any(importlib.util.find_spec(f"jax_cuda{number}_plugin") for number in (12, 13))


def keep_freed_memory(libc: ctypes.CDLL) -> None:
    """Make malloc keep a step's memory for the next step, instead of returning it to the system."""
    for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20)):
        libc.mallopt(parameter, value)


def keep_known(options: Mapping[str, Option], library: str = "jaxlib") -> dict[str, Option]:
    """Return the flags or compiler options that the installed XLA knows; drop others, with a warning in the log.

    `library` is `jaxlib`, or `libtpu` for TPUs' flags. An unknown flag would end the process.
    """
    known_options = {}
    for name, value in options.items():
        if _is_known(name, library):
            known_options[name] = value
        else:
            logging.getLogger("eqformer").warning(
                "the installed %s does not know %s; it is left out", _LIBRARY_NAMES[library], name
            )
    return known_options


def format_flags(options: Mapping[str, Option]) -> list[str]:
    """Format options as words of `XLA_FLAGS` or of libtpu's `LIBTPU_INIT_ARGS`."""
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]


@functools.cache
def _is_known(name: str, library: str) -> bool:
    """Return whether the library contains the name as a zero-terminated string, as its table of flags does.

    Names of removed flags stay in XLA's protocol-buffer descriptions, but without a zero byte at the end.
    """
    spec = importlib.util.find_spec(library)
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [path for folder in folders for path in Path(folder).glob(_LIBRARY_FILES[library]) if path.is_file()]
    return any(_contains(path, b"\0" + name.encode() + b"\0") for path in files)


def _contains(path: Path, text: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


PROGRAMS = "JAX_COMPILATION_CACHE_DIR"  # JAX's variable for the folder; a user's value stays, and "" means no cache.
_LEAST_COMPILE_TIME = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_MAX_PROGRAM_BYTES = 2**30  # The maximum bytes of compiled programs that are stored.

# XLA's YNN library computes matrix products and reductions, fused with neighboring operations, and elementwise
# programs. With jaxlib 0.10 it is not used for elementwise programs, since XLA's kernels are faster
# (docs/benchmarks.md).
_KERNELS = "DOT", "REDUCE", *(() if version("jaxlib").startswith("0.10.") else ("ELTWISE",))
_KERNELS_FLAG, _KIND = "xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_"
_CPU_FLAGS = {_KERNELS_FLAG: ",".join(f"{_KIND}{kind}" for kind in _KERNELS)}
# Matrix products are not fused with each other: a chain of products, such as a feed-forward layer's, is slower fused.
# Programs with gradients do not get this flag, since XLA would then fuse operations that take longer than the products.
_FORWARD_FLAGS = {_KERNELS_FLAG: f"{_KIND}INDIVIDUAL_DOT"}
# LLVM's later passes take three quarters of the compilation of a program that initializes weights, and change no bit of
# the weights.
_SINGLE_RUN_FLAGS = {"xla_backend_optimization_level": 1}
# When random weights are initialized, YNN would store each intermediate array for all weights at once. With jaxlib 0.11
# and 0.12 this takes five times as long and four times the memory.
_RANDOM_FLAGS = {_KERNELS_FLAG: f"{_KIND}DOT"}
# In a loop over layers, all-gathers of weights begin one iteration before the weights are used. Otherwise half of a
# layer's all-gathers did not overlap with computation. Gradients are reduce-scattered in the iteration that computes
# them. If the next iteration did this, XLA would store and copy the gradients in float32 (docs/accelerators-memory.md).
# XLA's latency-hiding scheduler and asynchronous collectives are on by default.
_GPU_FLAGS = {"xla_gpu_enable_pipelined_all_gather": True, "xla_gpu_enable_pipelined_reduce_scatter": False}
# Without this limit, XLA merges the linear maps that read the same input into one product, and concatenates their
# weights in each step. With few tokens, the concatenation is most of the memory traffic of large maps: a Mamba-2 mixer
# read its weights twice and wrote them once (docs/accelerators-decoding.md).
_GPU_FORWARD_FLAGS = {"xla_gpu_dot_merger_threshold_mb": 1}
# The share of a GPU's memory that JAX allocates at its start; programs cannot use more. JAX's default is three
# quarters, and NVIDIA's runs take 0.8 to 0.9. The remaining memory is for CUDA, NCCL and the workspaces of their
# libraries.
GPU_SHARE = 0.9
_MEMORY_VARIABLES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
# With these flags, an all-gather of weights runs during the matrix product before the product that needs the weights.
# libtpu does so by default for v5e, and for tpu7x with its SparseCores, where these flags change nothing. For v5p and
# v6e libtpu by default did so for none of the all-gathers (docs/accelerators-memory.md).
_TPU_FLAGS = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
}
_TPU_VARIABLE = "LIBTPU_INIT_ARGS"
_SIMULATED = "--xla_force_host_platform_device_count"

# Compilers for accelerators of other machines must not look for accelerators here, and must not warn that there are
# none. They open no chip, so several processes may compile at once.
_COMPILER_VARIABLES = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_COMPILER_VARIABLES |= {"TF_CPP_MIN_LOG_LEVEL": "3"}

# Numbers of mallopt's parameters in glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8

# Libraries that hold tables of flags: their names in messages, and the patterns of their files.
_LIBRARY_NAMES = {"jaxlib": "XLA", "libtpu": "libtpu"}
_LIBRARY_FILES = {"jaxlib": "*jax_common*", "libtpu": "libtpu.so"}
