"""How models write reasoning and tool calls as text, and how an assistant turn is read back, in pieces as it comes.

Owns: the tool-call syntaxes (`SYNTAXES`), `TurnReader` (text -> content, reasoning, tool calls, stop strings).
Does not know: tokens, chat templates, HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from minirllm.types import Delta, Message, ToolCall

Tools = Sequence[dict[str, Any]]  # OpenAI function-tool form
Calls = list[tuple[str, str]]  # (name, arguments as JSON text)

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


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


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _property_type(tools: Tools, function: str, parameter: str) -> Any:
    """The declared JSON type of a parameter, or None. Tools come from clients, so any shape must be survived."""
    for tool in tools:
        node: Any = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(node, dict) and node.get("name") == function:
            for key in ("parameters", "properties", parameter, "type"):
                node = node.get(key) if isinstance(node, dict) else None
            return node
    return None


def _read_xml(text: str, tools: Tools) -> Calls | None:
    """<function=name> <parameter=key> value </parameter> ... </function>; values are typed by the tool's schema."""
    match = _FUNCTION.fullmatch(text)
    if match is None or not match[1].isprintable():
        return None
    name, body = match.groups()
    arguments: dict[str, Any] = {}
    index = 0
    while index < len(body.rstrip()):
        parameter = _PARAMETER.match(body, index)
        if parameter is None:
            return None
        key, value = parameter.groups()
        arguments[key] = value
        if _property_type(tools, name, key) not in ("string", None):
            with suppress(ValueError):  # not what the schema asks for: the agent gets to see the text
                arguments[key] = json_value(value)
        index = parameter.end()
    return [(name, json.dumps(arguments, ensure_ascii=False))]


def _write_xml(calls: Sequence[ToolCall]) -> str:
    def block(call: ToolCall) -> str:
        members = (parsed_arguments(call.arguments) or {}).items()
        texts = [
            (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for key, value in members
        ]
        parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts)
        return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"

    return "\n".join(map(block, calls))


