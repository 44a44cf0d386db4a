"""What all syntaxes of tool calls share: the form of a syntax, values of untyped text, comparing calls.

Owns: `ToolSyntax`, `json_value`, `typed`, `same_call`. Does not know: which syntaxes there are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from minirllm.types import CallDelta, ToolCall

Tools = Sequence[dict[str, Any]]  # OpenAI function-tool form
Calls = list[tuple[str, str]]  # (name, arguments as JSON text)


class Follower(Protocol):
    """Reads one block of calls as it is written.

    What it says of a text does not depend on the pieces it came in. When the block turns out whole, all that it said
    adds up to what `ToolSyntax.read` returns for it.
    """

    broken: bool  # nothing that may follow makes this a block of calls

    def feed(self, text: str) -> list[CallDelta]:
        """What this piece adds to the calls, which are counted from 0; without ids."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """One family's way to write tool calls. `read` gets the text between a marker and `close`; None means malformed."""

    opens: tuple[str, ...]  # markers that begin a block of calls
    close: str | None  # marker that ends it; None: the end of the turn
    read: Callable[[str, Tools], Calls | None]
    write: Callable[[Sequence[ToolCall]], str]
    follow: Callable[[], Follower] | None = None  # None: calls are known when their block is complete
    inner: tuple[str, ...] = ()  # further markers, inside a block
    bare: str = ""  # a turn that begins with this character may be calls, without any marker
    meant: str = ""  # pattern: a bare turn that cannot be read was meant as calls when this is found in it
    call_id: str = "{index:09d}"  # the ids that templates get: nine characters, because some insist on them

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.opens, *([self.close] if self.close else []), *self.inner)


MAX_DEPTH = 100  # of lists and objects in one another: deeper ones cannot be read back everywhere

_DECODER = json.JSONDecoder(parse_constant=int)  # int("NaN") raises: the agent's own JSON parser would refuse it too


def json_value(text: str) -> Any:
    """The value of strict JSON text. Raises ValueError, also for what is nested too deeply to be read."""
    text = text.strip(" \t\r\n")
    try:
        value, end = _DECODER.raw_decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if end != len(text):
        raise ValueError("text after the JSON value")
    if text.count("[") + text.count("{") > MAX_DEPTH and _deep([value]):
        raise ValueError("nested too deeply")
    return value


def _deep(level: list[Any]) -> bool:
    """Whether some of these values have more than `MAX_DEPTH` levels."""
    for _ in range(MAX_DEPTH):
        inner = (
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        )
        level = [item for items in inner for item in items]
    return any(isinstance(value, dict | list) for value in level)


def json_text(value: Any) -> str:
    """`value` as JSON, in plain letters where UTF-8 has them. Raises ValueError or TypeError where JSON has none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if sendable(text) else json.dumps(value)


def sendable(text: str) -> bool:
    """Whether UTF-8 can carry it: half a surrogate pair it cannot, only its escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_name(name: Any) -> bool:
    """Whether a function can be called so."""
    return isinstance(name, str) and name.isprintable() and bool(name.strip())


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


# ---- values written as bare text ----

_PYTHON = {"True": "true", "False": "false", "None": "null"}  # how templates, which are Jinja, may write them


def as_texts(call: ToolCall) -> list[tuple[str, str]]:
    """(name, text) of a call's arguments: strings as they are, anything else as JSON."""
    members = (parsed_arguments(call.arguments) or {}).items()
    return [(key, value if isinstance(value, str) else json_text(value)) for key, value in members]


def typed(members: Sequence[tuple[str, str]], tools: Tools, function: str) -> str | None:
    """The arguments, as JSON text, of (name, text) pairs whose texts mean what the function's schema says.

    A text that is not what the schema asks for stays a string, for the agent to see. None: a name comes twice, or it is
    all nested too deeply.
    """
    schema = _schema(tools, function)
    properties = schema.get("properties")
    declared = properties if isinstance(properties, dict) else {}
    pairs = [f"{json_text(key)}: {_typed(text, _types(declared.get(key), schema))}" for key, text in members]
    arguments = "{" + ", ".join(pairs) + "}"
    whole = len({key for key, _ in members}) == len(members) and parsed_arguments(arguments) is not None
    return arguments if whole else None


def _typed(text: str, types: set[str]) -> str:
    """A string where one is allowed, except for the null of what is a string or nothing; else the JSON that it is."""
    if types and ("string" not in types or (text in ("null", "None") and "null" in types)):
        bare = _PYTHON.get(text.strip(), text.strip(" \t\r\n"))
        with suppress(ValueError):
            json_value(bare)
            return bare
    return json_text(text)


def _schema(tools: Tools, function: str) -> Mapping[str, Any]:
    """The schema of a function's parameters. Tools come from clients, so any shape must be survived."""
    for tool in tools:
        node = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(node, dict) and node.get("name") == function:
            parameters = node.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


def _types(node: Any, schema: Mapping[str, Any], depth: int = 4) -> set[str]:
    """The JSON types that a property may have; empty when it does not say."""
    if not isinstance(node, dict) or depth == 0:
        return set()
    types = node.get("type")
    found = {kind for kind in (types if isinstance(types, list) else [types]) if isinstance(kind, str)}
    for choice in ("anyOf", "oneOf"):
        if isinstance(options := node.get(choice), list):
            found = found.union(*(_types(option, schema, depth - 1) for option in options[:64]))
    if isinstance(reference := node.get("$ref"), str) and re.fullmatch(r"#/(\$defs|definitions)/[^/]+", reference):
        _, place, name = reference.split("/")
        known = schema.get(place)
        found |= _types(known.get(name) if isinstance(known, dict) else None, schema, depth - 1)
    return found


# ---- comparing ----


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
