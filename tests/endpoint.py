"""A small endpoint for tests: real sessions, renderer and sockets; the engine says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

import httpx
import openai

from minirllm.models.tiny import build_tokenizer
from minirllm.renderer import Renderer
from minirllm.server import Endpoint, Server
from minirllm.session import Session
from minirllm.sessions import Sessions
from minirllm.types import Completion, SampledToken, SamplingParams

KEY, ADMIN = "secret", "admin-secret"
USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>'


@dataclass
class FakeEngine:
    """Says `texts` one after another (the last one for ever), `pause` seconds before each token, after `gate` opens."""

    renderer: Renderer
    texts: list[str] = field(default_factory=lambda: ["Hello"])
    pause: float = 0.0
    max_context: int = 4096
    vocab_size: int = 512
    fault: Exception | None = None
    cancelled: int = 0
    calls: int = 0

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.ended = asyncio.Event()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed, *, stop=None, on_token=None, weights=None
    ) -> Completion:
        text = self.texts[min(self.calls, len(self.texts) - 1)]
        self.calls += 1
        try:
            await self.gate.wait()
            if self.fault is not None:
                raise self.fault
            sampled: list[int] = []
            reason = "stop"
            for token in [*self.renderer.encode(text), min(self.renderer.eos_ids)]:
                await asyncio.sleep(self.pause)
                sampled.append(token)
                if on_token is not None:
                    on_token(SampledToken(token, -0.25, ((token, -0.25), (65, -2.0))[: params.top_logprobs]))
                if stop is not None and stop(sampled):
                    break
                if len(sampled) == params.max_tokens:
                    reason = "length"
                    break
            tops = [((token, -0.25), (65, -2.0))[: params.top_logprobs] for token in sampled]
            return Completion(sampled, [-0.25] * len(sampled), reason, 0, params.temperature, tops)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.ended.set()


@dataclass
class Place:
    """A running endpoint with one session `task:0/1`."""

    base: str
    sessions: Sessions
    session: Session
    engine: FakeEngine
    server: Server

    @property
    def url(self) -> str:
        return f"{self.base}/sessions/{quote(self.session.id, safe='')}/v1"

    def client(self, **options) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url, api_key=KEY, max_retries=0, **options)

    async def post(self, path: str = "chat/completions", body=None, **options) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}", **options.pop("headers", {})}
        if body is not None:
            options["json"] = body
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=20) as client:
            return await client.post(f"{self.url}/{path}", headers=headers, **options)


@asynccontextmanager
async def serving(enforced: SamplingParams | None = None, **options) -> AsyncIterator[Place]:
    renderer = Renderer(build_tokenizer())
    engine = FakeEngine(renderer)
    sessions = Sessions(engine, renderer, "tiny")
    session = sessions.create("task:0/1", key=KEY, enforced=enforced)
    server = Server(Endpoint(sessions, model="tiny", admin_key=ADMIN, **options))
    base = await server.start()
    try:
        yield Place(base, sessions, session, engine, server)
    finally:
        await server.close()


async def until(condition) -> None:
    """Wait for something that happens on the loop; the test's own time-out ends a hopeless wait."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def error_of(response: httpx.Response) -> dict:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


async def raw(
    place: Place, header: str = "", body: bytes | None = None, **fields
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A chat call by hand, whose connection the test controls."""
    body = json.dumps({"messages": [USER], **fields}).encode() if body is None else body
    header = header or f"content-length: {len(body)}"
    url = urlsplit(place.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n{header}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer
