"""Snapshots that are folders of this machine.

Owns: `OnDisk`, where they lie, that each is whole or not there. Does not know: how one is filled, or begun with.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from minirllm.errors import SandboxError
from minirllm.files import cache_root
from minirllm.sandboxes import NoSnapshot, Sandbox
from minirllm.sandboxes.place import remove_tree


def snapshots(kind: str) -> Path:
    """The folder in which this kind of sandbox keeps its snapshots, each a folder called by its id."""
    folder = cache_root() / "snapshots" / kind
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def find_snapshot(kind: str, id: str) -> Path:
    """Its folder. Raises NoSnapshot when there is none."""
    folder = snapshots(kind) / id
    if not id or Path(id).name != id or not folder.is_dir():
        raise NoSnapshot(f"There is no {kind} snapshot {id!r}.")
    return folder


def keep(kind: str, copy: Callable[[Path], object]) -> str:
    """A new snapshot of this kind, whole or not there: `copy` makes its folder. Returns its id; SandboxError when the
    disk is full, say, or files went while they were copied."""
    id = uuid.uuid4().hex
    partial = snapshots(kind) / f".{id}.partial"
    try:
        copy(partial)
        partial.rename(snapshots(kind) / id)
    except OSError as error:
        raise SandboxError(f"The files cannot be kept: {str(error)[:300]}.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return id


class OnDisk(Sandbox):
    """One whose snapshots are folders of this machine, see `snapshots`."""

    name: str  # in SANDBOXES

    @classmethod
    async def weigh(cls, id: str) -> int:
        """See `Sandbox.weigh`."""

        def added() -> int:
            found = find_snapshot(cls.name, id)
            return sum(path.lstat().st_blocks * 512 for path in found.rglob("*"))

        return await asyncio.to_thread(added)

    @classmethod
    async def forget(cls, id: str) -> None:
        """See `Sandbox.forget`."""
        with contextlib.suppress(NoSnapshot):
            await asyncio.to_thread(lambda: remove_tree(find_snapshot(cls.name, id)))
