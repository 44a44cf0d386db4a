"""Ports inside a sandbox without a network that lead to one address outside.

Owns: `Forward`: a listening socket made in the sandbox's network namespace and served from here. Does not know: what
is said over it. Needs root. Nothing else is reachable: the namespace has its own loopback and no other interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from minirllm.errors import SandboxError

CLONE_NEWNET = 0x40000000
IP_FREEBIND = 15  # <linux/in.h>: the loopback interface may not be up yet
PIECE = 2**16
MAX_CONNECTIONS = 256  # of one sandbox at once


def listen(pid: int, port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1:`port` where process `pid` lives, made by a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(_listen, pid, port).result()
        except (OSError, OverflowError) as error:
            raise SandboxError(f"Port {port} cannot be opened in the sandbox: {error}.") from None


def _listen(pid: int, port: int) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    other = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(other, CLONE_NEWNET):
            raise SandboxError(f"A port into a sandbox needs root: {os.strerror(ctypes.get_errno())}.")
        with contextlib.ExitStack() as failing:
            made = failing.enter_context(socket.socket())
            made.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
            made.bind(("127.0.0.1", port))
            made.listen(64)
            made.setblocking(False)
            failing.pop_all()
        return made
    finally:
        libc.setns(own, CLONE_NEWNET)
        os.close(own)
        os.close(other)


class Forward:
    """Serves `ports` (inside -> address outside) of one command, whose first process is `pid`, until closed."""

    def __init__(self, ports: Mapping[int, tuple[str, int]]):
        self.ports = ports
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self, pid: int) -> None:
        """Listen on every port."""
        for port, address in self.ports.items():
            listener = await asyncio.to_thread(listen, pid, port)
            self._servers.append(await asyncio.start_server(self._to(address), sock=listener))

    async def close(self) -> None:
        """End all connections."""
        for server in self._servers:
            server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _to(self, address: tuple[str, int]) -> Callable[..., Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                if len(self._connections) <= MAX_CONNECTIONS:
                    await _join(reader, writer, address)
            self._connections.discard(task)
            writer.close()

        return serve


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: tuple[str, int]) -> None:
    """Both ways, until both sides have said all they had to say."""
    beyond_reader, beyond_writer = await asyncio.open_connection(*address)
    try:
        await asyncio.gather(_pour(reader, beyond_writer), _pour(beyond_reader, writer))
    finally:
        beyond_writer.close()


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass everything on; at the end say so to the other side, which may still have something to answer."""
    try:
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()
