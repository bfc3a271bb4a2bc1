"""Errors of the system are named by what they are."""

import errno
import os

import jax
import pytest

from eqformer import reason_and_fix


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
        (system(errno.EIO), "Input/output error", "see to the disk"),
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
        (OSError("hub.example: Connection reset by peer [Errno 104]"), "hub.example", ""),
        (OSError("503 Server Error: Service Unavailable for url: https://hub.example"), "503", ""),
        (FileNotFoundError(2, "No such file or directory", "/peer/quota exceeded/timed out"), "No such file", ""),
        (ValueError("heads=3 must divide embed=8"), "heads=3", ""),
        (RuntimeError(), "RuntimeError", ""),
    ],
)
def test_an_error_is_named_by_what_it_is(error, reason, fix):
    line, done = reason_and_fix(error)
    assert reason in line and len(line) < 320 and "\n" not in line
    assert (fix in done) if fix else done == ""
