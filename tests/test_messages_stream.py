"""Streams of the Messages dialect: whole sequences of named events, whatever pieces the answer comes in."""

from __future__ import annotations

import json

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from minirllm.dialects import messages
from minirllm.errors import RequestError
from minirllm.types import CallDelta, Choice, Completion, Delta, Message, ModelReply, SampledToken, ToolCall
from tests.bodies import text_of

USER = {"role": "user", "content": "hi"}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
CALLS = (ToolCall("call_0", "run", '{"cmd": "ls"}'), ToolCall("call_1", "run", "{}"))


def stream(**fields) -> messages.Stream:
    return messages.Stream(messages.parse({"messages": [USER], "stream": True, **fields}), text_of, "tiny")


def reply(message: Message, finish="stop", stop="", **fields) -> ModelReply:
    completion = Completion([1, 2, 9], [-0.5, -1.0, -1.5], "stop", 0, cached_tokens=1)
    return ModelReply(
        "chatcmpl-c0", "tiny", 0, [5, 6, 7], [Choice(0, "c0", message, completion, finish, stop)], **fields
    )


def events(frames: list[str]) -> list[dict]:
    """The events, each named by its type in the line before it, as Anthropic's clients need it."""
    parsed = []
    for frame in frames:
        name, data, *rest = frame.split("\n")
        assert rest == ["", ""]
        event = json.loads(data.removeprefix("data: "))
        assert (name, data[:6]) == (f"event: {event['type']}", "data: ")
        parsed.append(event)
    return parsed


def run(answer: ModelReply, *deltas: Delta, **fields) -> list[dict]:
    """All events of an answer that came in these pieces."""
    one = stream(**fields)
    one.accepted(answer.id, answer.prompt_ids)
    frames = one.start()
    for delta in deltas:
        frames += one.delta(delta)
    return events([*frames, *one.finish(answer)])


def types(events: list[dict]) -> list[str]:
    return [event["type"] for event in events]


def accumulated(events: list[dict]):
    """The message that the official client makes of them; every event has the official shape."""
    snapshot, buffers = None, {}
    for event in events:
        if event["type"] != "ping":
            parsed = EVENT.validate_python(event)
            snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot


def test_the_whole_sequence_of_a_plain_answer() -> None:
    got = run(reply(Message("assistant", "Hello")), Delta(0, "He"), Delta(0, "llo"))
    assert types(got) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert got[0]["message"] == {
        "id": "msg_c0",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "input_tokens": 3, "output_tokens": 0},
    }
    assert got[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert got[3] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "He"}}
    assert got[5] == {"type": "content_block_stop", "index": 0}
    assert got[6] == {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {**usage, "input_tokens": 2, "cache_read_input_tokens": 1, "output_tokens": 3},
    }


def test_thinking_text_and_calls_follow_one_another_each_block_ended() -> None:
    message = Message("assistant", "so", CALLS, reasoning="hm")
    pieces = [Delta(0, reasoning="h"), Delta(0, reasoning="m"), Delta(0, "so")]
    got = run(reply(message, "tool_calls"), *pieces, Delta(0, calls=(CallDelta(0, "call_0", "run", '{"cmd'),)))
    blocks = [e for e in got if e["type"].startswith("content_block")]
    assert [e["index"] for e in blocks if e["type"] == "content_block_start"] == [0, 1, 2, 3]
    open_block = None
    for event in blocks:  # one block at a time, and none left open
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        else:
            assert event["index"] == open_block
            open_block = None if event["type"] == "content_block_stop" else open_block
    assert open_block is None
    assert [e["delta"]["type"] for e in blocks if "delta" in e] == [
        "thinking_delta",
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
        "input_json_delta",
    ]
    uses = [e["content_block"] for e in blocks if e.get("content_block", {}).get("type") == "tool_use"]
    assert uses == [{"type": "tool_use", "id": call.id, "name": "run", "input": {}} for call in CALLS]


def test_a_call_that_breaks_is_text_and_none_of_it_was_sent_as_a_call() -> None:
    broken = '<tool_call>{"name": "run", "arguments": {"cmd'
    message = Message("assistant", f"so {broken}", malformed=True)
    pieces = [Delta(0, "so"), Delta(0, calls=(CallDelta(0, "call_0", "run", '{"cmd'),)), Delta(0, f" {broken}")]
    got = run(reply(message), *pieces)
    assert not any(e.get("content_block", {}).get("type") == "tool_use" for e in got)
    assert "".join(e["delta"]["text"] for e in got if e["type"] == "content_block_delta") == message.content
    assert got[-2]["malformed_tool_call"] is True


