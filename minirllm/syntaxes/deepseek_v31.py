"""DeepSeek V3.1: between special tokens, a name, a separator, and JSON arguments for each call.

Owns: this syntax and the tokens of the family. Does not know: others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from minirllm.syntaxes.calls import Calls, Tools, ToolSyntax
from minirllm.syntaxes.json_calls import NamedCalls, whole
from minirllm.types import ToolCall


def token(words: str) -> str:
    """A special token of this family, which has its own bar and its own space."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


CALLS, CALLS_END = token("tool calls begin"), token("tool calls end")
CALL, SEPARATOR, CALL_END = token("tool call begin"), token("tool sep"), token("tool call end")

follow = partial(NamedCalls, rf"\s*{CALL}\s*(?P<name>[^\s<{{}}]+)\s*{SEPARATOR}\s*", rf"\s*{CALL_END}\s*")


def read(text: str, tools: Tools) -> Calls | None:
    """The calls of a block."""
    return whole(follow(), text)


def write(calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them."""
    blocks = [f"{CALL}{call.name}{SEPARATOR}{call.arguments}{CALL_END}" for call in calls]
    return f"{CALLS}{''.join(blocks)}{CALLS_END}"


SYNTAX = ToolSyntax((CALLS,), CALLS_END, read, write, follow, inner=(CALL, SEPARATOR, CALL_END))
