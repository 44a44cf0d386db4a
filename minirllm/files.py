"""What several modules do to files: write them whole, wait for the disk, know them by their bytes.

Owns: those three. Does not know: what is in the files.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from minirllm.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """The file, in a folder made if need be, has its old content or all of `text`, whenever the machine stops.

    Raises UserError when it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from None


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
