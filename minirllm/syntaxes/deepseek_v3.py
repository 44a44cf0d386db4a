"""DeepSeek V3 and R1: between special tokens, a type, a name, and JSON arguments in a fence for each call.

Owns: this syntax. Does not know: others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from minirllm.syntaxes.calls import Calls, Tools, ToolSyntax
from minirllm.syntaxes.deepseek_v31 import CALL, CALL_END, CALLS, CALLS_END, SEPARATOR
from minirllm.syntaxes.json_calls import NamedCalls, whole
from minirllm.types import ToolCall

_HEAD = rf"\s*{CALL}[^<{{}}]*{SEPARATOR}\s*(?P<name>[^\s<{{}}]+)\s*```json\s*"

follow = partial(NamedCalls, _HEAD, rf"\s*```\s*{CALL_END}\s*")


def read(text: str, tools: Tools) -> Calls | None:
    """The calls of a block."""
    return whole(follow(), text)


def write(calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them."""
    blocks = [f"{CALL}function{SEPARATOR}{call.name}\n```json\n{call.arguments}\n```{CALL_END}" for call in calls]
    newline = "\n"
    return f"{CALLS}{newline.join(blocks)}{CALLS_END}"


SYNTAX = ToolSyntax((CALLS,), CALLS_END, read, write, follow, inner=(CALL, SEPARATOR, CALL_END))
