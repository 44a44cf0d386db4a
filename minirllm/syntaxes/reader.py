"""How an assistant turn is read back, in pieces as it comes: content, reasoning, tool calls, stop strings.

Owns: `TurnReader`. Does not know: tokens, chat templates, HTTP, which syntaxes there are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from minirllm.syntaxes.calls import Calls, Follower, Tools, ToolSyntax
from minirllm.types import CallDelta, Delta, Message, ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def _open_end(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    for length in range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class _Block(NamedTuple):
    """A block of calls that is being read; the buffer begins behind its marker."""

    before: str  # white space and the marker, as they were
    follower: Follower | None
    first: int  # the number of its first call in the turn
    said: list[int]  # how many characters of the arguments of each of its calls were returned


class TurnReader:
    """Splits one assistant turn, fed in pieces of any size, into content, reasoning and tool calls. Never raises.

    What it returns does not depend on where the text was cut into pieces. Text that may still become a marker or a
    stop string is held back. The text ends before the first stop string to be completed. Without tool calls and
    reasoning the content is the text, unchanged; white space beside a call or after the reasoning is dropped.

    Calls are returned while they are written, where the syntax allows it. A block of calls that cannot be read stays in
    the content, with `malformed` set; what was returned of its calls is not in the message, and their numbers are not
    given again. `ToolCall.id` is ``call_<number>``.
    """

    def __init__(
        self,
        syntax: ToolSyntax | None,
        tools: Tools = (),
        stops: Sequence[str] = (),
        thinking: bool | None = False,
        tokens: frozenset[str] = frozenset(),
    ):
        """`thinking`: the turn begins inside the reasoning; None: reasoning is text like any other.

        `tokens`: markers that are single tokens, so that text which merely spells them is text.
        """
        self._syntax = syntax
        self._tools = tools
        self._stops = tuple(stop for stop in stops if stop)
        self._tokens = tokens
        self.stopped = ""  # the stop string that was found: nothing that follows counts
        self.malformed = False
        self._held = ""  # may be the beginning of a stop string
        self._buffer = ""  # not yet decided what it is
        self._fed = self._at = 0  # characters fed, and those of them that stand before the buffer
        self._real: set[int] = set()  # where in what was fed a marker that is a token begins
        self._state = {None: self._content, False: self._start, True: self._reasoning}[thinking]
        self._trim = False  # white space at the beginning of the buffer does not count
        self._block: _Block | None = None
        self._followed = self._tried = 0  # how much of the block was followed; its ends before this index were tried
        self._separate = False  # a call stands between the content so far and what follows
        self._meant = False  # a turn that began like calls without a marker could not be read
        self._begun = 0  # calls whose numbers are given
        self._delta = Delta(0)
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, text: str, token: bool = False) -> Delta:
        """What the next piece of text adds. `token`: it is one token."""
        if token:
            self._real.add(self._fed)
        self._fed += len(text)
        return self._take(self._cut(text), final=False)

    def finish(self) -> Delta:
        """What the end of the turn adds: everything held back."""
        held, self._held = self._held, ""
        return self._take(held, final=True)

    def message(self) -> Message:
        """The whole turn; complete after `finish`."""
        content = "".join(self._text)
        meant = self._meant and self._syntax is not None and re.search(self._syntax.meant, content) is not None
        return Message(
            role="assistant",
            content=content,
            tool_calls=tuple(self._calls),
            reasoning="".join(self._thoughts),
            malformed=self.malformed or meant,
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
        delta, self._delta = self._delta, Delta(0)
        return delta

    def _find(self, markers: Sequence[str], start: int = 0) -> tuple[int, str]:
        """Where the next of these markers stands in the buffer: (-1, "") for nowhere."""
        found = []
        for marker in markers:
            at = self._buffer.find(marker, start)
            while at >= 0 and marker in self._tokens and self._at + at not in self._real:
                at = self._buffer.find(marker, at + 1)
            if at >= 0:
                found.append((at, marker))
        return min(found, default=(-1, ""))

    def _drop(self, count: int) -> str:
        """Take so many characters from the buffer."""
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        self._at += count
        return taken

    # Each state handles the beginning of the buffer and returns whether there is more to do.

    def _start(self, final: bool) -> bool:
        head = self._buffer.lstrip()
        blank = len(self._buffer) - len(head)
        if not final and THINK_OPEN.startswith(head):
            return False
        if self._find((THINK_OPEN,))[0] == blank:
            self._drop(blank + len(THINK_OPEN))
            self._state = self._reasoning
        else:
            self._state = self._content
        return True

    def _reasoning(self, final: bool) -> bool:
        at, _ = self._find((THINK_CLOSE,))
        thought = self._buffer if at < 0 else self._buffer[:at]
        if at < 0 and not final:
            thought = thought[: len(thought) - _open_end(thought, (THINK_CLOSE,))]
        thought = thought.rstrip()
        if at >= 0:
            self._drop(at + len(THINK_CLOSE))
            self._state, self._trim = self._content, True
        else:
            self._drop(len(self._buffer) if final else len(thought))
        if not self._thoughts:
            thought = thought.lstrip()
        if thought:
            self._thoughts.append(thought)
            self._delta = replace(self._delta, reasoning=self._delta.reasoning + thought)
        return at >= 0

    def _content(self, final: bool) -> bool:
        if self._trim:
            self._drop(len(self._buffer) - len(self._buffer.lstrip()))
            self._trim = not self._buffer
        if self._syntax is None:
            self._emit(self._drop(len(self._buffer)))
            return False
        at, marker = self._find(self._syntax.opens)
        first = self._syntax.bare and not (self._text or self._calls or self._meant)
        if first and self._buffer.lstrip().startswith(self._syntax.bare):
            at, marker = 0, ""
        if at >= 0:
            before = self._buffer[:at].rstrip()
            self._emit(self._drop(len(before)))
            follower = self._syntax.follow() if self._syntax.follow else None
            self._block = _Block(self._drop(at - len(before) + len(marker)), follower, self._begun, [])
            self._state, self._followed, self._tried = self._call, 0, 0
            return True
        text = self._buffer
        if not final:
            text = text[: len(text) - _open_end(text, self._syntax.opens)].rstrip()
        self._emit(self._drop(len(text)))
        return False

    def _call(self, final: bool) -> bool:
        assert self._syntax is not None
        assert self._block is not None
        ends = [self._syntax.close] if self._syntax.close else []
        while not self._broken():
            at, close = self._find(ends, self._tried)
            known = at if at >= 0 else len(self._buffer) - (0 if final else _open_end(self._buffer, ends))
            self._follow(known)
            if (at >= 0 or final) and not self._broken():
                calls = self._syntax.read(self._buffer[:known], self._tools)
                if calls:
                    return self._close(calls, known + len(close))
            if at < 0:
                break
            self._tried = at + 1  # the marker may stand inside a JSON string: try the next one
        if not (final or self._broken()):
            return False
        self.malformed |= bool(self._block.before.strip())  # one without a marker may also be just an answer
        self._meant = not self._block.before.strip()
        self._begun = self._block.first + len(self._block.said)
        self._emit(self._block.before)
        self._state = self._malformed if ends and not self._meant else self._content
        return True

    def _broken(self) -> bool:
        return self._block is not None and self._block.follower is not None and self._block.follower.broken

    def _malformed(self, final: bool) -> bool:
        """A broken block is text to its first end marker, or to the end of the turn."""
        assert self._syntax is not None
        assert self._syntax.close is not None
        at, close = self._find((self._syntax.close,))
        if at >= 0:
            self._emit(self._drop(at + len(close)))
            self._state = self._content
            return True
        held = 0 if final else _open_end(self._buffer, (self._syntax.close,))
        self._emit(self._drop(len(self._buffer) - held))
        return False

    def _follow(self, end: int) -> None:
        """Return what the block, up to this index, says of its calls."""
        assert self._block is not None
        if self._block.follower is not None and end > self._followed:
            for piece in self._block.follower.feed(self._buffer[self._followed : end]):
                self._say(piece)
            self._followed = end

    def _say(self, piece: CallDelta) -> None:
        """Return a piece of a call that has its number in the block."""
        assert self._block is not None
        said, number = self._block.said, self._block.first + piece.index
        id = f"call_{number}" if piece.index == len(said) else ""
        if id:
            said.append(0)
        said[piece.index] += len(piece.arguments)
        whole = replace(piece, index=number, id=id)
        self._delta = replace(self._delta, calls=(*self._delta.calls, whole))

    def _close(self, calls: Calls, end: int) -> bool:
        assert self._block is not None
        for index, (name, arguments) in enumerate(calls):
            self._calls.append(ToolCall(f"call_{self._block.first + index}", name, arguments))
            if index >= len(self._block.said):
                self._say(CallDelta(index, name=name, arguments=arguments))
            assert self._block.said[index] == len(arguments), "followed to its end"
        self._begun = self._block.first + len(calls)
        self._drop(end)
        self._state, self._trim, self._separate = self._content, True, True
        return True

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._separate and self._text:
            text = "\n" + text
        self._separate = False
        self._text.append(text)
        self._delta = replace(self._delta, text=self._delta.text + text)
