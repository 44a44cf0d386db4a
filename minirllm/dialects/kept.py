"""Answers that can be asked for again by their id, and conversations that go on from one of them.

Owns: `Kept`, the newest answers of one session, up to a number of characters. What was said before an answer is not
kept here: the session's steps have it. Does not know: HTTP, what an answer looks like.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minirllm.types import Message, Step

MOST = 16 * 2**20  # characters of the answers of one session; the newest is kept whatever its size


class Kept:
    """The answers of one session. `steps` are the session's own, which grow with every call."""

    def __init__(self, steps: Sequence[Step], most: int = MOST):
        self._steps, self._most = steps, most
        self._bodies: dict[str, tuple[str, str]] = {}  # the answer's id -> (call id, JSON), the oldest first
        self._size = 0

    def keep(self, id: str, call_id: str, body: Mapping[str, Any]) -> None:
        """Keep an answer, and forget the oldest where there are too many. One that is given again takes its place."""
        self.forget(id)
        self._bodies[id] = (call_id, json.dumps(body))
        self._size += len(self._bodies[id][1])
        while self._size > self._most and len(self._bodies) > 1:
            self.forget(next(iter(self._bodies)))

    def forget(self, id: str) -> None:
        """One that is not known is forgotten already."""
        _, text = self._bodies.pop(id, ("", ""))
        self._size -= len(text)

    def body(self, id: str) -> dict[str, Any] | None:
        """The answer as it was given; None for one that is not known, or not any more."""
        known = self._bodies.get(id)
        return dict(json.loads(known[1])) if known else None

    def conversation(self, id: str) -> list[Message]:
        """All that was said up to the answer, and the answer last. It must be known."""
        steps = {step.id: step for step in self._steps}
        messages: list[Message] = []
        step = steps.get(self._bodies[id][0])
        while step is not None:
            messages[:0] = [*step.messages, *([step.response] if step.response else [])]
            step = steps.get(step.parent or "")
        return messages
