"""64 sessions stream at once over real sockets, in three dialects: nothing is lost or ends up in another's answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from minirllm.config import Config
from minirllm.engines.scripted import ScriptedEngine
from minirllm.inflight import identify, prompt_digest
from minirllm.session import Session
from minirllm.stack import Stack, serving
from minirllm.types import SamplingParams

SESSIONS, SLOTS = 64, 16
ROUTES = ("chat/completions", "messages", "responses")
SHOWN = {"content_block_delta": "text", "response.output_text.delta": ""}  # event -> where its delta has the text


def line(name: str) -> str:
    return f"{name} says " + " ".join(f"{name}.{word}" for word in range(12))


class Echo(ScriptedEngine):
    """Says `line` of the name that its prompt holds."""

    @staticmethod
    def script(prompt: str) -> str:
        (name,) = set(re.findall(r"session-\d+", prompt))
        return line(name)


def body(number: int, route: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "tiny", "stream": True}
    message = {"role": "user", "content": f"I am session-{number}."}
    if route == "responses":
        return {**asked, "input": [message], "max_output_tokens": 400}
    return {**asked, "messages": [message], "max_tokens": 400, "return_token_ids": True}


async def pieces(response: httpx.Response) -> AsyncIterator[tuple[str, list[int]]]:
    """(text, token ids) of each event, whatever the dialect."""
    assert response.status_code == 200
    async for row in response.aiter_lines():
        if not row.startswith("data: ") or row == "data: [DONE]":
            continue
        event = json.loads(row.removeprefix("data: "))
        assert "error" not in event, event
        if "choices" in event:
            for choice in event["choices"]:
                yield choice["delta"].get("content") or "", choice.get("token_ids") or []
        else:
            delta = event.get("delta") if event["type"] in SHOWN else ""
            yield delta.get("text", "") if isinstance(delta, dict) else delta, []


async def stream(
    client: httpx.AsyncClient, stack: Stack, session: Session, together: asyncio.Barrier
) -> tuple[str, list[int]]:
    """What one session's client got. It reads on when the streams of all have begun."""
    number = int(session.id.partition("-")[2])
    route = ROUTES[number % len(ROUTES)]
    text, ids, begun = "", list[int](), False
    url = f"{stack.base_url}/sessions/{session.id}/v1/{route}"
    headers = {"Authorization": f"Bearer {session.key}"}
    async with client.stream("POST", url, json=body(number, route), headers=headers) as response:
        async for piece, tokens in pieces(response):
            text, ids = text + piece, ids + tokens
            if not begun:
                begun = True
                await together.wait()
    return text, ids


@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", ["hf", "tests.test_streams:Echo"])
async def test_64_streams_at_once(engine: str) -> None:
    config = Config(model="tiny", engine=engine, slots=SLOTS, max_tokens=400)
    async with serving(config) as stack:
        enforced = SamplingParams(max_tokens=40 if engine == "hf" else 400)
        sessions = [stack.sessions.create(f"session-{n}", seed_parts=(n,), enforced=enforced) for n in range(SESSIONS)]
        together = asyncio.Barrier(SESSIONS)
        limits = httpx.Limits(max_connections=SESSIONS)
        async with httpx.AsyncClient(trust_env=False, timeout=120, limits=limits) as client:
            got = await asyncio.gather(*[stream(client, stack, session, together) for session in sessions])
        for number, (session, (text, ids)) in enumerate(zip(sessions, got, strict=True)):
            (step,) = session.steps
            assert step.node is not None
            assert step.response is not None
            sampled, _ = session.tree.response(step.node)
            assert text == step.response.content == stack.renderer.parse(sampled).content
            assert ids == (sampled if number % len(ROUTES) == 0 else [])
            prompt = stack.renderer.decode(session.tree.prompt_ids(step.node))
            assert set(re.findall(r"session-\d+", prompt)) == {session.id}
            assert text == line(session.id) or engine == "hf"
            assert session.counters["drift"] == session.counters["aborted"] == 0
        if engine == "hf":
            for session in sessions[::8]:
                await alone(stack, session)


async def alone(stack: Stack, session: Session) -> None:
    """Asked when nobody else is, the engine says the same, to the bit."""
    (step,) = session.steps
    assert step.node is not None
    assert step.params is not None
    prompt = session.tree.prompt_ids(step.node)
    call_id, seed = identify(session.seed_parts, prompt_digest(prompt), 0, 0)
    assert call_id == step.id
    again = await stack.engine.generate(prompt, step.params, seed)
    assert (again.token_ids, again.logprobs) == session.tree.response(step.node)