def test_whatever_was_not_streamed_comes_at_the_end() -> None:
    message = Message("assistant", "Hello", CALLS, reasoning="hm")
    got = run(reply(message, "tool_calls"))  # an answer given again
    assert (
        accumulated(got).to_dict()
        == accumulated(run(reply(message, "tool_calls"), Delta(0, "He", "hm"), Delta(0, "llo"))).to_dict()
    )


def test_an_empty_answer_still_ends_and_says_why() -> None:
    assert types(run(reply(Message("assistant")))) == ["message_start", "ping", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [("stop", "END", "stop_sequence"), ("length", "", "max_tokens"), ("tool_calls", "", "tool_use")],
)
def test_why_it_ended(finish, stop, reason) -> None:
    got = run(reply(Message("assistant", "Hello"), finish, stop))
    assert got[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop or None}


def test_a_silent_stream_pings_with_real_events() -> None:
    assert events(stream().keep_alive()) == [{"type": "ping"}]


def test_an_error_after_the_start_is_an_error_event() -> None:
    (event,) = events(stream().fail(RequestError("gone", status=503)))
    assert (event["type"], event["error"]) == ("error", {"type": "overloaded_error", "message": "gone"})


def test_a_stream_that_begins_before_its_prompt_is_known() -> None:
    one = stream(return_token_ids=True)
    first, _ = events(one.start())
    assert first["message"]["id"].startswith("msg_")
    assert first["message"]["usage"]["input_tokens"] == 0
    assert types(events(one.finish(reply(Message("assistant", "Hello")))))[-2:] == ["message_delta", "message_stop"]


def test_tokens_come_with_the_end_on_request_only() -> None:
    pieces = [Delta(0, "He", tokens=(SampledToken(1, -0.5),))]
    got = run(reply(Message("assistant", "Hello")), *pieces, return_token_ids=True)
    assert got[0]["message"]["prompt_token_ids"] == [5, 6, 7]
    assert got[-2]["token_ids"] == [1, 2, 9]
    assert [entry["logprob"] for entry in got[-2]["logprobs"]["content"]] == [-0.5, -1.0, -1.5]
    plain = run(reply(Message("assistant", "Hello")), *pieces)
    assert not {"token_ids", "logprobs"} & set(plain[-2])
    assert "prompt_token_ids" not in plain[0]["message"]


def test_extras_stand_in_the_event_that_ends() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    got = run(reply(Message("assistant", "Hello"), overridden={"top_p": 1.0}), output_config={"format": form})
    assert got[-2]["overridden"] == {"top_p": 1.0}
    assert got[-2]["format_error"].startswith("choice 0: not JSON")


def cut(text: str, data: st.DataObject) -> list[str]:
    """The text in pieces."""
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@given(
    content=st.sampled_from(["", "Hello", "é\u2028🙂 x\n"]),
    reasoning=st.sampled_from(["", "because\n"]),
    calls=st.sampled_from([(), CALLS[:1], CALLS]),
    data=st.data(),
)
def test_the_client_gets_the_whole_answer_in_whatever_pieces_it_comes(content, reasoning, calls, data) -> None:
    deltas = [Delta(0, reasoning=piece) for piece in cut(reasoning, data)]
    deltas += [Delta(0, piece) for piece in cut(content, data)]
    for index, call in enumerate(calls):
        first, *rest = cut(call.arguments, data)
        deltas.append(Delta(0, calls=(CallDelta(index, call.id, call.name, first),)))
        deltas += [Delta(0, calls=(CallDelta(index, arguments=piece),)) for piece in rest]
    answer = reply(Message("assistant", content, calls, reasoning=reasoning), "tool_calls" if calls else "stop")
    whole = messages.response(answer, messages.parse({"messages": [USER]}), text_of)
    kept = data.draw(st.integers(0, len(deltas)))  # the rest comes at the end
    got = accumulated(run(answer, *deltas[:kept])).to_dict()
    assert {key: got[key] for key in whole if key in got} == {key: whole[key] for key in whole if key in got}
    assert got["content"] == whole["content"]
