"""The clients of `soak.py`, in a process of their own: agents that call, give up, hang up, stall, lie and die.

Owns: what clients do and what answer each deed must get. Plain sockets, no HTTP library, so that half a request, a
reset or a stream that nobody reads are one line each. Knows of the server only its URL and the admin key.

Writes JSON lines: ``[session, call id, sha of the token ids]`` for every answer that arrived whole; the last line is an
object with the counts, and whatever answer was not among those allowed. ``python benchmarks/soak_client.py --help``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import socket
import struct
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

DEADLINE = 240.0  # seconds for one call; nobody may be left waiting longer
DEEDS = {  # how often, in percent
    "talk": 34, "stream": 20, "complete": 5, "choices": 4, "hang_up": 8, "give_up": 6, "reset": 4, "half_a_body": 3,
    "stall": 3, "unread": 3, "malformed": 8, "close_meanwhile": 2,
}  # fmt: skip
WORDS = ["river", "stone", "lamp", "copper", "window", "garden", "seven", "paper", "winter", "boat"]


def sha(token_ids: list[int]) -> str:
    return hashlib.sha256(repr(token_ids).encode()).hexdigest()[:16]


class Wrong(Exception):
    """The server answered something that it must not."""


class Connection:
    """One HTTP/1.1 connection by hand."""

    def __init__(self, host: str, port: int):
        self.host, self.port = host, port

    async def __aenter__(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def send(self, method: str, path: str, key: str, body: bytes, **headers: str) -> None:
        fields = {"host": "soak", "authorization": f"Bearer {key}", "content_length": str(len(body)), **headers}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items())]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        pairs = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def chunk(self) -> bytes:
        """The next piece of a chunked body; empty at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self) -> tuple[int, Any]:
        status, headers = await self.head()
        body = await self.reader.readexactly(int(headers["content-length"]))
        return status, json.loads(body) if body else None

    def reset(self) -> None:
        """Close as a dying process does: the other side gets a reset, not an end."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


class Agent:
    """Opens a session, does things in it, closes it, until time is up."""

    def __init__(self, crowd: Crowd, name: str):
        self.crowd, self.name, self.chance = crowd, name, random.Random(name)

    async def run(self) -> None:
        await asyncio.sleep(self.chance.random() * min(10.0, self.crowd.seconds / 5))
        for number in range(10**9):
            if time.monotonic() >= self.crowd.until:
                return
            try:
                await asyncio.wait_for(self.session(f"{self.name}:{number}/{self.chance.randrange(100)}"), 8 * DEADLINE)
            except Exception as error:
                self.crowd.wrong(self.name, f"{type(error).__name__}: {error}")

    async def session(self, sid: str) -> None:
        status, made = await self.ask("POST", "/admin/sessions", self.crowd.admin, {"id": sid})
        self.expect("open", status, {201})
        self.sid, self.key, self.path = sid, made["key"], urlsplit(made["base_url"]).path
        self.messages = [{"role": "user", "content": f"{sid} {self.words()}"}]
        self.closed = False
        deeds = self.chance.choices(list(DEEDS), list(DEEDS.values()), k=self.chance.randint(3, 9))
        for deed in deeds:
            if time.monotonic() < self.crowd.until and not self.closed:
                self.crowd.counts[deed] += 1
                await asyncio.wait_for(getattr(self, deed)(), DEADLINE)
        await self.close()

    async def close(self) -> None:
        quoted = self.path.removeprefix("/sessions/").removesuffix("/v1")
        status, _ = await self.ask("DELETE", f"/admin/sessions/{quoted}", self.crowd.admin)
        self.expect("close", status, {410} if self.closed else {200})
        self.closed = True
        status, _ = await self.ask("POST", f"{self.path}/chat/completions", self.key, self.body())
        self.expect("call a closed session", status, {410})

    # -- pieces ------------------------------------------------------------------------------------------------------

    def words(self) -> str:
        return " ".join(self.chance.choices(WORDS, k=self.chance.randint(2, 12)))

    def body(self, **fields: Any) -> dict[str, Any]:
        given = {"messages": self.messages, "max_tokens": self.chance.randint(1, 24), "return_token_ids": True}
        return {**given, **fields}

    def connection(self) -> Connection:
        return Connection(self.crowd.host, self.crowd.port)

    async def ask(self, method: str, path: str, key: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        async with self.connection() as connection:
            connection.send(method, path, key, raw, **headers)
            return await connection.answer()

    def expect(self, deed: str, status: int, allowed: set[int]) -> None:
        if status not in allowed:
            raise Wrong(f"{deed}: status {status}, expected {sorted(allowed)}")

    def post(self, connection: Connection, route: str = "chat/completions", **fields: Any) -> None:
        connection.send("POST", f"{self.path}/{route}", self.key, json.dumps(self.body(**fields)).encode())

    def take(self, reply_id: str, choices: dict[int, list[int]]) -> None:
        """Write down what arrived: choice 0 has the reply's own call id, later ones are told apart by their place."""
        for index, ids in choices.items():
            self.crowd.say([self.sid, f"{reply_id.partition('-')[2]}-{index}", sha(ids)])

    def next_turn(self, text: str) -> None:
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        self.messages.append({"role": "user", "content": self.words()})
        if len(self.messages) > 6:
            self.messages = [{"role": "user", "content": f"{self.sid} again {self.words()}"}]

    # -- deeds -------------------------------------------------------------------------------------------------------

    async def talk(self, body: dict[str, Any] | None = None) -> None:
        status, reply = await self.ask("POST", f"{self.path}/chat/completions", self.key, body or self.body())
        self.expect("talk", status, {200})
        (choice,) = reply["choices"]
        self.take(reply["id"], {0: choice["token_ids"]})
        self.next_turn(choice["message"]["content"] or "")

    async def choices(self) -> None:
        status, reply = await self.ask("POST", f"{self.path}/chat/completions", self.key, self.body(n=3, stop=["e"]))
        self.expect("choices", status, {200})
        self.take(reply["id"], {choice["index"]: choice["token_ids"] for choice in reply["choices"]})

    async def complete(self) -> None:
        fields = {**self.body(), "prompt": f"{self.sid}: {self.words()}"}
        status, reply = await self.ask("POST", f"{self.path}/completions", self.key, fields)
        self.expect("complete", status, {200})
        self.take(reply["id"], {0: reply["choices"][0]["token_ids"]})

    async def events(self, connection: Connection) -> Any:
        """The events of a stream, until ``[DONE]``."""
        status, _ = await connection.head()
        self.expect("stream", status, {200})
        rest = b""
        while piece := await connection.chunk():
            *frames, rest = (rest + piece).split(b"\n\n")
            for frame in frames:
                if frame == b"data: [DONE]":
                    return
                yield json.loads(frame.removeprefix(b"data: "))
        raise Wrong("stream: it ended without [DONE]")

    async def stream(self) -> None:
        ids, text, reply_id = list[int](), "", ""
        async with self.connection() as connection:
            self.post(connection, stream=True)
            async for event in self.events(connection):
                if "error" in event:
                    raise Wrong(f"stream: {event['error']}")
                for choice in event["choices"]:
                    reply_id = event["id"]
                    ids += choice.get("token_ids") or []
                    text += choice["delta"].get("content") or ""
        self.take(reply_id, {0: ids})
        self.next_turn(text)

    async def hang_up(self) -> None:
        """In the middle of a stream."""
        left = self.chance.randint(1, 12)
        async with self.connection() as connection:
            self.post(connection, stream=True)
            async for _ in self.events(connection):
                left -= 1
                if left == 0:
                    break
            if self.chance.random() < 0.5:
                connection.reset()

    async def give_up(self) -> None:
        """The client's own time is up before the answer comes; sometimes it asks the same again."""
        body = self.body()
        async with self.connection() as connection:
            self.post(connection, **body)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.reader.read(1), self.chance.random() * 2)
            if self.chance.random() < 0.5:
                connection.reset()
        if self.chance.random() < 0.5:
            await self.talk(body)

    async def reset(self) -> None:
        async with self.connection() as connection:
            self.post(connection, n=self.chance.choice([1, 1, 4]))
            await asyncio.sleep(self.chance.choice([0, 0, 0.2, 1.0]))
            connection.reset()

    async def half_a_body(self) -> None:
        async with self.connection() as connection:
            connection.send("POST", f"{self.path}/chat/completions", self.key, b'{"messages": [', content_length="900")
            await asyncio.sleep(self.chance.random())

    async def stall(self) -> None:
        """Half of the headers, then nothing."""
        async with self.connection() as connection:
            connection.writer.write(f"POST {self.path}/chat/completions HTTP/1.1\r\nhost: so".encode())
            await asyncio.sleep(self.chance.random() * 3)

    async def unread(self) -> None:
        """Asks for a stream and never reads it."""
        async with self.connection() as connection:
            self.post(connection, stream=True, n=8, logprobs=True, top_logprobs=20)
            await asyncio.sleep(self.chance.random() * 3)
            connection.reset()

    async def close_meanwhile(self) -> None:
        """The session is closed while a call runs in it."""
        call = asyncio.create_task(self.ask("POST", f"{self.path}/chat/completions", self.key, self.body()))
        await asyncio.sleep(self.chance.random() * 0.3)
        quoted = self.path.removeprefix("/sessions/").removesuffix("/v1")
        status, _ = await self.ask("DELETE", f"/admin/sessions/{quoted}", self.crowd.admin)
        self.expect("close_meanwhile", status, {200})
        self.closed = True
        status, reply = await call
        self.expect("a call whose session was closed", status, {200, 410})
        if status == 200:
            self.take(reply["id"], {0: reply["choices"][0]["token_ids"]})

    async def malformed(self) -> None:
        chat, good = f"{self.path}/chat/completions", json.dumps(self.body()).encode()
        kind, method, path, key, body, headers, allowed = self.chance.choice([
            ("no JSON", "POST", chat, self.key, b"{", {}, 400),
            ("deep JSON", "POST", chat, self.key, b'{"a":' * 5000, {}, 400),
            ("no UTF-8", "POST", chat, self.key, b'{"messages": "\xff"}', {}, 400),
            ("no messages", "POST", chat, self.key, b"{}", {}, 400),
            ("wrong messages", "POST", chat, self.key, b'{"messages": {"role": 1}}', {}, 400),
            ("negative", "POST", chat, self.key, json.dumps(self.body(max_tokens=-3)).encode(), {}, 400),
            ("too many choices", "POST", chat, self.key, json.dumps(self.body(n=9999)).encode(), {}, 400),
            ("too long", "POST", chat, self.key, json.dumps(self.body(messages=[
                {"role": "user", "content": "x" * 50_000}])).encode(), {}, 400),
            ("wrong key", "POST", chat, "no-key", good, {}, 401),
            ("session of nobody", "POST", "/sessions/nobody/v1/chat/completions", self.key, good, {}, 404),
            ("no route", "POST", f"{self.path}/chatter", self.key, good, {}, 404),
            ("wrong method", "GET", chat, self.key, b"", {}, 404),
            ("text", "POST", chat, self.key, good, {"content_type": "text/plain"}, 415),
            ("admin without its key", "GET", "/admin/sessions", self.key, b"", {}, 401),
            ("no number", "POST", chat, self.key, good, {"content_length": "many"}, 400),
        ])  # fmt: skip
        async with self.connection() as connection:
            connection.send(method, path, key, body, **headers)
            status, _ = await connection.head()
        self.expect(kind, status, {allowed})


