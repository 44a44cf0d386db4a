"""Which earlier call a chat request continues, found by its messages.

Owns: `Conversations`, a trie of messages in which every sampled answer knows its call. Does not know: tokens, engines,
how two messages are compared (given as `same`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from minirllm.types import Message


@dataclass(eq=False)
class Answer:
    """A finished call. `message` is its answer as the client got it, `tools` what the model was told of."""

    call_id: str
    node: int  # of the token tree: ends with the last sampled token
    tools: list[dict[str, Any]]
    message: Message


@dataclass(eq=False)
class _Turn:
    """A message, and the conversations that go on from it."""

    message: Message
    children: list[_Turn] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)  # calls that sampled this message here


@dataclass(frozen=True)
class Match:
    """What a request continues."""

    parent: Answer | None = None  # the longest earlier call whose request and answer it repeats
    added: list[Message] = field(default_factory=list)  # its messages after that
    edited: bool = False  # an assistant turn stands where this session sampled another


class Conversations:
    """All conversations of one session, each message stored once. `same` must be an equivalence."""

    def __init__(self, same: Callable[[Message, Message], bool]):
        self._same = same
        self._root = _Turn(Message("root"))

    def match(self, messages: list[Message], tools: list[dict[str, Any]]) -> Match:
        """The call to continue; at least one message is left over for `added`. Calls with other tools do not count."""
        turn, parent, depth, edited = self._root, None, 0, False
        for index, message in enumerate(messages[:-1], 1):
            following = self._find(turn, message)
            if following is None:
                edited = message.role == "assistant" and any(child.answers for child in turn.children)
                break
            turn = following
            answers = [answer for answer in turn.answers if answer.tools == tools]
            if answers:  # several samples may say the same: prefer equal tool call ids, then any, but always the same
                parent, depth = min(answers, key=lambda answer: (answer.message != message, answer.call_id)), index
        return Match(parent, messages[depth:], edited)

    def record(self, messages: Iterable[Message], answer: Answer) -> None:
        """`answer` was sampled in reply to `messages`."""
        turn = self._root
        for message in (*messages, answer.message):
            following = self._find(turn, message)
            if following is None:
                following = _Turn(message)
                turn.children.append(following)
            turn = following
        turn.answers.append(answer)

    def _find(self, turn: _Turn, message: Message) -> _Turn | None:
        return next((c for c in turn.children if c.message == message or self._same(c.message, message)), None)
