"""A provider answers: official clients, through our endpoint, to real servers that refuse, hang, lie and die."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path

import openai
import pytest

from minirllm.types import Message
from tests import endpoint
from tests.endpoint import until
from tests.upstream import HELLO, SECRET, USAGE, USER, call, die, hang, piece, proxy, says, scripted, status

TOOL = endpoint.TOOL


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short pauses, and a home of its own."""
    monkeypatch.setattr("minirllm.providers.upstream.FIRST_WAIT", 0.01)
    monkeypatch.setenv("HOME", str(tmp_path))


async def ask(client: openai.AsyncOpenAI, **fields):
    return await client.chat.completions.create(model="any", messages=fields.pop("messages", [USER]), **fields)


# ---- through another of our endpoints ----


async def test_both_ends_are_real_and_a_conversation_goes_on() -> None:
    async with endpoint.serving() as upper, proxy(upper.url, endpoint.KEY) as (client, place):
        upper.engine.texts = ["Hello", endpoint.CALL, "Done"]
        first = await ask(client)
        assert first.choices[0].message.content == "Hello"
        assert first.usage.prompt_tokens == len(upper.session.tree.prompt_ids(upper.session.steps[0].node))
        assert first.usage.completion_tokens == upper.session.steps[0].response_length
        history = [USER, first.choices[0].message.model_dump(exclude_none=True), USER]
        second = await ask(client, messages=history, tools=[TOOL])
        (tool_call,) = second.choices[0].message.tool_calls
        assert (tool_call.function.name, json.loads(tool_call.function.arguments)) == ("run", {"cmd": "ls"})
        assert second.choices[0].finish_reason == "tool_calls"
        history += [second.choices[0].message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": tool_call.id, "content": "a.txt"}]
        third = await ask(client, messages=history, tools=[TOOL])
        assert third.choices[0].message.content == "Done"
        shared = place.sessions.create_open("sk-ours")
        assert [step.parent for step in shared.steps] == [None, None, shared.steps[1].id]  # other tools: not continued
        assert shared.steps[2].messages == [Message("tool", "a.txt", tool_call_id=tool_call.id)]
        assert shared.tree.num_sampled == 0
        assert upper.session.counters["extended"] == 1  # ids, arguments and texts went through unchanged


async def test_streaming_is_real() -> None:
    """The first piece is there while the provider is still busy with the next one."""
    async with endpoint.serving() as upper, proxy(upper.url, endpoint.KEY) as (client, _):
        upper.engine.texts, upper.engine.pause = ["Hello world"], 0.01
        stream = await ask(client, stream=True, stream_options={"include_usage": True})
        seen = [chunk async for chunk in stream]
        texts = [chunk.choices[0].delta.content for chunk in seen if chunk.choices and chunk.choices[0].delta.content]
        assert "".join(texts) == "Hello world"
        assert len(texts) > 3
        assert seen[-1].usage.completion_tokens == upper.session.steps[0].response_length
        assert {chunk.id for chunk in seen} == {seen[0].id}


async def test_a_streamed_tool_call_comes_in_pieces() -> None:
    pieces = (
        call(0, "", id="a1", name="run"),
        call(0, '{"cm'),
        call(0, 'd": "ls"}'),
        call(1, "{}", id="a2", name="run"),
    )
    async with scripted(says(*pieces, piece("tool_calls"), USAGE)) as upper, proxy(upper.url) as (client, _):
        async with client.chat.completions.stream(model="m", messages=[USER], tools=[TOOL]) as stream:
            events = [event async for event in stream]
            message = (await stream.get_final_completion()).choices[0].message
        got = [(one.id, one.function.name, one.function.arguments) for one in message.tool_calls]
        assert got == [("a1", "run", '{"cmd": "ls"}'), ("a2", "run", "{}")]
        assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) >= 3
        assert upper.asked[0]["tools"] == [TOOL]


