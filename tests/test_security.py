"""What hostile agents, requests and files can do, and what they cannot: docs/security.md, attacked. Raw sockets."""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest

from minirllm import AgentConfig, Task
from minirllm.config import Config
from minirllm.errors import ConfigError, EngineError, RequestError
from minirllm.models import tiny
from minirllm.renderer import Renderer
from minirllm.rollouts import Job
from minirllm.server import check_key
from minirllm.session import Session
from minirllm.sessions import Sessions
from minirllm.store import EpisodeStore
from minirllm.types import SamplingParams
from tests import agent_server
from tests.agent_server import ask
from tests.endpoint import ADMIN, KEY, USER, Place, error_of, raw, serving, until
from tests.fake_engine import FakeEngine, chat, session
from tests.test_architecture import named, sources, tree

ROOT = Path(__file__).parent.parent
SECRET = "sk-SENTINEL-KEY"
PROMPT = "SENTINEL-PROMPT"


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with serving() as place:
        yield place


# ---- keys ----


def test_keys_are_compared_in_constant_time_and_nowhere_else() -> None:
    """Every comparison in the package that names a key is `hmac.compare_digest`."""

    def names_a_key(node: ast.expr) -> bool:
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        return name in ("key", "api_key", "admin_key", "open_key", "secret")

    compared, safe = [], 0
    holders = {f"minirllm/{name}.py" for name in ("server", "session", "sessions", "exchange", "stack", "cli")}
    for path in sources():
        if named(path) not in holders:
            continue  # elsewhere `key` is a dictionary's
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Compare) and any(map(names_a_key, [node.left, *node.comparators])):
                others = [n for n in node.comparators if not (isinstance(n, ast.Constant) and n.value is None)]
                compared += [f"{named(path)}:{node.lineno}"] if others else []
            safe += isinstance(node, ast.Attribute) and node.attr == "compare_digest"
    assert compared == []
    assert safe == 1


@pytest.mark.parametrize("given", ["", "s", "secre", "secretx", "secret\0", "SECRET", "secret secret", "s" * 50_000])
def test_only_the_very_key_opens(given: str) -> None:
    for name, before in (("authorization", "Bearer "), ("x-api-key", ""), ("x-goog-api-key", "")):
        check_key({name: f"{before}secret"}, "secret")
        with pytest.raises(RequestError):
            check_key({name: before + given}, "secret")


async def test_no_key_opens_another_session(place: Place) -> None:
    """Ids can be guessed; they are no secret. Keys are, and each is good for one session only."""
    other = place.sessions.create("task:0/2")
    assert len(other.key) >= 32
    assert other.key != place.sessions.create("task:0/3").key
    async with httpx.AsyncClient(base_url=place.base, trust_env=False) as client:
        for sid, key in [(other.id, KEY), (place.session.id, other.key), (other.id, ADMIN), (other.id, "")]:
            base = f"/sessions/{quote(sid, safe='')}/v1"
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            for method, path in [("POST", "chat/completions"), ("POST", "completions"), ("GET", "models")]:
                reply = await client.request(method, f"{base}/{path}", json={"messages": [USER]}, headers=headers)
                assert (reply.status_code, error_of(reply)["code"]) == (401, "invalid_api_key")
                assert other.key not in reply.text
    assert place.engine.calls == 0


