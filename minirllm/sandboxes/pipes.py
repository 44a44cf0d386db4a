"""Talking to a program: its input, its output up to a limit, until it ends, floods or is out of time.

Owns: `communicate`, `gone`, `feed`, what is kept of an output. Does not know: sandboxes, how a program is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass

PIECE = 2**16
Input = bytes | AsyncIterable[bytes]  # whole, or piece by piece
Sink = Callable[[bytes], Awaitable[None]]


class Kept:
    """What is kept of an output: `limit` bytes, the last ones with `tail`. With a `sink` so many go there instead."""

    def __init__(self, limit: int, tail: bool = False, sink: Sink | None = None):
        self.limit, self.tail, self.sink = limit, tail, sink
        self.count, self.bytes = 0, bytearray()

    async def take(self, piece: bytes) -> bool:
        """False: that was more than may be."""
        self.count += len(piece)
        if self.sink is not None:
            await self.sink(piece)
        else:
            self.bytes += piece
            if self.tail:
                del self.bytes[: -self.limit]
        return self.tail or self.count <= self.limit

    def __bytes__(self) -> bytes:
        return bytes(self.bytes[: self.limit])


@dataclass
class Ended:
    """What it wrote, and whether it was stopped."""

    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    flooded: bool = False


async def communicate(
    process: asyncio.subprocess.Process, stdin: Input, outputs: tuple[Kept, Kept], timeout: float
) -> Ended:
    """Until the program has ended, was silent for good, or must be ended, which is then the caller's to do.

    A program that closes its outputs has not ended; one that has ended may have left its outputs open.
    """
    assert process.stdin is not None, "it was started with pipes"
    assert process.stdout is not None, "it was started with pipes"
    assert process.stderr is not None, "it was started with pipes"
    ended = Ended()

    async def collect(stream: asyncio.StreamReader, kept: Kept) -> None:
        while piece := await stream.read(PIECE):
            if not await kept.take(piece):
                ended.flooded = True
                return

    readers = [
        asyncio.ensure_future(collect(stream, kept))
        for stream, kept in zip((process.stdout, process.stderr), outputs, strict=True)
    ]
    feeder, waiter = asyncio.ensure_future(feed(process.stdin, stdin)), asyncio.ensure_future(process.wait())
    try:
        async with asyncio.timeout(timeout):
            while not waiter.done() and not ended.flooded:
                pending = {task for task in (*readers, waiter) if not task.done()}
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if not ended.flooded:
                await asyncio.wait(readers)
    except TimeoutError:
        ended.timed_out = True
    finally:
        for task in (*readers, feeder, waiter):
            task.cancel()
        await asyncio.gather(*readers, feeder, waiter, return_exceptions=True)
    ended.stdout, ended.stderr = map(bytes, outputs)
    return ended


async def gone(process: asyncio.subprocess.Process) -> int:
    """The exit code of a program that has ended or was killed. Its pipes are let go first: `wait` waits for their ends,
    too, which do not come when nobody reads on after a flood, or a process that was not killed holds them."""
    transport = process._transport  # type: ignore[attr-defined]
    stdin, *outputs = [transport.get_pipe_transport(number) for number in range(3)]
    if stdin.get_write_buffer_size():  # which nobody will read
        stdin.abort()
    for pipe in (stdin, *outputs):
        pipe.close()
    code = await process.wait()
    transport.close()
    return code


async def feed(writer: asyncio.StreamWriter, data: Input) -> None:
    """Write all of it, and that this was all; as much as is read."""
    with contextlib.suppress(OSError):
        if isinstance(data, bytes):
            writer.write(data)
            await writer.drain()
        else:
            async for piece in data:
                writer.write(piece)
                await writer.drain()
        writer.write_eof()
