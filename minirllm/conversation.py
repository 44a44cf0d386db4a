"""Which earlier call a chat request continues, found by its messages.

Owns: `Conversations`, a trie of messages in which every sampled answer knows its call, and `MATCHERS`: what counts as
a message sent back. Does not know: tokens, engines, wire formats (a dialect has made its spellings of nothing, of parts
and of cache marks alike).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minirllm.config import find
from minirllm.errors import ConfigError
from minirllm.syntaxes.calls import same_call
from minirllm.types import Message

Matcher = Callable[[Message, Message], bool]  # (what was said, what was sent later): is it the same, sent back?

MATCHERS = {"normalized": f"{__name__}:normalized"}


def matcher(name: str) -> Matcher:
    """The matcher called `name`, or the function at ``module:attr``. Raises ConfigError when there is none."""
    found: Matcher = find("matcher", name, MATCHERS)
    if not callable(found):
        raise ConfigError(f"Matcher {name!r} is not a function (said, sent) -> bool of two Messages.")
    return found


def normalized(said: Message, sent: Message) -> bool:
    """What clients change without meaning to: outer white space, the spelling of JSON, ids, names, reasoning left out.

    What they mean to change (text, arguments, the number of calls, other reasoning) makes another message.
    """
    return (
        said.role == sent.role
        and said.content.strip() == sent.content.strip()
        and sent.reasoning.strip() in ("", said.reasoning.strip())
        and len(said.tool_calls) == len(sent.tool_calls)
        and all(map(same_call, said.tool_calls, sent.tool_calls))
    )


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
    """All conversations of one session, each call behind the one it continues.

    `same` says of a message and one sent back later whether the second is the first. Clients do not send back all that
    they got, so a request may repeat several calls; it continues the one it repeats most literally, and of equal ones
    always the same, whatever the order in which they were recorded.
    """

    def __init__(self, same: Matcher):
        self._same = same
        self._root = _Turn(Message("root"))
        self._turns: dict[str, _Turn] = {}  # call id -> the turn of its answer

    def match(self, messages: list[Message], tools: list[dict[str, Any]]) -> Match:
        """The call to continue; at least one message is left over for `added`. Calls with other tools do not count."""
        reached = [(0, self._root)]  # turns that say what was sent so far, and how many of their messages are not equal
        parent, depth, edited = None, 0, False
        for index, message in enumerate(messages[:-1], 1):
            children = [(unlike, child) for unlike, turn in reached for child in turn.children]
            reached = [
                (unlike + (child.message != message), child)
                for unlike, child in children
                if child.message == message or self._same(child.message, message)
            ]
            if not reached:
                edited = message.role == "assistant" and any(child.answers for _, child in children)
                break
            answers = [(unlike, a.call_id, a) for unlike, turn in reached for a in turn.answers if a.tools == tools]
            if answers:
                parent, depth = min(answers, key=lambda answer: answer[:2])[2], index
        return Match(parent, messages[depth:], edited)

    def record(self, match: Match, answer: Answer) -> None:
        """`answer` was sampled in reply to the request that `match` is of."""
        turn = self._turns[match.parent.call_id] if match.parent else self._root
        for message in (*match.added, answer.message):
            following = next((child for child in turn.children if child.message == message), None)
            if following is None:
                following = _Turn(message)
                turn.children.append(following)
            turn = following
        turn.answers.append(answer)
        self._turns[answer.call_id] = turn
