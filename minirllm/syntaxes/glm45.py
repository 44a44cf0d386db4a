"""GLM 4.5: ``<tool_call>name`` with an ``<arg_key>`` and an ``<arg_value>`` per argument.

Owns: this syntax. Does not know: others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from minirllm.syntaxes.calls import Calls, Tools, ToolSyntax, as_texts, is_name, typed
from minirllm.types import ToolCall

_NAME = re.compile(r"\s*([^\s<{\[]+)\s*")
_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def read(text: str, tools: Tools) -> Calls | None:
    """The name, then <arg_key>key</arg_key> <arg_value>value</arg_value> ...; values are typed by the tool's schema."""
    match = _NAME.match(text)
    if match is None or not is_name(match[1]):
        return None
    members: list[tuple[str, str]] = []
    index = match.end()
    while index < len(text):
        argument = _ARGUMENT.match(text, index)
        if argument is None:
            return None
        members.append((argument[1].strip(), argument[2]))
        index = argument.end()
    arguments = typed(members, tools, match[1])
    return None if arguments is None else [(match[1], arguments)]


def write(calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them."""

    def block(call: ToolCall) -> str:
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in as_texts(call)]
        return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(map(block, calls))


SYNTAX = ToolSyntax(
    ("<tool_call>",), "</tool_call>", read, write, inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
)
