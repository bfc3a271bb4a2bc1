"""Settings before JAX is imported, and the user's cache folders: import this module first."""

import contextlib
import hashlib
import io
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from support.flags import parse_words
from support.stopping import end_at_interrupt


PROGRAMS = "JAX_COMPILATION_CACHE_DIR"  # JAX's variable for the cache folder; a user's value wins, "" means no cache.
MAX_PROGRAM_BYTES = 2**30  # The most bytes of compiled programs that are kept.
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
    if not shared or has_several or "--coordinator" in flags:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
    else:
        share_programs()
    if "--check-shapes" in flags:
        from jaxtyping import install_import_hook

        install_import_hook("eqformer", "beartype.beartype")
    import eqformer

    eqformer.prepare(devices=devices, compilers=compilers, gradients=gradients)


def simulated_devices(flags: Mapping[str, Sequence[str]]) -> int | None:
    """Return the N of `--simulate N`; None if it is absent or not a count, which is an error later."""
    words = flags.get("--simulate", [])
    return int(words[0]) if words and words[0].isdecimal() and int(words[0]) > 0 else None


@contextlib.contextmanager
def share_kernel_choices() -> Iterator[None]:
    """Have processes that start inside run the same GPU kernels for the same products, as the first of them chose."""
    before = os.environ.get("XLA_FLAGS")
    with tempfile.TemporaryDirectory() as folder:
        _add_xla_flags({"xla_gpu_per_fusion_autotune_cache_dir": folder})
        try:
            yield
        finally:
            del os.environ["XLA_FLAGS"]
            os.environ.update({} if before is None else {"XLA_FLAGS": before})


def skip_autotuning() -> None:
    """Let XLA choose GPU kernels without measuring them, in a process where JAX has not started."""
    _add_xla_flags({"xla_gpu_autotune_level": 0})


def _add_xla_flags(options: Mapping[str, bool | int | str]) -> None:
    from eqformer._prepare import drop_user_options, format_flags, keep_known

    flags = format_flags(keep_known(drop_user_options(options)))
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])


def user_folder(name: str) -> Path | None:
    """Return a folder that the user's runs share, in `eqformer` in the user's cache; None without a home.

    The cache is found by the XDG base directory specification. The folder may be deleted at any time.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = cache if cache.is_absolute() else Path.home() / ".cache"  # the specification ignores relative ones
    except RuntimeError:
        return None
    return cache / "eqformer" / name


def share_programs() -> None:
    """Have JAX cache compiled programs for the user's next runs, unless the user chose a folder or space is short.

    Each kind of processor has a folder of its own, because compiled CPU programs use the processor's instructions.
    """
    if PROGRAMS in os.environ or (shared := user_folder("programs")) is None:
        return
    folder = shared / _processor_name()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > MAX_PROGRAM_BYTES:
            delete_oldest(folder, MAX_PROGRAM_BYTES)
            os.environ[PROGRAMS] = str(folder)
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def delete_oldest(folder: Path, max_bytes: int) -> None:
    """Delete the files that were written first, until the others have no more than `max_bytes`."""
    with suppress(OSError):  # another run's files may come and go
        for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True):
            max_bytes -= file.stat().st_size
            if max_bytes < 0:
                file.unlink(missing_ok=True)


def _processor_name() -> str:
    """Return a short name of the processor's instruction set, with its extensions."""
    features = platform.processor()
    with suppress(OSError):  # only Linux has the file
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
