"""Kimi K2: a section of calls, each ``functions.name:index``, a marker, and JSON arguments.

Owns: this syntax. Does not know: others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from minirllm.syntaxes.calls import Calls, Tools, ToolSyntax
from minirllm.syntaxes.json_calls import NamedCalls, whole
from minirllm.types import ToolCall

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_HEAD = rf"\s*{re.escape(_CALL)}\s*(?:functions\.)?(?P<name>[^\s{{}}<|:]+):\d+\s*{re.escape(_ARGUMENTS)}\s*"

follow = partial(NamedCalls, _HEAD, rf"\s*{re.escape(_CALL_END)}\s*")


def read(text: str, tools: Tools) -> Calls | None:
    """The calls of a section."""
    return whole(follow(), text)


def write(calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them."""
    ids = [
        call.id if call.id.startswith("functions.") else f"functions.{call.name}:{index}"
        for index, call in enumerate(calls)
    ]
    blocks = [f"{_CALL}{id}{_ARGUMENTS}{call.arguments}{_CALL_END}" for id, call in zip(ids, calls, strict=True)]
    return f"{_SECTION}{''.join(blocks)}{_SECTION_END}"


SYNTAX = ToolSyntax(
    (_SECTION,),
    _SECTION_END,
    read,
    write,
    follow,
    inner=(_CALL, _ARGUMENTS, _CALL_END),
    call_id="functions.{name}:{index}",
)