async def test_a_client_that_leaves_ends_the_providers_call() -> None:
    async with scripted(says(piece(content="He"), end="", then=hang)) as upper, proxy(upper.url) as (client, place):
        stream = await ask(client, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await until(lambda: upper.gone == 1)
        assert place.sessions.create_open("sk-ours").counters["aborted"] == 1


# ---- what goes out ----


async def test_what_the_provider_is_sent() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"cmd":"ls"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt", "name": "run"},
    ]  # fmt: skip
    async with scripted(says(*HELLO)) as upper, proxy(upper.url) as (client, _):
        options = {"temperature": 0.5, "top_p": 0.9, "stop": ["x"], "max_completion_tokens": 9, "seed": 5}
        await ask(client, messages=messages, tools=[TOOL], tool_choice="required", response_format=form, **options)
        await ask(client)
        body, plain = upper.asked
        assert upper.headers[0]["path"] == "/v1/chat/completions"
        assert upper.headers[0]["authorization"] == f"Bearer {SECRET}"
        assert body["messages"] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": messages[2]["tool_calls"]},
            {"role": "tool", "content": "a.txt", "tool_call_id": "c1"},
        ]
        assert {name: body[name] for name in ("temperature", "top_p", "stop", "max_tokens", "seed")} == {
            "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "max_tokens": 9, "seed": 5}  # fmt: skip
        assert (body["model"], body["tool_choice"], body["stream"]) == ("m", "required", True)
        assert body["response_format"]["json_schema"] == {"name": "answer", "schema": schema, "strict": True}
        assert set(plain) == {"model", "messages", "stream", "stream_options", "seed"}  # nothing that nobody asked for


async def test_n_answers_are_n_calls_with_seeds_of_their_own() -> None:
    async with scripted(says(*HELLO)) as upper, proxy(upper.url) as (client, place):
        reply = await ask(client, n=3, seed=5)
        assert [choice.message.content for choice in reply.choices] == ["Hello"] * 3
        assert sorted(body["seed"] for body in upper.asked) == [5, 6, 7]
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (11, 21)
        steps = place.sessions.create_open("sk-ours").steps
        assert [(step.prompt_length, step.response_length) for step in steps] == [(11, 7)] * 3
        said = {"match": "conversation", "provider": upper.url[7:-3], "model": "m-1", "finish_reason": "stop"}
        assert steps[0].metadata == said
        assert place.sessions.create_open("sk-ours").claim([reply.id, f"{reply.id}-2"]) == [steps[0], steps[2]]


@pytest.mark.parametrize("field", [{"logprobs": True}, {"extra_body": {"return_token_ids": True}}])
async def test_what_only_the_local_model_knows_is_refused(field: dict) -> None:
    async with scripted(says(*HELLO)) as upper, proxy(upper.url) as (client, _):
        with pytest.raises(openai.BadRequestError, match="whose tokens are not known here"):
            await ask(client, **field)
        with pytest.raises(openai.BadRequestError, match="answers chats only"):
            await client.completions.create(model="m", prompt="x")
        assert upper.asked == []


# ---- what comes back broken ----


async def test_busy_then_well() -> None:
    acts = (status(429, retry_after="0.05"), status(503), status(529), says(*HELLO))
    async with scripted(*acts) as upper, proxy(upper.url) as (client, _):
        began = time.monotonic()
        assert (await ask(client)).choices[0].message.content == "Hello"
        assert time.monotonic() - began >= 0.05  # the pause it asked for
        assert len(upper.asked) == 4
        assert upper.asked[0] == upper.asked[3]


@pytest.mark.parametrize(("code", "kind"), [(429, 503), (500, 502), (503, 502)])
async def test_for_ever_busy(code: int, kind: int) -> None:
    async with scripted(status(code)) as upper, proxy(upper.url) as (client, _):
        with pytest.raises(openai.APIStatusError, match=f"answered HTTP {code}: said {code}") as caught:
            await ask(client)
        assert (caught.value.status_code, len(upper.asked)) == (kind, 6)


async def test_a_pause_too_long_is_not_waited_for() -> None:
    async with scripted(status(429, retry_after="3600")) as upper, proxy(upper.url) as (client, _):
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client)
        assert (caught.value.status_code, len(upper.asked)) == (503, 1)


