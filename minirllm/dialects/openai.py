"""What dialects have in common on the way out: OpenAI's errors, usage, log-probabilities, server-sent events.

Owns: those shapes. Does not know: how a request is read, HTTP, sessions.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minirllm.dialects import response_format
from minirllm.errors import RequestError
from minirllm.types import CallDelta, Choice, Completion, Delta, Message, ModelReply, ModelRequest, SampledToken

TokenText = Callable[[int], str]  # the text of one token id
Counted = Mapping[str, Callable[[int], dict[str, Any]]]  # by route: the answer that says how many tokens there are

DONE = "data: [DONE]\n\n"
COUNT: Counted = {}  # chats and completions have no route that counts
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


def error(problem: RequestError) -> dict[str, Any]:
    """The error body of every OpenAI route."""
    kind = "server_error" if problem.status >= 500 else "invalid_request_error"
    if problem.code == "insufficient_quota":
        kind = problem.code
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def frame(event: dict[str, Any]) -> str:
    """One server-sent event. ASCII only, so that no client splits it at a Unicode line separator."""
    return f"data: {json.dumps(event, allow_nan=False)}\n\n"


def usage(reply: ModelReply) -> dict[str, Any]:
    """Token counts."""
    used = reply.usage
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.sampled,
        "total_tokens": used.prompt + used.sampled,
        "prompt_tokens_details": {"cached_tokens": used.cached},
    }


def answer(kind: str, choices: list[dict[str, Any]], reply: ModelReply, request: ModelRequest) -> dict[str, Any]:
    """The body of a whole answer; `kind` is its `object`."""
    body = {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model, "choices": choices}
    if request.return_token_ids:
        body["prompt_token_ids"] = reply.prompt_ids
    return {**body, "usage": usage(reply), **extras(reply, request)}


def extras(reply: ModelReply, request: ModelRequest) -> dict[str, Any]:
    """Fields beside usage that OpenAI does not have, only when there is something to say."""
    problem = response_format.error(reply, request.response_format)
    said: dict[str, Any] = {"overridden": reply.overridden, "format_error": problem}
    return {name: value for name, value in said.items() if value}


def sampled(completion: Completion) -> list[SampledToken]:
    """The tokens of a completion as the engine reported them."""
    tops = completion.top_logprobs or [()] * len(completion.token_ids)
    rows = zip(completion.token_ids, completion.logprobs, tops, strict=True)
    return [SampledToken(i, logprob, top) for i, logprob, top in rows]


def token_logprobs(tokens: Sequence[SampledToken], token_text: TokenText) -> list[dict[str, Any]]:
    """What chat and responses say of each token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id)
        # a token that is a part of a character shows as U+FFFD: its bytes cannot be told from the text
        return {
            "token": text,
            "logprob": finite(logprob),
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }

    return [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(i, logprob) for i, logprob in token.top]}
        for token in tokens
    ]


def finite(logprob: float) -> float:
    """`logprob` as JSON can say it."""
    return max(logprob, LEAST_LOGPROB)


class AnswerStream(ABC):
    """One streamed answer of any dialect. Every method returns whole server-sent events, ready to be sent."""

    def __init__(self, request: ModelRequest, token_text: TokenText, model: str):
        self.request, self.token_text, self.model = request, token_text, model
        self.reply_id = uuid.uuid4().hex  # until the reply's own is known, which is before anything is sent
        self.prompt_ids: Sequence[int] = ()
        self.sent = [Sent() for _ in range(request.n)]

    def accepted(self, reply_id: str, prompt_ids: Sequence[int]) -> None:
        """The prompt was accepted; called before `start` whenever it is known by then."""
        self.reply_id, self.prompt_ids = reply_id, tuple(prompt_ids)

    @abstractmethod
    def start(self) -> list[str]:
        """The first events, sent once, before anything else."""

    @abstractmethod
    def keep_alive(self) -> list[str]:
        """A real event that carries nothing: clients' idle timers count events, not comments."""

    def delta(self, delta: Delta) -> list[str]:
        """A piece of the answer; no events when it holds nothing to be sent yet."""
        self.sent[delta.index].add(delta)
        return self.events(delta)

    @abstractmethod
    def events(self, delta: Delta) -> list[str]:
        """What says this piece."""

    @abstractmethod
    def finish(self, reply: ModelReply) -> list[str]:
        """What was not streamed yet (all of it, for an answer given again), and the end."""

    @abstractmethod
    def fail(self, problem: RequestError) -> list[str]:
        """An error after `start`; nothing follows."""


