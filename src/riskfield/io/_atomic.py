"""Write a file whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` by a file that holds `text`, in UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace `path` by a file that holds `content`; if anything fails, the old file stays and nothing else is left.

    A target that is no regular file, such as a pipe or terminal, is written to directly.
    """
    target = Path(os.path.realpath(path))
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as stream:
            stream.write(content)
        return
    temporary = _beside(target)
    try:
        # Mode "x" rather than a temporary-file helper: the new file gets the permissions the user's umask grants.
        with open(temporary, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


def _beside(target: Path) -> Path:
    # Cut the name: with a long one the temporary name would pass the limit of the file system.
    return target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
