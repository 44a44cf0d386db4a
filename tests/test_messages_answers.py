"""Answers and errors of the Messages dialect have every field that its clients need."""

from __future__ import annotations

import json
import math

import pytest
from anthropic.types import ErrorResponse
from anthropic.types import Message as AnthropicMessage

from minirllm.dialects import messages
from minirllm.errors import (
    ContextOverflow,
    QuotaExceeded,
    RequestError,
    SessionClosed,
    Stalled,
    TooLarge,
    Unauthorized,
    UnknownSession,
)
from minirllm.types import Choice, Completion, Message, ModelReply, ModelRequest, ToolCall
from tests.bodies import text_of

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}


def parse(**fields) -> ModelRequest:
    return messages.parse({"model": "m", "max_tokens": 10, "messages": [USER], **fields})


def reply(message: Message | None = None, finish="stop", stop="", cached=1, **fields) -> ModelReply:
    completion = Completion([1, 2, 9], [-0.5, -1.0, -math.inf], "stop", 0, cached_tokens=cached)
    choice = Choice(0, "c0", message or Message("assistant", "Hello"), completion, finish, stop)
    return ModelReply("chatcmpl-c0", "tiny", 1700000000, [5, 6, 7], [choice], **fields)


def test_a_plain_answer_has_every_field() -> None:
    body = messages.response(reply(), parse(), text_of)
    assert body == {
        "id": "msg_c0",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 3,
        },
    }
    assert AnthropicMessage.model_validate(body).content[0].text == "Hello"


def test_thinking_text_and_calls_are_blocks_in_this_order() -> None:
    calls = (ToolCall("call_0", "run", '{"cmd": "ls"}'), ToolCall("call_1", "run", "{}"))
    body = messages.response(
        reply(Message("assistant", "I run it", calls, reasoning="hm"), "tool_calls"), parse(), text_of
    )
    parsed = AnthropicMessage.model_validate(body)
    assert [block.type for block in parsed.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (parsed.content[0].thinking, bool(parsed.content[0].signature)) == ("hm", True)
    assert [(call.id, call.name, call.input) for call in parsed.content[2:]] == [
        ("call_0", "run", {"cmd": "ls"}),
        ("call_1", "run", {}),
    ]
    assert parsed.stop_reason == "tool_use"


def test_what_an_answer_holds_comes_back_as_the_same_message() -> None:
    message = Message("assistant", "I run\n it ", (ToolCall("call_0", "run", '{"cmd": "é"}'),), reasoning="hm")
    body = messages.response(reply(message, "tool_calls"), parse(), text_of)
    again = parse(messages=[USER, {"role": "assistant", "content": body["content"]}, USER])
    assert again.messages[1] == message


def test_an_empty_answer_has_no_blocks() -> None:
    assert messages.response(reply(Message("assistant")), parse(), text_of)["content"] == []


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [
        ("stop", "", "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", "", "max_tokens", None),
        ("tool_calls", "", "tool_use", None),
        ("tool_calls", "END", "tool_use", None),
    ],
)
def test_why_it_ended(finish, stop, reason, sequence) -> None:
    body = messages.response(reply(finish=finish, stop=stop), parse(), text_of)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_numbers_that_json_cannot_say_are_the_greatest_it_can() -> None:
    call = ToolCall("a", "run", '{"x": 1e999, "y": -1e999, "z": 0.5}')
    body = messages.response(reply(Message("assistant", "", (call,)), "tool_calls"), parse(), text_of)
    assert body["content"][0]["input"] == {"x": 1.7976931348623157e308, "y": -1.7976931348623157e308, "z": 0.5}
    json.dumps(body, allow_nan=False)


def test_tokens_on_request_only() -> None:
    body = messages.response(reply(), parse(return_token_ids=True), text_of)
    assert (body["prompt_token_ids"], body["token_ids"]) == ([5, 6, 7], [1, 2, 9])
    assert [entry["logprob"] for entry in body["logprobs"]["content"]] == [-0.5, -1.0, -9999.0]
    assert "token_ids" not in messages.response(reply(), parse(logprobs=True), text_of)


def test_what_was_replaced_or_is_broken_is_said() -> None:
    body = messages.response(
        reply(Message("assistant", "{oops", malformed=True), overridden={"temperature": 1.0}),
        parse(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
        text_of,
    )
    assert body["overridden"] == {"temperature": 1.0}
    assert body["format_error"].startswith("choice 0: not JSON")
    assert body["malformed_tool_call"] is True


# ---- errors ----


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (RequestError("wrong"), "invalid_request_error"),
        (RequestError("method", status=405), "invalid_request_error"),
        (RequestError("type", status=415), "invalid_request_error"),
        (Unauthorized("key"), "authentication_error"),
        (QuotaExceeded("no calls left"), "permission_error"),
        (UnknownSession("none"), "not_found_error"),
        (SessionClosed("over"), "not_found_error"),
        (TooLarge("large"), "request_too_large"),
        (Stalled("slow"), "timeout_error"),
        (RequestError("bug", status=500), "api_error"),
        (RequestError("busy", status=503), "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(problem, kind) -> None:
    body = messages.error(problem)
    assert (body["type"], body["error"]) == ("error", {"type": kind, "message": problem.message})
    assert body["request_id"].startswith("req_")
    if kind != "request_too_large":  # documented, and not among the types of the client
        assert ErrorResponse.model_validate(body).error.message == problem.message


def test_overflow_is_said_in_the_words_that_agents_know() -> None:
    assert messages.error(ContextOverflow(100, 120))["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 120 tokens > 100 maximum",
    }
