"""Hermes and Qwen2.5/3: ``<tool_call>`` around a JSON object {"name", "arguments"} per call.

Owns: this syntax. Does not know: others.
"""

from __future__ import annotations

from collections.abc import Sequence

from minirllm.syntaxes.calls import ToolSyntax, as_object
from minirllm.syntaxes.json_calls import JsonCalls, read_json
from minirllm.types import ToolCall


def write(calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them."""
    return "\n".join(f"<tool_call>\n{as_object(call, 'arguments')}\n</tool_call>" for call in calls)


SYNTAX = ToolSyntax(("<tool_call>",), "</tool_call>", read_json, write, JsonCalls)
