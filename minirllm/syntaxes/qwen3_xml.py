"""Qwen3-Coder: ``<function=name>`` with a ``<parameter=key>`` per argument, inside ``<tool_call>``.

Owns: this syntax. Does not know: others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from minirllm.syntaxes.calls import Calls, Tools, ToolSyntax, json_value, parsed_arguments
from minirllm.types import ToolCall

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _property_type(tools: Tools, function: str, parameter: str) -> Any:
    """The declared JSON type of a parameter, or None. Tools come from clients, so any shape must be survived."""
    for tool in tools:
        node: Any = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(node, dict) and node.get("name") == function:
            for key in ("parameters", "properties", parameter, "type"):
                node = node.get(key) if isinstance(node, dict) else None
            return node
    return None


def read(text: str, tools: Tools) -> Calls | None:
    """<function=name> <parameter=key> value </parameter> ... </function>; values are typed by the tool's schema."""
    match = _FUNCTION.fullmatch(text)
    if match is None or not match[1].isprintable():
        return None
    name, body = match.groups()
    arguments: dict[str, Any] = {}
    index = 0
    while index < len(body.rstrip()):
        parameter = _PARAMETER.match(body, index)
        if parameter is None:
            return None
        key, value = parameter.groups()
        arguments[key] = value
        if _property_type(tools, name, key) not in ("string", None):
            with suppress(ValueError):  # not what the schema asks for: the agent gets to see the text
                arguments[key] = json_value(value)
        index = parameter.end()
    return [(name, json.dumps(arguments, ensure_ascii=False))]


def write(calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them."""

    def block(call: ToolCall) -> str:
        members = (parsed_arguments(call.arguments) or {}).items()
        texts = [
            (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for key, value in members
        ]
        parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts)
        return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"

    return "\n".join(map(block, calls))


SYNTAX = ToolSyntax(("<tool_call>",), "</tool_call>", read, write)
