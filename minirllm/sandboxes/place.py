"""Where an agent program works for one episode if no sandbox was chosen: ``work``, ``home`` and ``tmp`` in a folder of
their own, with the rights of this user.

Owns: that folder, from making it to deleting it, what is written into it before and read from it after; that nothing
the program started outlives it (reaper.py). Does not know: which program, tasks, what the files are for.

Its path is a function of task and rollout, not of the run: programs that tell the model where they are, tell it the
same in every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from minirllm.errors import TaskError, UserError
from minirllm.sandboxes import Result, reaper
from minirllm.watchdog import Deadline

logger = logging.getLogger(__name__)

MAX_FILE, MAX_FILES, MAX_BYTES = 2**16, 500, 2**20  # what of the work folder is kept: bytes of one, files, bytes of all
LAST = 1.0  # seconds that the outputs of an ended program may still take


class Place:
    """An episode's folder, held against other processes of this user; one more is made where another run holds it."""

    def __init__(self, split: str, task: str, rollout: int):
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", task)[:24]
        name = f"{split}-{slug}-{sha256(task.encode()).hexdigest()[:8]}-{rollout}"
        base = own_folder("minirllm")
        for number in range(1, 1000):
            self.root = base / (name if number == 1 else f"{name}-{number}")
            if self._lock():
                break
        else:
            raise UserError(f"{base} has no folder left for {name}: other runs hold a thousand.")
        if number > 1:
            logger.warning("another run works in %s, so paths that the agent sees differ: %s", base / name, self.root)
        self.work, self.home = self.root / "work", self.root / "home"
        remove_tree(self.root)
        for folder in (self.work, self.home, self.root / "tmp"):
            folder.mkdir(parents=True)

    def _lock(self) -> bool:
        path = f"{self.root}.lock"
        self.lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(self.lock), os.stat(path)):  # else: its owner has just deleted it
                return True
        os.close(self.lock)
        return False

    def fill(self, work: Mapping[str, str], home: Mapping[str, str]) -> None:
        """Write the task's files and the program's own. Raises TaskError for a path that leads out."""
        write_files(self.work, work)
        write_files(self.home, home)

    async def run(self, argv: Sequence[str], env: Mapping[str, str], deadline: Deadline, output: int) -> Result:
        """Run a program in `work` to its end, or to the deadline; the last `output` bytes of each output are kept.
        Cancelled, it ends the program, too."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", reaper.__file__, *argv, env=env, cwd=self.work, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None, "it was started with pipes"
        assert process.stdout is not None, "it was started with pipes"
        assert process.stderr is not None, "it was started with pipes"
        tails = [asyncio.ensure_future(_tail(stream, output)) for stream in (process.stdout, process.stderr)]
        timed_out = False
        try:
            await asyncio.wait_for(process.wait(), deadline.remaining())
        except TimeoutError:
            timed_out = True
        finally:
            process.stdin.close()  # ends what still runs
            await process.wait()
            await asyncio.wait(tails, timeout=LAST)
        stdout, stderr = (b"" if tail.cancel() else tail.result() for tail in tails)
        code = process.returncode or 0
        return Result(stdout, stderr, code if code >= 0 else 128 - code, timed_out)

    def close(self) -> None:
        """Delete it. The lock's file goes first: whoever opens it then makes a new one."""
        remove_tree(self.root)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.root}.lock")
        os.close(self.lock)


async def _tail(stream: asyncio.StreamReader, size: int) -> bytes:
    kept = b""
    while piece := await stream.read(size):
        kept = (kept + piece)[-size:]
    return kept


def own_folder(name: str) -> Path:
    """A folder for temporary ones, ``name-UID``, that only this user can enter. Raises UserError for one that another
    user has made."""
    folder = Path(tempfile.gettempdir()).resolve() / f"{name}-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise UserError(f"{folder} belongs to somebody else: remove it, or set TMPDIR to another folder.")
    return folder


def remove_tree(folder: Path) -> None:
    """Delete a tree, also one that an agent has locked up."""
    for path, folders, _ in os.walk(folder):
        for name in folders:
            with contextlib.suppress(OSError):
                if not os.path.islink(os.path.join(path, name)):
                    os.chmod(os.path.join(path, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts below `folder`, those with ``#!`` executable. Raises TaskError for a path that leads out."""
    for name, text in files.items():
        path = Path(os.path.normpath(folder / name))
        if folder not in path.parents or not isinstance(text, str):
            raise TaskError(f"files: {name!r} must be a path below the work folder, and have a text.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(0o755)


class Listed(NamedTuple):
    """A file that was found: its path below the folder, its bytes, whether it is a plain file."""

    name: str
    size: int
    plain: bool

    def order(self) -> list[tuple[bool, str]]:
        """By which files are sorted: those of a folder before those in its folders."""
        *folders, file = self.name.split("/")
        return [*((True, folder) for folder in folders), (False, file)]


def within_limits(listed: Iterable[Listed]) -> tuple[list[str], list[str]]:
    """(paths to be kept, paths left out): plain files, within limits."""
    chosen: list[str] = []
    left_out: list[str] = []
    room = MAX_BYTES
    for name, size, plain in listed:
        if plain and size <= min(MAX_FILE, room) and len(chosen) < MAX_FILES:
            chosen.append(name)
            room -= size
        else:
            left_out.append(name)
    return chosen, left_out[:MAX_FILES]


def read_files(folder: Path) -> tuple[dict[str, str], list[str]]:
    """(relative path -> text, paths left out): the text files in order, within limits. Links are not followed."""
    listed = []
    for place, _, files in os.walk(folder):
        for path in (Path(place) / file for file in files):
            info = path.lstat()
            listed.append(Listed(path.relative_to(folder).as_posix(), info.st_size, stat.S_ISREG(info.st_mode)))
    chosen, left_out = within_limits(sorted(listed, key=Listed.order))
    found: dict[str, str] = {}
    for name in chosen:
        try:
            found[name] = (folder / name).read_bytes().decode()
        except (OSError, ValueError):
            left_out.append(name)
    return found, sorted(left_out)
