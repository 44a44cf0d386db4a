"""Gemini (generateContent): JSON to `ModelRequest`; the answers are in gemini_answer.

Owns: the fields of a request. Does not know: HTTP, sessions, templates, torch.

Every field may be spelled in camelCase or in snake_case, as Google's own endpoint takes both. What has no counterpart
in the one internal form is dealt with thus:
- Neighbouring contents of the model are one turn, its text parts joined without anything between: clients send a
  streamed answer back in the pieces in which it came. Text parts of the user are joined by lines, as chat does.
- A functionResponse whose only field is `output`, `result` or `content`, a text, reads as that text; one whose only
  field is `error` as ``Error: `` and its text; any other as JSON. Results come before the text of their content.
- Thoughts are answered with only where thinkingConfig has includeThoughts; its other fields and every thoughtSignature
  say nothing: it is the model's template that decides whether it thinks.
- Parts of anything but text and functions are refused, and so are tools other than functionDeclarations (googleSearch,
  codeExecution, ...): nobody here runs them.
- safetySettings, labels, the path's model and all unknown fields are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minirllm.dialects import fields as read
from minirllm.dialects import response_format
from minirllm.dialects.fields import Fields
from minirllm.dialects.gemini_answer import Stream, counted, error, response
from minirllm.dialects.openai import Counted
from minirllm.errors import RequestError
from minirllm.types import Message, ModelRequest, ToolCall

__all__ = ["COUNT", "ROUTES", "Stream", "error", "parse", "response"]

_MODELS = ("/v1beta/models/{model}", "/v1/models/{model}")  # which of them depends on the age of the client
_STREAM = ":streamGenerateContent"  # with or without alt=sse, events are what it sends
ROUTES: tuple[str, ...] = tuple(model + verb for model in _MODELS for verb in (":generateContent", _STREAM))
COUNT: Counted = {f"{model}:countTokens": counted for model in _MODELS}

_SAMPLING = {
    "max_tokens": "maxOutputTokens",
    "top_p": "topP",
    "top_k": "topK",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
    "stop": "stopSequences",
}
_MODES = {"AUTO": "auto", "VALIDATED": "auto", "MODE_UNSPECIFIED": "auto", "ANY": "required", "NONE": "none"}
_TYPES = ("STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL")
_DATA = {"inlineData", "fileData", "executableCode", "codeExecutionResult", "toolCall", "toolResponse"}
_TEXT_OF_RESULT = ("output", "result", "content")


class _Fields(Fields):
    """Fields that may be spelled in snake_case."""

    def get(self, name: str) -> Any:
        value = self.values.get(name)
        return self.values.get(re.sub("[A-Z]", lambda big: f"_{big[0].lower()}", name)) if value is None else value

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """Google's client sends a whole number as 5.0."""
        value = self.get(name)
        if isinstance(value, float) and value.is_integer():
            return Fields({name: int(value)}, self.at).integer(name, low, high)
        return super().integer(name, low, high)

    def part(self, name: str) -> _Fields:
        """The object in a field; an empty one when it is absent."""
        value = self.get(name)
        return _Fields({} if value is None else value, self.path(name))


def parse(body: Any, route: str = ROUTES[0]) -> ModelRequest:
    """The request in the one internal form. Raises RequestError naming the field."""
    fields = _Fields(body)
    if route in COUNT and fields.get("generateContentRequest") is not None:
        fields = fields.part("generateContentRequest")
    fields.refuse({"cachedContent": ""})
    config = fields.part("generationConfig")
    config.refuse({"responseModalities": ["TEXT"], "speechConfig": None}, {"responseModalities": "only ['TEXT'] is"})
    logprobs = config.flag("responseLogprobs")
    params, asked = read.sampling(config, config.integer("logprobs", 0, read.MAX_TOP_LOGPROBS) or 0, _SAMPLING)
    tools = _tools(fields)
    return ModelRequest(
        messages=_messages(fields),
        tools=tools,
        tool_choice=_tool_choice(fields, [tool["function"]["name"] for tool in tools]),
        params=params,
        asked=asked,
        n=config.integer("candidateCount", 1, read.MAX_CHOICES) or 1,
        stream=route.endswith(_STREAM),
        logprobs=logprobs,
        response_format=_format(config),
        notes={"thoughts": config.part("thinkingConfig").flag("includeThoughts")},
    )


# ---- messages ----


def _messages(fields: _Fields) -> list[Message]:
    contents = fields.list("contents", read.MAX_MESSAGES)
    if not contents:
        raise RequestError("contents must be a list with at least one content.", "contents")
    messages: list[Message] = []
    instruction = fields.get("systemInstruction")
    if instruction is not None:
        text = instruction if isinstance(instruction, str) else _system(fields.part("systemInstruction"))
        messages += [Message("system", text)] if text else []
    for i, value in enumerate(contents):
        content = _Fields(value, f"{fields.path('contents')}[{i}]")
        role = content.get("role")
        if role not in (None, "user", "model", "function"):
            raise content.wrong("role", "user or model")
        if role != "model":
            messages += _user(content)
        elif messages and messages[-1].role == "assistant":
            messages[-1] = _joined(messages[-1], _turn(content))
        else:
            messages.append(_turn(content))
    return messages


