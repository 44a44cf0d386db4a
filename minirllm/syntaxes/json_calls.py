"""Calls whose arguments are JSON, followed character by character while they are written.

Owns: `JsonText` (where a JSON value ends, and whether it still can), `JsonCalls` (objects with name and arguments),
`NamedCalls` (a name, then the arguments). All strict, the arguments kept to the letter. Does not know: markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from minirllm.syntaxes.calls import MAX_DEPTH, Calls, Tools, is_name, json_value, parsed_arguments, sendable
from minirllm.types import CallDelta

MEMBERS = {"name": "name", "arguments": "arguments", "parameters": "arguments"}  # of a call, and what they are

_SPACE = re.compile(r"[ \t\r\n]*")
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')  # of a string
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r'[^ \t\r\n"\[\]{},:]*')  # numbers, true, false, null, or something wrong


class JsonText:
    """One JSON value, fed in pieces. Of an object, `names` says which members are noted, and as what: each but once."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self.text = ""
        self.sure = 0  # what stands before is the beginning of a JSON value; what is in doubt is not counted
        self.ended = self.broken = False
        self.members: dict[str, tuple[int, int]] = {}  # those noted: where the value begins and ends, -1: not yet
        self._names = names or {}
        self._open = ""  # the containers around this place: "{[{"
        self._want = "value"  # or: key, colon, comma; "first" for a value or key that may be missing
        self._string = -1  # where the string begins that this place is in
        self._key: str | None = None  # of the noted member at this place

    def feed(self, text: str) -> str:
        """Take a piece; returns what stands behind the end of the value."""
        self.text += text
        while not (self.ended or self.broken) and self._step():
            pass
        if not self.ended:
            return ""
        rest, self.text = self.text[self.sure :], self.text[: self.sure]
        return rest

    def member(self, key: str) -> str:
        """The value of a member as it is written, as far as it is."""
        start, end = self.members[key]
        return self.text[start : self.sure if end < 0 else end]

    def _step(self) -> bool:
        if self._string >= 0:
            return self._in_string()
        at = self.sure = _SPACE.match(self.text, self.sure).end()  # type: ignore[union-attr]
        letter = self.text[at : at + 1]
        if letter in ("", ",", ":", "}", "]"):
            return letter != "" and self._punctuation(letter)
        key = self._open[-1:] == "{" and self._want in ("first", "key")
        if self._want not in ("value", "first", "key") or (key and letter != '"'):
            return self._break()
        if not key and self._open == "{" and self._key is not None:
            if self._key in self.members:
                return self._break()
            self.members[self._key] = (at, -1)
        if letter == '"':
            self._string, self.sure = at, at + 1
            self._want = "key" if key else "value"
        elif letter in "{[":
            self._open, self._want, self.sure = self._open + letter, "first", at + 1
            return len(self._open) <= MAX_DEPTH or self._break()
        else:
            return self._scalar(at)
        return True

    def _punctuation(self, letter: str) -> bool:
        inner = self._open[-1:]
        if letter == ":" and self._want == "colon":
            self._want = "value"
        elif letter == "," and self._want == "comma":
            self._want = "key" if inner == "{" else "value"
        elif letter == {"{": "}", "[": "]"}.get(inner) and self._want in ("first", "comma"):
            self._open = self._open[:-1]
            self.sure += 1
            return self._end()
        else:
            return self._break()
        self.sure += 1
        return True

    def _scalar(self, at: int) -> bool:
        end = _SCALAR.match(self.text, at).end()  # type: ignore[union-attr]
        if end == len(self.text):
            return False  # it may go on
        try:
            json_value(self.text[at:end])
        except ValueError:
            return self._break()
        self.sure = end
        return self._end()

    def _in_string(self) -> bool:
        self.sure = _CHARACTERS.match(self.text, self.sure).end()  # type: ignore[union-attr]
        rest = self.text[self.sure : self.sure + 6]
        if not rest or _ESCAPE_BEGUN.fullmatch(rest):
            return False
        if rest[0] != '"':
            return self._break()
        self.sure += 1
        start, self._string = self._string, -1
        if self._want == "value":
            return self._end()
        self._want = "colon"
        if len(self._open) == 1:
            self._key = self._names.get(json.loads(self.text[start : self.sure]))
        return True

    def _end(self) -> bool:
        """A value ends here."""
        self._want = "comma"
        if self._open == "{" and self._key is not None:
            self.members[self._key] = (self.members[self._key][0], self.sure)
        self.ended = not self._open
        return True

    def _break(self) -> bool:
        self.broken = True
        return False


