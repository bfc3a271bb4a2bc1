"""Errors of the operating system are explained by their causes."""

import errno
import os

import jax
import pytest

from eqformer import explain_error, explain_write_error, requested_bytes


TENSORSTORE = (
    'RESOURCE_EXHAUSTED: Error writing "x/0" in OCDBT database at local file "/disk/1.unfinished/": '
    + "Failed writing. " * 40
    + "Failed to write 785011 bytes to file 4: {} [os_error_code='{}' type_url='...']"
)
GLOO = "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]"


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def system(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/disk/file")


@pytest.mark.parametrize(
    "error,reason,fix",
    [
        (system(errno.ENOSPC), "No space left on device", "free some space"),
        (system(errno.EDQUOT), "quota", "free some space"),
        (system(errno.EFBIG), "File too large", "ulimit -f"),
        (system(errno.EACCES), "Permission denied", "make it writable"),
        (system(errno.EROFS), "Read-only file system", "make it writable"),
        (system(errno.ETIMEDOUT), "timed out", "storage takes so long"),
        (TimeoutError(), "TimeoutError", "storage takes so long"),
        (TimeoutError("Timed out while waiting for async_write_complete barrier."), "waiting", "storage takes so long"),
        (system(errno.EIO), "Input/output error", "check the disk"),
        (system(errno.EMFILE), "Too many open files", "ulimit -n"),
        (ValueError(TENSORSTORE.format("No space left on device", 28)), "No space left on device", "free some space"),
        (ValueError(TENSORSTORE.format("Permission denied", 13)), "Permission denied", "make it writable"),
        (ValueError(GLOO), "closed by peer", "another process"),
        (jax.errors.JaxRuntimeError(GLOO), "closed by peer", "another process"),
        (jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out. Id: a"), "Barrier", "another process"),
        (caused(ValueError("not saved"), system(errno.ENOSPC)), "not saved", "free some space"),
        (ExceptionGroup("of two", [ValueError(""), system(errno.EACCES)]), "of two", "make it writable"),
        (jax.errors.JaxRuntimeError("NCCL operation failed: errno 104"), "NCCL", "another process"),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: Failed to reach coordination service"), "reach", "another process"),
        *((system(number), os.strerror(number), "") for number in (errno.EPIPE, errno.ECONNREFUSED, errno.ECONNRESET)),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to"), "memory", "hold less"),
        (OSError("hub.example: Connection reset by peer [Errno 104]"), "hub.example", ""),
        (OSError("503 Server Error: Service Unavailable for url: https://hub.example"), "503", ""),
        (
            FileNotFoundError(2, "No such file or directory", "/peer/quota exceeded/timed out"),
            "No such file",
            "/ has no 'peer'",
        ),
        (ValueError("heads=3 must divide embed=8"), "heads=3", ""),
        (RuntimeError(), "RuntimeError", ""),
    ],
)
def test_an_error_is_named_by_what_it_is(error, reason, fix):
    line, done = explain_error(error)
    assert reason in line and len(line) < 320 and "\n" not in line
    assert (fix in done) if fix else done == ""


def failure_of(call) -> OSError:
    """The error that a call of the system raises."""
    with pytest.raises(OSError) as caught:
        call()
    return caught.value


def test_a_path_that_cannot_be_written_is_told_by_what_is_wrong_with_it(tmp_path):
    """Of a path that cannot exist it was said that 0 bytes are free; free bytes belong to a full disk alone."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    make = lambda *parts: failure_of(lambda: tmp_path.joinpath(*parts).mkdir(parents=True, exist_ok=True))
    table = {
        errno.ENOENT: (failure_of((tmp_path / "a" / "b").touch), f"{tmp_path} has no 'a'"),
        errno.ENOTDIR: (make("file", "run"), f"{tmp_path}/file is not a folder; remove it"),
        errno.EEXIST: (make("file"), f"{tmp_path}/file is not a folder; remove it"),
        errno.EISDIR: (failure_of((tmp_path).read_text), f"{tmp_path} is a folder and not a file"),
        errno.ENAMETOOLONG: (make("n" * 300), "has 300 bytes, and file systems allow 255; shorten it"),
        errno.ELOOP: (make("loop", "run"), "leads back to itself; mend the link"),
        errno.EACCES: (system(errno.EACCES), "make it writable"),
        errno.EROFS: (system(errno.EROFS), "make it writable"),
        errno.ENOSPC: (system(errno.ENOSPC), "free some space"),
        errno.EDQUOT: (system(errno.EDQUOT), "free some space"),
    }
    for number, (error, wanted) in table.items():
        reason, fix = explain_write_error(tmp_path / "run", error)
        assert error.errno == number and wanted in fix, (number, fix)
        assert ("bytes are free" in reason) == (number in (errno.ENOSPC, errno.EDQUOT)), reason
        assert os.strerror(number) in reason and len(f"{reason}; {fix}") < 600
    long = explain_write_error(tmp_path, failure_of(lambda: os.mkdir(f"{tmp_path}{'/abcdefg' * 600}")))[1]
    assert "bytes, and systems allow 4096" in long


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="/proc is Linux's")
def test_a_folder_of_the_kernel_lets_nothing_be_made():
    error = failure_of(lambda: os.makedirs("/proc/run/checkpoints"))
    reason, fix = explain_write_error("/proc/run/checkpoints", error)
    assert "free" not in reason and fix == "/proc has no 'run', and perhaps it cannot be made there; check the path"


MEMORY = {
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.": 4770354232,
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.\nBufferAssignment OOM": 3 * 2**29,
    "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device ordinal 0": 184549376,
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.50G of 15.75G "
    "hbm.": 41 * 2**29,
    "RESOURCE_EXHAUSTED: Attempting to allocate 2.00G. That was not possible. There are 1.50G free.": 2**31,
    "RESOURCE_EXHAUSTED: out of memory": 0,
}


@pytest.mark.parametrize("message", MEMORY)
def test_what_was_asked_for_of_a_full_memory(message):
    assert requested_bytes(jax.errors.JaxRuntimeError(message)) == MEMORY[message]
    assert requested_bytes(caused(ValueError("stopped"), RuntimeError(message))) == MEMORY[message]


@pytest.mark.parametrize("error", [ValueError(TENSORSTORE.format("No space left", 28)), ValueError(GLOO), OSError()])
def test_a_full_disk_is_no_full_memory(error):
    assert requested_bytes(error) is None
