"""Talking to a program: all of its input, its output up to a limit, until it ends, floods or is out of time.

Owns: `communicate`, `gone`. Does not know: sandboxes, how a program is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

PIECE = 2**16


@dataclass
class Ended:
    """What it wrote, and whether it was stopped."""

    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    flooded: bool = False


async def communicate(
    process: asyncio.subprocess.Process, stdin: bytes, limit: int, timeout: float, tail: bool = False
) -> Ended:
    """Until the program has ended, was silent for good, or must be ended, which is then the caller's to do.

    A program that closes its outputs has not ended; one that has ended may have left its outputs open.
    """
    assert process.stdout is not None, "it was started with pipes"
    assert process.stderr is not None, "it was started with pipes"
    outputs, ended = (bytearray(), bytearray()), Ended()

    async def collect(stream: asyncio.StreamReader, kept: bytearray) -> None:
        while piece := await stream.read(PIECE):
            kept += piece
            if tail:
                del kept[:-limit]
            elif len(kept) > limit:
                ended.flooded = True
                return

    readers = [
        asyncio.ensure_future(collect(stream, kept))
        for stream, kept in zip((process.stdout, process.stderr), outputs, strict=True)
    ]
    feeder, waiter = asyncio.ensure_future(_feed(process, stdin)), asyncio.ensure_future(process.wait())
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
    ended.stdout, ended.stderr = (bytes(kept[:limit]) for kept in outputs)
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


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None, "it was started with pipes"
    with contextlib.suppress(OSError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()
