"""A lock on a folder that one process at a time may write to.

The lock is an advisory lock of the operating system on the file `.lock` in the folder. The system releases it when its
holder ends, however it ends, so that a killed process blocks nobody. The file says who holds the lock. Where the
platform or the file system has no such locks, there is no protection.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NAME = ".lock"


@contextlib.contextmanager
def lock_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of `folder`, which is made if it does not exist.

    Raises:
        BlockingIOError: if another process, or another part of this one, holds it; the message says who.
    """
    path = Path(folder) / NAME
    handle = _acquire(path)
    try:
        yield
    finally:
        if handle is not None:
            path.unlink(missing_ok=True)  # before the lock is released: afterwards it may be somebody else's
            os.close(handle)


def _acquire(path: Path) -> int | None:
    """A handle of the locked file; None where there are no locks, or the folder cannot be written to."""
    try:
        import fcntl
    except ImportError:  # not on this platform
        return None
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None  # what is written to the folder next fails as well, and says why
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, handle):
                with contextlib.suppress(OSError):  # a full disk; the lock holds all the same
                    os.ftruncate(handle, 0)
                    os.write(handle, _description().encode())
                return handle
            os.close(handle)
        except OSError as error:
            holder = os.pread(handle, 1000, 0).decode(errors="replace")
            os.close(handle)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            what = f"is in use by {holder or 'another process'}. Wait for it, end it, or name another folder"
            raise BlockingIOError(errno.EWOULDBLOCK, what, str(path.parent)) from None


def _is_still(path: Path, handle: int) -> bool:
    """Whether `path` is the open file: the last holder of the lock may have removed it since it was opened."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _description() -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {since} ({shlex.join(sys.argv)[:200]})"
