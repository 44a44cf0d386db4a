"""Items of the Responses API and its tools, to messages and function tools, and back.

Owns: what each kind of item and tool is. All that a model said in one turn (reasoning, text, calls) is one message here
and several items there. Does not know: requests, answers, events.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minirllm.dialects import fields as read
from minirllm.dialects.fields import Fields
from minirllm.errors import RequestError
from minirllm.types import Message, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "refusal")
_IGNORED = ("web_search", "web_search_preview", "tool_search")  # agents list them whatever the server can do
_FREE = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The text that the tool is given."}},
    "required": ["input"],
}

Find = Callable[[str], dict[str, Any] | None]  # an output item of a kept answer by its id


@dataclass(frozen=True)
class Tool:
    """A tool as the client calls it."""

    name: str
    namespace: str = ""
    custom: bool = False  # takes any text; the model sees a function with one string, `input`


class Tools:
    """The tools of a request: `shown` is what the model is told of them, `known` what each name there means."""

    def __init__(self, values: Sequence[Any], at: str = "tools"):
        self.shown: list[dict[str, Any]] = []
        self.known: dict[str, Tool] = {}
        found = [entry for place, value in enumerate(values) for entry in _tools(value, f"{at}[{place}]", "")]
        plain = {tool.name for tool, _ in found if not tool.namespace}
        for tool, shown in found:
            taken = tool.namespace and (tool.name in plain or tool.name in self.known)
            name = f"{tool.namespace}__{tool.name}" if taken else tool.name
            self.known[name] = tool
            self.shown.append({**shown, "function": {**shown["function"], "name": name}})

    def name(self, name: str, namespace: str = "") -> str:
        """How the model knows the tool that the client calls so; one that it was not told of keeps its name."""
        return next((n for n, tool in self.known.items() if (tool.name, tool.namespace) == (name, namespace)), name)

    def only(self, names: set[str]) -> list[dict[str, Any]]:
        """Those of `shown` with these names."""
        return [tool for tool in self.shown if tool["function"]["name"] in names]


def _tools(value: Any, at: str, namespace: str) -> Iterator[tuple[Tool, dict[str, Any]]]:
    """(the tool, what the model is told of it) of an entry of `tools`; a namespace has several."""
    fields = Fields(value, at)
    kind = fields.get("type")
    if kind == "namespace" and not namespace:
        inside = enumerate(fields.list("tools", read.MAX_TOOLS))
        yield from (entry for i, tool in inside for entry in _tools(tool, f"{at}.tools[{i}]", read.name(fields)))
    elif kind in ("function", "custom"):
        told = Fields({**fields.values, "parameters": _FREE}, at) if kind == "custom" else fields
        yield Tool(read.name(fields), namespace, kind == "custom"), read.function_tool(told)
    elif not isinstance(kind, str) or not kind.startswith(_IGNORED):
        names = "only function, custom and namespace tools are"
        raise RequestError(f"{at}.type {read.shown(kind)} is not supported here: {names}.", f"{at}.type")


# ---- items -> messages ----


def messages_of(items: Sequence[Any], tools: Tools, find: Find, at: str = "input") -> list[Message]:
    """The conversation. Raises RequestError naming the item that cannot be understood."""
    turns = _Turns()
    for place, value in enumerate(items):
        _item(Fields(value, f"{at}[{place}]"), tools, find, turns)
    return turns.messages


class _Turns:
    """Messages out of pieces: what follows in one turn of the model is added to its message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._last = ""  # the kind of the model's last piece, while its turn may go on

    def add(self, message: Message) -> None:
        """A message of somebody else: the model's turn is over."""
        self.messages.append(message)
        self._last = ""

    def said(self, kind: str, piece: Message) -> None:
        """A piece that the model said: `kind` is reasoning, text or call. Reasoning begins a turn, and two texts on
        end are two turns, since one turn has a call between them."""
        goes_on = {"": (), "reasoning": ("reasoning", "text", "call"), "text": ("call",), "call": ("text", "call")}
        if kind in goes_on[self._last]:
            turn = self.messages[-1]
            self.messages[-1] = replace(
                turn,
                content=turn.content + piece.content,
                reasoning="\n".join(text for text in (turn.reasoning, piece.reasoning) if text),
                tool_calls=turn.tool_calls + piece.tool_calls,
            )
        else:
            self.messages.append(piece)
        self._last = kind


