"""The Gemini dialect over a real socket, and a conversation that began in chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.endpoint import CALL, KEY, Place, serving, until
from tests.endpoint import TOOL as CHAT_TOOL

USER = {"role": "user", "parts": [{"text": "hi"}]}
TOOLS = [{"functionDeclarations": [{"name": "run", "parametersJsonSchema": CHAT_TOOL["function"]["parameters"]}]}]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with serving() as place:
        yield place


def url(place: Place, verb: str, version: str = "v1beta") -> str:
    return f"{place.url.removesuffix('/v1')}/{version}/models/tiny:{verb}"


async def ask(place: Place, verb: str = "generateContent", key: str = KEY, **fields) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        return await client.post(url(place, verb), json={"contents": [USER], **fields}, headers={"x-goog-api-key": key})


def chunks(answer: httpx.Response) -> list[dict]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(frame.removeprefix("data: ")) for frame in answer.text.split("\n\n") if frame]


async def test_a_plain_answer(place: Place) -> None:
    body = (await ask(place, systemInstruction={"parts": [{"text": "be brief"}]})).json()
    assert body["candidates"][0]["content"] == {"parts": [{"text": "Hello"}], "role": "model"}
    assert body["responseId"] == place.session.steps[0].id
    assert body["usageMetadata"]["promptTokenCount"] == place.session.steps[0].prompt_length
    assert [message.role for message in place.session.steps[0].messages] == ["system", "user"]


async def test_a_stream(place: Place) -> None:
    got = chunks(await ask(place, "streamGenerateContent?alt=sse"))
    texts = [part["text"] for chunk in got for part in chunk["candidates"][0]["content"]["parts"]]
    assert "".join(texts) == "Hello"
    assert got[-1]["candidates"][0]["finishReason"] == "STOP"
    assert got[-1]["usageMetadata"]["candidatesTokenCount"] == 6


async def test_counting_leaves_no_trace(place: Place) -> None:
    counted = (await ask(place, "countTokens", generateContentRequest={"contents": [USER], "tools": TOOLS})).json()
    assert dict(place.session.counters) == dict.fromkeys(place.session.counters, 0)
    answer = (await ask(place, tools=TOOLS)).json()
    assert counted["totalTokens"] == answer["usageMetadata"]["promptTokenCount"]


@pytest.mark.parametrize("verb", ["generateContent", "streamGenerateContent?alt=sse"])
async def test_a_round_of_tools(place: Place, verb: str) -> None:
    place.engine.texts = [f"I run it\n{CALL}", "done"]
    answer = await ask(place, verb, tools=TOOLS)
    got = chunks(answer) if "stream" in verb else [answer.json()]
    said = [{"role": "model", "parts": chunk["candidates"][0]["content"]["parts"]} for chunk in got]
    calls = [part["functionCall"] for content in said for part in content["parts"] if "functionCall" in part]
    assert [(call["name"], call["args"]) for call in calls] == [("run", {"cmd": "ls"})]
    result = {"functionResponse": {"id": calls[0]["id"], "name": "run", "response": {"output": "a.txt"}}}
    history = [USER, *said, {"role": "user", "parts": [result]}]
    assert (await ask(place, verb, contents=history, tools=TOOLS)).status_code == 200
    counters = place.session.counters
    assert (counters["conversations"], counters["extended"], counters["branches"]) == (1, 1, 0)


async def test_a_conversation_begun_in_chat_goes_on_here_and_back(place: Place) -> None:
    place.engine.texts = [f"I run it\n{CALL}", "done", "bye"]
    first = {"role": "user", "content": "hi"}
    answer = (await place.post(body={"messages": [first], "tools": [CHAT_TOOL]})).json()["choices"][0]["message"]
    (call,) = answer["tool_calls"]
    args = json.loads(call["function"]["arguments"])
    said = {"role": "model", "parts": [{"text": "I run it"}, {"functionCall": {"name": "run", "args": args}}]}
    result = {"functionResponse": {"name": "run", "response": {"output": "a.txt"}}}
    history = [USER, said, {"role": "user", "parts": [result]}]
    assert (await ask(place, contents=history, tools=TOOLS)).status_code == 200
    results = {"role": "tool", "tool_call_id": call["id"], "content": "a.txt"}
    chat = [first, answer, results, {"role": "assistant", "content": "done"}, first]
    assert (await place.post(body={"messages": chat, "tools": [CHAT_TOOL]})).status_code == 200
    counters = place.session.counters
    assert (counters["conversations"], counters["extended"], counters["branches"]) == (1, 2, 0)
    assert [step.parent for step in place.session.steps[1:]] == [step.id for step in place.session.steps[:-1]]


async def test_errors_have_googles_shape_on_every_route(place: Place) -> None:
    for verb in ("generateContent", "streamGenerateContent?alt=sse", "countTokens"):
        locked = await ask(place, verb, key="wrong")
        assert (locked.status_code, locked.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
        wrong = await ask(place, verb, contents=[{"parts": [{"inlineData": {"data": ""}}]}])
        assert (wrong.status_code, wrong.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
        assert "text only" in wrong.json()["error"]["message"]
    long = await ask(place, contents=[{"parts": [{"text": "word " * 4000}]}])
    assert long.status_code == 400
    assert "exceeds the maximum number of tokens allowed (4096)" in long.json()["error"]["message"]


@pytest.mark.parametrize("verb", ["generateContent", "streamGenerateContent", "countTokens"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"contents": 5}', b"\xff", b'{"contents": [{"parts": [1]}]}'])
async def test_a_malformed_body_is_refused_in_this_dialect(place: Place, verb, body) -> None:
    headers = {"x-goog-api-key": KEY, "content-type": "application/json"}
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        answer = await client.post(url(place, verb, "v1"), content=body, headers=headers)  # newer clients say v1
    assert (answer.status_code, answer.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")


async def test_an_error_after_the_start_is_bare_json(place: Place) -> None:
    place.engine.gate.clear()
    call = asyncio.create_task(ask(place, "streamGenerateContent?alt=sse"))
    await until(lambda: place.engine.calls)
    place.session.close()
    *events, bare = (await call).text.strip().split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert json.loads(bare)["error"]["code"] == 410


async def test_a_silent_stream_gets_chunks_that_carry_nothing() -> None:
    async with serving(keep_alive=0.02) as place:
        place.engine.gate.clear()
        call = asyncio.create_task(ask(place, "streamGenerateContent?alt=sse"))
        await until(lambda: place.engine.calls)
        await asyncio.sleep(0.1)
        place.engine.gate.set()
        got = chunks(await call)
    empty = [chunk for chunk in got if chunk["candidates"][0]["content"]["parts"] == [{"text": ""}]]
    assert len(empty) >= 3  # the first, the last, and one at least in between
