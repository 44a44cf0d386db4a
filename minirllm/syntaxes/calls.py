"""What all syntaxes of tool calls share: the form of a syntax, and calls as JSON objects.

Owns: `ToolSyntax`, strict reading of JSON calls that keeps their arguments to the letter, comparing calls.
Does not know: which syntaxes there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minirllm.types import ToolCall

Tools = Sequence[dict[str, Any]]  # OpenAI function-tool form
Calls = list[tuple[str, str]]  # (name, arguments as JSON text)


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """One family's way to write tool calls. `read` gets the text between a marker and `close`; None means malformed."""

    opens: tuple[str, ...]  # markers that begin a block of calls
    close: str | None  # marker that ends it; None: the end of the turn
    read: Callable[[str, Tools], Calls | None]
    write: Callable[[Sequence[ToolCall]], str]
    bare_json: bool = False  # a turn that begins with "{" is a call, without any marker
    inner: tuple[str, ...] = ()  # further markers, inside a block


_DECODER = json.JSONDecoder(parse_constant=int)  # int("NaN") raises: the agent's own JSON parser would refuse it too


def _skip(text: str, index: int, characters: str = " \t\r\n") -> int:
    return len(text) - len(text[index:].lstrip(characters))


def _members(text: str, index: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The JSON object at `index`: {key: (value, its exact text)} and the index behind it. Raises ValueError."""
    members: dict[str, tuple[Any, str]] = {}
    whole, end = _DECODER.raw_decode(text, index)
    if not isinstance(whole, dict):
        raise ValueError("not an object")
    while whole and text[index] != "}":  # known to be valid: walk over `{"key": value` and `, "key": value`
        key, index = _DECODER.raw_decode(text, _skip(text, index + 1))
        start = _skip(text, _skip(text, index) + 1)
        value, index = _DECODER.raw_decode(text, start)
        members[key] = (value, text[start:index])
        index = _skip(text, index)
    return members, end


def json_value(text: str) -> Any:
    """The value of strict JSON text. Raises ValueError, also for what is nested too deeply to be read."""
    try:
        value, end = _DECODER.raw_decode(text, _skip(text, 0))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _skip(text, end) != len(text):
        raise ValueError("text after the JSON value")
    return value


def _call(members: dict[str, tuple[Any, str]], need_arguments: bool) -> tuple[str, str] | None:
    name = members.get("name", (None, ""))[0]
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        return None
    value, raw = members.get("arguments") or members.get("parameters") or (None, "")
    if isinstance(value, dict):
        return name, raw
    if isinstance(value, str) and isinstance(json_value(value), dict):  # arguments encoded twice
        return name, value
    return (name, "{}") if value is None and not need_arguments else None


def read_json(text: str, tools: Tools, need_arguments: bool = False) -> Calls | None:
    """Calls as JSON objects {"name", "arguments" or "parameters"}: one, several in a row, or a list of them."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1].strip()
    calls: Calls = []
    index = 0
    try:
        while index < len(text):
            members, index = _members(text, index)
            if (call := _call(members, need_arguments)) is None:
                return None
            calls.append(call)
            index = _skip(text, index, " \t\r\n;,")
    except (ValueError, RecursionError):
        return None
    return calls or None


def parsed_arguments(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call as a dict, or None when they are not a JSON object."""
    try:
        value = json_value(arguments)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def as_object(call: ToolCall, key: str) -> str:
    """One call as a JSON object, its arguments as they are (as a JSON string when they are not an object)."""
    whole = parsed_arguments(call.arguments) is not None
    arguments = call.arguments if whole else json.dumps(call.arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {arguments}}}'


def same_call(a: ToolCall, b: ToolCall) -> bool:
    """Whether two calls are one, written differently: arguments are compared as JSON, ids do not count."""
    return a.name == b.name and (a.arguments == b.arguments or _canonical(a.arguments) == _canonical(b.arguments))


def _canonical(arguments: str) -> Any:
    """Equal for equal JSON, whatever its spacing, key order and spelling of whole numbers (1.0 is 1, true is not 1)."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    try:
        return json.dumps(plain(json_value(arguments)), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()
