"""What must be set before JAX is imported: import this module first."""

import ctypes
import importlib.util
import io
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from support.user_folder import share_programs
from support.xla import as_flags, known


def prepare(arguments: Sequence[str] = (), *, shared: bool = True) -> None:
    """Set XLA's flags for CPUs and GPUs and malloc's parameters for CPUs, except those that the user has set.

    What the flags do is told in docs/benchmarks.md and docs/accelerators.md.

    What is compiled is kept for the user's next runs, unless `shared` is False, as where compilation is timed, or the
    CPU acts as several devices: a program of theirs that XLA has loaded again may wait for itself forever.
    `--simulate N` among the arguments makes the CPU act as N devices, which must be set before JAX starts, and
    `--check-shapes` has shapes and types of all calls of eqformer checked, which is decided when it is imported.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal cannot show are escaped
            stream.reconfigure(errors="backslashreplace")
    flags = os.environ.get("XLA_FLAGS", "").split()
    given = {flag.partition("=")[0].lstrip("-") for flag in flags}
    flags += as_flags(known({name: value for name, value in platform_flags().items() if name not in given}))
    number = simulated(arguments)
    if number is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = [flag for flag in flags if flag.partition("=")[0] != _DEVICES] + [f"{_DEVICES}={number}"]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    if not shared or any(flag.startswith(_DEVICES) for flag in flags) or "--coordinator" in " ".join(arguments):
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    else:
        share_programs()
    if {"--check-shapes", "--check_shapes"} & {*arguments}:
        from jaxtyping import install_import_hook

        install_import_hook("eqformer", "beartype.beartype")
    if platform.libc_ver()[0] == "glibc" and os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        keep_pages(ctypes.CDLL(None))


def platform_flags() -> dict[str, Any]:
    """XLA's flags for CPUs and, where JAX can compile for them, for GPUs: a planned program is compiled as a run's."""
    has_gpus = any(importlib.util.find_spec(f"jax_cuda{number}_plugin") for number in (12, 13))
    return _CPU_FLAGS | (_GPU_FLAGS if has_gpus else {})


def simulated(arguments: Sequence[str]) -> int | None:
    """The N of `--simulate N` or `--simulate=N`; None if it is absent or not a count, which is an error later."""
    number = None
    for flag, value in zip(arguments, [*arguments[1:], ""]):
        name, _, own = flag.partition("=")
        if name == "--simulate":
            text = own or value
            number = int(text) if text.isdecimal() and int(text) > 0 else None
    return number


def prepare_compilers() -> None:
    """Set what compilers for accelerators that are not here need: they must look for none, and try no kernel on one."""
    for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("TPU_WORKER_HOSTNAMES", "localhost")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is opened, so several may compile at once
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # without their warnings that no accelerator is here
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_autotune_level" not in flags:
        os.environ["XLA_FLAGS"] = " ".join([flags, *as_flags(known({"xla_gpu_autotune_level": 0}))]).strip()


def keep_pages(libc: ctypes.CDLL) -> None:
    """Make malloc keep a step's memory for the next step, instead of returning it to the system."""
    for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20)):
        libc.mallopt(parameter, value)


# XLA's YNN library computes products and reductions, fused with the operations around them, and element-wise programs
# too; not these with jaxlib 0.10, where XLA's own are faster (docs/benchmarks.md).
_KERNELS = "DOT", "REDUCE", *(() if version("jaxlib").startswith("0.10.") else ("ELTWISE",))
_CPU_FLAGS = {"xla_cpu_experimental_ynn_fusion_type": ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in _KERNELS)}
# In a loop over layers, gathers of weights begin in the turn before they are used: without it, half of those of a layer
# stood exposed (docs/accelerators.md). XLA's latency-hiding scheduler and asynchronous collectives are on by default.
_GPU_FLAGS = {"xla_gpu_enable_pipelined_all_gather": True}
_DEVICES = "--xla_force_host_platform_device_count"

# Numbers of mallopt's parameters in glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