class Stream(AnswerStream):
    """One streamed answer of OpenAI's older dialects. The subclass says what a chunk of its dialect looks like."""

    object = ""

    def __init__(self, request: ModelRequest, token_text: TokenText, model: str):
        super().__init__(request, token_text, model)
        self.created = int(time.time())
        self.prompt_sent = False

    @abstractmethod
    def first(self, index: int) -> dict[str, Any]:
        """The entry of `choices` that opens choice `index`, before anything is sampled."""

    @abstractmethod
    def piece(self, delta: Delta) -> dict[str, Any]:
        """The entry of `choices` for one piece, which may be empty."""

    @abstractmethod
    def place_prompt(self, event: dict[str, Any], ids: list[int]) -> None:
        """Put the prompt's token ids where the dialect has them."""

    def start(self) -> list[str]:
        return [self._chunk([self.first(index)]) for index in range(self.request.n)]

    def keep_alive(self) -> list[str]:
        return [self._chunk([self.piece(Delta(0))])]

    def events(self, delta: Delta) -> list[str]:
        """One event; none when it holds nothing this client asked for."""
        tokens_wanted = self.request.logprobs or self.request.return_token_ids
        if not (delta.text or delta.reasoning or delta.calls or (delta.tokens and tokens_wanted)):
            return []
        return [self._chunk([self.piece(delta)])]

    def finish(self, reply: ModelReply) -> list[str]:
        """Finish reasons, extras and usage come last."""
        self.accepted(reply.id, reply.prompt_ids)
        frames = []
        for choice in reply.choices:
            frames += self.delta(self.sent[choice.index].rest(choice))
            last = self.piece(Delta(choice.index))
            last["finish_reason"] = choice.finish_reason
            if choice.message.malformed:
                last["malformed_tool_call"] = True
            frames.append(self._chunk([last], **(extras(reply, self.request) if choice is reply.choices[-1] else {})))
        if self.request.include_usage:
            frames.append(self._chunk([], usage=usage(reply)))
        return [*frames, DONE]

    def fail(self, problem: RequestError) -> list[str]:
        return [frame(error(problem))]

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> str:
        header = {"id": self.reply_id, "created": self.created, "model": self.model}
        event = {**header, "object": self.object, "choices": choices}
        if self.request.include_usage:
            event["usage"] = None
        if self.request.return_token_ids and self.prompt_ids and not self.prompt_sent:
            self.place_prompt(event, list(self.prompt_ids))
            self.prompt_sent = True
        return frame({**event, **extra})


@dataclass
class Sent:
    """How much of one choice was streamed: characters, tokens, and of each call its id and characters of arguments."""

    text: int = 0
    reasoning: int = 0
    tokens: int = 0
    calls: list[tuple[str, int]] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text += len(delta.text)
        self.reasoning += len(delta.reasoning)
        for call in delta.calls:
            if call.id:
                self.calls.append((call.id, 0))
            known, length = self.calls[call.index]
            self.calls[call.index] = (known, length + len(call.arguments))
        self.tokens += len(delta.tokens)

    def rest(self, choice: Choice) -> Delta:
        message, tokens = choice.message, sampled(choice.completion)
        text, reasoning = message.content[self.text :], message.reasoning[self.reasoning :]
        return Delta(choice.index, text, reasoning, tuple(self._calls(message)), tuple(tokens[self.tokens :]))

    def _calls(self, message: Message) -> Iterator[CallDelta]:
        begun, total = {id: (index, length) for index, (id, length) in enumerate(self.calls)}, len(self.calls)
        for call in message.tool_calls:
            if call.id not in begun:
                yield CallDelta(total, call.id, call.name, call.arguments)
                total += 1
            elif rest := call.arguments[begun[call.id][1] :]:
                yield CallDelta(begun[call.id][0], arguments=rest)
