"""A sandbox of Daytona's (https://www.daytona.io), through its own package.

Owns: `Daytona`. Does not know: how commands are carried out there (remote.py).

The account is that of DAYTONA_API_KEY; DAYTONA_API_URL and DAYTONA_TARGET are read, too. Sizes are whole processors and
GiB there, so limits are rounded up; a snapshot has those that it was made with.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shlex
import threading
import uuid
from collections.abc import Awaitable, Callable
from functools import cache
from hashlib import sha256
from typing import Any, TypeVar

import aiohttp
import daytona
from daytona import AsyncDaytona, DaytonaAuthenticationError, DaytonaError, DaytonaNotFoundError

from minirllm.errors import SandboxError
from minirllm.sandboxes import NoSnapshot, Spec
from minirllm.sandboxes.remote import IMAGE, Remote

T = TypeVar("T")
SNAPSHOT = re.compile("minirllm-[0-9a-f]{32}")
GIB = 2**30
KEEP_SECONDS = 600.0  # to keep a snapshot
PASSING = (408, 425, 429, 500, 502, 503, 504)
FAILED = ("error", "build_failed")


class _Lane:
    """An event loop in a thread, and the one client that lives there: making it blocks for a tenth of a second."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.api: Any = None
        self.users = 0
        threading.Thread(target=self.loop.run_forever, name="daytona", daemon=True).start()

    async def join(self) -> Any:
        if self.api is None:
            self.api = AsyncDaytona()
        self.users += 1
        return self.api

    async def leave(self) -> None:
        self.users -= 1
        if not self.users:
            api, self.api = self.api, None
            await api.close()


@cache
def _lane() -> _Lane:
    return _Lane()


class Daytona(Remote):
    """See the module. `Spec.image` and `Spec.build` say of what it is made."""

    name = "daytona"
    patience = 20.0  # proxies end a request that is silent for a minute
    errors = (DaytonaError, aiohttp.ClientError, OSError)

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self.api: Any = None
        self.box: Any = None

    @classmethod
    def check(cls) -> None:
        """See `Sandbox.check`."""
        if not (os.environ.get("DAYTONA_API_KEY") or os.environ.get("DAYTONA_JWT_TOKEN")):
            raise SandboxError("There is no account at daytona: set DAYTONA_API_KEY.")

    @classmethod
    def place(cls) -> str:
        """See `Sandbox.place`."""
        key = os.environ.get("DAYTONA_API_KEY", "")
        return f"{os.environ.get('DAYTONA_API_URL', '')} {sha256(key.encode()).hexdigest()[:8]}"

    async def connect(self) -> None:
        """See `Remote.connect`."""
        self.api = await self.asked("There is no account", _lane().join)

    async def disconnect(self) -> None:
        """See `Remote.disconnect`."""
        await self.called(_lane().leave)

    async def called(self, call: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """See `Remote.called`."""

        async def there() -> T:
            return await call(*arguments)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), _lane().loop))

    async def make(self) -> str:
        """See `Remote.make`."""
        minutes = max(1, math.ceil(self.spec.lifetime / 60))
        common: dict[str, Any] = {
            "labels": self.labels, "network_block_all": True, "ephemeral": True, "ttl_minutes": minutes,
            "auto_stop_interval": 0,
        }  # fmt: skip
        limits = self.spec.limits
        if self.spec.snapshot is not None:
            await self._kept(self.spec.snapshot)
            wanted = daytona.CreateSandboxFromSnapshotParams(snapshot=self.spec.snapshot, **common)
        else:
            image = self.spec.image or IMAGE
            if self.spec.build is not None:
                image = await asyncio.to_thread(daytona.Image.from_dockerfile, self.spec.build / "Dockerfile")
            sizes = daytona.Resources(
                cpu=math.ceil(limits.cpus), memory=math.ceil(limits.memory / GIB), disk=math.ceil(limits.disk / GIB)
            )
            wanted = daytona.CreateSandboxFromImageParams(image=image, resources=sizes, **common)
        self.box = await self.api.create(wanted, timeout=self.spec.build_seconds)
        id: str = self.box.id
        return id

    async def _kept(self, name: str) -> Any:
        """The snapshot of this name."""
        try:
            if SNAPSHOT.fullmatch(name):
                return await self.api.snapshot.get(name)
        except DaytonaNotFoundError:
            pass
        raise NoSnapshot(f"There is no daytona snapshot {name!r}.")

    async def bash(self, argv: list[str], seconds: float) -> str:
        """See `Remote.bash`."""
        done = await self.box.process.exec(shlex.join(argv), cwd=None, timeout=math.ceil(seconds))
        said: str = done.result
        return said

    async def put(self, path: str, data: bytes) -> None:
        """See `Remote.put`."""
        await self.box.fs.upload_file(data, path)

    async def take(self, path: str) -> bytes:
        """See `Remote.take`."""
        data: bytes = await self.box.fs.download_file(path)
        return data

    async def keep(self) -> str:
        """See `Remote.keep`."""
        name = f"minirllm-{uuid.uuid4().hex}"
        await self.box.create_snapshot(name, timeout=KEEP_SECONDS)
        for _ in range(int(KEEP_SECONDS)):
            state = str((await self._kept(name)).state.value).lower()
            if state == "active":
                return name
            if state in FAILED:
                break
            await asyncio.sleep(1.0)
        raise SandboxError("The snapshot cannot be kept at daytona: it never became active.")

    async def drop(self, snapshot: str) -> None:
        """See `Remote.drop`."""
        with contextlib.suppress(DaytonaNotFoundError, NoSnapshot):
            await self.api.snapshot.delete(await self._kept(snapshot))

    async def machines(self, label: str) -> list[tuple[str, str]]:
        """See `Remote.machines`."""
        return [(box.id, box.labels[label]) async for box in self.api.list() if label in box.labels]

    async def remove(self, machine: str) -> None:
        """See `Remote.remove`."""
        with contextlib.suppress(DaytonaNotFoundError):
            await (await self.api.get(machine)).delete()

    def judged(self, error: Exception) -> tuple[str, float | None]:
        """See `Remote.judged`."""
        if isinstance(error, DaytonaAuthenticationError):
            return f"set DAYTONA_API_KEY ({error})", None
        status = getattr(error, "status_code", None)
        headers = {name.lower(): value for name, value in getattr(error, "headers", {}).items()}
        passes = status in PASSING or isinstance(error, daytona.DaytonaConnectionError | aiohttp.ClientError | OSError)
        try:
            after = float(headers.get("retry-after", 0.0))
        except ValueError:
            after = 0.0
        return str(error), min(after, 60.0) if passes else None
