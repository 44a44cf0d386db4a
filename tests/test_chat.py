"""The chat dialect: what real clients send is understood, what would be lost is refused, answers have every field."""

from __future__ import annotations

import json
import math

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from minirllm.dialects import chat
from minirllm.errors import ContextOverflow, QuotaExceeded, RequestError, SessionClosed
from minirllm.types import (
    CallDelta,
    Choice,
    Completion,
    Delta,
    Message,
    ModelReply,
    ModelRequest,
    SampledToken,
    ToolCall,
)
from tests.bodies import names_each, refusing, text_of

USER = {"role": "user", "content": "hi"}
TOOL = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
}


def parse(**fields) -> ModelRequest:
    return chat.parse({"messages": [USER], **fields})


refused = refusing(parse)


def reply(*messages: Message, tokens=(1, 2, 9), finish="stop", **fields) -> ModelReply:
    choices = []
    for index, message in enumerate(messages or (Message("assistant", "Hello"),)):
        completion = Completion(list(tokens), [-0.5 * (k + 1) for k in range(len(tokens))], "stop", 0, cached_tokens=4)
        choices.append(Choice(index, f"c{index}", message, completion, finish))
    return ModelReply("chatcmpl-c0", "tiny", 1700000000, [5, 6, 7], choices, **fields)


# ---- requests ----


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}], ...])
def test_no_content_in_any_spelling_is_empty_text(content) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "run", "arguments": "{}"}}]
    message = {"role": "assistant", "tool_calls": calls, **({} if content is ... else {"content": content})}
    assert parse(messages=[USER, message]).messages[1] == Message("assistant", "", (ToolCall("a", "run", "{}"),))


def test_text_parts_are_joined_by_lines_and_a_single_part_is_its_text() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert parse(messages=[{"role": "user", "content": parts}]).messages == [Message("user", "a\nb")]
    assert parse(messages=[{"role": "user", "content": parts[:1]}]).messages == [Message("user", "a")]


def test_every_role_and_field_of_real_conversations() -> None:
    request = parse(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "one"},
            {"role": "user", "content": "two", "name": "bob"},
            {
                "role": "assistant",
                "content": "ok",
                "reasoning_content": "hm",
                "refusal": None,
                "audio": None,
                "function_call": None,
            },
            {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "run", "arguments": {"cmd": "ls"}}}]},
            {"role": "tool", "tool_call_id": "x", "name": "run", "content": [{"type": "text", "text": "out"}]},
            {"role": "tool", "content": "no id"},
        ],
        tools=[TOOL],
    )
    assert request.messages == [
        Message("system", "be brief"),
        Message("user", "one"),
        Message("user", "two", name="bob"),
        Message("assistant", "ok", reasoning="hm"),
        Message("assistant", "", (ToolCall("x", "run", '{"cmd": "ls"}'),)),
        Message("tool", "out", tool_call_id="x", name="run"),
        Message("tool", "no id"),
    ]
    assert request.tools == [TOOL]


def test_defaults_nulls_and_unknown_fields_ask_for_nothing() -> None:
    names = "temperature top_p top_k seed stop n max_tokens max_completion_tokens tools tool_choice logit_bias audio "
    names += "functions modalities stream stream_options response_format logprobs top_logprobs echo"
    nulls = dict.fromkeys(names.split())
    others = {
        "reasoning_effort": None,
        "store": False,
        "prompt_cache_key": "k",
        "thinking": {"type": "enabled"},
        "session_id": "s",
    }
    harmless = {
        "logit_bias": {},
        "modalities": ["text"],
        "best_of": 1,
        "function_call": "none",
        "repetition_penalty": 1,
    }
    assert parse(**nulls) == parse(**others) == parse(**harmless) == parse()
    assert parse().asked == frozenset()


def test_sampling_fields_arrive() -> None:
    request = parse(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-3,
        stop="END",
        max_tokens=32000,
        n=3,
        logprobs=True,
        top_logprobs=2,
        return_token_ids=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.0, 0.5, 0, 0.1, -3)
    assert (params.stop, params.max_tokens) == (("END",), 32000)
    assert (request.n, request.logprobs, params.top_logprobs, request.return_token_ids) == (3, True, 2, True)
    assert request.stream
    assert request.include_usage
    assert request.asked >= {"temperature", "top_p", "top_k", "seed", "stop", "max_tokens"}
    assert "ignore_eos" not in request.asked


def test_near_greedy_is_kept_and_the_newer_name_wins() -> None:
    assert parse(temperature=1e-9).params.temperature == 1e-9
    assert parse(max_tokens=5, max_completion_tokens=7).params.max_tokens == 7
    assert parse(stop=["a", "b"]).params.stop == ("a", "b")


