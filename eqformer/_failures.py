"""Errors of the operating system and of other packages: the cause in one line, and what to do about it."""

import errno
import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


_MAX_MESSAGE = 300  # characters of another library's message
_LOST_PEER = (
    "another process of the run has ended or cannot be reached; its own message says why. Start all processes again"
)
# XLA has one error code for full device memory and a full disk, but different words; these are the words for memory.
_OUT_OF_MEMORY = r"\bout of memory\b|failed to allocate request|attempting to allocate .* not possible"
_LESS_MEMORY = (
    "make each device hold less: use more devices or microbatches, fewer rows or tokens, 16-bit dtypes, or more "
    "recomputation; scripts/plan.py says what fits"
)
# For each kind of error: the system's error numbers, the words of libraries that give no number, and what to do.
_KINDS = (
    ((), _OUT_OF_MEMORY, _LESS_MEMORY),
    ((), r"\bgloo\b|\bNCCL\b|\bbarrier\b|\bheartbeat|coordination (service|agent)", _LOST_PEER),
    ((errno.ENOSPC, errno.EDQUOT), "no space left|quota exceeded", "free some space"),
    ((errno.EFBIG,), "file too large", "raise the largest size that a file may have (ulimit -f)"),
    ((errno.EACCES, errno.EPERM, errno.EROFS), r"permission|read-only|\bPERMISSION_DENIED\b", "make it writable"),
    ((errno.EMFILE, errno.ENFILE), "too many open files", "raise the number of files that may be open (ulimit -n)"),
    ((errno.ETIMEDOUT,), r"timed? ?out|\bDEADLINE_EXCEEDED\b", "see why the storage takes so long"),
    ((errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO), "input/output error|stale file", "check the disk"),
)
_MAX_BYTES = {"name": 255, "path": 4096}  # limits of Linux and its common file systems
# For these errors the number of free bytes of the disk is part of the reason.
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# A lost connection may be to a hub or to another process of the run; only the words of the message tell which.
_LOST_CONNECTION = {errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE}
_ERROR_NUMBER = re.compile(r"(?:os_error_code='|errno |OS error )(\d+)", re.IGNORECASE)


def explain_error(error: BaseException) -> tuple[str, str]:
    """Return the error in one line, and what to do about it as a clause ("" if unknown).

    The advice follows from the system's error number, in the error or in its causes. Some libraries pass on no number;
    then the advice follows from the words of the messages.
    """
    errors = list(_related_errors(error))
    reason = next(filter(None, map(_shorten_message, errors)), type(error).__name__)
    numbers = {number for related in errors for number in _error_numbers(related)} - _LOST_CONNECTION
    for kind_numbers, _, fix in _KINDS:
        if numbers & set(kind_numbers):
            return reason, fix
    for related in errors:
        match related:
            case OSError(errno=int(number), filename=str() | os.PathLike() as name) if fix := _explain_path(
                number, name
            ):
                return reason, fix
    words = " ".join(f"{type(related).__name__} {related}" for related in errors)
    fixes = (fix for _, pattern, fix in _KINDS if not numbers and re.search(pattern, words, re.IGNORECASE))
    return reason, next(fixes, "")


# Types of matplotlib, which annotations name although the package is optional.
Axes = Any
Figure = Any


def load_extra(module: str, *, extra: str, call: str) -> Any:
    """Import an optional module; raise an `ImportError` that names the extra of eqformer that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{call} needs the package {package}, which could not be imported ({error}); "
            f'install it with `pip install "eqformer[{extra}]"` or `pip install {package}`.'
        ) from error


@contextmanager
def foreign_call(describe: Callable[[str], str]) -> Iterator[None]:
    """Turn every failure of another library in the block into a `ValueError`.

    `describe` turns the failure's first line into the message. Libraries in Rust panic on bad input, which raises a
    `BaseException` that handlers of `Exception` do not catch.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ValueError(describe(explain_error(error)[0])) from error


