"""A provider answers, in Chat Completions, what comes in by any other dialect: official clients and real servers."""

from __future__ import annotations

import asyncio
import email.utils
import time
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from minirllm import Task, evaluator, rollout
from minirllm.client import chat
from minirllm.config import Config
from minirllm.errors import EngineError
from minirllm.providers.upstream import retry_after
from minirllm.rollouts import Job, Runner
from minirllm.types import AgentConfig, Episode, TerminationReason
from tests.endpoint import TOOL
from tests.upstream import HELLO, USAGE, USER, Act, call, piece, proxy, says, scripted, status


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home of its own, and short pauses."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("minirllm.providers.upstream.FIRST_WAIT", 0.01)


async def test_responses_in_chat_completions_out() -> None:
    tool = {"type": "function", "name": "run", "parameters": TOOL["function"]["parameters"], "strict": False}
    pieces = (piece(reasoning="hm"), call(0, "", id="a1", name="run"), call(0, '{"cmd": "ls"}'), piece("tool_calls"))
    async with scripted(says(*pieces, USAGE), says(*HELLO)) as upper, proxy(upper.url) as (client, _):
        first = await client.responses.create(model="m", input="hi", tools=[tool])
        tool_call = next(item for item in first.output if item.type == "function_call")
        assert (tool_call.name, tool_call.arguments, tool_call.call_id) == ("run", '{"cmd": "ls"}', "a1")
        assert (first.usage.input_tokens, first.usage.output_tokens) == (11, 7)
        result = {"type": "function_call_output", "call_id": "a1", "output": "a.txt"}
        async with client.responses.stream(
            model="m", previous_response_id=first.id, input=[result], tools=[tool]
        ) as stream:
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            last = await stream.get_final_response()
        assert (texts, last.output_text, last.usage.output_tokens) == (["Hel", "lo"], "Hello", 7)
        function = {"name": "run", "arguments": '{"cmd": "ls"}'}
        called = {"id": "a1", "type": "function", "function": function}
        assert upper.asked[1]["messages"][1:] == [
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "content": "a.txt", "tool_call_id": "a1"},
        ]


async def test_messages_in_chat_completions_out() -> None:
    tool = {"name": "run", "input_schema": TOOL["function"]["parameters"]}
    pieces = (piece(content="Ok"), call(0, "", id="a1", name="run"), call(0, '{"cmd": "ls"}'), piece("tool_calls"))
    overflow = {"error": {"message": "prompt is too long: 9000 tokens > 8000 maximum"}}
    acts = (says(*pieces, USAGE), says(*HELLO), status(400, overflow), status(401))
    async with scripted(*acts) as upper, proxy(upper.url) as (_, place):
        options = {"model": "m", "max_tokens": 50, "tools": [tool]}
        ask_it = anthropic.AsyncAnthropic(base_url=place.base_url, api_key="sk-ours", max_retries=0)
        async with ask_it as client:
            first = await client.messages.create(messages=[USER], **options)
            text, use = first.content
            assert (text.text, use.name, use.input, first.stop_reason) == ("Ok", "run", {"cmd": "ls"}, "tool_use")
            assert (first.usage.input_tokens, first.usage.output_tokens) == (11, 7)
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "a.txt"}
            history = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            async with client.messages.stream(messages=history, **options) as stream:
                texts = [text async for text in stream.text_stream]
                last = await stream.get_final_message()
            assert (texts, last.usage.output_tokens) == (["Hel", "lo"], 7)
            assert upper.asked[1]["messages"][2] == {"role": "tool", "content": "a.txt", "tool_call_id": use.id}
            assert upper.asked[1]["tools"][0]["function"]["name"] == "run"
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9000 tokens > 8000 maximum"):
                await client.messages.create(messages=[USER], **options)
            with pytest.raises(anthropic.AuthenticationError, match="Its key is wrong"):
                await client.messages.create(messages=[USER], **options)
            with pytest.raises(anthropic.NotFoundError, match="cannot be counted"):
                await client.messages.count_tokens(model="m", messages=[USER])