def _item(fields: Fields, tools: Tools, find: Find, turns: _Turns) -> None:
    kind = fields.get("type")
    if kind == "message" or (kind is None and "role" in fields.values):
        role = fields.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise fields.wrong("role", f"one of {', '.join(_ROLES)}")
        message = Message(_ROLES[role], text_of(fields, "content"))
        turns.said("text", message) if role == "assistant" else turns.add(message)
    elif kind == "reasoning":
        text = text_of(fields, "content", "reasoning_text") or text_of(fields, "summary", "summary_text")
        if text:
            turns.said("reasoning", Message("assistant", reasoning=text))
    elif kind in ("function_call", "custom_tool_call"):
        name = tools.name(read.name(fields), fields.text("namespace"))
        custom = kind == "custom_tool_call"
        arguments = _as_arguments(fields.text("input")) if custom else fields.text("arguments")
        call = ToolCall(fields.text("call_id"), name, arguments or "{}")
        turns.said("call", Message("assistant", tool_calls=(call,)))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        turns.add(Message("tool", text_of(fields, "output"), tool_call_id=fields.text("call_id") or None))
    elif kind == "item_reference" or (kind is None and set(fields.values) == {"id"}):
        found = find(fields.text("id"))
        if found is None:
            why = "no stored answer of this session has it: send the item itself"
            raise RequestError(f"Item with id {read.shown(fields.text('id'))} not found: {why}.", fields.path("id"))
        _item(Fields(found, fields.at), tools, find, turns)
    elif kind != "additional_tools":  # those are tools, and have been read
        raise RequestError(f"{fields.path('type')} {read.shown(kind)} is not supported here.", fields.path("type"))


def text_of(fields: Fields, name: str, *kinds: str) -> str:
    """The text of a field; its parts must be of these kinds."""

    def text(value: Any, at: str) -> str:
        part = Fields(value, at)
        kind = part.get("type")
        if kind not in (kinds or _TEXTS):
            problem = f"{part.path('type')} {read.shown(kind)} is not supported here: only text parts are."
            raise RequestError(problem, part.path("type"))
        return part.text("refusal" if kind == "refusal" else "text")

    return read.lines(fields, name, "a string or a list of parts", text)


# ---- messages -> items ----


def reasoning_item(id: str, text: str | None) -> dict[str, Any]:
    """The text stands in the summary, which clients show and send back; None: nothing was thought yet."""
    summary = [] if text is None else [{"type": "summary_text", "text": text}]
    return {"id": id, "type": "reasoning", "summary": summary, "encrypted_content": None}


def message_item(id: str, role: str, text: str, status: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """A message with one part."""
    part = text_part(text, logprobs) if role == "assistant" else {"type": "input_text", "text": text}
    return {"id": id, "type": "message", "status": status, "role": role, "content": [part]}


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """A part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_item(id: str, call: ToolCall, tool: Tool, status: str) -> dict[str, Any]:
    """A call as its tool is called."""
    kind, told = ("custom_tool_call", "input") if tool.custom else ("function_call", "arguments")
    given = as_input(call.arguments) if tool.custom else call.arguments
    item = {"id": id, "type": kind, "status": status, "call_id": call.id, "name": tool.name, told: given}
    return {**item, "namespace": tool.namespace} if tool.namespace else item


def output_item(id: str, message: Message, custom: bool) -> dict[str, Any]:
    """What a tool answered."""
    kind = "custom_tool_call_output" if custom else "function_call_output"
    return {"id": id, "type": kind, "call_id": message.tool_call_id or "", "output": message.content}


def items_of(messages: Sequence[Message], tools: Tools, prefix: str) -> list[dict[str, Any]]:
    """The items that these messages are; their ids are `prefix` and a number."""
    items: list[dict[str, Any]] = []
    customs = set()
    for message in messages:

        def name(kind: str) -> str:
            return f"{kind}_{prefix}_{len(items)}"

        if message.role == "tool":
            items.append(output_item(name("out"), message, message.tool_call_id in customs))
            continue
        if message.reasoning:
            items.append(reasoning_item(name("rs"), message.reasoning))
        if message.content or not (message.reasoning or message.tool_calls):
            items.append(message_item(name("msg"), message.role, message.content, "completed"))
        for call in message.tool_calls:
            tool = tools.known.get(call.name, Tool(call.name))
            customs |= {call.id} if tool.custom else set()
            items.append(call_item(name("fc"), call, tool, "completed"))
    return items


def as_input(arguments: str) -> str:
    """The text that a model gave to a custom tool: the value of its one argument, or else what it wrote."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    texts = list(value.values()) if isinstance(value, dict) else []
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else arguments


def _as_arguments(text: str) -> str:
    return json.dumps({"input": text}, ensure_ascii=False)