_NAMED = re.compile(r"\s*([^\s\[\]{}]+)(?:\s*\[CALL_ID\][^\s\[\]{}]*)?(?:\s*\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL)


def _read_mistral(text: str, tools: Tools) -> Calls | None:
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


def parsed_arguments(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call as a dict, or None when they are not a JSON object."""
    try:
        value = json_value(arguments)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _object(call: ToolCall, key: str) -> str:
    """One call as a JSON object, its arguments as they are (as a JSON string when they are not an object)."""
    whole = parsed_arguments(call.arguments) is not None
    arguments = call.arguments if whole else json.dumps(call.arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {arguments}}}'


def _write_hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)


def _write_llama(calls: Sequence[ToolCall]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _write_mistral(calls: Sequence[ToolCall]) -> str:
    return f"[TOOL_CALLS][{', '.join(_object(call, 'arguments') for call in calls)}]"


SYNTAXES: dict[str, ToolSyntax] = {  # the first that reads back what a chat template writes is taken
    "hermes": ToolSyntax(("<tool_call>",), "</tool_call>", read_json, _write_hermes),
    "qwen3_xml": ToolSyntax(("<tool_call>",), "</tool_call>", _read_xml, _write_xml),
    "mistral": ToolSyntax(("[TOOL_CALLS]",), None, _read_mistral, _write_mistral, inner=("[ARGS]", "[CALL_ID]")),
    "llama3_json": ToolSyntax(("<|python_tag|>",), None, partial(read_json, need_arguments=True), _write_llama, True),
}


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


def _open_end(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    for length in range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class TurnReader:
    """Splits one assistant turn, fed in pieces of any size, into content, reasoning and tool calls. Never raises.

    What it returns does not depend on where the text was cut into pieces. Text that may still become a marker or a
    stop string is held back. The text ends before the first stop string to be completed. Without tool calls and
    reasoning the content is the text, unchanged; white space beside a call or after the reasoning is dropped.
    A block of calls that cannot be read stays in the content, with `malformed` set.
    """

    def __init__(
        self, syntax: ToolSyntax | None, tools: Tools = (), stops: Sequence[str] = (), thinking: bool | None = False
    ):
        """`thinking`: the turn begins inside the reasoning; None: reasoning is text like any other."""
        self._syntax = syntax
        self._tools = tools
        self._stops = tuple(stop for stop in stops if stop)
        self.stopped = False  # a stop string was found: nothing that follows counts
        self.malformed = False
        self._held = ""  # may be the beginning of a stop string
        self._buffer = ""  # not yet decided what it is
        self._state = {None: self._content, False: self._start, True: self._reasoning}[thinking]
        self._trim = False  # white space at the beginning of the buffer does not count
        self._gap = ""  # white space between the content and a call's marker
        self._marker = ""
        self._separate = False  # a call stands between the content so far and what follows
        self._tried = 0  # ends of the block before this index were tried
        self._delta_text = self._delta_reasoning = ""
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._announced = 0  # calls already returned in a delta

    def feed(self, text: str) -> Delta:
        """What the next piece of text adds."""
        return self._take(self._cut(text), final=False)

    def finish(self) -> Delta:
        """What the end of the turn adds: everything held back."""
        held, self._held = self._held, ""
        return self._take(held, final=True)

    def message(self) -> Message:
        """The whole turn; complete after `finish`."""
        return Message(
            role="assistant",
            content="".join(self._text),
            tool_calls=tuple(self._calls),
            reasoning="".join(self._thoughts),
            malformed=self.malformed,
        )

    def _cut(self, text: str) -> str:
        """The part of the text that is certain to come before every stop string."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        keep = _open_end(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _take(self, text: str, final: bool) -> Delta:
        self._buffer += text
        while self._state(final):
            pass
        calls, self._announced = tuple(self._calls[self._announced :]), len(self._calls)
        delta = Delta(index=0, text=self._delta_text, reasoning=self._delta_reasoning, tool_calls=calls)
        self._delta_text = self._delta_reasoning = ""
        return delta

    # Each state handles the beginning of the buffer and returns whether there is more to do.

    def _start(self, final: bool) -> bool:
        head = self._buffer.lstrip()
        if not final and THINK_OPEN.startswith(head):
            return False
        if head.startswith(THINK_OPEN):
            self._buffer = head[len(THINK_OPEN) :]
            self._state = self._reasoning
        else:
            self._state = self._content
        return True

    def _reasoning(self, final: bool) -> bool:
        thought, close, rest = self._buffer.partition(THINK_CLOSE)
        if not close and not final:
            sure = thought[: len(thought) - _open_end(thought, (THINK_CLOSE,))]
            thought = sure.rstrip()
            rest = self._buffer[len(thought) :]
        else:
            thought = thought.rstrip()
        if not self._thoughts:
            thought = thought.lstrip()
        if thought:
            self._thoughts.append(thought)
            self._delta_reasoning += thought
        self._buffer = rest
        if close:
            self._state, self._trim = self._content, True
        return bool(close)

    def _content(self, final: bool) -> bool:
        if self._trim:
            self._buffer = self._buffer.lstrip()
            self._trim = not self._buffer
        text = self._buffer
        if self._syntax is None:
            self._buffer = ""
            self._emit(text)
            return False
        first = self._syntax.bare_json and not self._text and not self._calls
        if first and text.lstrip().startswith("{"):
            return self._open_call("", 0)
        found = [(at, marker) for marker in self._syntax.opens if (at := text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            return self._open_call(marker, at)
        if not final:
            text = text[: len(text) - _open_end(text, self._syntax.opens)].rstrip()
        self._buffer = self._buffer[len(text) :]
        self._emit(text)
        return False

    def _open_call(self, marker: str, at: int) -> bool:
        before = self._buffer[:at].rstrip()
        self._gap, self._marker, self._tried = self._buffer[len(before) : at], marker, 0
        self._emit(before)
        self._buffer = self._buffer[at + len(marker) :]
        self._state = self._call
        return True

    def _call(self, final: bool) -> bool:
        assert self._syntax is not None
        close = self._syntax.close
        while close is not None and (end := self._buffer.find(close, self._tried)) >= 0:
            if calls := self._syntax.read(self._buffer[:end], self._tools):
                return self._close_call(calls, end + len(close))
            self._tried = end + 1  # the marker may stand inside a JSON string: try the next one
        if not final:
            return False
        if calls := self._syntax.read(self._buffer, self._tools):  # the closing marker was left out
            return self._close_call(calls, len(self._buffer))
        first = self._buffer.find(close) if close is not None else -1
        end = first + len(close or "") if first >= 0 else len(self._buffer)
        broken, self._buffer = self._buffer[:end], self._buffer[end:]
        names_a_call = '"name"' in broken and ('"parameters"' in broken or '"arguments"' in broken)
        self.malformed |= bool(self._marker) or names_a_call  # bare JSON may also be just an answer
        self._emit(self._gap + self._marker + broken)
        self._state = self._content
        return bool(self._buffer)

    def _close_call(self, calls: Calls, end: int) -> bool:
        for name, arguments in calls:
            self._calls.append(ToolCall(id=f"call_{len(self._calls)}", name=name, arguments=arguments))
        self._buffer = self._buffer[end:]
        self._state, self._trim = self._content, True
        self._separate = True
        return True

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._separate and self._text:
            text = "\n" + text
        self._separate = False
        self._text.append(text)
        self._delta_text += text
