"""Mistral: ``[TOOL_CALLS]`` and a JSON list of calls, or ``name[ARGS]{...}``.

Owns: this syntax. Does not know: others.
"""

from __future__ import annotations

from collections.abc import Sequence

from minirllm.syntaxes.calls import Calls, Tools, ToolSyntax, as_object
from minirllm.syntaxes.json_calls import JsonCalls, NamedCalls, whole
from minirllm.types import CallDelta, ToolCall

_NAMED = r"\s*(?:\[TOOL_CALLS\]\s*)?(?P<name>[^\s\[\]{}]+)(?:\s*\[CALL_ID\][^\s\[\]{}]*)?(?:\s*\[ARGS\])?\s*"


class Follower:
    """A list or an object begins a block of JSON; the marker is repeated before each further name. See `calls`."""

    def __init__(self) -> None:
        self.broken = False
        self._form: JsonCalls | NamedCalls | None = None

    def feed(self, text: str) -> list[CallDelta]:
        """See `calls.Follower`."""
        if self._form is None and (text := text.lstrip()):
            self._form = JsonCalls() if text[0] in "[{" else NamedCalls(_NAMED)
        said = self._form.feed(text) if self._form else []
        self.broken = self._form is not None and self._form.broken
        return said


def read(text: str, tools: Tools) -> Calls | None:
    """A JSON list of calls, or name[ARGS]{...} once or more."""
    return whole(JsonCalls() if text.lstrip()[:1] in ("[", "{") else NamedCalls(_NAMED), text.lstrip())


def write(calls: Sequence[ToolCall]) -> str:
    """The calls as the model would write them: the JSON list, which all of them read."""
    return f"[TOOL_CALLS][{', '.join(as_object(call, 'arguments') for call in calls)}]"


SYNTAX = ToolSyntax(("[TOOL_CALLS]",), None, read, write, Follower, inner=("[ARGS]", "[CALL_ID]"))
