"""A machine for tests of providers: a system of its own, in which programs are started from outside and live on.

Owns: `Machine`, made of bubblewrap's namespaces and entered as root; `elsewhere`, for the
provider's server. Does not know: which provider is played.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

from minirllm.sandboxes.local import _bubblewrap

T = TypeVar("T")
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "IMAGE_SAYS": "hello"}


@contextlib.contextmanager
def elsewhere(server: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Run a server in a thread and an event loop of its own, as what is played is not in this process either."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(60)
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def _whole(pipe: int) -> str:
    with open(pipe) as opened:
        return opened.read()


class Machine:
    """`root` holds the folders that can be written; `files` is a copy of another's to begin with."""

    def __init__(self, files: Path | None = None):
        self.root = Path(tempfile.mkdtemp(prefix="minirllm-machine-"))
        if files is not None:
            shutil.copytree(files, self.root, symlinks=True, dirs_exist_ok=True)
        for name in ("work", "tmp", "root"):
            (self.root / name).mkdir(exist_ok=True)
        self.process: asyncio.subprocess.Process | None = None
        self.pid = 0  # of its first process, as seen from outside

    async def start(self) -> None:
        read, write = os.pipe()
        argv = [
            await asyncio.to_thread(_bubblewrap),
            "--unshare-all",
            "--as-pid-1",
            "--die-with-parent",
            "--info-fd",
            str(write),
            "--proc",
            "/proc",
        ]
        argv += ["--dev", "/dev", "--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib64"):
            argv += ["--ro-bind", os.path.realpath(f"/{name}"), f"/{name}"]
        for place in self.root.iterdir():
            argv += ["--bind", str(place), f"/{place.name}"]
        argv += ["--", "/usr/bin/bash", "-c", "echo ready; while :; do sleep 1000 > /dev/null & wait $!; done"]
        self.process = await asyncio.create_subprocess_exec(*argv, pass_fds=(write,), stdout=-1)
        os.close(write)
        self.pid = json.loads(await asyncio.to_thread(_whole, read))["child-pid"]
        assert self.process.stdout is not None, "it is a pipe"
        assert await self.process.stdout.readline() == b"ready\n", "the machine stands"

    async def run(
        self, argv: list[str], cwd: str = "/work", env: dict[str, str] | None = None, stdin: bytes = b""
    ) -> tuple[int, bytes, bytes]:
        """Exit code and both outputs, as soon as nobody holds them any more."""
        enter = ["nsenter", "-t", str(self.pid), "-m", "-p", "-i", "-u", "-n", f"--wdns={cwd}", "--"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *enter, *argv, stdin=pipe, stdout=pipe, stderr=pipe, env={**ENV, **(env or {})}
        )
        out, err = await process.communicate(stdin)
        return process.returncode or 0, out, err

    def keep(self, place: Path) -> None:
        """Copy its files."""
        shutil.copytree(self.root, place, symlinks=True, ignore_dangling_symlinks=True)

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await asyncio.to_thread(shutil.rmtree, self.root, ignore_errors=True)
