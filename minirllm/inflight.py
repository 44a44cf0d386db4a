"""A request from its acceptance until its answer is delivered: what is sampled so far, and who listens.

Owns: `Accepted`, `Flight`, `Sample`, and by what requests, prompts and calls are known. Does not know: how requests are
matched, sampled or recorded.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from minirllm.conversation import Match
from minirllm.renderer import Stream
from minirllm.types import Delta, Message, ModelReply, ModelRequest, SampledToken, SamplingParams, ToolCall

OnDelta = Callable[[Delta], None]


@dataclass(frozen=True)
class Accepted:
    """A request that its session has accepted: what it continues, which of the session it is, what its steps say."""

    request: ModelRequest
    match: Match
    arrival: int
    metadata: dict[str, Any]


@dataclass(eq=False)
class Sample:
    """One choice of a request, as far as it is sampled. `stream` reads its tokens as text."""

    call_id: str
    seed: int
    stream: Stream
    tokens: list[SampledToken] = field(default_factory=list)

    def name(self, id: str) -> str:
        """The id of a tool call that its stream calls `id`: unique in the session, and the same in every run."""
        return f"call_{self.call_id}_{id.removeprefix('call_')}"

    def message(self) -> Message:
        """The whole answer, once it is finished."""
        return self.named(self.stream.message())

    def named(self, message: Message) -> Message:
        """`message` with the ids of its calls."""
        calls = [replace(call, id=self.name(call.id)) for call in message.tool_calls]
        return replace(message, tool_calls=tuple(calls))


@dataclass(eq=False)
class Flight:
    """A request being answered, or answered and not delivered."""

    accepted: Accepted  # its request is as `identity` leaves it
    prompt_ids: list[int]
    params: SamplingParams
    overridden: dict[str, Any]
    nth: tuple[bytes, int]  # digest of the prompt, and how many equal prompts were sent before
    samples: list[Sample]
    deltas: list[Delta] = field(default_factory=list)  # everything said so far, for whoever asks again
    on_delta: OnDelta | None = None
    lost: bool = False  # answered, but the answer did not reach its client
    aborted: bool = False
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[ModelReply] | None = None

    @property
    def reply_id(self) -> str:
        """`ModelReply.id`: a prefix and the call id of choice 0."""
        return ("cmpl-" if self.accepted.request.messages is None else "chatcmpl-") + self.samples[0].call_id

    @property
    def done(self) -> bool:
        """Is the answer there (or its failure)?"""
        return self.task is not None and self.task.done()

    def listen(self, on_delta: OnDelta | None) -> None:
        """Tell `on_delta` everything, from the beginning on."""
        self.on_delta = on_delta
        if on_delta is not None:
            for delta in (Delta(0, reply_id=self.reply_id, prompt_ids=tuple(self.prompt_ids)), *self.deltas):
                on_delta(delta)

    def token(self, index: int, token: SampledToken) -> None:
        """Choice `index` got one more token."""
        sample = self.samples[index]
        sample.tokens.append(token)
        self._tell(index, sample.stream.push(token.id), (token,))

    def finish(self, index: int) -> None:
        """Choice `index` has all its tokens: what was held back is said."""
        self._tell(index, self.samples[index].stream.finish(), ())

    def drifts(self, index: int, recorded: list[tuple[int, float]], read: Message) -> bool:
        """Is what the client of choice `index` was told not `read`, the message that the recorded tokens say at one
        go, or are those not the ones that the engine sampled?"""
        sample, told = self.samples[index], self.told(index)
        read = sample.named(read)
        sampled = [(token.id, token.logprob) for token in sample.tokens]
        calls = told.tool_calls == read.tool_calls or (read.malformed and {*read.tool_calls} <= {*told.tool_calls})
        text = (told.content, told.reasoning) == (read.content, read.reasoning)
        return not (calls and text and read == sample.message() and sampled == recorded)

    def told(self, index: int) -> Message:
        """What the pieces of choice `index` add up to; of calls that broke what was sent of them, too."""
        said = [delta for delta in self.deltas if delta.index == index]
        calls: dict[int, ToolCall] = {}
        for piece in (call for delta in said for call in delta.calls):
            begun = calls.get(piece.index, ToolCall(piece.id, piece.name, ""))
            calls[piece.index] = replace(begun, arguments=begun.arguments + piece.arguments)
        text, reasoning = "".join(delta.text for delta in said), "".join(delta.reasoning for delta in said)
        return Message("assistant", text, tuple(calls.values()), reasoning=reasoning)

    def _tell(self, index: int, piece: Delta, tokens: tuple[SampledToken, ...]) -> None:
        sample = self.samples[index]
        calls = tuple(replace(call, id=sample.name(call.id)) if call.id else call for call in piece.calls)
        if tokens or piece.text or piece.reasoning or calls:
            delta = Delta(index, piece.text, piece.reasoning, calls, tokens)
            self.deltas.append(delta)
            if self.on_delta is not None:
                self.on_delta(delta)


def prompt_digest(prompt_ids: Iterable[int]) -> bytes:
    """What a prompt is known by."""
    return blake2b(array("q", prompt_ids).tobytes()).digest()


def identify(seed_parts: tuple[Any, ...], digest: bytes, nth: int, index: int) -> tuple[str, int]:
    """(call id, request seed) of choice `index` of a prompt that was sent `nth` times before in its session.

    Both come of one hash: who knows a call's id can find out its seed again, and that neither was changed.
    """
    noise = blake2b(digest + repr((seed_parts, nth, index)).encode(), digest_size=16).digest()
    return noise[8:].hex(), int.from_bytes(noise[:8], "big") >> 1


def identity(request: ModelRequest) -> ModelRequest:
    """The request without what only says how its answer travels: equal identities are one request sent twice."""
    return replace(request, stream=False, include_usage=False)


def shown_tools(request: ModelRequest) -> list[dict[str, Any]]:
    """The tools that the model is told of: the request's, unless it forbids them."""
    return [] if request.tool_choice == "none" else request.tools
