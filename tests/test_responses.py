"""The Responses dialect: what real clients send is understood, what would be lost is refused, answers are whole."""

from __future__ import annotations

import json
import math

import pytest
from openai.types.responses import Response

from minirllm.dialects import responses
from minirllm.errors import ContextOverflow, RequestError
from minirllm.types import (
    Choice,
    Completion,
    Message,
    ModelReply,
    ModelRequest,
    ToolCall,
)
from tests.bodies import names_each, refusing, text_of
from tests.test_responses_items import AGENTS, CALL, OUT, PATCH, RUN

ID = "0123456789abcdef"
LS = ToolCall(f"call_{ID}_0", "run", '{"cmd": "ls"}')


def parse(**fields) -> ModelRequest:
    return responses.parse({"input": "hi", **fields})


refused = refusing(parse)


def reply(message=None, tokens=(1, 2, 9), finish="stop", **fields) -> ModelReply:
    completion = Completion(list(tokens), [-0.5 * (k + 1) for k in range(len(tokens))], "stop", 0, cached_tokens=4)
    choice = Choice(0, ID, message or Message("assistant", "Hello"), completion, finish)
    return ModelReply(f"chatcmpl-{ID}", "tiny", 1700000000, [5, 6, 7, 8], [choice], **fields)


# ---- requests ----


def test_input_as_text_and_as_items() -> None:
    assert parse().messages == [Message("user", "hi")]
    assert parse(input=[{"role": "user", "content": "hi"}]).messages == [Message("user", "hi")]
    request = parse(instructions="be brief", input=[{"role": "developer", "content": "x"}, CALL, OUT], tools=[RUN])
    assert [message.role for message in request.messages] == ["system", "system", "assistant", "tool"]
    assert request.messages[0].content == "be brief"


def test_what_agents_send_besides_asks_for_nothing() -> None:
    """Fields seen in requests of Codex, pi, openai-agents and the client libraries."""
    others = {
        "store": False, "parallel_tool_calls": True, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"x": "y"},
        "text": {"verbosity": "low"}, "reasoning": {"effort": "high", "summary": "auto"},
        "service_tier": "auto", "truncation": "auto", "user": "u", "safety_identifier": "s", "metadata": {"a": "b"},
        "stream_options": {"include_obfuscation": False}, "max_tool_calls": 3, "background": False, "unknown": {},
    }  # fmt: skip
    names = [
        *others,
        "instructions",
        "tools",
        "tool_choice",
        "temperature",
        "top_p",
        "top_logprobs",
        "max_output_tokens",
    ]
    assert parse(**others) == parse(**dict.fromkeys([*names, "previous_response_id", "conversation"])) == parse()
    assert parse().asked == frozenset()
    assert not parse().logprobs


def test_sampling_fields_arrive() -> None:
    request = parse(temperature=0, top_p=0.5, max_output_tokens=32000, seed=3, stream=True, return_token_ids=True)
    assert (request.params.temperature, request.params.top_p, request.params.max_tokens) == (0.0, 0.5, 32000)
    assert request.asked == {"temperature", "top_p", "max_tokens", "seed"}
    assert request.stream
    assert request.return_token_ids
    assert parse(include=["message.output_text.logprobs"]).logprobs
    assert (parse(top_logprobs=2).logprobs, parse(top_logprobs=2).params.top_logprobs) == (True, 2)


def test_tools_and_their_choice() -> None:
    extra = {"type": "additional_tools", "role": "developer", "tools": [PATCH]}
    request = parse(tools=[RUN], input=[{"role": "user", "content": "x"}, extra])
    assert [tool["function"]["name"] for tool in request.tools] == ["run", "patch"]
    assert request.messages == [Message("user", "x")]
    tools = {"tools": [RUN, PATCH, AGENTS]}
    named = [("run", {"type": "function", "name": "run"}), ("patch", {"type": "custom", "name": "patch"})]
    named.append(("agents__run", {"type": "function", "name": "run", "namespace": "agents"}))
    for name, choice in named:
        assert parse(**tools, tool_choice=choice).tool_choice == {"type": "function", "function": {"name": name}}
    assert [parse(**tools, tool_choice=choice).tool_choice for choice in ("none", "required", "auto")] == [
        "none", "required", "auto",
    ]  # fmt: skip
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "run"}]}
    request = parse(**tools, tool_choice=allowed)
    assert request.tool_choice == "required"
    assert [tool["function"]["name"] for tool in request.tools] == ["run"]


def test_formats() -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    checked = {"type": "json_schema", "schema": {"type": "object"}}
    assert parse(text={"format": form}).response_format == {**checked, "strict": True}
    assert parse(text={"format": {**form, "strict": None}}).response_format == checked
    assert parse(text={"format": {"type": "json_object"}}).response_format == {"type": "json_object"}
    assert parse(text={"format": {"type": "text"}}).response_format is None


WRONG = {
    "input": [None, [], 5, {"role": "user"}, [{"type": "reasoning", "summary": []}]],
    "instructions": [5],
    "temperature": [-0.1, 2.1, math.nan, "1", True],
    "top_p": [1.5],
    "max_output_tokens": [0, -1, 1.5, "9"],
    "stream": ["yes"],
    "store": ["no"],
    "background": [True],
    "conversation": ["conv_1", {"id": "conv_1"}],
    "prompt": [{"id": "pmpt_1"}],
    "n": [2],
    "include": ["x"],
    "top_logprobs": [21],
    "metadata": ["x"],
    "reasoning": ["high"],
    "text": ["json"],
    "tools": [{}],
    "tool_choice": ["required", "any", {"type": "function", "name": "run"}],
    "previous_response_id": [5],
}