WRONG = {
    "temperature": [-0.1, 2.1, math.nan, math.inf, "1", True],
    "top_p": [1.5, -0.5],
    "top_k": [-2, 1.5],
    "min_p": [2],
    "presence_penalty": [3],
    "max_tokens": [-1, 0, 1.5, "9"],
    "max_completion_tokens": [-5],
    "n": [0, -1, 129, "2", True],
    "seed": ["x", 2**63],
    "stop": [5, "", ["a", 1], ["x"] * 17],
    "stop_token_ids": [["a"], [-1]],
    "stream": ["yes"],
    "stream_options": [[]],
    "logprobs": [3],
    "top_logprobs": [2, 21],
    "messages": [[], None, "hi"],
    "tools": [{}],
    "tool_choice": ["required", {"type": "function", "function": {"name": "run"}}],
    "response_format": ["json"],
    "logit_bias": [{"5": 100}],
    "audio": [{"voice": "x"}],
    "modalities": [["text", "audio"]],
    "functions": [[{"name": "f"}]],
    "function_call": ["auto"],
    "best_of": [2],
    "echo": [True],
    "suffix": ["x"],
    "repetition_penalty": [1.1],
    "min_tokens": [4],
}


test_a_wrong_value_is_refused_by_name = names_each(refused, WRONG)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text", "text": "x"}}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": ["a", {"type": "input_audio"}]}, "messages[0].content[1].type"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, "messages[0].tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 4}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(message, param) -> None:
    assert refused(messages=[message]).param == param


def test_wrong_tools_are_refused_by_their_place() -> None:
    assert refused(tools=[{"type": "custom", "custom": {"name": "x"}}]).param == "tools[0].type"
    assert refused(tools=[TOOL, {"type": "function"}]).param == "tools[1].function"
    assert refused(tools=[{"type": "function", "function": {"name": ""}}]).param == "tools[0].function.name"
    assert (
        refused(tools=[{"type": "function", "function": {"name": "f", "parameters": []}}]).param
        == "tools[0].function.parameters"
    )
    assert refused(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}).param == "tool_choice"
    assert refused(tools=[TOOL], tool_choice="any").param == "tool_choice"


def test_tool_choice_forms() -> None:
    named = {"type": "function", "function": {"name": "run"}}
    assert [parse(tools=[TOOL], tool_choice=c).tool_choice for c in (None, "auto", "none", "required", named)] == [
        "auto", "auto", "none", "required", named,
    ]  # fmt: skip
    assert parse(tool_choice="auto").tool_choice == "auto"  # without tools: harmless


def test_the_body_must_be_an_object() -> None:
    for body in ([], "x", 5, None):
        with pytest.raises(RequestError, match="The body must be a JSON object"):
            chat.parse(body)


# ---- answers ----


def test_a_plain_answer_validates_against_the_official_types() -> None:
    body = chat.response(reply(), parse(), text_of)
    parsed = ChatCompletion.model_validate(body)
    assert parsed.id == "chatcmpl-c0"
    assert parsed.choices[0].message.content == "Hello"
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    assert not {"prompt_token_ids", "overridden", "format_error"} & set(body)


def test_tool_calls_reasoning_and_the_malformed_flag() -> None:
    message = Message("assistant", "", (ToolCall("call_0", "run", '{"cmd": "ls"}'),), reasoning="think")
    body = chat.response(reply(message, finish="tool_calls"), parse(), text_of)
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": None, "refusal": None, "reasoning_content": "think",
        "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "run", "arguments": '{"cmd": "ls"}'}}],
    }  # fmt: skip
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert "malformed_tool_call" not in body["choices"][0]
    broken = chat.response(reply(Message("assistant", "{oops", malformed=True)), parse(), text_of)
    assert broken["choices"][0]["malformed_tool_call"] is True


def test_token_ids_and_logprobs_are_aligned() -> None:
    answer = reply(tokens=(1, 3))
    answer.choices[0].completion.top_logprobs = [((1, -0.5), (2, -math.inf)), ((3, -1.0),)]
    body = chat.response(answer, parse(return_token_ids=True, logprobs=True, top_logprobs=2), text_of)
    assert body["prompt_token_ids"] == [5, 6, 7]
    assert body["choices"][0]["token_ids"] == [1, 3]
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "He", "logprob": -0.5, "bytes": [72, 101],
        "top_logprobs": [
            {"token": "He", "logprob": -0.5, "bytes": [72, 101]},
            {"token": "llo", "logprob": -9999.0, "bytes": [108, 108, 111]},
        ],
    }  # fmt: skip
    assert second["bytes"] is None  # a piece of a character has no text of its own
    json.dumps(body, allow_nan=False)
    ChatCompletion.model_validate(body)


def test_overridden_sampling_is_reported() -> None:
    assert chat.response(reply(overridden={"temperature": 1.0}), parse(), text_of)["overridden"] == {"temperature": 1.0}


