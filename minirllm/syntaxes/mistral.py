"""Mistral: ``[TOOL_CALLS]`` and a JSON list of calls, or ``name[ARGS]{...}``.

Owns: this syntax. Does not know: others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from minirllm.syntaxes.calls import Calls, Tools, ToolSyntax, as_object, parsed_arguments, read_json
from minirllm.types import ToolCall

_NAMED = re.compile(r"\s*([^\s\[\]{}]+)(?:\s*\[CALL_ID\][^\s\[\]{}]*)?(?:\s*\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)


def read(text: str, tools: Tools) -> Calls | None:
    """A JSON list of calls, or name[ARGS]{...}, the marker repeated before each further call."""
    calls: Calls = []
    for part in text.split("[TOOL_CALLS]"):
        named = _NAMED.fullmatch(part)
        if named is not None and parsed_arguments(named[2]) is not None and named[1].isprintable():
            calls.append((named[1], named[2]))
        elif (found := read_json(part, tools)) is not None:
            calls.extend(found)
        else:
            return None
    return calls


def write(calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them: the JSON list, which all of them read."""
    return f"[TOOL_CALLS][{', '.join(as_object(call, 'arguments') for call in calls)}]"


SYNTAX = ToolSyntax(("[TOOL_CALLS]",), None, read, write, inner=("[ARGS]", "[CALL_ID]"))