PATHS = [
    "/sessions/task:0%2F1/../../admin/sessions",
    "/sessions/task:0%2F1/v1/../../../admin/sessions",
    "/sessions//admin/sessions/v1/chat/completions",
    "//admin/sessions",
    "/admin//sessions",
    "/admin/sessions/task:0%2F1%00",
    "/admin/sessions/task:0%2F2",
    "/ADMIN/sessions",
    "/admin/sessions;x",
    "http://admin@127.0.0.1/admin/sessions",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_an_agent_gets_nothing_from_admin_routes(place: Place, path: str, method: str) -> None:
    other = place.sessions.create("task:0/2")
    url = urlsplit(place.base)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(
        f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 2\r\n"
        "connection: close\r\n\r\n{}".encode()
    )
    answer = await reader.read()
    writer.close()
    assert int(answer.split(b" ")[1]) in (400, 401, 404, 405, 410)
    assert other.key.encode() not in answer
    assert not other.closed
    assert not place.session.closed


# ---- logs ----


async def test_no_key_and_no_prompt_in_the_logs(caplog: pytest.LogCaptureFixture) -> None:
    """At the default level, whatever goes wrong."""
    caplog.set_level(logging.WARNING)
    async with serving() as place:
        place.sessions.close(place.session.id)
        place.session = place.sessions.create("s", key=SECRET)
        headers = {"Authorization": f"Bearer {SECRET}"}
        message = {"role": "user", "content": PROMPT}
        for fault in (None, EngineError("device failed"), KeyError("x"), RequestError("no")):
            place.engine.fault = fault
            for body in ({"messages": [message]}, {"messages": [message], "stream": True}, {"prompt": PROMPT}):
                path = "completions" if "prompt" in body else "chat/completions"
                await place.post(path, body, headers=headers)
        await place.post(content=PROMPT.encode(), headers={**headers, "Content-Type": "application/json"})
        url = urlsplit(place.base)
        for text in (f"{PROMPT} {SECRET} nonsense\r\n\r\n", f"GET /{PROMPT}?{SECRET} HTTP/1.1\r\nx\r\n\r\n"):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(text.encode())
            await reader.read()
            writer.close()
    async with agent_server.serving() as place_of_agents:

        async def agent(task: Task, config: AgentConfig) -> str:
            answer = await ask(task, config)
            if task.id == "slow":
                await asyncio.sleep(60)
            return answer

        jobs = [Job(Task(name, PROMPT, {"prompt": PROMPT})) for name in ("slow", "quick")]
        await place_of_agents.runner(agent, episode_timeout=0.5).run_many(jobs)
    assert len(caplog.records) >= 5  # there was something to say
    assert "SENTINEL" not in caplog.text


async def test_a_run_folder_holds_no_key(tmp_path: Path) -> None:
    seen: list[str] = []

    async def agent(task: Task, config: AgentConfig) -> str:
        seen.append(config.api_key)
        return await ask(task, config)

    async with agent_server.serving() as place:
        episode = await place.run(agent)
    store = EpisodeStore(tmp_path / "episodes")
    await asyncio.to_thread(store.append, 1, episode)
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert texts
    assert not any(key.encode() in text for key in seen for text in texts)


# ---- quotas ----


async def test_the_token_quota_holds_however_many_calls_are_in_flight() -> None:
    engine = FakeEngine(lambda prompt, seed: "x" * 500, hold=True)
    s = session(engine, max_tokens_total=400, default_max_tokens=100)
    calls = [asyncio.create_task(s.call(chat(f"question {i}"))) for i in range(20)]
    await until(lambda: sum(call.done() for call in calls) + engine.active == 20)
    engine.release()
    replies = [r for r in await asyncio.gather(*calls, return_exceptions=True) if not isinstance(r, Exception)]
    assert 0 < s.tokens_used <= 400
    assert len(replies) == len(s.steps) >= 2
    prompts = replies[0].prompt_ids
    last = session(FakeEngine(lambda prompt, seed: "x" * 500), max_tokens_total=len(prompts) + 7)
    reply = await last.call(chat("question 0"))
    assert len(reply.choices[0].completion.token_ids) == 7  # what was left, and no more


async def test_one_session_samples_a_few_calls_at_once_and_the_rest_wait() -> None:
    engine = FakeEngine(hold=True)
    s = session(engine, max_streams=3)
    calls = [asyncio.create_task(s.call(chat(str(i), n=2))) for i in range(4)]
    await until(lambda: engine.active == 3)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (engine.active, s.counters["calls"]) == (3, 8)
    calls[0].cancel()  # gives its place to one that waits
    await asyncio.gather(calls[0], return_exceptions=True)
    await until(lambda: engine.active == 3)
    engine.release()
    assert len(await asyncio.gather(*calls[1:])) == 3
    assert (engine.active, len(s.steps)) == (0, 6)


async def test_an_agent_cannot_exhaust_the_slots_of_the_others() -> None:
    """200 calls of one session are in flight; another session's call is sampled beside them."""
    engine = FakeEngine(hold=True)
    sessions = Sessions(engine, engine_renderer(), "tiny", max_streams=2)
    greedy, honest = sessions.create("greedy"), sessions.create("honest")
    flood = [asyncio.create_task(greedy.call(chat(str(i)))) for i in range(200)]
    await until(lambda: greedy.counters["calls"] == 200)
    call = asyncio.create_task(honest.call(chat("hello")))
    await until(lambda: honest.counters["calls"] == 1 and engine.active == 3)
    sessions.close("greedy")
    await asyncio.gather(*flood, return_exceptions=True)
    engine.release()
    await call


def engine_renderer() -> Renderer:
    return Renderer(tiny.build_tokenizer())


async def test_a_session_that_is_refused_again_and_again_is_not_read_any_more(place: Place) -> None:
    place.session.max_calls = 3
    place.session.refused = 102
    body = {"messages": [{"role": "user", "content": "x" * 9000}]}  # does not fit the context
    assert error_of(await place.post(body=body))["code"] == "context_length_exceeded"
    refused = await place.post(body={"messages": [USER]})
    assert (refused.status_code, error_of(refused)["code"]) == (403, "insufficient_quota")
    reader, writer = await raw(place, "content-length: 4000000", b"")  # answered before a byte of the body came
    assert b" 403 " in await reader.readline()
    writer.close()


async def test_a_session_cannot_hold_more_connections_than_calls(place: Place) -> None:
    place.session.max_calls = 3
    held = [await raw(place, "content-length: 5000", b"{") for _ in range(103)]
    await until(lambda: len(place.server.endpoint.exchanges) == 103)
    refused = await place.post(body={"messages": [USER]})
    assert (refused.status_code, error_of(refused)["code"]) == (403, "insufficient_quota")
    for _, writer in held:
        writer.close()
    await until(lambda: not place.server.endpoint.exchanges)
    assert (await place.post(body={"messages": [USER]})).status_code == 200


async def test_idle_connections_give_way(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minirllm.server.resource.getrlimit", lambda kind: (40, 40))
    url = urlsplit(place.base)
    idle = [await asyncio.open_connection(url.hostname, url.port) for _ in range(60)]
    for i in range(5):
        body = {"messages": [{"role": "user", "content": str(i)}]}
        assert (await place.post(body=body)).status_code == 200
    assert place.server._uvicorn is not None
    assert len(place.server._uvicorn.server_state.connections) <= 21
    for _, writer in idle:
        writer.close()


@pytest.mark.parametrize("setting", [{"max_streams": 0}, {"max_calls": 0}, {"max_session_tokens": -1}, {"max_body": 9}])
def test_a_senseless_quota_is_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} must be at least"):
        Config(**setting)  # type: ignore[arg-type]


# ---- bombs ----


def body_of(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], **fields}).encode()


