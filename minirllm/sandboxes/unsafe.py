"""No sandbox: commands run as this user, in a folder of their own. For machines on which nothing else works.

Owns: `Unsafe`. Does not know: what runs in it. It keeps honest programs apart and their folders tidy; a hostile one can
read, write and reach whatever this user can.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pwd
import shutil
import signal
import tempfile
from collections.abc import Mapping

from minirllm.errors import SandboxError
from minirllm.sandboxes import WORK, Command, Result, to_end
from minirllm.sandboxes.ondisk import OnDisk, find_snapshot, keep
from minirllm.sandboxes.pipes import communicate, gone

logger = logging.getLogger(__name__)


class Unsafe(OnDisk):
    """See the module. `work` is a folder of this machine; absolute paths are this machine's, too."""

    name = "local-unsafe"
    contained = False
    streams = True

    async def start(self) -> None:
        """See `Sandbox.start`."""
        if self.spec.forward or self.spec.binds:
            raise SandboxError(
                "local-unsafe has this machine's network and files: it forwards no ports and binds nothing."
            )
        logger.warning("local-unsafe isolates nothing: commands can do whatever this user can")
        await to_end(self._make, self.spec.snapshot)

    def _make(self, id: str | None) -> None:
        self.work = tempfile.mkdtemp(prefix="minirllm-unsafe-")
        if id is not None:
            shutil.copytree(find_snapshot(self.name, id), self.work, symlinks=True, dirs_exist_ok=True)

    async def close(self) -> None:
        """See `Sandbox.close`."""
        if self.work != WORK:
            work, self.work = self.work, WORK
            await to_end(shutil.rmtree, work, True)

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`."""
        return await to_end(keep, self.name, lambda place: shutil.copytree(self.work, place, symlinks=True))

    @property
    def running(self) -> bool:
        """See `Sandbox.running`."""
        return self.work != WORK

    @classmethod
    def users(cls) -> tuple[str, ...]:
        """See `Sandbox.users`."""
        with contextlib.suppress(KeyError):
            return (pwd.getpwuid(os.getuid()).pw_name, str(os.getuid()))
        return (str(os.getuid()),)

    @property
    def variables(self) -> Mapping[str, str]:
        """See `Sandbox.variables`."""
        return {"PATH": os.defpath, "HOME": self.work, "LANG": "C.UTF-8"}

    async def carry_out(self, command: Command) -> Result:
        """See `Sandbox.carry_out`. What left the command's process group outlives it."""
        if command.cwd is None and not await asyncio.to_thread(os.path.isdir, self.work):
            return Result(b"", f"{self.work}: no such folder\n".encode(), 125)
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv, stdin=-1, stdout=-1, stderr=-1, start_new_session=True, env=command.env,
                cwd=command.cwd or self.work,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise SandboxError(f"The command cannot be started: {error}.") from None
        try:
            ended = await communicate(process, command.stdin, command.outputs(), command.timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = await gone(process)
        return Result(
            ended.stdout, ended.stderr, code if code >= 0 else 128 - code, ended.timed_out, flooded=ended.flooded
        )
