"""Trees as tar, piece by piece, in and out: however large they are, memory holds a piece.

Owns: `Packed`, `unpacking`, `digest`, what of a hostile archive is written. Does not know: sandboxes.

What comes out of a sandbox may be anything. Files and folders are made below a folder of ours by names relative to open
folders, and no name on the way may be a link; of links only those are made that stay inside: up at most to the top,
then down, where each further link keeps to the same. So no later member, and nobody who reads the tree, is led out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import socket
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from minirllm.errors import SandboxError
from minirllm.sandboxes.pipes import Sink

PIECE = 2**18
MAX_HEADER = 2**20  # bytes of all that says what one member is
DEPTH = 100  # folders in each other: those who read or remove a tree go into each
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
INTO = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Packed:
    """The tree under a folder as the input of a command; links are links, sockets are left out. What went wrong while
    it was read, is in `problem`: the archive then ends early."""

    def __init__(self, local: Path):
        self.local, self.problem = local, ""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = _joined(_packed(self.local))
        try:
            while piece := await asyncio.to_thread(next, pieces, b""):
                yield piece
        except OSError as error:
            self.problem = str(error)


def _packed(local: Path) -> Iterator[bytes]:
    with tarfile.TarFile(fileobj=io.BytesIO(), mode="w") as archive:  # it knows what it has seen under another name
        for path in sorted(local.rglob("*")):
            info = archive.gettarinfo(path, path.relative_to(local).as_posix())
            if info is None:
                continue
            yield info.tobuf(archive.format, "utf-8", "surrogateescape")
            if not info.isreg():
                continue
            with path.open("rb") as file:
                left = info.size
                while left:
                    piece = file.read(min(PIECE, left))
                    if not piece:
                        raise OSError(f"{path} became shorter while it was read")
                    left -= len(piece)
                    yield piece
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def digest(folder: Path) -> str:
    """A hash of a tree: names, modes, bytes, where links lead."""
    state = sha256()
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        state.update(f"{path.relative_to(folder).as_posix()}\0{info.st_mode}\0".encode(errors="surrogateescape"))
        data = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        state.update(sha256(data).digest())
    return state.hexdigest()


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes, of small pieces many at once."""
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= PIECE:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


