"""What must be set before JAX is imported: import this module first."""

import ctypes
import io
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version

from _xla import as_flags, known


def prepare(arguments: Sequence[str] = ()) -> None:
    """Choose how XLA and the C library run on a CPU, leaving what the user has set; docs/benchmarks.md has figures.

    `--simulate N` among the arguments has the CPU act as N devices, for which JAX must be told before it starts.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a letter is shown its number
            stream.reconfigure(errors="backslashreplace")
    flags = os.environ.get("XLA_FLAGS", "").split()
    given = {flag.partition("=")[0].lstrip("-") for flag in flags}
    flags += as_flags(known({name: value for name, value in _CPU_FLAGS.items() if name not in given}))
    number = simulated(arguments)
    if number is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = [flag for flag in flags if flag.partition("=")[0] != _DEVICES] + [f"{_DEVICES}={number}"]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    if platform.libc_ver()[0] == "glibc" and os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
        keep_pages(ctypes.CDLL(None))


def simulated(arguments: Sequence[str]) -> int | None:
    """The N of `--simulate N` or `--simulate=N`; None where it is not there or no count, which is told later."""
    number = None
    for flag, value in zip(arguments, [*arguments[1:], ""]):
        name, _, own = flag.partition("=")
        if name == "--simulate":
            text = own or value
            number = int(text) if text.isdecimal() and int(text) > 0 else None
    return number


def keep_pages(libc: ctypes.CDLL) -> None:
    """Let malloc keep the memory of one step for the next, instead of asking the system for fresh pages each time."""
    for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20)):
        libc.mallopt(parameter, value)


# Products and reductions by XLA's own library of kernels, fused with what surrounds them; element-wise programs too,
# but for XLA of jaxlib 0.10, whose own are faster (docs/benchmarks.md).
_KERNELS = "DOT", "REDUCE", *(() if version("jaxlib").startswith("0.10.") else ("ELTWISE",))
_CPU_FLAGS = {"xla_cpu_experimental_ynn_fusion_type": ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in _KERNELS)}
_DEVICES = "--xla_force_host_platform_device_count"

# Numbers of mallopt's parameters in glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
