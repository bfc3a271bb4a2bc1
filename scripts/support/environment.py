"""Settings before JAX is imported: import this module first."""

import io
import os
import sys
from collections.abc import Mapping, Sequence

from support.flags import parse_words
from support.stopping import end_at_interrupt


_SIMULATED = "--xla_force_host_platform_device_count"


def prepare(
    arguments: Sequence[str] = (), *, shared: bool = True, compilers: bool = False, gradients: bool = True
) -> None:
    """Call `eqformer.prepare`, and set how JAX starts for a command with these arguments.

    Compiled programs are cached for the user's next runs, unless `shared` is False (for example to time compilation) or
    the CPU acts as several devices: a program for several CPU devices may deadlock after XLA loads it from the cache.
    `--simulate N` among the arguments makes the CPU act as N devices. `--check-shapes` checks shapes and types in all
    calls of eqformer; the check must be installed before eqformer is imported.
    """
    end_at_interrupt()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal cannot show are escaped
            stream.reconfigure(errors="backslashreplace")
    flags = parse_words(arguments)
    devices = simulated_devices(flags)
    has_several = devices is not None or _SIMULATED in os.environ.get("XLA_FLAGS", "")
    caches = shared and not has_several and "--coordinator" not in flags
    if not caches:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    if "--check-shapes" in flags:
        from jaxtyping import install_import_hook

        install_import_hook("eqformer", "beartype.beartype")
    import eqformer

    if caches:
        eqformer.cache_programs()
    eqformer.prepare(devices=devices, compilers=compilers, gradients=gradients)


def simulated_devices(flags: Mapping[str, Sequence[str]]) -> int | None:
    """Return the N of `--simulate N`; None if it is absent or not a count, which is an error later."""
    words = flags.get("--simulate", [])
    return int(words[0]) if words and words[0].isdecimal() and int(words[0]) > 0 else None