async def test_nobody_there() -> None:
    async with scripted() as upper:
        url = upper.url
    async with proxy(url) as (client, _):
        with pytest.raises(openai.APIStatusError, match="could not be reached") as caught:
            await ask(client)
        assert caught.value.status_code == 502


async def test_silence_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minirllm.providers.upstream.SILENCE", 0.3)
    async with scripted(hang, says(piece(content="He"), end="", then=hang)) as upper, proxy(upper.url) as (client, _):
        with pytest.raises(openai.APIStatusError, match=r"sent nothing for 0\.3 s") as caught:
            await ask(client)
        assert (caught.value.status_code, len(upper.asked)) == (504, 1)  # it may have cost something: not again
        with pytest.raises(openai.APIError, match="sent nothing"):
            _ = [chunk async for chunk in await ask(client, stream=True)]


@pytest.mark.parametrize(
    "broken",
    [
        says(piece(content="He"), end="", then=die),
        says(piece(content="He"), end=""),
        says(piece(content="He"), "{nonsense"),
        says(piece(content="He"), {"error": {"message": "overloaded", "code": 529}}),
        says(piece(content=3)),
        says("[1]"),
    ],
    ids=["reset", "closed", "no JSON", "error event", "no text", "no object"],
)
async def test_an_answer_that_breaks(broken) -> None:
    """Asked for again where nobody has heard the half of it; told where somebody has."""
    async with scripted(broken, says(*HELLO), broken) as upper, proxy(upper.url) as (client, _):
        assert (await ask(client)).choices[0].message.content == "Hello"
        assert len(upper.asked) == 2
        heard: list[str] = []

        async def listen() -> None:
            async for chunk in await ask(client, stream=True):
                heard.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError):
            await listen()
        assert "".join(heard) in ("", "He")
        assert len(upper.asked) in (3, 8)  # 8: nothing was heard of any attempt


@pytest.mark.parametrize("arguments", ['{"cmd": ', '{"cmd": NaN}', '["ls"]'])
async def test_broken_arguments_of_a_tool_are_text(arguments: str) -> None:
    pieces = (piece(content="Ok "), call(0, arguments, id="a", name="run"))
    async with scripted(says(*pieces, piece("stop"))) as upper, proxy(upper.url) as (client, place):
        reply = await ask(client, tools=[TOOL])
        message = reply.choices[0].message
        assert (message.tool_calls, reply.choices[0].finish_reason) == (None, "stop")
        assert message.content == "Ok " + json.dumps({"name": "run", "arguments": arguments})
        assert place.sessions.create_open("sk-ours").counters["malformed_tool_calls"] == 1


async def test_calls_without_index_id_or_arguments() -> None:
    pieces = (call(None, "", name="run"), call(None, "", id="", name="run"), call(None, '{"cmd": "x"}'))
    async with scripted(says(*pieces, piece("stop"))) as upper, proxy(upper.url) as (client, _):
        reply = await ask(client, tools=[TOOL])
        calls = reply.choices[0].message.tool_calls
        assert [one.function.arguments for one in calls] == ["{}", '{"cmd": "x"}']
        assert len({one.id for one in calls}) == 2
        assert reply.choices[0].finish_reason == "tool_calls"


async def test_plain_json_in_place_of_events_and_reasoning_and_strange_letters() -> None:
    message = {"role": "assistant", "content": "a\u2028b", "reasoning": "hm"}
    whole = {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "length"}], "usage": None}
    odd = json.dumps(piece(content="a\u2028b\u0085"), ensure_ascii=False)
    async with scripted(status(200, whole), says(odd, piece("stop"))) as upper, proxy(upper.url) as (client, _):
        reply = await ask(client)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("a\u2028b", "length")
        assert reply.choices[0].message.reasoning_content == "hm"
        assert (await ask(client)).choices[0].message.content == "a\u2028b\u0085"


# ---- refusals ----

