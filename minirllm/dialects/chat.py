"""Chat Completions: JSON to `ModelRequest`, `ModelReply` to JSON and server-sent events.

Owns: the fields of this dialect, in both directions. Does not know: HTTP, sessions, templates, torch.
Lenient where real clients differ (content as string, parts, null, missing or an empty list all mean the same), strict
where a wrong value would be silently lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from minirllm.dialects import fields as read
from minirllm.dialects import openai, response_format
from minirllm.dialects.fields import Fields
from minirllm.dialects.openai import COUNT, TokenText, error
from minirllm.errors import RequestError
from minirllm.types import CallDelta, Delta, Message, ModelReply, ModelRequest, SampledToken, ToolCall

__all__ = ["COUNT", "ROUTES", "Stream", "error", "parse", "response"]

ROUTES: tuple[str, ...] = ("/v1/chat/completions",)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_UNSUPPORTED: dict[str, Any] = {
    "functions": [],
    "function_call": "none",
    "audio": None,
    "modalities": ["text"],
    "web_search_options": None,
    "prediction": None,
    "suffix": None,
    "echo": False,
}
_INSTEAD = {"functions": "use tools", "function_call": "use tool_choice", "modalities": "only ['text'] is"}


def parse(body: Any, route: str = ROUTES[0]) -> ModelRequest:
    """The request in the one internal form. Raises RequestError naming the field."""
    fields = Fields(body)
    fields.refuse(_UNSUPPORTED, _INSTEAD)
    logprobs, top_logprobs = read.logprobs(fields)
    messages = fields.list("messages", read.MAX_MESSAGES)
    if not messages:
        raise RequestError("messages must be a list with at least one message.", "messages")
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.list("tools", read.MAX_TOOLS))]
    params, asked = read.sampling(fields, top_logprobs)
    return ModelRequest(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        tools=tools,
        tool_choice=_tool_choice(fields, tools),
        params=params,
        asked=asked,
        n=read.choices(fields),
        stream=fields.flag("stream"),
        include_usage=read.stream_options(fields),
        logprobs=logprobs,
        return_token_ids=fields.flag("return_token_ids"),
        response_format=response_format.parse(fields),
    )


def _message(value: Any, at: str) -> Message:
    fields = Fields(value, at)
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.wrong("role", f"one of {', '.join(_ROLES)}")
    fields.refuse({"function_call": None, "audio": None}, {"function_call": "use tool_calls"})
    calls = [_tool_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(fields.list("tool_calls"))]
    if calls and role != "assistant":
        raise RequestError(
            f"{at}.tool_calls: only assistant messages have them, this is a {role} message.", f"{at}.tool_calls"
        )
    content = read.lines(fields, "content", "a string or a list of content parts", _part)
    return Message(
        role=_ROLES[role],
        content=content or (fields.text("refusal") if role == "assistant" else ""),
        tool_calls=tuple(calls),
        tool_call_id=(fields.text("tool_call_id") or None) if role == "tool" else None,
        name=fields.text("name") or None,
        reasoning=(fields.text("reasoning_content") or fields.text("reasoning")) if role == "assistant" else "",
    )


def _part(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    fields = Fields(part, at)
    kind = fields.get("type")
    if kind not in ("text", "refusal"):
        raise RequestError(f"{at}.type {read.shown(kind)} is not supported here: only text parts are.", f"{at}.type")
    return fields.text(kind)


def _tool_call(value: Any, at: str) -> ToolCall:
    fields = Fields(value, at)
    if fields.get("type") not in (None, "function"):
        raise fields.wrong("type", "function")
    function = Fields(fields.get("function"), f"{at}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif arguments is not None and not isinstance(arguments, str):
        raise function.wrong("arguments", "JSON text")
    return ToolCall(fields.text("id"), read.name(function), arguments or "{}")


def _tool(value: Any, at: str) -> dict[str, Any]:
    fields = Fields(value, at)
    if fields.get("type") != "function":
        raise RequestError(
            f"{at}.type {read.shown(fields.get('type'))} is not supported here: only function tools are.", f"{at}.type"
        )
    return read.function_tool(Fields(fields.get("function"), f"{at}.function"))


def _tool_choice(fields: Fields, tools: list[dict[str, Any]]) -> str | dict[str, Any]:
    choice = fields.get("tool_choice")
    if choice is None or choice in ("auto", "none"):
        return choice or "auto"
    if not tools:
        raise RequestError("tool_choice asks for a tool, but tools is empty.", "tool_choice")
    if choice == "required":
        return "required"
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise fields.wrong("tool_choice", "auto, none, required or {'type': 'function', 'function': {'name': ...}}")
    return read.one_tool(Fields(choice.get("function"), "tool_choice.function"), tools)


def response(reply: ModelReply, request: ModelRequest, token_text: TokenText) -> dict[str, Any]:
    """The whole answer as JSON."""
    choices = []
    for choice in reply.choices:
        message = choice.message
        entry: dict[str, Any] = {
            "index": choice.index,
            "message": {**message_json(message), "refusal": None},
            "logprobs": _logprobs(openai.sampled(choice.completion), request, token_text),
            "finish_reason": choice.finish_reason,
        }
        if message.malformed:
            entry["malformed_tool_call"] = True
        if request.return_token_ids:
            entry["token_ids"] = choice.completion.token_ids
        choices.append(entry)
    return openai.answer("chat.completion", choices, reply, request)


def message_json(message: Message) -> dict[str, Any]:
    """A message of any role as this dialect says it."""
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        entry["content"] = message.content or None
        entry["tool_calls"] = [_call_json(call) for call in message.tool_calls]
    if message.reasoning:
        entry["reasoning_content"] = message.reasoning
    if message.role == "tool":
        entry["tool_call_id"] = message.tool_call_id or ""
    elif message.name:
        entry["name"] = message.name
    return entry


def _call_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_piece(call: CallDelta) -> dict[str, Any]:
    head = {"id": call.id, "type": "function"} if call.id else {}
    function = {"name": call.name} if call.id else {}
    return {"index": call.index, **head, "function": {**function, "arguments": call.arguments}}


def _logprobs(tokens: Sequence[SampledToken], request: ModelRequest, token_text: TokenText) -> dict[str, Any] | None:
    if not (request.logprobs or request.return_token_ids):
        return None
    return {"content": openai.token_logprobs(tokens, token_text), "refusal": None}


class Stream(openai.Stream):
    """A streamed chat answer."""

    object = "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, delta: Delta) -> dict[str, Any]:
        content: dict[str, Any] = {}
        if delta.text:
            content["content"] = delta.text
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.calls:
            content["tool_calls"] = [_call_piece(call) for call in delta.calls]
        entry: dict[str, Any] = {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}
        if delta.tokens:
            entry["logprobs"] = _logprobs(delta.tokens, self.request, self.token_text)
            if self.request.return_token_ids:
                entry["token_ids"] = [token.id for token in delta.tokens]
        return entry

    def place_prompt(self, event: dict[str, Any], ids: list[int]) -> None:
        event["prompt_token_ids"] = ids
