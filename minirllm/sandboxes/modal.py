"""A sandbox of Modal's (https://modal.com), through its own package.

Owns: `Modal`. Does not know: how commands are carried out there (remote.py).

The account is that of ``modal token``, or of MODAL_TOKEN_ID and MODAL_TOKEN_SECRET. Sandboxes belong to the app
`minirllm` there. Modal has no limit of disk for a sandbox; snapshots are kept for 30 days.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import modal
from modal.config import config
from modal.exception import AuthError, ConnectionError, Error, NotFoundError, ResourceExhaustedError, ServiceError
from modal.experimental import image_delete

from minirllm.errors import SandboxError
from minirllm.sandboxes import MIB, NoSnapshot, Spec
from minirllm.sandboxes.remote import IMAGE, Remote

APP = "minirllm"
SNAPSHOT = re.compile(r"im-\w+")
LONGEST = 24 * 3600  # seconds that a sandbox may live there
REAP = "while :; do sleep 1000 & wait $!; done"  # the first process takes leave of processes whose parents are gone
KEEP_SECONDS = 600


class Modal(Remote):
    """See the module. `Spec.image` and `Spec.build` say of what it is made."""

    name = "modal"
    patience = 600.0
    errors = (Error, OSError)

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self.app: Any = None
        self.box: Any = None

    @classmethod
    def check(cls) -> None:
        """See `Sandbox.check`."""
        if not config["token_id"]:
            raise SandboxError("There is no account at modal: see `modal token new`.")

    @classmethod
    def place(cls) -> str:
        """See `Sandbox.place`."""
        return f"{config['server_url']} {config['token_id']}"

    async def connect(self) -> None:
        """See `Remote.connect`."""
        self.app = await self.asked("The app cannot be had", self._app)

    async def _app(self) -> Any:
        return await modal.App.lookup.aio(APP, create_if_missing=True)

    async def disconnect(self) -> None:
        """See `Remote.disconnect`. The package's one connection is its own business."""
        if self.box is not None:
            await self.box.detach.aio()

    async def make(self) -> str:
        """See `Remote.make`."""
        limits, snapshot = self.spec.limits, self.spec.snapshot
        if snapshot is not None and not SNAPSHOT.fullmatch(snapshot):
            raise NoSnapshot(f"There is no modal snapshot {snapshot!r}.")
        if snapshot is not None:
            image = modal.Image.from_id(snapshot)
        elif self.spec.build is not None:
            image = modal.Image.from_dockerfile(self.spec.build / "Dockerfile", context_dir=self.spec.build)
        else:
            image = modal.Image.from_registry(self.spec.image or IMAGE)
        memory = math.ceil(limits.memory / MIB)
        try:
            self.box = await modal.Sandbox.create.aio(
                "/usr/bin/bash", "-c", REAP, app=self.app, image=image, tags=self.labels, block_network=True,
                timeout=min(LONGEST, math.ceil(self.spec.lifetime)), cpu=(limits.cpus, limits.cpus),
                memory=(memory, memory),
            )  # fmt: skip
        except NotFoundError:
            if snapshot is None:
                raise
            raise NoSnapshot(f"There is no modal snapshot {snapshot!r}.") from None
        id: str = self.box.object_id
        return id

    async def bash(self, argv: list[str], seconds: float) -> str:
        """See `Remote.bash`."""
        process = await self.box.exec.aio(*argv, timeout=math.ceil(seconds), text=False)
        said: bytes = await process.stdout.read.aio()
        await process.wait.aio()
        return said.decode(errors="replace")

    async def put(self, path: str, data: bytes) -> None:
        """See `Remote.put`."""
        await self.box.filesystem.write_bytes.aio(data, path)

    async def take(self, path: str) -> bytes:
        """See `Remote.take`."""
        data: bytes = await self.box.filesystem.read_bytes.aio(path)
        return data

    async def keep(self) -> str:
        """See `Remote.keep`."""
        id: str = (await self.box.snapshot_filesystem.aio(KEEP_SECONDS)).object_id
        return id

    async def drop(self, snapshot: str) -> None:
        """See `Remote.drop`."""
        with contextlib.suppress(NotFoundError):
            await image_delete.aio(snapshot)

    async def machines(self, label: str) -> list[tuple[str, str]]:
        """See `Remote.machines`."""
        found = []
        async for box in modal.Sandbox.list.aio(app_id=self.app.app_id):
            if value := (await box.get_tags.aio()).get(label):
                found.append((box.object_id, value))
        return found

    async def remove(self, machine: str) -> None:
        """See `Remote.remove`."""
        with contextlib.suppress(NotFoundError):
            box = self.box if self.box and self.box.object_id == machine else await modal.Sandbox.from_id.aio(machine)
            await box.terminate.aio()

    def judged(self, error: Exception) -> tuple[str, float | None]:
        """See `Remote.judged`. Calls that nothing came of have been made again by the package itself."""
        if isinstance(error, AuthError):
            return f"it needs an account, see `modal token new` ({error})", None
        passing = (ConnectionError, ResourceExhaustedError, ServiceError, OSError)
        return str(error) or type(error).__name__, 0.0 if isinstance(error, passing) else None
