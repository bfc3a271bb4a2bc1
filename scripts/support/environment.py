"""What must be set before JAX is imported: import this module first."""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from support.flags import given
from support.stopping import end_at_interrupt
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
    end_at_interrupt()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal cannot show are escaped
            stream.reconfigure(errors="backslashreplace")
    flags = given(arguments)
    number = simulated(flags)
    several = number is not None or _SIMULATED in os.environ.get("XLA_FLAGS", "")
    if not shared or several or "--coordinator" in flags:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    else:
        share_programs()
    if "--check-shapes" in flags:
        from jaxtyping import install_import_hook

        install_import_hook("eqformer", "beartype.beartype")
    import eqformer

    eqformer.prepare(devices=number, compilers=compilers, gradients=gradients)


def simulated(flags: Mapping[str, Sequence[str]]) -> int | None:
    """The N of `--simulate N`; None if it is absent or not a count, which is an error later."""
    words = flags.get("--simulate", [])
    return int(words[0]) if words and words[0].isdecimal() and int(words[0]) > 0 else None


@contextlib.contextmanager
def kernels_kept() -> Iterator[None]:
    """Processes that start meanwhile take GPUs' kernels as others chose them, for the same products."""
    before = os.environ.get("XLA_FLAGS")
    with tempfile.TemporaryDirectory() as folder:
        _add_flags({"xla_gpu_per_fusion_autotune_cache_dir": folder})
        try:
            yield
        finally:
            del os.environ["XLA_FLAGS"]
            os.environ.update({} if before is None else {"XLA_FLAGS": before})


def take_kernels_unmeasured() -> None:
    """Let XLA choose GPUs' kernels without measuring them, in a process where JAX has not started."""
    _add_flags({"xla_gpu_autotune_level": 0})


def _add_flags(options: Mapping[str, object]) -> None:
    from eqformer._prepare import drop_user_options
    from eqformer._xla_flags import format_flags, keep_known

    more = format_flags(keep_known(drop_user_options(options)))
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *more])


_SIMULATED = "--xla_force_host_platform_device_count"
