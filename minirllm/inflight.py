"""A request from its acceptance until its answer is delivered, and the clients that wait for it.

Owns: `Flight` (what is sampled so far), `Listener` (sampled tokens -> deltas for one client). Does not know: how
requests are matched, sampled or recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minirllm.conversation import Match
from minirllm.renderer import Stream
from minirllm.types import Completion, Delta, ModelReply, ModelRequest, SampledToken, SamplingParams, ToolCall

OnDelta = Callable[[Delta], None]


@dataclass(eq=False)
class Sample:
    """One choice of a request, as far as it is sampled."""

    call_id: str
    seed: int
    tokens: list[SampledToken] = field(default_factory=list)
    completion: Completion | None = None  # once it is finished


@dataclass(eq=False)
class Flight:
    """A request being answered, or answered and not delivered."""

    request: ModelRequest  # as `identity` leaves it
    prompt_ids: list[int]
    params: SamplingParams
    overridden: dict[str, Any]
    match: Match
    nth: tuple[bytes, int]  # digest of the prompt, and how many equal prompts were sent before
    arrival: int  # which request of the session this is
    samples: list[Sample]
    waiters: int = 0
    listeners: list[Listener] = field(default_factory=list)
    aborted: bool = False
    task: asyncio.Task[ModelReply] | None = None

    @property
    def reply_id(self) -> str:
        """`ModelReply.id`: a prefix and the call id of choice 0."""
        return ("cmpl-" if self.request.messages is None else "chatcmpl-") + self.samples[0].call_id

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return shown_tools(self.request)

    @property
    def done(self) -> bool:
        """Is the answer there (or its failure)?"""
        return self.task is not None and self.task.done()

    def token(self, index: int, token: SampledToken) -> None:
        """Choice `index` got one token."""
        self.samples[index].tokens.append(token)
        for listener in self.listeners:
            listener.push(index, token)

    def finish(self, index: int, completion: Completion) -> None:
        """Choice `index` is finished."""
        self.samples[index].completion = completion
        for listener in self.listeners:
            listener.finish(index)


class Listener:
    """A client that streams: gets the deltas of every choice from the first token on, whenever it joined."""

    def __init__(self, on_delta: OnDelta, flight: Flight, streams: Sequence[Stream]):
        self.on_delta, self.flight, self.streams = on_delta, flight, streams
        self.calls = [0] * len(streams)  # tool calls sent
        on_delta(Delta(0, reply_id=flight.reply_id, prompt_ids=tuple(flight.prompt_ids)))
        for index, sample in enumerate(flight.samples):
            for token in sample.tokens:
                self.push(index, token)
            if sample.completion is not None:
                self.finish(index)

    def push(self, index: int, token: SampledToken) -> None:
        """One more token of choice `index`."""
        self._send(index, self.streams[index].push(token.id), (token,))

    def finish(self, index: int) -> None:
        """Choice `index` is finished: send what was held back."""
        self._send(index, self.streams[index].finish(), ())

    def _send(self, index: int, piece: Delta, tokens: tuple[SampledToken, ...]) -> None:
        calls = with_ids(piece.tool_calls, self.flight.samples[index].call_id, self.calls[index])
        self.calls[index] += len(calls)
        if tokens or piece.text or piece.reasoning or calls:
            self.on_delta(Delta(index, piece.text, piece.reasoning, calls, tokens))


def with_ids(calls: Iterable[ToolCall], call_id: str, start: int = 0) -> tuple[ToolCall, ...]:
    """Tool calls with ids that are unique in the session and the same in every run."""
    return tuple(replace(call, id=f"call_{call_id}_{index}") for index, call in enumerate(calls, start))


def identity(request: ModelRequest) -> ModelRequest:
    """The request without what only says how its answer travels: equal identities are one request sent twice."""
    return replace(request, stream=False, include_usage=False)


def shown_tools(request: ModelRequest) -> list[dict[str, Any]]:
    """The request's tools, unless it forbids them."""
    return [] if request.tool_choice == "none" else request.tools