OVERFLOWS = {
    "openai": ("maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens.", 8192, 9001),
    "vllm": ("maximum context length is 2048 tokens. However, you requested 3000 tokens (2500 in the messages, 500 in "
             "the completion).", 2048, 3000),
    "anthropic": ("prompt is too long: 210,000 tokens > 200,000 maximum", 200000, 210000),
    "unknown": ("the request exceeds the context window", None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERFLOWS)
async def test_a_full_context_is_recognised(name: str) -> None:
    said, limit, got = OVERFLOWS[name]
    body = {"error": {"message": said, "type": "invalid_request_error"}}
    async with scripted(status(400, body)) as upper, proxy(upper.url) as (client, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, stream=True)
        assert caught.value.code == "context_length_exceeded"
        words = f"maximum context length is {limit} tokens. However, your messages resulted in {got} tokens"
        assert (words if limit else said) in str(caught.value)
        assert len(upper.asked) == 1


@pytest.mark.parametrize(
    ("code", "body", "seen", "words"),
    [
        (400, {"error": {"message": "no such field"}}, 400, "no such field"),
        (400, "<html>\n<b>Bad</b>", 400, "<html> <b>Bad</b>"),
        (422, [{"error": {"message": "listed"}}], 422, "listed"),
        (401, {"error": {"message": "Incorrect API key provided: KEY"}}, 401, "Its key is wrong"),
        (402, {"error": "pay"}, 402, "no credit left"),
        (429, {"error": {"message": "x", "code": "insufficient_quota"}}, 402, "no credit left"),
        (404, {"error": {"message": "model m does not exist"}}, 404, "Look at the model's name"),
        (307, {}, 502, "answered HTTP 307"),
    ],
)
async def test_a_refusal_is_told_as_it_is_and_not_asked_again(code: int, body, seen: int, words: str) -> None:
    body = json.loads(json.dumps(body).replace("KEY", SECRET))
    async with scripted(status(code, body, location="http://127.0.0.1:9/")) as upper, proxy(upper.url) as (client, _):
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client)
        assert (caught.value.status_code, len(upper.asked)) == (seen, 1)
        assert words in str(caught.value)
        assert SECRET not in str(caught.value)


async def test_a_wrong_key_of_ours_never_reaches_the_provider() -> None:
    async with scripted(says(*HELLO)) as upper, proxy(upper.url) as (client, _):
        with pytest.raises(openai.AuthenticationError, match="key that came with this base URL"):
            await ask(client.with_options(api_key=SECRET))
        assert upper.asked == []


async def test_nothing_says_the_key(caplog: pytest.LogCaptureFixture) -> None:
    """Logs at their most talkative, whatever goes wrong; what a provider repeats of it, too."""
    caplog.set_level(logging.DEBUG)
    echo = {"error": {"message": f"header Authorization: Bearer {SECRET}"}}
    acts = [status(code, echo) for code in (503, 401, 400, 404)] + [says({"error": {"message": SECRET}}), says(*HELLO)]
    async with scripted(*acts) as upper, proxy(upper.url) as (client, place):
        said = []
        for _ in range(4):
            try:
                said.append(repr(await ask(client)))
            except openai.APIStatusError as error:
                said.append(repr(error) + json.dumps(error.body))
        sessions = list(place.sessions), place.sessions.create_open("sk-ours")
        assert "Hello" in said[-1]
        assert len(caplog.records) > 5
        assert SECRET not in caplog.text + "".join(said) + repr(sessions) + repr(place) + repr(sessions[1].upstream)
        assert all(SECRET in str(headers) for headers in upper.headers)


async def test_closing_a_session_ends_its_calls() -> None:
    async with scripted(hang) as upper, proxy(upper.url) as (client, place):
        session = place.sessions.create("s", key="k")
        ours = client.with_options(base_url=f"{place.base_url}/sessions/s/v1", api_key="k")
        waits = asyncio.create_task(ask(ours))
        await until(lambda: upper.asked)
        assert "1 call(s) of" in session.waiting()
        place.sessions.close("s")
        with pytest.raises(openai.APIStatusError) as caught:
            await waits
        assert caught.value.status_code == 410
        await until(lambda: upper.gone == 1)
        assert session.counters["aborted"] == 1
