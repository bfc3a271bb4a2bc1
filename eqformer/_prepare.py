"""What JAX and XLA take from the process before they start, so that programs are as fast as those of the commands."""

import ctypes
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from ._xla_flags import as_flags, known


def prepare(*, devices: int | None = None, compilers: bool = False, gradients: bool = True) -> None:
    """Set flags of XLA and libtpu, the share of a GPU's memory that JAX takes and malloc's parameters for CPUs.

    What the user has set stays. Nothing else in eqformer sets them, and XLA reads them once: call it before JAX makes
    its first array or looks for devices. On CPUs training is about twice as fast with them, and texts and forward
    passes are up to a fifth faster with those of `gradients=False`; docs/benchmarks.md and docs/accelerators-memory.md
    tell what each brings. Flags that those installed do not know are left out, with a line in the log.

    With `devices` JAX takes the CPU for so many devices, whatever else is there. With `compilers` libtpu and CUDA
    compile for accelerators that are not here, as `planning.compilation_of` has them do. Raises a `ValueError` where
    JAX has started without these flags.
    """
    if devices is not None and devices < 1:
        raise ValueError(
            f"prepare(devices={devices}): it counts devices, so pass at least 1, or None for those there are."
        )
    flags = _flags(devices, compilers, gradients)
    more = _share_of_memory() | _tpu_flags()
    if more or flags != os.environ.get("XLA_FLAGS", "").split():
        if _has_started():
            raise ValueError(
                "prepare(): JAX has started already, and XLA reads its flags only then; call it before the first array "
                "is made and before jax.devices()."
            )
        os.environ.update({"XLA_FLAGS": " ".join(flags)} | more)
    if devices is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        if (jax := sys.modules.get("jax")) is not None:  # which has read the variable
            jax.config.update("jax_platforms", "cpu")
    if compilers:
        for name, value in _OF_COMPILERS.items():
            os.environ.setdefault(name, value)
    if platform.libc_ver()[0] == "glibc" and os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        keep_pages(ctypes.CDLL(None))


def _flags(devices: int | None, compilers: bool, gradients: bool) -> list[str]:
    """The words of `XLA_FLAGS`: the user's, and those of the others that XLA knows."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    wanted = platform_flags() | ({"xla_gpu_autotune_level": 0} if compilers else {})
    wanted |= {} if gradients else _FORWARD_FLAGS | (_GPU_FORWARD_FLAGS if _has_gpus() else {})
    flags += as_flags(known(unset(wanted)))
    if devices is not None:
        flags = [flag for flag in flags if flag.partition("=")[0] != _SIMULATED] + [f"{_SIMULATED}={devices}"]
    return flags


def unset(options: Mapping[str, Any], variable: str = "XLA_FLAGS") -> dict[str, Any]:
    """The options that the user has not set in the environment's variable."""
    given = {flag.partition("=")[0].lstrip("-") for flag in os.environ.get(variable, "").split()}
    return {name: value for name, value in options.items() if name not in given}


def _tpu_flags() -> dict[str, str]:
    """libtpu's own variable, with those of our flags that it knows, where it is installed and more are to be set."""
    more = as_flags(known(unset(_TPU_FLAGS, _OF_TPUS), "libtpu")) if importlib.util.find_spec("libtpu") else []
    return {_OF_TPUS: " ".join([*os.environ.get(_OF_TPUS, "").split(), *more])} if more else {}


def compiler_flags() -> str:
    """All flags that this process' compilers take from its environment: other flags, other programs."""
    return " ".join(filter(None, (os.environ.get(name) for name in ("XLA_FLAGS", _OF_TPUS))))


def run_once(platform: str) -> dict[str, Any]:
    """XLA's options for a program of random weights, which runs once, but for those that the user has set."""
    if platform != "cpu":
        return {}
    is_ours = as_flags(_CPU_FLAGS)[0] in os.environ.get("XLA_FLAGS", "").split()
    return unset(_ONCE) | (_DRAWN if is_ours else {})