async def test_one_conversation_through_two_dialects_is_one() -> None:
    """And the side calls that a program makes are marked."""
    async with scripted(says(*HELLO)) as upper, proxy(upper.url) as (_, place):
        session = place.sessions.create("s", key="k", auxiliary=lambda request: "title" if len(request.tools) else None)
        url, history = f"{place.base_url}/sessions/s", [USER]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as chat:
            reply = await chat.chat.completions.create(model="m", messages=history)
            await chat.chat.completions.create(model="m", messages=history, tools=[TOOL])
        history += [{"role": "assistant", "content": reply.choices[0].message.content}, USER]
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k") as messages:
            await messages.messages.create(model="m", max_tokens=9, messages=history)
        assert [step.auxiliary for step in session.steps] == ["", "title", ""]
        assert [step.metadata["match"] for step in session.steps] == ["conversation", "conversation", "extended"]
        assert session.steps[2].parent == session.steps[0].id
        assert [session.counters[name] for name in ("calls", "auxiliary", "extended")] == [3, 1, 1]


async def test_gemini_in_chat_completions_out() -> None:
    async with scripted(says(*HELLO)) as upper, proxy(upper.url) as (_, place), httpx.AsyncClient(timeout=20) as client:
        body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
        url, headers = f"{place.base_url}/v1beta/models/m", {"x-goog-api-key": "sk-ours"}
        whole = (await client.post(f"{url}:generateContent", json=body, headers=headers)).json()
        assert whole["candidates"][0]["content"]["parts"] == [{"text": "Hello"}]
        assert whole["usageMetadata"]["promptTokenCount"] == 11
        assert whole["usageMetadata"]["candidatesTokenCount"] == 7
        streamed = await client.post(f"{url}:streamGenerateContent?alt=sse", json=body, headers=headers)
        assert streamed.text.count("data: ") >= 2


async def test_answers_side_by_side_are_streamed_each_to_its_own() -> None:
    async with scripted(says(*HELLO)) as upper, proxy(upper.url) as (client, _):
        texts = ["", ""]
        async for chunk in await client.chat.completions.create(model="m", messages=[USER], n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == ["Hello", "Hello"]


async def test_a_slow_provider_is_accepted_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a stream that has begun carries the id by which its call is known."""
    monkeypatch.setattr("minirllm.providers.session.ACCEPTED", 0.05)
    begin = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        await begin.wait()
        await says(*HELLO)(writer)

    async with scripted(slow) as upper, proxy(upper.url) as (client, place):
        stream = aiter(await client.chat.completions.create(model="m", messages=[USER], stream=True))
        first = await anext(stream)
        begin.set()
        assert {chunk.id async for chunk in stream} == {first.id}
        shared = place.sessions.create_open("sk-ours")
        assert shared.claim([first.id]) == shared.steps


async def episode_with(act: Act, **settings: Any) -> Episode:
    """One rollout of a simple agent that a provider which acts like this answers."""

    async def agent(task: Task, config: AgentConfig) -> str:
        return str((await chat(config, [USER])).output)

    async with scripted(act) as upper, proxy(upper.url) as (_, place):
        config = Config(episode_timeout=20.0, retries=0, **settings)
        runner = Runner(place.sessions, place.base_url, rollout(agent), evaluator(lambda task, episode: 1.0), config)
        return await runner.run(Job(Task("t"), validation=True))


async def test_what_becomes_of_a_rollout() -> None:
    """A provider that fails for long costs the episode; a full context ends it as with the local model; a provider
    that refuses every call ends the evaluation, since no other episode would do better."""
    well = await episode_with(says(*HELLO))
    assert (well.reward, well.answer, well.metrics["turns"], well.metrics["drift"]) == (1.0, "Hello", 1.0, 0.0)
    failed = await episode_with(status(500))
    assert (failed.reward, failed.termination_reason) == (None, TerminationReason.ERROR)
    assert "answered HTTP 500: said 500" in failed.reason
    full = await episode_with(status(400, {"error": {"message": "prompt is too long: 900 tokens > 800 maximum"}}))
    assert full.termination_reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    for code in (401, 403, 404):
        with pytest.raises(EngineError, match=f"answered HTTP {code}"):
            await episode_with(status(code))


def test_how_long_a_provider_asks_to_wait() -> None:
    assert retry_after({}) is None
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({"retry-after": "1.5"}) == 1.5
    assert retry_after({"retry-after": "-1"}) == 0.0
    assert retry_after({"retry-after-ms": "250", "retry-after": "9"}) == 0.25
    date = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert 25 < (retry_after({"retry-after": date}) or 0) <= 30
