"""The Messages dialect over a real socket: Anthropic's own client, and conversations that change their dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import anthropic
import pytest

from minirllm.types import SamplingParams
from tests.endpoint import CALL, KEY, Place, serving, until
from tests.endpoint import TOOL as CHAT_TOOL

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
TOOL = {"name": "run", "input_schema": SCHEMA}
ASK = {"model": "tiny", "max_tokens": 256, "messages": [USER]}


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with serving() as place:
        yield place


def base(place: Place) -> str:
    return place.url.removesuffix("/v1")


def client(place: Place, **options) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(**{"base_url": base(place), "api_key": KEY, "max_retries": 0, **options})


# ---- the official client ----


async def test_a_plain_answer(place: Place) -> None:
    async with client(place) as agent:
        answer = await agent.messages.create(**ASK, system="be brief", metadata={"user_id": "u"})
    assert [(block.type, block.text) for block in answer.content] == [("text", "Hello")]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    assert answer.id == f"msg_{place.session.steps[0].id}"
    assert answer.usage.output_tokens == 6
    assert answer.usage.input_tokens == place.session.steps[0].prompt_length
    assert [message.role for message in place.session.steps[0].messages] == ["system", "user"]


async def test_the_bearer_form_of_the_key_and_the_beta_route(place: Place) -> None:
    async with client(place, api_key=None, auth_token=KEY) as agent:
        answer = await agent.beta.messages.create(**ASK, betas=["context-management-2025-06-27"])
    assert answer.content[0].text == "Hello"


async def test_the_sync_client_in_a_thread(place: Place) -> None:
    def ask() -> tuple[str, str]:
        with anthropic.Anthropic(base_url=base(place), api_key=KEY) as agent:
            with agent.messages.stream(**ASK) as stream:
                streamed = "".join(stream.text_stream)
            return agent.messages.create(**ASK).content[0].text, streamed

    assert await asyncio.to_thread(ask) == ("Hello", "Hello")


async def test_the_streaming_helper(place: Place) -> None:
    async with client(place) as agent, agent.messages.stream(**ASK) as stream:
        pieces = [piece async for piece in stream.text_stream]
        final = await stream.get_final_message()
    assert pieces == list("Hello")
    assert (final.content[0].text, final.stop_reason) == ("Hello", "end_turn")
    assert final.id == f"msg_{place.session.steps[0].id}"
    assert (final.usage.input_tokens, final.usage.output_tokens) == (place.session.steps[0].prompt_length, 6)


async def test_the_raw_stream(place: Place) -> None:
    async with client(place) as agent:
        stream = await agent.messages.create(**ASK, stream=True)
        got = [event async for event in stream]
    assert [event.type for event in got] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 5,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_a_round_of_tools(place: Place) -> None:
    place.engine.texts = [f"I run it\n{CALL}", "done"]
    async with client(place) as agent:
        first = await agent.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "auto"})
        said, call = first.content
        assert (said.text, call.name, call.input, first.stop_reason) == ("I run it", "run", {"cmd": "ls"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a.txt", "cache_control": None}
        history = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await agent.messages.create(**{**ASK, "messages": history}, tools=[TOOL])
    assert second.content[0].text == "done"
    assert place.session.counters["extended"] == 1
    assert place.session.counters["branches"] == 0


async def test_a_round_of_tools_in_a_stream_keeps_the_ids(place: Place) -> None:
    place.engine.texts = [f"{CALL}\n{CALL}", "done"]
    async with client(place) as agent:
        async with agent.messages.stream(**ASK, tools=[TOOL]) as stream:
            first = await stream.get_final_message()
        assert [(call.type, call.input) for call in first.content] == [("tool_use", {"cmd": "ls"})] * 2
        assert [call.id for call in first.content] == [c.id for c in place.session.steps[0].response.tool_calls]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "x"} for call in first.content]
        history = [
            USER,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
        ]
        await agent.messages.create(**{**ASK, "messages": history}, tools=[TOOL])
    assert place.session.counters["extended"] == 1
    assert [message.role for message in place.session.steps[1].messages] == ["tool", "tool", "user"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_thinking_goes_out_and_comes_back(place: Place, streamed: bool) -> None:
    place.engine.texts = ["<think>\nhm\n</think>\n\nyes", "done"]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    async with client(place) as agent:
        if streamed:
            async with agent.messages.stream(**ASK, thinking=thinking) as stream:
                first = await stream.get_final_message()
        else:
            first = await agent.messages.create(**ASK, thinking=thinking)
        thought, said = first.content
        assert (thought.type, thought.thinking, said.text) == ("thinking", "hm", "yes")
        assert thought.signature
        history = [USER, {"role": "assistant", "content": first.content}, USER]
        await agent.messages.create(**{**ASK, "messages": history}, thinking=thinking)
    assert place.session.counters["extended"] == 1


async def test_stop_sequences_say_which(place: Place) -> None:
    async with client(place) as agent:
        answer = await agent.messages.create(**ASK, stop_sequences=["xyz", "lo"])
        assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("Hel", "stop_sequence", "lo")
        async with agent.messages.stream(**ASK, stop_sequences=["xyz", "lo"]) as stream:
            final = await stream.get_final_message()
        assert (final.content[0].text, final.stop_reason, final.stop_sequence) == ("Hel", "stop_sequence", "lo")
        short = await agent.messages.create(**{**ASK, "max_tokens": 2})
        assert (short.content[0].text, short.stop_reason) == ("He", "max_tokens")


async def test_counting_leaves_no_trace(place: Place) -> None:
    async with client(place) as agent:
        counted = await agent.messages.count_tokens(model="tiny", messages=[USER], system="be brief", tools=[TOOL])
        assert dict(place.session.counters) == dict.fromkeys(place.session.counters, 0)
        answer = await agent.messages.create(**ASK, system="be brief", tools=[TOOL])
        assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        assert (await agent.beta.messages.count_tokens(model="tiny", messages=[USER])).input_tokens > 0


async def test_a_schema_for_the_answer(place: Place) -> None:
    place.engine.texts = ['{"cmd": "ls"}', "no JSON"]
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    async with client(place) as agent:
        right = await agent.messages.create(**ASK, output_config=form)
        assert not hasattr(right, "format_error")
        assert "not JSON" in (await agent.messages.create(**ASK, output_config=form)).format_error


async def test_token_ids_and_replaced_sampling() -> None:
    async with serving(SamplingParams(temperature=1.0)) as place, client(place) as agent:
        answer = await agent.messages.create(**ASK, extra_body={"return_token_ids": True, "temperature": 0})
        assert answer.overridden == {"temperature": 1.0}
        assert answer.token_ids[:5] == [*b"Hello"]
        assert [entry["logprob"] for entry in answer.logprobs["content"]] == [-0.25] * 6
        assert answer.prompt_token_ids + answer.token_ids == place.session.tree.ids(place.session.steps[0].node)


async def test_a_limit_above_the_window_is_capped_and_not_refused(place: Place) -> None:
    async with client(place) as agent:
        assert (await agent.messages.create(**{**ASK, "max_tokens": 2_000_000}, timeout=20)).content[0].text == "Hello"


async def test_the_models_of_the_endpoint(place: Place) -> None:
    async with client(place) as agent:
        assert [model.id async for model in agent.models.list()] == ["tiny"]


# ---- errors ----


async def test_errors_arrive_as_the_clients_exceptions(place: Place) -> None:
    async with client(place) as agent:
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type 'image'") as wrong:
            await agent.messages.create(**{**ASK, "messages": [{"role": "user", "content": [image]}]})
        assert wrong.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
            await agent.messages.create(**{**ASK, "messages": [{"role": "user", "content": "word " * 4000}]})
        place.session.max_calls = 0
        with pytest.raises(anthropic.PermissionDeniedError) as used_up:
            await agent.messages.create(**ASK)
        assert used_up.value.body["error"]["type"] == "permission_error"
    async with client(place, api_key="wrong") as agent:
        with pytest.raises(anthropic.AuthenticationError) as locked:
            await agent.messages.create(**ASK)
        assert locked.value.body["error"]["type"] == "authentication_error"
    async with client(place, base_url=f"{place.base}/sessions/nobody") as agent:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await agent.messages.count_tokens(model="tiny", messages=[USER])
        assert unknown.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens", "messages?beta=true"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"messages": 5}', b"\xff", b'{"messages": [{"role": "user"}, 1]}']
)
async def test_a_malformed_body_is_refused_in_this_dialect(place: Place, path, body) -> None:
    answer = await place.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()
    assert set(error) == {"type", "error", "request_id"}
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


async def test_an_error_after_the_start_ends_the_stream_with_an_error_event(place: Place) -> None:
    place.engine.pause = 0.02
    async with client(place) as agent:
        stream = await agent.messages.create(**ASK, stream=True)
        first = await anext(stream)
        assert first.type == "message_start"
        place.session.close()
        with pytest.raises(anthropic.APIStatusError) as caught:
            _ = [event async for event in stream]
    assert caught.value.body["type"] == "error"
    assert "closed" in caught.value.body["error"]["message"]


async def test_a_silent_stream_gets_pings() -> None:
    async with serving(keep_alive=0.02) as place:
        place.engine.gate.clear()
        call = asyncio.create_task(place.post("messages", {**ASK, "stream": True}))
        await until(lambda: place.engine.calls)
        await asyncio.sleep(0.1)
        place.engine.gate.set()
        frames = [frame for frame in (await call).text.split("\n\n") if frame]
    assert frames.count('event: ping\ndata: {"type": "ping"}') >= 2  # one opens every stream
    assert frames[0].startswith("event: message_start\n")
    assert frames[-1] == 'event: message_stop\ndata: {"type": "message_stop"}'


async def test_a_call_held_back_pings_too_and_is_sent_once() -> None:
    async with serving(keep_alive=0.02) as place:
        place.engine.texts, place.engine.pause = [CALL], 0.005
        answer = await place.post("messages", {**ASK, "stream": True, "tools": [TOOL]})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["tool_use"]
    assert [e["type"] for e in events].count("ping") >= 2
    sent = "".join(e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta")
    assert json.loads(sent) == {"cmd": "ls"}


# ---- one conversation in two dialects ----


async def test_a_conversation_begun_in_chat_goes_on_in_messages(place: Place) -> None:
    place.engine.texts = [f"I run it\n{CALL}", "done"]
    system = {"role": "system", "content": "be brief"}
    async with place.client() as chat, client(place) as agent:
        first = await chat.chat.completions.create(model="m", messages=[system, USER], tools=[CHAT_TOOL])
        call = first.choices[0].message.tool_calls[0]
        use = {"type": "tool_use", "id": call.id, "name": "run", "input": json.loads(call.function.arguments)}
        history = [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [{"type": "text", "text": "I run it"}, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "a.txt"}]},
        ]
        await agent.messages.create(**{**ASK, "messages": history}, system="be brief", tools=[TOOL])
    one_path(place)


async def test_a_conversation_begun_in_messages_goes_on_in_chat(place: Place) -> None:
    place.engine.texts = [f"<think>\nhm\n</think>\n\nI run it\n{CALL}", "done"]
    async with place.client() as chat, client(place) as agent:
        async with agent.messages.stream(**ASK, system=[{"type": "text", "text": "be brief"}], tools=[TOOL]) as stream:
            thought, said, call = (await stream.get_final_message()).content
        function = {"name": "run", "arguments": json.dumps(call.input, separators=(",", ":"))}
        history = [
            {"role": "system", "content": "be brief"},
            USER,
            {
                "role": "assistant",
                "content": said.text,
                "reasoning_content": thought.thinking,
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "a.txt"},
        ]
        await chat.chat.completions.create(model="m", messages=history, tools=[CHAT_TOOL])
    one_path(place)


def one_path(place: Place) -> None:
    """Both calls lie on one path of the token tree: what was sampled first is read, to the letter, by the second."""
    counters = place.session.counters
    assert (counters["calls"], counters["conversations"], counters["extended"]) == (2, 1, 1)
    assert (counters["branches"], counters["edited"]) == (0, 0)
    first, second = place.session.steps
    assert second.parent == first.id
    so_far = place.session.tree.ids(first.node)
    assert place.session.tree.ids(second.node)[: len(so_far)] == so_far