MIB = 2**20
SMALL = b'{"role":"user"}'
BOMBS: dict[str, tuple[bytes, int]] = {
    "many values": (b'{"messages":[' + b",".join([b"{}"] * (MIB)) + b"]}", 400),
    "many keys": (b"{" + b",".join(b'"%d":0' % i for i in range(300_000)) + b"}", 400),
    "many messages": (b'{"messages":[' + b",".join([SMALL] * 5000) + b"]}", 400),
    "many tools": (body_of(tools=[{"type": "function", "function": {"name": "f"}}] * 513), 400),
    "deep": (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "deep in text": (
        body_of(
            messages=[
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]},
                USER,
            ]
        ),
        400,
    ),
    "long text": (body_of(messages=[{"role": "user", "content": "a" * 4_000_000}]), 400),
    "blank text": (body_of(messages=[{"role": "user", "content": " " * 4_000_000}]), 400),
    "long prompt": (json.dumps({"prompt": "a" * 4_000_000}).encode(), 400),
    "wide letters": (body_of(messages=[{"role": "user", "content": "\ufdfa" * 600_000}]), 400),
    "joined letters": (body_of(messages=[{"role": "user", "content": "e" + "\u0301" * 600_000}]), 400),
    "half surrogates": (b'{"messages":[{"role":"user","content":"' + b"\\ud800" * 600_000 + b'"}]}', 400),
    "too large": (b'{"messages":[{"role":"user","content":"' + b"a" * 5_000_000 + b'"}]}', 413),
    "long number": (b'{"seed":' + b"9" * 1_000_000 + b"}", 400),
    "large exponent": (body_of()[:-1] + b', "temperature": 1e999999}', 400),
    "long stop": (body_of(stop=["a" * 257]), 400),
    "many stops": (body_of(stop=["a"] * 17), 400),
    "many choices": (body_of(n=129), 400),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_is_refused_and_nobody_waits_for_long(name: str) -> None:
    """Each at the default limits. The bound is wide: what it is about took from ten seconds to hours."""
    content, status = BOMBS[name]
    async with serving(max_body=Config.max_body) as place:
        place.engine.renderer.limit = place.engine.max_context
        path = "completions" if name == "long prompt" else "chat/completions"
        began = time.monotonic()
        answer = await place.post(path, content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, place.engine.calls) == (status, 0)
        assert len(answer.content) < 1000
        assert time.monotonic() - began < 5
        assert (await place.post(body={"messages": [USER]})).status_code == 200


@pytest.mark.parametrize(
    "header",
    ["content-encoding: gzip", "content-encoding: deflate", "content-encoding: br", "content-encoding: identity, gzip"],
)
async def test_compressed_bodies_are_never_unpacked(place: Place, header: str) -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    reader, writer = await raw(place, f"content-length: {len(bomb)}\r\n{header}", bomb)
    assert b" 415 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    "headers",
    [
        "transfer-encoding: gzip, chunked",
        "transfer-encoding: gzip",
        "content-length: 5\r\ncontent-length: 6",
        "content-length: -1",
        "content-length: 5\r\nx: " + "a" * 2_000_000,
        "content-length : 5",
    ],
)
async def test_ambiguous_or_endless_headers_are_refused(place: Place, headers: str) -> None:
    reader, writer = await raw(place, headers, b"{}")
    try:
        assert (await reader.read(12))[9:] in (b"400", b"501", b"431")
    except ConnectionResetError:  # closed before all of it was sent
        assert len(headers) > 70_000
    writer.close()
    assert place.engine.calls == 0


def test_sessions_do_not_show_their_keys() -> None:
    """Where objects end up in tracebacks and logs, their repr does."""
    s = Session("s", SECRET, FakeEngine(), engine_renderer(), "m", enforced=SamplingParams())
    config = AgentConfig("http://x/v1", "m", SECRET)
    assert SECRET not in repr(s)
    assert SECRET not in repr(config)
