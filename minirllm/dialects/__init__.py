"""Wire dialects: JSON in, JSON and server-sent events out. A new one is a module here, one line in `DIALECTS`.

Owns: the protocol. Dialects know no torch, no HTTP library, no session; the server calls them by route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from minirllm.dialects import chat, completions, gemini, messages, responses
from minirllm.dialects.kept import Kept
from minirllm.dialects.openai import AnswerStream, Counted, TokenText
from minirllm.errors import RequestError
from minirllm.types import ModelReply, ModelRequest


class Dialect(Protocol):
    """What a dialect module offers."""

    ROUTES: tuple[str, ...]  # whole paths, below the session's prefix; they may hold path parameters
    COUNT: Counted  # routes that only count a prompt's tokens, and what says how many there are

    def parse(self, body: Any, route: str) -> ModelRequest:
        """The request in the one internal form. Raises RequestError naming the field."""

    def response(self, reply: ModelReply, request: ModelRequest, token_text: TokenText) -> dict[str, Any]:
        """The whole answer as JSON."""

    def Stream(self, request: ModelRequest, token_text: TokenText, model: str) -> AnswerStream:
        """The answer piece by piece."""

    def error(self, problem: RequestError) -> dict[str, Any]:
        """The error body of this dialect."""


class KeepingDialect(Dialect, Protocol):
    """A dialect whose answers can be asked for again: its requests may refer to those `kept` for their session."""

    KEPT: tuple[tuple[str, str], ...]  # (method, route) for each thing that can be done with one; routes hold {id}

    def parse(self, body: Any, route: str, kept: Kept | None = None) -> ModelRequest:
        """The request in the one internal form; its answer may keep itself."""

    def recall(self, method: str, route: str, id: str, query: Mapping[str, str], kept: Kept) -> dict[str, Any]:
        """What such a route answers. Raises RequestError with 404 for an answer that is not kept."""


KEEPING: dict[str, KeepingDialect] = {"responses": responses}
DIALECTS: dict[str, Dialect] = {
    "chat": chat,
    "completions": completions,
    "gemini": gemini,
    "messages": messages,
    **KEEPING,
}
