"""The sessions of one endpoint, by id.

Owns: `Sessions`, the registry: what is open, what was closed, and the session of calls that name none. Does not
know: what a session does.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from minirllm.errors import SessionClosed, UnknownSession
from minirllm.recorded import AnySession
from minirllm.session import Session

SHARED_TOKENS = 1_000_000  # after so many a shared session is replaced, since it remembers them all
CLOSED_KEPT = 10_000  # ids of closed sessions whose late calls are told so; of an older one none is known


class Sessions:
    """The sessions of one endpoint, by id.

    `answering`: engine, renderer and the model's name; or what else sessions of another `kind` are made of, after id
    and key. `defaults` are fields that every new one gets.
    """

    def __init__(self, *answering: Any, kind: Callable[..., AnySession] = Session, **defaults: Any):
        self.answering, self.kind, self.defaults = answering, kind, defaults
        self._open: dict[str, AnySession] = {}
        self._closed: dict[str, None] = {}  # the last to close is the last
        self._shared: AnySession | None = None
        self._shared_count = 0

    def create(self, id: str, *, key: str | None = None, **settings: Any) -> AnySession:
        """A new session; `settings` are fields of Session. The key is random if none is given."""
        assert id not in self._open, f"session {id!r} is open already"
        self._open[id] = self._new(id, key or secrets.token_urlsafe(24), settings)
        self._closed.pop(id, None)
        return self._open[id]

    def create_open(self, key: str) -> AnySession:
        """The session of calls that name none, shared by the bearers of `key`; a fresh one when it has grown large."""
        if self._shared is None or self._shared.tokens_used > SHARED_TOKENS:
            free = dict.fromkeys(("max_calls", "max_streams"), sys.maxsize)
            self._shared = self._new("shared", key, {"seed_parts": ("shared", self._shared_count), **free})
            self._shared_count += 1
        return self._shared

    def _new(self, id: str, key: str, settings: Mapping[str, Any]) -> AnySession:
        return self.kind(id, key, *self.answering, **{**self.defaults, **settings})

    def get(self, id: str) -> AnySession:
        """The open session. Raises SessionClosed for one that was closed, UnknownSession for one that never was."""
        if id in self._closed:
            raise SessionClosed(f"Session {id!r} has ended: late calls are refused.")
        if id not in self._open:
            raise UnknownSession(f"There is no session {id[:200]!r}.")
        return self._open[id]

    def close(self, id: str) -> None:
        """Close the session and forget all but its id. Closing twice is fine."""
        session = self._open.pop(id, None)
        if session is not None:
            session.close()
            self._closed[id] = None
            if len(self._closed) > CLOSED_KEPT:
                del self._closed[next(iter(self._closed))]

    def __contains__(self, id: object) -> bool:
        return id in self._open

    def __iter__(self) -> Iterator[AnySession]:
        return iter(list(self._open.values()))