@contextlib.asynccontextmanager
async def unpacking(local: Path, files: int) -> AsyncIterator[Sink]:
    """Give it the pieces of an archive: the tree is made below `local`, `files` members of it at most. What no tree of
    ours may have is left out. Raises SandboxError when it is no archive, ends early, or cannot be written."""
    ours, theirs = socket.socketpair()
    thread = ThreadPoolExecutor(1, "unpack")  # its own: those of the loop may all be waiting for it
    working = asyncio.get_running_loop().run_in_executor(thread, _receive, theirs, local, files)
    _, writer = await asyncio.open_connection(sock=ours)

    async def sink(piece: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it has failed, which is said in the end
            writer.write(piece)
            await writer.drain()

    try:
        yield sink
        writer.close()
    except BaseException:
        writer.transport.abort()
        raise
    finally:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        thread.shutdown(wait=False)
        problem = working.exception()
    if problem is not None:
        raise problem


def _receive(theirs: socket.socket, local: Path, files: int) -> None:
    try:
        with theirs, theirs.makefile("rb") as file:
            unpack(file, local, files)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise SandboxError(f"A tree of the sandbox cannot be copied to {local}: {error}.") from None


def unpack(file: BinaryIO, local: Path, files: int) -> None:
    """See `unpacking`. Raises TarError or OSError."""
    local.mkdir(parents=True, exist_ok=True)
    source = _Onwards(file)
    tree = _Tree(local)
    try:
        with tarfile.TarFile(fileobj=source, mode="r") as archive:  # type: ignore[arg-type]
            for _ in range(files):
                source.room = MAX_HEADER
                member = archive.next()
                archive.members = []  # type: ignore[attr-defined]  # else all that have been are kept
                if member is None:
                    return
                source.room = None
                source.seek(member.offset_data)
                tree.add(member, source)
        raise tarfile.TarError(f"it has more than {files} files")
    finally:
        tree.close()


class _Onwards:
    """A file that is read once, from its beginning to its end. `room`: so much may be read in all; None: any."""

    def __init__(self, file: BinaryIO):
        self.file, self.at = file, 0
        self.room: int | None = MAX_HEADER

    def read(self, size: int) -> bytes:
        if self.room is not None:
            self.room -= size
            if size < 0 or self.room < 0:
                raise tarfile.TarError("what it says of a file is too long")
        data = self.file.read(size)
        self.at += len(data)
        return data

    def tell(self) -> int:
        return self.at

    def seek(self, place: int) -> None:
        if place < self.at:
            raise tarfile.TarError("it leads back to what was read before")
        while self.at < place and (piece := self.file.read(min(PIECE, place - self.at))):
            self.at += len(piece)


class _Tree:
    """What is made below a folder."""

    def __init__(self, local: Path):
        self.top = os.open(local, INTO & ~os.O_NOFOLLOW)

    def close(self) -> None:
        os.close(self.top)

    def add(self, member: tarfile.TarInfo, source: _Onwards) -> None:
        """A member, whose content comes next in `source`; nothing when it may not be, or its place is taken."""
        parts = _parts(member.name)
        if parts is None:
            return
        file = -1
        try:
            with self._folder(parts[:-1] if not member.isdir() else parts) as folder:
                if member.isdir() or not parts:
                    return
                file = self._make(member, parts, folder)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            return
        if file >= 0:
            with open(file, "wb") as out:
                _copy(source, out, member.size)
                with contextlib.suppress(OSError, OverflowError, ValueError):
                    os.utime(file, (member.mtime, member.mtime))

    def _make(self, member: tarfile.TarInfo, parts: list[str], folder: int) -> int:
        """The open file of a plain one, else -1."""
        plain = member.isreg() and not member.issparse()
        if not plain and not member.islnk() and not (member.issym() and _inside(member.linkname, len(parts) - 1)):
            return -1
        if member.islnk():
            self._link(member, parts[-1], folder)
            return -1
        with contextlib.suppress(FileNotFoundError):
            os.unlink(parts[-1], dir_fd=folder)
        if member.issym():
            os.symlink(member.linkname, parts[-1], dir_fd=folder)
            return -1
        return os.open(parts[-1], NEW, 0o755 if member.mode & 0o100 else 0o644, dir_fd=folder)

    def _link(self, member: tarfile.TarInfo, name: str, folder: int) -> None:
        """Another name of a plain file that is there: a link elsewhere could lead elsewhere."""
        target = _parts(member.linkname)
        if target:
            with self._folder(target[:-1], make=False) as other:
                if stat.S_ISREG(os.stat(target[-1], dir_fd=other, follow_symlinks=False).st_mode):
                    os.link(target[-1], name, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)

    @contextlib.contextmanager
    def _folder(self, parts: list[str], make: bool = True) -> Iterator[int]:
        """An open folder below the top, made if need be. Raises OSError where a link or a file is on the way."""
        here = os.dup(self.top)
        try:
            for part in parts:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=here)
                below = os.open(part, INTO, dir_fd=here)
                os.close(here)
                here = below
            yield here
        finally:
            os.close(here)


def _parts(name: str) -> list[str] | None:
    """The folders and the file that a member's name is made of; None when it leads up. Raises TarError when it leads
    too far down."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if len(parts) > DEPTH:
        raise tarfile.TarError(f"it has more than {DEPTH} folders in each other")
    return None if ".." in parts else parts


def _inside(target: str, depth: int) -> bool:
    """Does a link in a folder at this depth stay below the top?"""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return bool(target) and not target.startswith("/") and up <= depth and ".." not in parts[up:]


def _copy(source: _Onwards, out: Any, size: int) -> None:
    while size > 0:
        piece = source.read(min(PIECE, size))
        if not piece:
            raise tarfile.TarError("it ends early")
        out.write(piece)
        size -= len(piece)