def explain_write_error(path: str | Path, error: BaseException) -> tuple[str, str]:
    """Return why `path` could not be written, and what to do about it, as `explain_error` does.

    The reason names the free bytes of the disk only if a full disk is the cause.
    """
    reason, fix = explain_error(error)
    if not _DISK_FULL & {number for related in _related_errors(error) for number in _error_numbers(related)}:
        return reason, fix
    return f"{reason}; {shutil.disk_usage(_nearest_folder(Path(path))).free:,} bytes are free there", fix


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust has panicked: the exception derives from `BaseException`."""
    # Each library in Rust has its own class of this name.
    return type(error).__name__ == "PanicException"


@contextmanager
def quiet_panics() -> Iterator[None]:
    """Drop the text that a library in Rust writes to standard error when it panics.

    All standard error of the process waits until the block ends, so the block should be short.
    """
    try:
        standard_error = os.dup(2)
    except OSError:
        # Standard error is closed.
        yield
        return
    with tempfile.TemporaryFile() as buffer:
        os.dup2(buffer.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = any(map(is_panic, _related_errors(error)))
            raise
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
            if not panicked:
                buffer.seek(0)
                os.write(2, buffer.read())


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that another process of the run has ended or cannot be reached."""
    return explain_error(error)[1] == _LOST_PEER


def requested_bytes(error: BaseException) -> int | None:
    """Return the bytes of the failed allocation if a device's memory was full (0: unknown); None for other errors."""
    words = " ".join(str(related) for related in _related_errors(error))
    if not re.search(_OUT_OF_MEMORY, words, re.IGNORECASE | re.DOTALL):
        return None
    size = re.search(r"(?:allocate|request for|\bUsed) ([\d.]+) ?([KMGT]?)(?:i?B|bytes)?\b", words)
    return 0 if size is None else int(float(size[1]) * 1024 ** " KMGT".index(size[2] or " "))


def _related_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the members of its group, its causes and contexts, each once."""
    pending, visited = [error], set()
    while pending:
        related = pending.pop(0)
        if id(related) in visited:
            continue
        visited.add(id(related))
        yield related
        pending += getattr(related, "exceptions", ())
        context = None if related.__suppress_context__ else related.__context__
        pending += [origin for origin in (related.__cause__, context) if origin]


def _error_numbers(error: BaseException) -> list[int]:
    match error:
        case OSError(errno=int(number)):
            return [number]
        case TimeoutError():
            return [errno.ETIMEDOUT]
        case _:
            return [int(number) for number in _ERROR_NUMBER.findall(str(error))]


def _explain_path(number: int, name: str | os.PathLike[str]) -> str:
    """Return what is wrong with the path of a system error, and what to do; "" if the path is not the cause."""
    path = Path(os.fsdecode(name))
    nearest = _nearest_folder(path)
    missing = path.absolute().relative_to(nearest).parts
    match number:
        case errno.ENOENT if missing:
            return f"{nearest} has no {_shorten_name(missing[0])}, and perhaps it cannot be made there; check the path"
        case errno.ENOTDIR | errno.EEXIST if missing:
            return f"{nearest / missing[0]} is not a folder; remove it, or check the path"
        case errno.EISDIR:
            return f"{path} is a folder and not a file; check the path"
        case errno.ENAMETOOLONG:
            name, longest = max(path.parts, key=lambda part: len(os.fsencode(part))), _MAX_BYTES["name"]
            if (size := len(os.fsencode(name))) > longest:
                return f"the name {_shorten_name(name)} has {size} bytes, and file systems allow {longest}; shorten it"
            return f"the path has {len(os.fsencode(path))} bytes, and systems allow {_MAX_BYTES['path']}; shorten it"
        case errno.ELOOP:
            return f"a symbolic link of {path} leads back to itself; mend the link"
        case errno.ENOTEMPTY:
            return f"{path} holds other files; empty it, or give another path"
    return ""


def _shorten_name(name: str) -> str:
    return repr(name if len(name) <= 40 else f"{name[:40]}...")


def _nearest_folder(path: Path) -> Path:
    """Return the nearest existing folder of a path, which may not exist."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.isdir(folder))


def _shorten_message(error: BaseException) -> str:
    """Return the first line of a message, or both ends of a long line, since the cause is often at the end."""
    line = str(error).strip().partition("\n")[0]
    half = _MAX_MESSAGE // 2
    return line if len(line) <= _MAX_MESSAGE else f"{line[:half]} ... {line[-half:]}"
