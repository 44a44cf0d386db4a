"""What several modules do to files: write them whole, wait for the disk, know them by their bytes, say why it failed.

Owns: those four, and where the cache folder is. Does not know: what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from pathlib import Path

from minirllm.errors import UserError

ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "let this user write there, or choose another folder",
    errno.EPERM: "let this user write there, or choose another folder",
    errno.EROFS: "choose another folder",
}


def cache_root() -> Path:
    """MINIRLLM_CACHE, else XDG_CACHE_HOME/minirllm, else ~/.cache/minirllm."""
    if chosen := os.environ.get("MINIRLLM_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minirllm"


def write_whole(path: Path, text: str) -> None:
    """The file, in a folder made if need be, has its old content or all of `text`, whenever the machine stops.

    A link stays one; a device or a pipe is written to. Raises UserError when it cannot be written.
    """
    target = path.resolve()
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not (target.is_file() or target.is_dir()):
            target.write_text(text, encoding="utf-8")
            return
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UserError(f"Cannot write {path}: {why(error)}.") from None


def why(error: Exception) -> str:
    """What the system said, and what would help: ``No space left on device; free some space``."""
    inside = re.search(r"\(os error (\d+)\)", str(error))  # how safetensors reports the system's errors
    number = error.errno if isinstance(error, OSError) else int(inside[1]) if inside else None
    said = os.strerror(number) if number is not None else str(error)
    return f"{said}; {ADVICE[number]}" if number in ADVICE else said


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