class Crowd:
    """All agents of this process."""

    def __init__(self, options: argparse.Namespace, out: TextIO):
        url = urlsplit(options.url)
        assert url.hostname is not None
        assert url.port is not None
        self.host, self.port, self.admin, self.seconds = url.hostname, url.port, options.admin, options.seconds
        self.until = time.monotonic() + options.seconds
        self.out, self.counts, self.problems = out, Counter[str](), list[str]()
        self.agents = [Agent(self, f"{options.name}-{index}") for index in range(options.agents)]

    def say(self, line: Any) -> None:
        self.out.write(json.dumps(line) + "\n")

    def wrong(self, agent: str, what: str) -> None:
        self.counts["wrong"] += 1
        if len(self.problems) < 20:
            self.problems.append(f"{agent}: {what}")

    async def health(self, times_ms: list[float]) -> None:
        while True:
            began = time.perf_counter()
            async with Connection(self.host, self.port) as connection:
                connection.send("GET", "/health", "", b"")
                await connection.answer()
            times_ms.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(0.25)

    async def run(self) -> None:
        times_ms: list[float] = []
        health = asyncio.create_task(self.health(times_ms))
        await asyncio.gather(*[agent.run() for agent in self.agents])
        health.cancel()
        times_ms.sort()
        self.say({"counts": self.counts, "problems": self.problems, "health_ms": times_ms})


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--url", "--admin", "--name"):
        parser.add_argument(name, required=True)
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with options.out.open("w") as out:
        asyncio.run(Crowd(options, out).run())


if __name__ == "__main__":
    main()
