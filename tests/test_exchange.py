"""One call over one connection: hostile bodies, keep-alive events, clients that leave, answers given again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import openai
import pytest

from minirllm.errors import EngineError
from minirllm.server import build_app
from tests.endpoint import CALL, KEY, TOOL, USER, Place, error_of, raw, serving, until


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with serving() as place:
        yield place


# ---- hostile input ----


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "The body is empty"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"messages": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"messages": "\xff\xfe"}', "not valid UTF-8 (byte 14)"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"temperature": -1e999}', "-1e999 is too large a number"),
        (f'{{"messages": {deep(100)}}}'.encode(), "nested more than 64"),
        (f'{{"messages": {deep(100_000)}}}'.encode(), "nested more than 64"),
        (b'{"a":' * 100_000, "nested more than 64"),
    ],
    ids=range(12),
)
async def test_a_bad_body_is_a_400_that_says_why(place: Place, content, said) -> None:
    answer = await place.post(content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert said in error_of(answer)["message"]


async def test_only_plain_json_is_accepted(place: Place) -> None:
    for headers in ({"Content-Type": "text/plain"}, {"Content-Type": "application/json", "Content-Encoding": "gzip"}):
        assert (answer := await place.post(content=b"{}", headers=headers)).status_code == 415
        assert error_of(answer)["message"].startswith("Send ")
    body = json.dumps({"messages": [USER]}).encode()
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json", "APPLICATION/JSON"):
        assert (await place.post(content=body, headers={"Content-Type": kind})).status_code == 200


async def test_half_a_surrogate_pair_is_replaced_not_fatal(place: Place) -> None:
    body = b'{"messages": [{"role": "user", "content": "cut \\ud83d"}]}'
    assert (await place.post(content=body, headers={"Content-Type": "application/json"})).status_code == 200
    assert place.session.steps[0].messages[-1].content == "cut \ufffd"


async def test_a_wrong_field_is_named(place: Place) -> None:
    answer = await place.post(body={"messages": [USER], "max_tokens": -1})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "max_tokens")


async def test_context_overflow_has_the_exact_body_also_for_streams(place: Place) -> None:
    place.engine.max_context = 30
    for stream in (False, True):
        answer = await place.post(body={"messages": [{"role": "user", "content": "x" * 50}], "stream": stream})
        assert answer.status_code == 400
        got = error_of(answer)["message"].split("resulted in ")[1].split(" ")[0]
        assert answer.json()["error"] == {
            "message": "This model's maximum context length is 30 tokens. However, your messages resulted in "
            f"{got} tokens. Please reduce the length of the messages.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }


async def test_a_50_mb_body_is_refused_before_it_is_read(place: Place) -> None:
    answer = await place.post(content=b" " * 50_000_000, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "16777216" in error_of(answer)["message"]
    reader, writer = await raw(place, "content-length: 50000000", b'{"messages"')  # and no more
    assert b" 413 " in await reader.readline()
    writer.close()


async def test_an_endless_chunked_body_is_cut_off() -> None:
    async with serving(max_body=1000) as place:

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(30):
                yield b"x" * 100

        answer = await place.post(content=endless(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413


async def test_engine_trouble_hides_internals(place: Place, caplog) -> None:
    place.engine.fault = KeyError("internal detail")
    answer = await place.post(body={"messages": [USER]})
    assert (answer.status_code, error_of(answer)["type"]) == (500, "server_error")
    assert "detail" not in answer.text
    assert "internal detail" in caplog.text
    caplog.clear()
    place.engine.fault = EngineError("device failed")
    assert (await place.post(body={"messages": [USER]})).status_code == 503
    place.engine.fault.__cause__ = RuntimeError("out of memory")
    assert (await place.post(body={"messages": [USER]})).status_code == 503
    first, second = caplog.records
    assert ("device failed" in first.getMessage(), first.exc_info) == (True, None)
    assert second.exc_info is not None  # where the cause is known, it is shown


# ---- slow generation, vanishing clients ----


async def test_events_flow_while_the_engine_is_silent() -> None:
    async with serving(keep_alive=0.02) as place, place.client() as client:
        place.engine.gate.clear()
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        chunks = [await anext(stream) for _ in range(5)]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert all(c.choices[0].delta.content is None for c in chunks[1:])  # real events that carry nothing
        assert place.engine.calls == 1
        place.engine.gate.set()
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "Hello"


async def test_events_flow_while_a_tool_call_is_sampled() -> None:
    async with serving(keep_alive=0.02) as place, place.client() as client:
        place.engine.pause, place.engine.texts = 0.005, [CALL]
        stream = await client.chat.completions.create(model="m", messages=[USER], tools=[TOOL], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert sum(delta.content is None and not delta.tool_calls for delta in deltas) > 4
    calls = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert [call.function.name for call in calls if call.id] == ["run"]
    assert len(calls) > 4
    assert "".join(call.function.arguments for call in calls) in CALL


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_generation(place: Place, stream) -> None:
    place.engine.pause = 0.01
    place.engine.texts = ["a" * 200]
    reader, writer = await raw(place, stream=stream)
    if stream:
        while b'"content": "a"' not in await reader.readline():
            pass
    await until(lambda: place.engine.calls)
    writer.close()
    await place.engine.ended.wait()
    assert place.engine.cancelled == 1
    await until(lambda: place.session.counters["aborted"])
    assert place.session.steps == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_never_arrived_is_given_again(place: Place, stream) -> None:
    place.engine.texts = ["first", "other"]
    body = {"messages": [USER], "stream": stream}
    broken = asyncio.Event()

    async def receive() -> dict:
        if not received:
            received.append(True)
            return {"type": "http.request", "body": json.dumps(body).encode()}
        await broken.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        if place.session.steps and message["type"] == "http.response.body":
            broken.set()  # the connection breaks while the answer is on its way
            await asyncio.sleep(0.01)

    received: list[bool] = []
    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    path = "/sessions/task:0/1/v1/chat/completions"
    await build_app(place.server.endpoint)(
        {"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send
    )
    assert len(place.session.steps) == 1
    again = (await place.post(body={"messages": [USER]})).json()
    assert again["id"] == f"chatcmpl-{place.session.steps[0].id}"
    assert (len(place.session.steps), place.session.counters["replayed"], place.engine.calls) == (1, 1, 1)
    fresh = (await place.post(body={"messages": [USER]})).json()  # delivered now: asking again is a new sample
    assert fresh["choices"][0]["message"]["content"] == "other"
    assert len(place.session.steps) == 2


async def test_equal_calls_at_the_same_time_are_samples_of_their_own(place: Place) -> None:
    place.engine.gate.clear()
    calls = [asyncio.create_task(place.post(body={"messages": [USER]})) for _ in range(2)]
    await until(lambda: place.engine.calls == 2)
    place.engine.gate.set()
    one, two = [(await call).json()["id"] for call in calls]
    assert one != two
    assert len(place.session.steps) == 2


async def test_an_error_after_the_stream_began_is_an_event() -> None:
    async with serving(keep_alive=0.02) as place, place.client() as client:
        place.engine.gate.clear()
        place.engine.fault = EngineError("device failed")
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        await anext(stream)
        place.engine.gate.set()
        with pytest.raises(openai.APIError, match="engine cannot serve"):
            async for _ in stream:
                pass


async def test_closing_a_session_ends_its_calls_with_410(place: Place) -> None:
    place.engine.gate.clear()
    call = asyncio.create_task(place.post(body={"messages": [USER]}))
    await until(lambda: place.engine.calls)
    place.sessions.close(place.session.id)
    assert (await call).status_code == 410
