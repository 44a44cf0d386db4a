"""Qwen3-Coder: ``<function=name>`` with a ``<parameter=key>`` per argument, inside ``<tool_call>``.

Owns: this syntax. Does not know: others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from minirllm.syntaxes.calls import Calls, Tools, ToolSyntax, as_texts, is_name, typed
from minirllm.types import ToolCall

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def read(text: str, tools: Tools) -> Calls | None:
    """<function=name> <parameter=key> value </parameter> ... </function>; values are typed by the tool's schema."""
    match = _FUNCTION.fullmatch(text)
    if match is None or not is_name(match[1]):
        return None
    name, body = match.groups()
    members: list[tuple[str, str]] = []
    index = 0
    while index < len(body.rstrip()):
        parameter = _PARAMETER.match(body, index)
        if parameter is None:
            return None
        members.append((parameter[1], parameter[2]))
        index = parameter.end()
    arguments = typed(members, tools, name)
    return None if arguments is None else [(name, arguments)]


def write(calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them."""

    def block(call: ToolCall) -> str:
        parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in as_texts(call))
        return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"

    return "\n".join(map(block, calls))


SYNTAX = ToolSyntax(("<tool_call>",), "</tool_call>", read, write)
