"""How an assistant turn is read back, in pieces as it comes: content, reasoning, tool calls, stop strings.

Owns: `TurnReader`. Does not know: tokens, chat templates, HTTP, which syntaxes there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from minirllm.syntaxes.calls import Calls, Tools, ToolSyntax
from minirllm.types import CallDelta, Delta, Message, ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


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
        self.stopped = ""  # the stop string that was found: nothing that follows counts
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
            end, at = min(ends)
            self.stopped, self._held = text[at:end], ""
            return text[:at]
        keep = _open_end(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _take(self, text: str, final: bool) -> Delta:
        self._buffer += text
        while self._state(final):
            pass
        news = enumerate(self._calls[self._announced :], self._announced)
        calls = tuple(CallDelta(index, call.id, call.name, call.arguments) for index, call in news)
        self._announced = len(self._calls)
        delta = Delta(index=0, text=self._delta_text, reasoning=self._delta_reasoning, calls=calls)
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
