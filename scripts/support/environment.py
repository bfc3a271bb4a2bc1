"""What must be set before JAX is imported: import this module first."""

import io
import os
import sys
from collections.abc import Sequence

from support.user_folder import share_programs


def prepare(
    arguments: Sequence[str] = (), *, shared: bool = True, compilers: bool = False, gradients: bool = True
) -> None:
    """Call `eqformer.prepare`, and set how JAX starts for a command with these arguments.

    What is compiled is kept for the user's next runs, unless `shared` is False, as where compilation is timed, or the
    CPU acts as several devices: a program of theirs that XLA has loaded again may wait for itself forever.
    `--simulate N` among the arguments makes the CPU act as N devices, and `--check-shapes` has shapes and types of all
    calls of eqformer checked, which is decided when it is imported.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal cannot show are escaped
            stream.reconfigure(errors="backslashreplace")
    number = simulated(arguments)
    several = number is not None or _SIMULATED in os.environ.get("XLA_FLAGS", "")
    if not shared or several or "--coordinator" in " ".join(arguments):
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    else:
        share_programs()
    if {"--check-shapes", "--check_shapes"} & {*arguments}:
        from jaxtyping import install_import_hook

        install_import_hook("eqformer", "beartype.beartype")
    import eqformer

    eqformer.prepare(devices=number, compilers=compilers, gradients=gradients)


def simulated(arguments: Sequence[str]) -> int | None:
    """The N of `--simulate N` or `--simulate=N`; None if it is absent or not a count, which is an error later."""
    number = None
    for flag, value in zip(arguments, [*arguments[1:], ""]):
        name, _, own = flag.partition("=")
        if name == "--simulate":
            text = own or value
            number = int(text) if text.isdecimal() and int(text) > 0 else None
    return number


_SIMULATED = "--xla_force_host_platform_device_count"
