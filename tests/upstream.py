"""A provider that does what a test tells it: a real server, its HTTP written by hand, so it can hang, lie and die."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

from minirllm.config import Config
from minirllm.providers.serving import Served, serving

SECRET = "sk-provider-SENTINEL-0123456789"
USER = {"role": "user", "content": "hi"}
Act = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Scripted:
    """Answers by `acts`, one after another, the last one for ever. `asked` are the bodies, `headers` came with them."""

    acts: list[Act]
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gone: int = 0  # clients that left before their answer was out
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            pairs = (line.split(": ", 1) for line in head[1:] if line)
            headers = {name.lower(): value for name, value in pairs}
            self.headers.append({**headers, "path": head[0].split()[1]})
            self.asked.append(json.loads(await reader.readexactly(int(headers["content-length"]))))
            act = asyncio.ensure_future(self.acts[min(len(self.asked), len(self.acts)) - 1](writer))
            left = asyncio.ensure_future(reader.read())
            await asyncio.wait([act, left], return_when=asyncio.FIRST_COMPLETED)
            self.gone += not act.done()
            act.cancel()
            left.cancel()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted(*acts: Act) -> AsyncIterator[Scripted]:
    place = Scripted(list(acts))
    server = await asyncio.start_server(place.serve, "127.0.0.1", 0)
    place.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield place
    finally:
        server.close()


def status(code: int, body: Any = None, **headers: str) -> Act:
    """An error."""

    async def act(writer: asyncio.StreamWriter) -> None:
        text = body if isinstance(body, str) else json.dumps(body or {"error": {"message": f"said {code}"}})
        lines = [f"HTTP/1.1 {code} X", f"content-length: {len(text)}", "content-type: application/json"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write(("\r\n".join(lines) + "\r\nconnection: close\r\n\r\n" + text).encode())
        await writer.drain()

    return act


def piece(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "up-1", "model": "m-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call(index: int | None, arguments: str, **head: str) -> dict[str, Any]:
    function = {"arguments": arguments, **({"name": head["name"]} if "name" in head else {})}
    entry = {"function": function, **({"id": head["id"]} if "id" in head else {})}
    return piece(tool_calls=[entry if index is None else {"index": index, **entry}])


USAGE = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 7, "prompt_tokens_details": None}}
HELLO = (piece(role="assistant", content=""), piece(content="Hel"), piece(content="lo"), piece("stop"), USAGE)


def says(*events: Any, end: str = "data: [DONE]\n\n", then: Act | None = None) -> Act:
    """A streamed answer; after it `then`, else the end of the connection."""

    async def act(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for event in events:
            writer.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
            await writer.drain()
        writer.write(end.encode())
        await writer.drain()
        if then is not None:
            await then(writer)

    return act


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(1000)


async def die(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@asynccontextmanager
async def proxy(url: str, key: str = SECRET, **options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    """A proxy to `url`, and the official client to its open route."""
    os.environ["UPSTREAM_KEY"] = key
    config = Config(base_url=url, model="m", key_env="UPSTREAM_KEY", **options)
    async with (
        serving(config, open_key="sk-ours") as place,
        openai.AsyncOpenAI(base_url=f"{place.base_url}/v1", api_key="sk-ours", max_retries=0) as client,
    ):
        yield client, place
