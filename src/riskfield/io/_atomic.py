"""Write a file whole or not at all.

The content goes to a temporary file beside the target first, which is then moved into place. The name of a temporary
file says who writes it: `.model.json.HOST-PID-START-RANDOM.tmp`. A process that is killed leaves its temporary file
behind; the next process that writes to the folder removes it, once it has seen that its writer is dead.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
from functools import cache
from pathlib import Path

_TEMPORARY = re.compile(r"\..*\.([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{12}\.tmp")
_cleaned: set[tuple[int, Path]] = set()  # (process, folder): each process looks for files left behind once per folder


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` by a file that holds `text`, in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace `path` by a file that holds `content`; if anything fails, the old file stays and nothing else is left.

    A target that is not a regular file, such as a pipe or terminal, is written to directly.
    """
    target = Path(os.path.realpath(path))
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as stream:
            stream.write(content)
        return
    _clean(target.parent)
    temporary = _beside(target)
    try:
        # Mode "x" rather than a temporary-file helper: the new file gets the permissions the user's umask grants.
        with open(temporary, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):  # users know the target alone
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
        raise
    _sync_folder(target.parent)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError if `write_text(path, ...)` could not work, and leave no trace."""
    target = Path(os.path.realpath(path))
    if os.path.isdir(path):
        raise IsADirectoryError(21, "Is a directory", str(path))
    if os.path.exists(path) and not os.path.isfile(path):
        return
    temporary = _beside(target)
    try:
        with open(temporary, "x", encoding="utf-8"):
            pass
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None
    temporary.unlink()


def _sync_folder(path: Path) -> None:
    """Make the move itself survive a power cut, where folders can be opened."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):  # some network file systems refuse; the file is in place all the same
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _beside(target: Path) -> Path:
    # Cut the name: with a long one the temporary name would pass the limit of the file system.
    pid = os.getpid()
    owner = f"{_host()}-{pid}-{_start_time(pid) or 0}"
    return target.with_name(f".{target.name[:100]}.{owner}-{secrets.token_hex(6)}.tmp")


def _clean(folder: Path) -> None:
    """Remove temporary files in `folder` whose writers are dead."""
    if (os.getpid(), folder) in _cleaned or os.name != "posix":  # elsewhere a process cannot be looked up safely
        return
    _cleaned.add((os.getpid(), folder))
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name)
            if match and match[1] == _host() and not _alive(int(match[2]), int(match[3])):
                Path(entry.path).unlink(missing_ok=True)


@cache
def _host() -> str:
    """A token for where process numbers mean the same: this machine, and this namespace of processes."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def _alive(pid: int, start_time: int) -> bool:
    """Whether the process is there, and not another one that got its number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it belongs to somebody else, perhaps
        pass
    now = _start_time(pid)
    return now is None or start_time in (0, now)


def _start_time(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None where that is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