test_a_wrong_value_is_refused_by_name = names_each(refused, WRONG)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text.format.schema"),
        ({"tools": [RUN], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [RUN], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [RUN], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [RUN], "tool_choice": ["run"]}, "tool_choice"),
        ({"tools": [RUN], "tool_choice": {"type": "allowed_tools", "tools": [5]}}, "tool_choice.tools[0]"),
        ({"tools": [RUN], "tool_choice": {"type": "allowed_tools", "mode": "x"}}, "tool_choice.mode"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "function"}]}]}, "tools[0].name"),
    ],
)
def test_a_wrong_part_is_refused_by_its_place(fields, param) -> None:
    assert refused(**fields).param == param


def test_the_body_must_be_an_object_and_an_unknown_answer_has_its_code() -> None:
    for body in ([], "x", 5, None):
        with pytest.raises(RequestError, match="The body must be a JSON object"):
            responses.parse(body)
    assert responses.error(refused(previous_response_id="resp_1"))["error"] == {
        "message": "Previous response with id 'resp_1' not found.", "type": "invalid_request_error",
        "param": "previous_response_id", "code": "previous_response_not_found",
    }  # fmt: skip


# ---- answers ----


def test_a_plain_answer_has_every_field_of_the_official_type() -> None:
    body = responses.response(reply(), parse(metadata={"a": "b"}, instructions="x", store=False), text_of)
    parsed = Response.model_validate(body)
    assert (parsed.id, parsed.created_at, parsed.status) == (f"resp_{ID}", 1700000000, "completed")
    assert parsed.output_text == "Hello"
    assert parsed.usage.model_dump(exclude_none=True) == {
        "input_tokens": 4, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 7,
    }  # fmt: skip
    assert (parsed.metadata, parsed.instructions, body["store"], body["tools"]) == ({"a": "b"}, "x", False, [])
    assert body["output"] == [
        {
            "id": f"msg_{ID}_0", "type": "message", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        }
    ]  # fmt: skip
    assert not {"prompt_token_ids", "overridden", "format_error", "malformed_tool_call"} & set(body)


def test_thoughts_and_calls_of_every_kind_are_items() -> None:
    calls = (
        LS,
        ToolCall("c1", "patch", '{"input": "a"}'),
        ToolCall("c2", "agents__run", "{}"),
        ToolCall("c3", "x", "{}"),
    )
    message = Message("assistant", "I look.", calls, reasoning="Hello")
    body = responses.response(reply(message, finish="tool_calls"), parse(tools=[RUN, PATCH, AGENTS]), text_of)
    Response.model_validate(body)
    assert [item["type"] for item in body["output"]] == [
        "reasoning", "message", "function_call", "custom_tool_call", "function_call", "function_call",
    ]  # fmt: skip
    assert body["output"][0] == {
        "id": f"rs_{ID}_0", "type": "reasoning", "summary": [{"type": "summary_text", "text": "Hello"}],
        "encrypted_content": None,
    }  # fmt: skip
    assert body["output"][2] == {
        "id": f"fc_{ID}_2", "type": "function_call", "status": "completed", "call_id": LS.id, "name": "run",
        "arguments": '{"cmd": "ls"}',
    }  # fmt: skip
    assert (body["output"][3]["input"], body["output"][4]["name"], body["output"][4]["namespace"]) == (
        "a",
        "run",
        "agents",
    )
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}  # He, llo


@pytest.mark.parametrize(
    ("message", "kinds"),
    [(Message("assistant"), ["message"]), (Message("assistant", reasoning="hm"), ["reasoning", "message"])],
)
def test_an_answer_without_text_has_an_empty_message(message, kinds) -> None:
    body = responses.response(reply(message), parse(), text_of)
    assert [item["type"] for item in body["output"]] == kinds
    assert body["output"][-1]["content"][0]["text"] == ""


def test_an_answer_that_was_cut_is_incomplete() -> None:
    body = responses.response(reply(finish="length"), parse(), text_of)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    body = responses.response(reply(Message("assistant", reasoning="hm"), finish="length"), parse(), text_of)
    assert [item["type"] for item in body["output"]] == ["reasoning"]


def test_token_ids_logprobs_and_what_else_openai_does_not_say() -> None:
    request = parse(return_token_ids=True, top_logprobs=2, text={"format": {"type": "json_object"}})
    answer = reply(Message("assistant", "He\ufffd", malformed=True), tokens=(1, 3), overridden={"temperature": 1.0})
    answer.choices[0].completion.top_logprobs = [((1, -0.5), (2, -math.inf)), ((3, -1.0),)]
    body = responses.response(answer, request, text_of)
    assert (body["prompt_token_ids"], body["token_ids"], body["token_logprobs"]) == ([5, 6, 7, 8], [1, 3], [-0.5, -1.0])
    first, second = body["output"][0]["content"][0]["logprobs"]
    assert first == {
        "token": "He", "logprob": -0.5, "bytes": [72, 101],
        "top_logprobs": [
            {"token": "He", "logprob": -0.5, "bytes": [72, 101]},
            {"token": "llo", "logprob": -9999.0, "bytes": [108, 108, 111]},
        ],
    }  # fmt: skip
    assert second["logprob"] == -1.0
    assert (body["overridden"], body["malformed_tool_call"]) == ({"temperature": 1.0}, True)
    assert "not JSON" in body["format_error"]
    json.dumps(body, allow_nan=False)


def test_error_bodies() -> None:
    assert responses.error(ContextOverflow(100, 120)) == {
        "error": {
            "message": "This model's maximum context length is 100 tokens. "
            "However, your messages resulted in 120 tokens. Please reduce the length of the messages.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    (counted,) = responses.COUNT.values()
    assert counted(5) == {"object": "response.input_tokens", "input_tokens": 5}
