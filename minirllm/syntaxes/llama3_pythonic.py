"""Llama 3.2 and 4: a turn that is a Python list of calls, ``[name(key='value'), ...]``.

Owns: this syntax. Does not know: others. The text is parsed, never run: only literals are read.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from collections.abc import Sequence
from typing import Any

from minirllm.syntaxes.calls import Calls, Tools, ToolSyntax, json_text, parsed_arguments
from minirllm.types import CallDelta, ToolCall

MAX_DEPTH = 50  # of brackets in one another

_BEGINNING = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.]*\s*(?:\([\s\S]*)?)?)?")  # and every beginning of it
_JSON_NAMES = {"true": True, "false": False, "null": None}  # which models write, too
_REFUSALS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


class Follower:
    """Says only whether a text still can be a list of calls: its calls are known when it is complete."""

    def __init__(self) -> None:
        self.broken = False
        self._text = ""

    def feed(self, text: str) -> list[CallDelta]:
        """See `calls.Follower`."""
        if "(" not in self._text:
            self._text += text
            self.broken = _BEGINNING.fullmatch(self._text) is None
        return []


def read(text: str, tools: Tools) -> Calls | None:
    """The calls of a list in which every argument has a name and is a literal."""
    try:
        with warnings.catch_warnings():  # an unknown escape in a string is its author's affair
            warnings.simplefilter("ignore")
            listed = ast.parse(text.strip(), mode="eval").body
        if not isinstance(listed, ast.List) or not listed.elts:
            return None
        return [_call(node) for node in listed.elts]
    except _REFUSALS:
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments: dict[str, Any] = {}
    for member in node.keywords:
        value = _literal(member.value, 0)
        members = {member.arg: value} if member.arg is not None else value  # **{"not an identifier": value}
        if not isinstance(members, dict) or arguments.keys() & members.keys():
            raise ValueError("not arguments, or one that is given twice")
        arguments |= members
    return _name(node.func), json_text(arguments)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("not a function's name")
    return node.id


def _literal(node: ast.expr, depth: int) -> Any:
    """The value of a literal, as JSON can say it."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values) if all(
            isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys
        ):
            return {key.value: _literal(v, depth + 1) for key, v in zip(keys, values, strict=True)}  # type: ignore[union-attr]
    raise ValueError("not a literal")


def _python(value: Any) -> str:
    """A literal. Its strings are JSON's, which are Python's as well, and leave every letter as it is."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(key)}: {_python(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def write(calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them."""

    def spelled(call: ToolCall) -> str:
        members = parsed_arguments(call.arguments) or {}
        named = {key: value for key, value in members.items() if key.isidentifier() and not keyword.iskeyword(key)}
        others = {key: value for key, value in members.items() if key not in named}
        arguments = [f"{key}={_python(value)}" for key, value in named.items()]
        arguments += [f"**{_python(others)}"] if others else []
        return f"{call.name}({', '.join(arguments)})"

    return f"[{', '.join(map(spelled, calls))}]"


SYNTAX = ToolSyntax(
    ("<|python_start|>", "<|python_tag|>"),
    "<|python_end|>",
    read,
    write,
    Follower,
    bare="[",
    meant=r"^\s*\[\s*[A-Za-z_][\w.]*\(",
)