def _parts(content: _Fields) -> list[_Fields]:
    return [_Fields(part, f"{content.path('parts')}[{i}]") for i, part in enumerate(content.list("parts"))]


def _system(instruction: _Fields) -> str:
    return "\n".join(map(_text, _parts(instruction)))


def _text(part: _Fields) -> str:
    other = next((name for name in part.values if name in _DATA or name in ("functionCall", "functionResponse")), None)
    if part.get("text") is None:
        what = f"{read.shown(other)} is" if other else "this part is"
        raise RequestError(f"{part.at}: {what} not supported here: this model reads text only.", part.at)
    return part.text("text")


def _user(content: _Fields) -> list[Message]:
    texts, results = [], []
    for part in _parts(content):
        if part.get("functionResponse") is None:
            texts.append(_text(part))
        else:
            results.append(_result(part.part("functionResponse")))
    return results if results and not any(texts) else [*results, Message("user", "\n".join(texts))]


def _result(fields: _Fields) -> Message:
    response = fields.part("response").values
    text = json.dumps(response, ensure_ascii=False)
    if len(response) == 1:
        ((name, value),) = response.items()
        if isinstance(value, str) and name in (*_TEXT_OF_RESULT, "error"):
            text = f"Error: {value}" if name == "error" else value
    return Message("tool", text, tool_call_id=fields.text("id") or None, name=read.name(fields))


def _turn(content: _Fields) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for part in _parts(content):
        if part.get("functionCall") is not None:
            call = part.part("functionCall")
            arguments = json.dumps(call.part("args").values, ensure_ascii=False)
            calls.append(ToolCall(call.text("id"), read.name(call), arguments))
        elif part.flag("thought"):
            thoughts.append(part.text("text"))
        elif part.get("text") is not None or part.get("thoughtSignature") is None:
            texts.append(_text(part))
    return Message("assistant", "".join(texts), tuple(calls), reasoning="".join(thoughts))


def _joined(first: Message, second: Message) -> Message:
    return replace(
        first,
        content=first.content + second.content,
        tool_calls=first.tool_calls + second.tool_calls,
        reasoning=first.reasoning + second.reasoning,
    )


# ---- tools, formats ----


def _tools(fields: _Fields) -> list[dict[str, Any]]:
    tools = []
    for i, value in enumerate(fields.list("tools", read.MAX_TOOLS)):
        holder = _Fields(value, f"tools[{i}]")
        other = next(
            (name for name in holder.values if name not in ("functionDeclarations", "function_declarations")), ""
        )
        if other and holder.get(other) is not None:
            raise RequestError(
                f"{holder.path(other)} is not supported here: nobody runs it; only functionDeclarations are.",
                holder.path(other),
            )
        for k, declared in enumerate(holder.list("functionDeclarations", read.MAX_TOOLS)):
            tools.append(_tool(_Fields(declared, f"{holder.path('functionDeclarations')}[{k}]")))
    return tools


def _tool(fields: _Fields) -> dict[str, Any]:
    if fields.get("parametersJsonSchema") is not None:
        return read.function_tool(fields, "parametersJsonSchema")
    return read.function_tool(Fields({**fields.values, "parameters": _lowered(fields.get("parameters"))}, fields.at))


def _lowered(schema: Any) -> Any:
    """An OpenAPI schema as a JSON schema: the names of types in lower case. A property may be called `type`."""
    if isinstance(schema, list):
        return [_lowered(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    lowered = {}
    for key, value in schema.items():
        if key == "type" and value in _TYPES:
            lowered[key] = value.lower()
        elif key == "properties" and isinstance(value, dict):
            lowered[key] = {name: _lowered(item) for name, item in value.items()}
        else:
            lowered[key] = value if key in ("enum", "default", "example") else _lowered(value)
    return lowered


def _tool_choice(fields: _Fields, names: Sequence[str]) -> str | dict[str, Any]:
    config = fields.part("toolConfig").part("functionCallingConfig")
    mode = config.get("mode")
    if mode is None:
        return "auto"
    if not isinstance(mode, str) or mode not in _MODES:
        raise config.wrong("mode", f"one of {', '.join(_MODES)}")
    if mode != "ANY":
        return _MODES[mode]
    if not names:
        raise RequestError(f"{config.path('mode')} asks for a tool, but tools is empty.", config.path("mode"))
    allowed = config.list("allowedFunctionNames")
    for name in allowed:
        if name not in names:
            where = config.path("allowedFunctionNames")
            raise RequestError(f"{where} names {read.shown(name)}, which is not in tools.", where)
    return {"type": "function", "function": {"name": allowed[0]}} if len(allowed) == 1 else "required"


def _format(config: _Fields) -> dict[str, Any] | None:
    kind = config.get("responseMimeType")
    if kind in (None, "text/plain"):
        return None
    if kind != "application/json":
        raise config.wrong("responseMimeType", "text/plain or application/json")
    name = "responseJsonSchema" if config.get("responseJsonSchema") is not None else "responseSchema"
    schema = config.get(name)
    form = {"type": "json_schema", "schema": schema if name == "responseJsonSchema" else _lowered(schema)}
    return response_format.checked(Fields(form, config.path(name)))