class JsonCalls:
    """Objects {"name", "arguments" or "parameters"}: one, several in a row, or a list of them. See `calls.Follower`."""

    def __init__(self, need_arguments: bool = False):
        self.broken = False
        self.calls: Calls = []  # those that are complete
        self._need_arguments = need_arguments
        self._object: JsonText | None = None
        self._said = -1  # how much of the arguments was said; -1: the call was not announced
        self._list = ""  # "[" in a list, "]" behind it

    @property
    def whole(self) -> bool:
        """Could the block end here?"""
        return bool(self.calls) and not self.broken and self._object is None and self._list != "["

    def feed(self, text: str) -> list[CallDelta]:
        """See `calls.Follower`."""
        said: list[CallDelta] = []
        while not self.broken and (text := text if self._object else self._between(text)):
            self._object = self._object or JsonText(MEMBERS)
            text = self._object.feed(text)
            said += self._announce(self._object)
            if self._object.ended:
                said += self._complete(self._object)
            self.broken |= self._object is not None and self._object.broken
        return said

    def _between(self, text: str) -> str:
        """The text from the beginning of the next object on."""
        text = text.lstrip(" \t\r\n;," if self.calls else " \t\r\n")
        if (text[:1] == "[" and not self._list and not self.calls) or (text[:1] == "]" and self._list == "["):
            self._list = text[0]
            return self._between(text[1:])
        self.broken = bool(text) and (text[0] != "{" or self._list == "]")
        return text

    def _announce(self, it: JsonText) -> list[CallDelta]:
        """What is new of the arguments, once there are a whole name and the beginning of an object."""
        if "arguments" not in it.members or it.members.get("name", (0, -1))[1] < 0:
            return []
        name, arguments = json_value(it.member("name")), it.member("arguments")
        if not is_name(name) or not arguments.startswith("{"):
            return []
        first, said = self._said < 0, max(self._said, 0)
        self._said = len(arguments)
        return [CallDelta(len(self.calls), name=name if first else "", arguments=arguments[said:])]

    def _complete(self, it: JsonText) -> list[CallDelta]:
        call = _call(it, self._need_arguments)
        if call is None:
            self.broken = True
            return []
        said = [CallDelta(len(self.calls), name=call[0], arguments=call[1])] if self._said < 0 else []
        self.calls.append(call)
        self._object, self._said = None, -1
        return said


def _call(it: JsonText, need_arguments: bool) -> tuple[str, str] | None:
    """The call that a complete object stands for."""
    name: Any = json_value(it.member("name")) if "name" in it.members else None
    if not is_name(name):
        return None
    arguments = it.member("arguments") if "arguments" in it.members else "null"
    if arguments.startswith("{"):
        return name, arguments
    value = json_value(arguments)
    if isinstance(value, str) and parsed_arguments(value) is not None and sendable(value):  # encoded twice
        return name, value
    return (name, "{}") if value is None and not need_arguments else None


class NamedCalls:
    """A name and its arguments, an object, for each call. See `calls.Follower`.

    `head` matches what stands before the arguments, and names its group `name`; `tail` what stands behind them.
    """

    def __init__(self, head: str, tail: str = r"\s*"):
        self.broken = False
        self.calls: Calls = []
        self._head, self._tail, self._between = re.compile(head), re.compile(tail), re.compile(tail + head)
        self._text = ""  # between arguments
        self._name = ""
        self._arguments: JsonText | None = None

    @property
    def whole(self) -> bool:
        """Could the block end here?"""
        at_end = self._arguments is None and self._tail.fullmatch(self._text) is not None
        return bool(self.calls) and not self.broken and at_end

    def feed(self, text: str) -> list[CallDelta]:
        """See `calls.Follower`."""
        said: list[CallDelta] = []
        while text and not self.broken:
            if self._arguments is None:
                before, brace, _ = text.partition("{")
                self._text, text = self._text + before, text[len(before) :]
                if brace:
                    match = (self._between if self.calls else self._head).fullmatch(self._text)
                    self.broken = match is None or not is_name(match["name"])
                    self._name, self._text, self._arguments = match["name"] if match else "", "", JsonText()
                continue
            known, first = self._arguments.sure, not self._arguments.text
            text = self._arguments.feed(text)
            piece = self._arguments.text[known : self._arguments.sure]
            said.append(CallDelta(len(self.calls), name=self._name if first else "", arguments=piece))
            self.broken = self._arguments.broken
            if self._arguments.ended:
                self.calls.append((self._name, self._arguments.text))
                self._arguments = None
        return [piece for piece in said if piece.name or piece.arguments]


def read_json(text: str, tools: Tools, need_arguments: bool = False) -> Calls | None:
    """The calls of a whole block of `JsonCalls`."""
    return whole(JsonCalls(need_arguments), text)


def whole(follower: JsonCalls | NamedCalls, text: str) -> Calls | None:
    """The calls of a whole block."""
    follower.feed(text)
    return follower.calls if follower.whole else None
