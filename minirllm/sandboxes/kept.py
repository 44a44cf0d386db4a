"""Snapshots by key: what a sandbox is prepared with is done once, kept, and begun with later.

Owns: `Recipe` and its key, `prepared`, the records of what is kept (who made it, when it was used, when it goes).
Does not know: how a backend keeps files, who works in a sandbox.

The key is a hash of all that the files depend on: backend and where it keeps them, image or the folder that it is built
of, setup, what a harness is installed of. So a snapshot is never stale, except for an image that has the same name and
is another one. Records lie in the cache folder, one file each. A lock for each key lets one make it while others wait,
and holds it as long as anybody works in a sandbox that began with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self

from minirllm.errors import SandboxError, UserError
from minirllm.files import cache_root, write_whole
from minirllm.sandboxes import NoSnapshot, Sandbox, Spec, create, kind
from minirllm.sandboxes.trees import digest

logger = logging.getLogger(__name__)

Snapshots = Literal["use", "make", "off"]  # those that are there; also make those that are not; neither
HOURS = 168.0  # that one is kept
POLL = 0.05  # seconds between looks at a lock
NOT_FILES = {"snapshot", "build_seconds", "limits", "forward", "binds", "lifetime"}  # of a Spec
_hopeless: set[str] = set()  # kinds that could keep nothing, in this process


@dataclass(frozen=True)
class Recipe:
    """A sandbox as it is to be before anybody works in it: started, then prepared. `made_of` are texts, and files and
    folders of this machine: all that `prepare` depends on."""

    kind: str
    spec: Spec = field(default_factory=Spec)
    prepare: Callable[[Sandbox], Awaitable[None]] | None = field(default=None, compare=False)
    made_of: tuple[str | Path, ...] = ()
    about: str = field(default="", compare=False)  # for people

    @cached_property
    def key(self) -> str:
        """Of its snapshot. Reads files."""
        own = {each.name: getattr(self.spec, each.name) for each in dataclasses.fields(Spec)}
        parts = ["1", self.kind, kind(self.kind).place(), *self.made_of]
        parts += [self.spec.compose.parent] if self.spec.compose else []  # of which it may build
        for name in sorted(own.keys() - NOT_FILES):
            parts += [name, own[name]]
        return sha256(json.dumps([_told(part) for part in parts]).encode()).hexdigest()[:32]


def _told(part: Any) -> Any:
    if isinstance(part, Path):
        return digest(part) if part.is_dir() else sha256(part.read_bytes()).hexdigest()
    return sorted(part.items()) if isinstance(part, Mapping) else part


@dataclass(frozen=True)
class Record:
    """A snapshot that is kept. Times are seconds since 1970."""

    key: str
    kind: str
    id: str  # the backend's
    place: str  # which engine or account has it, see `Sandbox.place`
    about: str
    bytes: int
    created: float
    expires: float

    @property
    def expired(self) -> bool:
        """May it go?"""
        return time.time() >= self.expires

    @property
    def used(self) -> float:
        """When a sandbox last began with it, or it was made."""
        with contextlib.suppress(OSError):
            return _file(self.key).stat().st_mtime
        return self.created

    def write(self) -> None:
        """Raises UserError when it cannot be."""
        used = self.used
        write_whole(_file(self.key), json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        os.utime(_file(self.key), (used, used))


def _file(key: str) -> Path:
    return cache_root() / "snapshots" / "keys" / f"{key}.json"


def read(key: str) -> Record | None:
    """The record of a key; None when there is none."""
    try:
        return Record(**json.loads(_file(key).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        logger.warning("the record %s cannot be read and does not count", _file(key))
        return None


def records() -> list[Record]:
    """All, the oldest first."""
    found = (read(file.stem) for file in _file("").parent.glob("*.json"))
    return sorted((record for record in found if record is not None), key=lambda record: record.created)


class _Lock:
    """Of a key, against other processes and other tasks: held together by those who use it, alone by who changes it."""

    def __init__(self, key: str):
        path = _file(key).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def now(self, how: int) -> bool:
        """Hold it (fcntl.LOCK_SH, LOCK_EX) or not at all."""
        try:
            fcntl.flock(self.file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self.file, fcntl.LOCK_UN)
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.file)


async def discard(key: str, only_expired: bool = False) -> bool:
    """Remove a snapshot and its record, unless somebody works in a sandbox that began with it: False. Raises
    SandboxError when its backend cannot."""
    with await asyncio.to_thread(_Lock, key) as lock:
        if not lock.now(fcntl.LOCK_EX):
            return False
        record = await asyncio.to_thread(read, key)
        if record is not None and (record.expired or not only_expired):
            backend = kind(record.kind)
            if record.place != backend.place():
                raise SandboxError(f"Snapshot {key[:12]} is kept by {record.place}, which is not the one in use now.")
            await backend.forget(record.id)
            await asyncio.to_thread(_file(key).unlink, missing_ok=True)
        return True


async def sweep() -> None:
    """Remove what has expired and is not in use, as far as that can be."""
    for record in await asyncio.to_thread(records):
        if record.expired:
            with contextlib.suppress(UserError):  # its kind may be there no more
                await discard(record.key, only_expired=True)


@contextlib.asynccontextmanager
async def prepared(recipe: Recipe, how: Snapshots = "use", hours: float = HOURS) -> AsyncIterator[Sandbox]:
    """A running sandbox, made by the recipe or begun with its snapshot. Raises SandboxError."""
    async with AsyncExitStack() as held:
        box = None
        if how != "off" and recipe.prepare is not None and kind(recipe.kind).contained:
            box = await _kept(recipe, how, hours, held)
        yield box or await _fresh(recipe, held)


async def _fresh(recipe: Recipe, held: AsyncExitStack) -> Sandbox:
    box = await held.enter_async_context(create(recipe.kind, recipe.spec))
    if recipe.prepare is not None:
        await recipe.prepare(box)
    return box


async def _kept(recipe: Recipe, how: Snapshots, hours: float, held: AsyncExitStack) -> Sandbox | None:
    """One that begins with the snapshot; who makes that has it already. None: there is none, and none is to be made."""
    key = await asyncio.to_thread(lambda: recipe.key)
    with contextlib.suppress(SandboxError):
        await discard(key, only_expired=True)
    if (how == "use" or recipe.kind in _hopeless) and not await asyncio.to_thread(_file(key).exists):
        return None
    lock = held.enter_context(await asyncio.to_thread(_Lock, key))
    while True:
        if lock.now(fcntl.LOCK_SH):
            if box := await _restored(recipe, held):
                return box
            if how == "use" or recipe.kind in _hopeless:
                lock.now(fcntl.LOCK_UN)
                return None
            if lock.now(fcntl.LOCK_EX):
                box = await _restored(recipe, held) or await _made(recipe, hours, held)
                lock.now(fcntl.LOCK_SH)
                return box
        await asyncio.sleep(POLL)


async def _restored(recipe: Recipe, held: AsyncExitStack) -> Sandbox | None:
    record = await asyncio.to_thread(read, recipe.key)
    if record is None:
        return None
    try:
        spec = dataclasses.replace(recipe.spec, snapshot=record.id)
        box = await held.enter_async_context(create(recipe.kind, spec))
    except NoSnapshot:  # removed behind our back
        logger.warning("snapshot %s of %s is gone", recipe.key[:12], recipe.about or recipe.kind)
        await asyncio.to_thread(_file(recipe.key).unlink, missing_ok=True)
        return None
    with contextlib.suppress(OSError):
        await asyncio.to_thread(os.utime, _file(recipe.key))
    return box


async def _made(recipe: Recipe, hours: float, held: AsyncExitStack) -> Sandbox:
    """A fresh one, of which the snapshot is kept."""
    box = await _fresh(recipe, held)
    try:
        id = await box.snapshot()
    except SandboxError as error:
        _hopeless.add(recipe.kind)
        logger.warning("no snapshots are kept: %s", error)
        return box
    backend, now = type(box), time.time()
    record = Record(
        recipe.key, recipe.kind, id, backend.place(), recipe.about, await backend.weigh(id), now, now + 3600 * hours
    )
    await asyncio.to_thread(record.write)
    return box