def _has_started() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(getattr(bridge, "_backends", None))


def platform_flags() -> dict[str, Any]:
    """XLA's flags for CPUs and, where JAX can compile for them, for GPUs: a planned program is compiled as a run's."""
    return _CPU_FLAGS | (_GPU_FLAGS if _has_gpus() else {})


def _share_of_memory() -> dict[str, str]:
    """The variable of JAX's share of a GPU's memory, where that is not set yet by the name it has or had."""
    is_set = any(os.environ.get(name) for name in _OF_MEMORY)
    return {_OF_MEMORY[0]: str(GPU_SHARE)} if _has_gpus() and not is_set else {}


def _has_gpus() -> bool:
    """Whether JAX can compile for GPUs."""
    return any(importlib.util.find_spec(f"jax_cuda{number}_plugin") for number in (12, 13))


def keep_pages(libc: ctypes.CDLL) -> None:
    """Make malloc keep a step's memory for the next step, instead of returning it to the system."""
    for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20)):
        libc.mallopt(parameter, value)


# XLA's YNN library computes products and reductions, fused with the operations around them, and element-wise programs
# too; not these with jaxlib 0.10, where XLA's own are faster (docs/benchmarks.md).
_KERNELS = "DOT", "REDUCE", *(() if version("jaxlib").startswith("0.10.") else ("ELTWISE",))
_KERNELS_FLAG, _KIND = "xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_"
_CPU_FLAGS = {_KERNELS_FLAG: ",".join(f"{_KIND}{kind}" for kind in _KERNELS)}
# Each product by itself: a chain of them, such as a feed-forward layer's, is slower fused. Of programs with gradients
# XLA would then fuse operations that take longer than the products.
_FORWARD_FLAGS = {_KERNELS_FLAG: f"{_KIND}INDIVIDUAL_DOT"}
# LLVM's later passes take three quarters of such a program's compilation, and change no bit of it.
_ONCE = {"xla_backend_optimization_level": 1}
# YNN would hold each step of drawing them in memory, beside those of all other weights: with jaxlib 0.11 and 0.12 five
# times as long, and four times the memory.
_DRAWN = {_KERNELS_FLAG: f"{_KIND}DOT"}
# In a loop over layers, gathers of weights begin in the turn before they are used: without it, half of those of a layer
# stood exposed. Gradients are scattered in their own turn: XLA would hold, and copy, them in float32 for the next one
# (docs/accelerators-memory.md). XLA's latency-hiding scheduler and asynchronous collectives are on by default.
_GPU_FLAGS = {"xla_gpu_enable_pipelined_all_gather": True, "xla_gpu_enable_pipelined_reduce_scatter": False}
# Maps of one input become one product, of weights that are copied one behind another in each step. With few tokens that
# is most of what large maps move: a mixer of Mamba-2 read its own twice and wrote them (docs/accelerators-decoding.md).
_GPU_FORWARD_FLAGS = {"xla_gpu_dot_merger_threshold_mb": 1}
# What of a GPU's memory JAX takes at its start for all its programs; by itself it takes three quarters, and a program
# has no more. The rest is for CUDA, NCCL and the workspaces of their libraries: NVIDIA's own runs take 0.8 to 0.9.
GPU_SHARE = 0.9
_OF_MEMORY = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
# A gather of weights begins before the product that stands before its own, and its parts arrive between that product's.
# libtpu does so by default for v5e, and by SparseCores for tpu7x, which these leave as they are; for v5p and v6e it did
# not for one gather (docs/accelerators-memory.md).
_TPU_FLAGS = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
}
_OF_TPUS = "LIBTPU_INIT_ARGS"
_SIMULATED = "--xla_force_host_platform_device_count"

# Compilers for accelerators that are not here must look for none, and say no word of it; no chip is opened, so that
# several may compile at once.
_OF_COMPILERS = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
_OF_COMPILERS |= {"TF_CPP_MIN_LOG_LEVEL": "3"}

# Numbers of mallopt's parameters in glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
