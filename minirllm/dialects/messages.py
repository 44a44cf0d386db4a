"""Messages (Anthropic's dialect): JSON to `ModelRequest`; the answers are in messages_answer.

Owns: the fields of a request. Does not know: HTTP, sessions, templates, torch.

What has no counterpart in the one internal form is dealt with thus:
- The results of tools come before the text of their message, in the order given; a result that `is_error` begins with
  ``Error: ``. Text blocks are joined by lines, as the chat dialect joins parts.
- Tools with `defer_loading` are shown from the start, for a list of tools that grows would rewrite the prompt; a
  `tool_reference` reads as the name of its tool. Of a tool only name, description and input_schema are read.
- Tools with a `type` (web_search_..., bash_..., ...) are refused: a provider runs them, or its models know them.
- `redacted_thinking` is dropped, and so is every `signature`: nobody here can read them. `thinking` only has to be
  well-formed, since it is the model's template that decides whether it thinks.
- Blocks of anything but text are refused, and so is a last message of the assistant's for the model to continue.
- `cache_control`, `context_management`, `metadata`, `output_config.effort` and all unknown fields are ignored.

Beyond Anthropic's: `logprobs`, `top_logprobs` and `return_token_ids` as in the chat dialect, `seed` and `min_p`.
"""

from __future__ import annotations

import json
from typing import Any

from minirllm.dialects import fields as read
from minirllm.dialects import response_format
from minirllm.dialects.fields import Fields
from minirllm.dialects.messages_answer import Stream, counted, error, response
from minirllm.dialects.openai import Counted
from minirllm.errors import RequestError
from minirllm.types import Message, ModelRequest, ToolCall

__all__ = ["COUNT", "ROUTES", "Stream", "error", "parse", "response"]

ROUTES: tuple[str, ...] = ("/v1/messages",)
COUNT: Counted = {"/v1/messages/count_tokens": counted}

_ROLES = ("user", "assistant", "system")
_THINKING = ("adaptive", "between_tools", "disabled", "enabled")
_THOUGHTS = ("thinking", "redacted_thinking")


def parse(body: Any, route: str = ROUTES[0]) -> ModelRequest:
    """The request in the one internal form. Raises RequestError naming the field."""
    fields = Fields(body)
    fields.refuse({"mcp_servers": []})
    _check_thinking(fields)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.list("tools", read.MAX_TOOLS))]
    logprobs, top_logprobs = read.logprobs(fields)
    params, asked = read.sampling(fields, top_logprobs, {"stop": "stop_sequences"})
    messages = _messages(fields)
    if messages[-1].role == "assistant" and route not in COUNT:
        raise RequestError(
            "The last message is the assistant's: this model does not continue one (prefill), end with the user's.",
            "messages",
        )
    return ModelRequest(
        messages=messages,
        tools=tools,
        tool_choice=_tool_choice(fields, tools),
        params=params,
        asked=asked,
        stream=fields.flag("stream"),
        logprobs=logprobs,
        return_token_ids=fields.flag("return_token_ids"),
        response_format=_format(fields),
    )


def _check_thinking(fields: Fields) -> None:
    value = fields.get("thinking")
    if value is not None and Fields(value, "thinking").get("type") not in _THINKING:
        raise Fields(value, "thinking").wrong("type", f"one of {', '.join(_THINKING)}")


def _format(fields: Fields) -> dict[str, Any] | None:
    """``output_config.format``, once called ``output_format``."""
    config = fields.get("output_config")
    holder, name = (fields, "output_format") if config is None else (Fields(config, "output_config"), "format")
    if holder.get(name) is None:
        return None
    return response_format.checked(Fields(holder.get(name), holder.path(name)))


# ---- messages ----


def _messages(fields: Fields) -> list[Message]:
    values = fields.list("messages", read.MAX_MESSAGES)
    if not values:
        raise RequestError("messages must be a list with at least one message.", "messages")
    system = read.lines(fields, "system", "a string or a list of text blocks", _block_text)
    messages = [Message("system", system)] if system else []
    for i, value in enumerate(values):
        messages += _message(value, f"messages[{i}]")
    return messages


def _message(value: Any, at: str) -> list[Message]:
    """A user message holds results of tools, text, or both; in the internal form each is a message of its own."""
    fields = Fields(value, at)
    role = fields.get("role")
    if role not in _ROLES:
        raise fields.wrong("role", f"one of {', '.join(_ROLES)}")
    content = fields.get("content")
    if content is None or isinstance(content, str):
        return [Message(role, content or "")]
    if not isinstance(content, list):
        raise fields.wrong("content", "a string or a list of content blocks")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    results: list[Message] = []
    for i, block in enumerate(content):
        part = Fields(block, f"{fields.path('content')}[{i}]")
        kind = part.get("type")
        if kind in _THOUGHTS and role == "assistant":
            thoughts.append(part.text("thinking"))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(part))
        elif kind == "tool_result" and role == "user":
            results.append(_result(part))
        elif kind in ("tool_use", "tool_result", *_THOUGHTS):
            raise RequestError(f"{part.path('type')}: a {role} message has no {kind} block.", part.path("type"))
        else:
            texts.append(_block_text(block, part.at))
    if results and not any(texts):
        return results
    thought = "\n".join(text for text in thoughts if text)
    return [*results, Message(role, "\n".join(texts), tuple(calls), reasoning=thought)]


def _block_text(value: Any, at: str) -> str:
    block = Fields(value, at)
    kind = block.get("type")
    if kind == "tool_reference":
        return block.text("tool_name")
    if kind != "text":
        where = block.path("type")
        raise RequestError(f"{where} {read.shown(kind)} is not supported here: this model reads text only.", where)
    return block.text("text")


def _call(block: Fields) -> ToolCall:
    given = Fields({} if block.get("input") is None else block.get("input"), block.path("input"))
    return ToolCall(block.text("id"), read.name(block), json.dumps(given.values, ensure_ascii=False))


def _result(block: Fields) -> Message:
    text = read.lines(block, "content", "a string or a list of content blocks", _block_text)
    if block.flag("is_error"):
        text = f"Error: {text}"
    return Message("tool", text, tool_call_id=block.text("tool_use_id") or None)


# ---- tools ----


def _tool(value: Any, at: str) -> dict[str, Any]:
    fields = Fields(value, at)
    if fields.get("type") not in (None, "custom"):
        raise RequestError(
            f"{at}.type {read.shown(fields.get('type'))} is not supported here: nobody runs it, or this model does "
            "not know it; only tools with name, description and input_schema are.",
            f"{at}.type",
        )
    return read.function_tool(fields, "input_schema")


def _tool_choice(fields: Fields, tools: list[dict[str, Any]]) -> str | dict[str, Any]:
    if fields.get("tool_choice") is None:
        return "auto"
    choice = Fields(fields.get("tool_choice"), "tool_choice")
    kind = choice.get("type")
    if kind in ("auto", "none"):
        return str(kind)
    if kind not in ("any", "tool"):
        raise choice.wrong("type", "auto, any, tool or none")
    if not tools:
        raise RequestError("tool_choice asks for a tool, but tools is empty.", "tool_choice")
    if kind == "any":
        return "required"
    return read.one_tool(choice, tools)
