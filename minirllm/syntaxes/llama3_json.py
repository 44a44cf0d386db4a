"""Llama 3: a turn that is JSON objects {"name", "parameters"}, with or without ``<|python_tag|>`` in front.

Owns: this syntax. Does not know: others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from minirllm.syntaxes.calls import ToolSyntax, as_object
from minirllm.syntaxes.json_calls import JsonCalls, read_json
from minirllm.types import ToolCall


def write(calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them."""
    return "; ".join(as_object(call, "parameters") for call in calls)


SYNTAX = ToolSyntax(
    ("<|python_tag|>",),
    None,
    partial(read_json, need_arguments=True),
    write,
    partial(JsonCalls, need_arguments=True),
    bare="{",
    meant=r'^(?=[\s\S]*"name")[\s\S]*"(?:parameters|arguments)"',
)