def test_error_bodies() -> None:
    error = chat.error(ContextOverflow(100, 120))["error"]
    assert error.pop("message") == (
        "This model's maximum context length is 100 tokens. "
        "However, your messages resulted in 120 tokens. Please reduce the length of the messages."
    )
    assert error == {"type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}
    assert chat.error(QuotaExceeded("no calls left"))["error"]["type"] == "insufficient_quota"
    assert chat.error(SessionClosed("over"))["error"]["code"] == "session_closed"


# ---- streams ----


def events(frames: list[str]) -> list[dict]:
    assert all(frame.startswith("data: ") and frame.endswith("\n\n") and frame.count("\n") == 2 for frame in frames)
    return [json.loads(frame[6:]) for frame in frames if frame != "data: [DONE]\n\n"]


def test_a_stream_opens_with_the_role_and_ends_with_reason_usage_done() -> None:
    request = parse(stream=True, stream_options={"include_usage": True})
    stream = chat.Stream(request, text_of, "tiny")
    stream.accepted("chatcmpl-c0", [5, 6, 7])
    frames = [*stream.start(), *stream.delta(Delta(0, "He")), *stream.keep_alive()]
    frames += [*stream.delta(Delta(0, "llo")), *stream.finish(reply())]
    assert frames[-1] == "data: [DONE]\n\n"
    chunks = [ChatCompletionChunk.model_validate(event) for event in events(frames)]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-c0"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.content for c in chunks[1:-1]] == ["He", None, "llo", None]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None, None, None, None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 6
    assert all(event["usage"] is None for event in events(frames)[:-1])


def test_usage_is_absent_when_not_asked_for() -> None:
    stream = chat.Stream(parse(stream=True), text_of, "tiny")
    assert not any("usage" in event for event in events([*stream.start(), *stream.finish(reply())]))


def test_whatever_was_not_streamed_comes_at_the_end() -> None:
    message = Message(
        "assistant", "Hello", (ToolCall("a", "f", "{}"), ToolCall("b", "g", '{"x":1}')), reasoning="because"
    )
    stream = chat.Stream(parse(stream=True), text_of, "tiny")
    frames = [*stream.start(), *stream.delta(Delta(0, "He", "bec", (CallDelta(0, "a", "f", "{"),)))]
    frames += stream.finish(reply(message))
    deltas = [choice["delta"] for event in events(frames) for choice in event["choices"]]
    assert "".join(d.get("content", "") for d in deltas) == "Hello"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "because"
    calls = [call for d in deltas for call in d.get("tool_calls", [])]
    heads = [(c["index"], c.get("id"), c["function"].get("name")) for c in calls]
    assert heads == [(0, "a", "f"), (0, None, None), (1, "b", "g")]
    assert [call["function"]["arguments"] for call in calls] == ["{", "}", '{"x":1}']


def test_streamed_tokens_cover_the_answer_once() -> None:
    request = parse(stream=True, return_token_ids=True)
    stream = chat.Stream(request, text_of, "tiny")
    frames = stream.start()  # the id and the prompt are not known yet
    frames += stream.delta(Delta(0, "He", tokens=(SampledToken(1, -0.5),)))
    frames += stream.delta(Delta(0, tokens=(SampledToken(2, -1.0),)))  # no text yet: the tokens are news all the same
    frames += stream.finish(reply())
    choices = [choice for event in events(frames) for choice in event["choices"]]
    assert [i for c in choices for i in c.get("token_ids", [])] == [1, 2, 9]
    assert [t["logprob"] for c in choices if c["logprobs"] for t in c["logprobs"]["content"]] == [-0.5, -1.0, -1.5]
    assert [event["prompt_token_ids"] for event in events(frames) if "prompt_token_ids" in event] == [[5, 6, 7]]


def test_a_delta_with_nothing_wanted_is_no_event() -> None:
    stream = chat.Stream(parse(stream=True), text_of, "tiny")
    assert stream.delta(Delta(0, tokens=(SampledToken(1, -0.5),))) == []
    assert stream.delta(Delta(0)) == []


def test_every_choice_of_a_stream_opens_and_ends() -> None:
    stream = chat.Stream(parse(stream=True, n=2), text_of, "tiny")
    frames = [
        *stream.start(),
        *stream.finish(reply(Message("assistant", "a"), Message("assistant", "b"), finish="length")),
    ]
    choices = [choice for event in events(frames) for choice in event["choices"]]
    for index in (0, 1):
        mine = [c for c in choices if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] for c in mine] == [None, None, "length"]
    assert "".join(c["delta"].get("content", "") for c in choices) == "ab"


def test_extras_and_errors_of_a_stream() -> None:
    stream = chat.Stream(parse(stream=True, response_format={"type": "json_object"}), text_of, "tiny")
    last = events([*stream.start(), *stream.finish(reply(overridden={"top_p": 1.0}))])[-1]
    assert last["overridden"] == {"top_p": 1.0}
    assert last["format_error"].startswith("choice 0: not JSON")
    assert last["choices"][0]["finish_reason"] == "stop"
    assert events(stream.fail(RequestError("boom")))[0]["error"]["message"] == "boom"
