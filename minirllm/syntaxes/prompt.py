"""What stands in for a chat template that has no place for tools: a system-prompt block, calls and results as text.

Owns: their wording. Does not know: chat templates, tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from minirllm.syntaxes.calls import Tools, ToolSyntax
from minirllm.types import Message, ToolCall

_EXAMPLE = ToolCall("", "the_function", '{"an_argument": "its value"}')


def instructions(tools: Tools, syntax: ToolSyntax, tagged: bool) -> str:
    """The block that ends the system message: the functions, how to call them, and how results come if `tagged`."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call functions to help with the request. Their signatures are between <tools> and </tools>, "
        f"one JSON object per line:\n<tools>\n{lines}\n</tools>\n"
        "To call a function, write its name and its arguments like this, once for each call:\n"
        f"{syntax.write([_EXAMPLE])}"
    ) + ("\nWhat a function returns is given to you between <tool_response> and </tool_response>." if tagged else "")


def spelled(message: Message, syntax: ToolSyntax) -> Message:
    """The calls of a message as text behind its content."""
    text = "\n".join(part for part in (message.content, syntax.write(message.tool_calls)) if part)
    return replace(message, content=text, tool_calls=())


def results_as_users(messages: Sequence[Message]) -> list[Message]:
    """The results that follow each other as one user message."""
    plain: list[Message] = []
    in_results = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if in_results:
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{text}")
            else:
                plain.append(Message("user", text))
        else:
            plain.append(message)
        in_results = message.role == "tool"
    return plain
