"""Whatever stands anywhere in a body of Messages or Gemini is understood or refused by name, and can be answered."""

from __future__ import annotations

import json

from hypothesis import given, settings

from minirllm.dialects import gemini, messages
from minirllm.types import Choice, Completion, Message, ModelReply, ModelRequest, ToolCall
from tests.bodies import changed
from tests.test_fields import outcome

SCHEMA = {"type": "OBJECT", "properties": {"cmd": {"type": "STRING"}}}
MESSAGES = {
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "run", "input": {"cmd": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": "x"},
                {
                    "type": "tool_result",
                    "content": [{"type": "tool_reference", "tool_name": "run"}, {"type": "text", "text": "x"}],
                },
                {"type": "text", "text": "more"},
            ],
        },
        {"role": "system", "content": "late"},
    ],
    "tools": [{"type": "custom", "name": "run", "description": "x", "input_schema": SCHEMA, "defer_loading": True}],
    "tool_choice": {"type": "tool", "name": "run", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 9, "temperature": 0.5, "top_p": 1, "top_k": 3,
    "stop_sequences": ["END"], "stream": True, "metadata": {"user_id": "u"}, "logprobs": True, "top_logprobs": 2,
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "output_format": {"type": "json_schema", "schema": {}}, "return_token_ids": True, "mcp_servers": [],
}  # fmt: skip
GEMINI = {
    "systemInstruction": {"parts": [{"text": "be brief"}]},
    "contents": [
        {"parts": [{"text": "hi"}]},
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True, "thoughtSignature": "s"},
                {"text": "I look."},
                {"functionCall": {"id": "a", "name": "run", "args": {"cmd": "ls"}}},
            ],
        },
        {"role": "model", "parts": [{"thoughtSignature": "s"}]},
        {"role": "user", "parts": [{"functionResponse": {"id": "a", "name": "run", "response": {"output": "x"}}}]},
    ],
    "tools": [{"functionDeclarations": [{"name": "run", "description": "x", "parameters": SCHEMA}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["run"]}},
    "generationConfig": {
        "maxOutputTokens": 9, "temperature": 0.5, "topP": 1, "topK": 3.0, "stopSequences": ["END"], "seed": 1,
        "candidateCount": 1, "responseLogprobs": True, "logprobs": 2, "responseMimeType": "application/json",
        "responseSchema": SCHEMA, "thinkingConfig": {"includeThoughts": True}, "responseModalities": ["TEXT"],
    },
    "cachedContent": "",
}  # fmt: skip


def reply(request: ModelRequest) -> ModelReply:
    message = Message("assistant", "x", (ToolCall("c", "run", "{}"),), reasoning="hm")
    choices = [Choice(k, f"c{k}", message, Completion([1], [-0.5], "stop", 0), "tool_calls") for k in range(request.n)]
    return ModelReply("chatcmpl-c0", "tiny", 0, [5], choices)


def answered(dialect, body) -> None:
    request = outcome(dialect, body)
    if isinstance(request, str):
        assert 10 < len(request) < 2000
    else:
        answer = dialect.response(reply(request), request, str)
        json.dumps(answer, allow_nan=False)
        assert dialect.Stream(request, str, "tiny").finish(reply(request))


def test_the_bodies_are_right_before_they_are_changed() -> None:
    assert isinstance(outcome(messages, MESSAGES), ModelRequest)
    assert isinstance(outcome(gemini, GEMINI), ModelRequest)


@settings(deadline=None)
@given(body=changed(MESSAGES))
def test_any_change_to_a_messages_body_is_understood_or_refused_in_a_sentence(body) -> None:
    answered(messages, body)


@settings(deadline=None)
@given(body=changed(GEMINI))
def test_any_change_to_a_gemini_body_is_understood_or_refused_in_a_sentence(body) -> None:
    answered(gemini, body)
