"""Errors of the operating system and of other libraries: their cause in a line, and what to do about them."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


_LONGEST = 300  # characters of a foreign message

# Numbers of the system's errors, the words that libraries without such numbers use, and what to do.
_PEER = "another process of the run has ended or cannot be reached; its own message says why. Start all of them again"
# Of a device's memory XLA has other words than of a disk, for which the same code stands.
_OF_MEMORY = r"\bout of memory\b|failed to allocate request|attempting to allocate .* not possible"
_SMALLER = (
    "have a device hold less: more devices or pieces of the batch, fewer rows or tokens, 16 bits, more recomputation; "
    "scripts/plan.py says what fits"
)
_KINDS = (
    ((), _OF_MEMORY, _SMALLER),
    ((), r"\bgloo\b|\bNCCL\b|\bbarrier\b|\bheartbeat|coordination (service|agent)", _PEER),
    ((errno.ENOSPC, errno.EDQUOT), "no space left|quota exceeded", "free some space"),
    ((errno.EFBIG,), "file too large", "raise the largest size that a file may have (ulimit -f)"),
    ((errno.EACCES, errno.EPERM, errno.EROFS), r"permission|read-only|\bPERMISSION_DENIED\b", "make it writable"),
    ((errno.EMFILE, errno.ENFILE), "too many open files", "raise the number of files that may be open (ulimit -n)"),
    ((errno.ETIMEDOUT,), r"timed? ?out|\bDEADLINE_EXCEEDED\b", "see why the storage takes so long"),
    ((errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO), "input/output error|stale file", "see to the disk"),
)
_MOST_BYTES = {"name": 255, "path": 4096}  # of Linux and its common file systems
_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # where the free bytes of a disk say something
# A lost connection may be one to a hub or one to another process of the run: for these, the message says more.
_CONNECTION = {errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EPIPE}
_NUMBER = re.compile(r"(?:os_error_code='|errno |OS error )(\d+)", re.IGNORECASE)


def reason_and_fix(error: BaseException) -> tuple[str, str]:
    """The error in one line, and what to do about it as a clause; "" for the latter if it is not known.

    The system's error numbers decide, of the error itself or of those that caused it; then the words of its message,
    for libraries that pass on no numbers.
    """
    family = list(_family(error))
    reason = next(filter(None, map(_line, family)), type(error).__name__)
    numbers = {number for one in family for number in _numbers(one)} - _CONNECTION
    for known, _, fix in _KINDS:
        if numbers & set(known):
            return reason, fix
    for one in family:
        if isinstance(one, OSError) and isinstance(one.filename, str | os.PathLike) and (fix := _path_fix(one)):
            return reason, fix
    words = " ".join(f"{type(one).__name__} {one}" for one in family)
    fixes = (fix for _, pattern, fix in _KINDS if not numbers and re.search(pattern, words, re.IGNORECASE))
    return reason, next(fixes, "")


@contextmanager
def foreign_call(describe: Callable[[str], str]) -> Iterator[None]:
    """Turn every failure of another library into a `ValueError`, whose message `describe` makes of its first line.

    Libraries in Rust end a call on bad input by a panic, which Python sees as a `BaseException` and few handlers catch.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ValueError(describe(reason_and_fix(error)[0])) from error


def write_failure(path: str | Path, error: BaseException) -> tuple[str, str]:
    """Return why `path` could not be written, and what to do about it, as `reason_and_fix` does.

    The reason names the bytes that are free on the disk only where the disk's space is the cause.
    """
    reason, fix = reason_and_fix(error)
    if not _SPACE & {number for one in _family(error) for number in _numbers(one)}:
        return reason, fix
    return f"{reason}; {shutil.disk_usage(_nearest_folder(Path(path))).free:,} bytes are free there", fix


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust has panicked: its exception derives from `BaseException`."""
    return type(error).__name__ == "PanicException"  # each such library has a class of its own by this name


@contextmanager
def quiet_panics() -> Iterator[None]:
    """Drop what a library in Rust writes to standard error when it panics; all else is written when the block ends.

    The whole process's standard error is kept back, so this is for short calls.
    """
    try:
        kept = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = any(map(is_panic, _family(error)))
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            if not panicked:
                written.seek(0)
                os.write(2, written.read())


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error says that another process of the run has ended or cannot be reached."""
    return reason_and_fix(error)[1] == _PEER


def bytes_asked(error: BaseException) -> int | None:
    """The bytes that were asked for where a device's memory was full, 0 if it does not say; None of other errors."""
    words = " ".join(str(one) for one in _family(error))
    if not re.search(_OF_MEMORY, words, re.IGNORECASE | re.DOTALL):
        return None
    found = re.search(r"(?:allocate|request for|\bUsed) ([\d.]+) ?([KMGT]?)(?:i?B|bytes)?\b", words)
    return 0 if found is None else int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))


def _family(error: BaseException) -> Iterator[BaseException]:
    """An error, the members of its group, its causes and contexts, each once."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += getattr(one, "exceptions", ())
        waiting += [from_ for from_ in (one.__cause__, None if one.__suppress_context__ else one.__context__) if from_]


def _numbers(error: BaseException) -> list[int]:
    if isinstance(error, OSError) and error.errno is not None:
        return [error.errno]
    if isinstance(error, TimeoutError):
        return [errno.ETIMEDOUT]
    return [int(number) for number in _NUMBER.findall(str(error))]


def _path_fix(error: OSError) -> str:
    """Return what to do about the path of a system error; "" where the path is not at fault."""
    path = Path(os.fsdecode(error.filename))
    nearest = _nearest_folder(path)
    missing = path.absolute().relative_to(nearest).parts
    match error.errno:
        case errno.ENOENT if missing:
            return f"{nearest} has no {_short(missing[0])}, and may not let one be made; check the path"
        case errno.ENOTDIR | errno.EEXIST if missing:
            return f"{nearest / missing[0]} is not a folder; remove it, or check the path"
        case errno.EISDIR:
            return f"{path} is a folder and not a file; check the path"
        case errno.ENAMETOOLONG:
            name, longest = max(path.parts, key=lambda part: len(os.fsencode(part))), _MOST_BYTES["name"]
            if (size := len(os.fsencode(name))) > longest:
                return f"the name {_short(name)} has {size} bytes, and file systems allow {longest}; shorten it"
            return f"the path has {len(os.fsencode(path))} bytes, and systems allow {_MOST_BYTES['path']}; shorten it"
        case errno.ELOOP:
            return f"a symbolic link of {path} leads back to itself; mend the link"
        case errno.ENOTEMPTY:
            return f"{path} holds other files; empty it, or give another path"
    return ""


def _short(name: str) -> str:
    return repr(name if len(name) <= 40 else f"{name[:40]}...")


def _nearest_folder(path: Path) -> Path:
    """The folder that exists and is nearest to a path, which may not exist itself."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.isdir(place))


def _line(error: BaseException) -> str:
    """The first line of a message; of a long line both ends, since the cause is often at the end."""
    line = str(error).strip().partition("\n")[0]
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} ... {line[-half:]}"
