"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by a file that holds `content`. If the process ends before that, the old file stays."""
    # One writer at a time: a process of its own name for the temporary file, which the next write of it replaces.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file that holds `text`, in UTF-8."""
    write_bytes(path, text.encode())
