"""Settings that must be made before JAX is imported; a script imports this module first."""

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

    Compiled programs are cached for the user's next runs. They are not cached if `shared` is False (for example to time
    compilation), or if several CPU devices are simulated, because a program for several CPU devices may deadlock after
    XLA loads it from the cache. `--simulate N` among the arguments simulates N devices on the CPU. `--check-shapes`
    checks shapes and types in all calls of eqformer; the check is installed here, before eqformer is imported.
    """
    end_at_interrupt()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # Escape characters that the terminal cannot show.
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
    """Return the N of `--simulate N`; None if the flag is absent, or if N is no count (refused later)."""
    words = flags.get("--simulate", [])
    return int(words[0]) if words and words[0].isdecimal() and int(words[0]) > 0 else None
