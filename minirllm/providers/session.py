"""A session whose calls a provider answers.

Owns: `ProviderSession`: seeds, what is asked of the provider. Does not know: HTTP, who the provider is, wire formats.
There are no tokens: the counts are those that the provider says, the token tree stays empty, so nothing can be trained.
Every request is a new call: an answer that was lost on its way is not kept, and sampling is the provider's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from hashlib import blake2b

from minirllm.conversation import Answer
from minirllm.errors import EngineError, ProviderError, QuotaExceeded, RequestError, SessionClosed
from minirllm.inflight import Accepted, OnDelta, identify, shown_tools
from minirllm.providers import wire
from minirllm.providers.upstream import Upstream
from minirllm.providers.wire import Reading
from minirllm.recorded import AnySession
from minirllm.types import Choice, Completion, Delta, ModelReply, ModelRequest, Usage

ACCEPTED = 3.0  # seconds after which a call counts as accepted although the provider has not begun to answer
MAX_SEED = 2**31  # some providers take no larger one


@dataclass(eq=False)
class ProviderSession(AnySession):
    """Everything that one rollout (or one served client) asks a provider. The session's key is not the provider's, and
    ``max_tokens_total`` holds for ended calls, as the provider counts them."""

    upstream: Upstream
    _: KW_ONLY
    default_max_tokens: int | None = None  # when a request has none; None: as many as the provider likes
    max_context: int = 128_000  # what agents that ask are told; no provider says it

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.enforced is None, "a provider's model is not trained"
        self.model = self.upstream.provider.model
        self._flying: dict[asyncio.Task[ModelReply], float] = {}  # since when
        self._sent: Counter[bytes] = Counter()  # by digest of the body

    async def call(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Answer one request. `on_delta` gets an empty delta once it is accepted, then the pieces as they come.

        Cancelling the caller cancels the provider's call. Raises RequestError of any kind.
        """
        task = asyncio.ensure_future(self._answer(self._begin(request), on_delta))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its caller may be gone
        self._flying[task] = time.monotonic()
        try:
            await asyncio.wait([task])
        finally:
            self.counters["aborted"] += 0 if task.done() and not task.cancelled() else request.n
            task.cancel()
            del self._flying[task]
            self._idle_since = time.monotonic()
        if task.cancelled():
            raise SessionClosed(f"Session {self.id!r} was closed during this call.")
        try:
            return task.result()
        except ProviderError as problem:
            self.failure = EngineError(problem.message.rstrip("."))
            raise

    def count(self, request: ModelRequest) -> int:
        """No provider says how many tokens a prompt has without answering it."""
        raise RequestError("Tokens cannot be counted here: an outside provider answers, not this server.", status=404)

    def waiting(self) -> str:
        """What its client waits for, and since when."""
        name = self.upstream.provider.name
        what = f"{len(self._flying)} call(s) of {name}, the first" if self._flying else "no unanswered model call"
        return f"{what} since {time.monotonic() - min(self._flying.values(), default=self._idle_since):.3g} s"

    def delivered(self, reply_id: str) -> None:
        """Answers are not kept."""

    def lost(self, reply_id: str) -> None:
        """Answers are not kept: an equal request is a new call."""

    def close(self) -> None:
        """End the session. Calls in flight are cancelled; later ones are refused."""
        self.closed = True
        for task in self._flying:
            task.cancel()

    # ---- one request ----

    def _begin(self, request: ModelRequest) -> _Call:
        """Accept a request. All refusals that need no provider are raised from here, and leave no trace."""
        self._admit(request)
        name = self.upstream.provider.name
        if self.max_tokens_total is not None and self.tokens_used >= self.max_tokens_total:
            used = f"may use {self.max_tokens_total} tokens and has used {self.tokens_used}"
            raise QuotaExceeded(f"Session {self.id!r} {used}.")
        if request.messages is None:
            raise RequestError(f"{name} answers chats only: send messages, to another route.", "prompt")
        if request.logprobs or request.return_token_ids:
            what = "logprobs" if request.logprobs else "return_token_ids"
            raise RequestError(f"{what}: {name} answers, whose tokens are not known here. Leave it out.", what)
        params, asked = request.params, request.asked
        params = replace(params, max_tokens=params.max_tokens or self.default_max_tokens)
        if "temperature" not in asked and self.default_temperature != 1.0:
            params, asked = replace(params, temperature=self.default_temperature), asked | {"temperature"}
        request = replace(request, params=params, asked=asked)
        match = self._conversations.match(request.messages or [], shown_tools(request))
        body = wire.body(request, self.model, 0)
        digest = blake2b(json.dumps(body, sort_keys=True).encode()).digest()
        nth = self._sent[digest]
        samples = [identify(self.seed_parts, digest, nth, index) for index in range(request.n)]
        kind = "extended" if match.parent else "conversations"
        accepted = self._accept(request, match, kind, nth, {"provider": name, **self._side_call(request)})
        self._sent[digest] += 1
        return _Call(accepted, samples)

    async def _answer(self, call: _Call, on_delta: OnDelta | None) -> ModelReply:
        """Ask for all choices at once. They are recorded together when all are there."""
        reply_id = f"chatcmpl-{call.id(0)}"
        told = False

        def accepted() -> None:
            nonlocal told
            if on_delta is not None and not told:
                told = True
                on_delta(Delta(0, reply_id=reply_id))

        timer = asyncio.get_running_loop().call_later(ACCEPTED, accepted)
        jobs = [asyncio.ensure_future(self._ask(call, index, on_delta, accepted)) for index in range(call.request.n)]
        try:
            answers = await asyncio.gather(*jobs)
        finally:
            timer.cancel()
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        choices = [self._record(call, index, read) for index, read in enumerate(answers)]
        used = Usage(answers[0].usage.prompt, sum(read.usage.sampled for read in answers), answers[0].usage.cached)
        return ModelReply(reply_id, self.model, int(self.clock()), [], choices, counted=used)

    async def _ask(self, call: _Call, index: int, on_delta: OnDelta | None, accepted: Callable[[], None]) -> Reading:
        body = wire.body(call.request, self.model, call.seed(index))

        def reading() -> Reading:
            return Reading(index, call.id(index), on_delta or (lambda _: None))

        async with self._streams:
            return await self.upstream.chat(body, reading, accepted, on_delta is None)

    def _record(self, call: _Call, index: int, read: Reading) -> Choice:
        """Its step says what model the provider had, and how it said that the answer ended."""
        message, reason = read.message()
        answer = Answer(call.id(index), 0, shown_tools(call.request), message)
        said = {"model": read.model, "finish_reason": read.finish}
        told = {"prompt_length": read.usage.prompt, "response_length": read.usage.sampled}
        params = replace(call.request.params, seed=call.seed(index))
        self._keep(call.accepted, index, answer, said, finish_reason=reason, params=params, **told)
        completion = Completion([], [], "length" if reason == "length" else "stop", 0)
        return Choice(index, answer.call_id, message, completion, reason)


@dataclass(eq=False)
class _Call:
    """An accepted request, and the id and seed of each choice."""

    accepted: Accepted
    samples: list[tuple[str, int]]

    @property
    def request(self) -> ModelRequest:
        """As it was accepted."""
        return self.accepted.request

    def id(self, index: int) -> str:
        """The call id of a choice."""
        return self.samples[index][0]

    def seed(self, index: int) -> int:
        """The request's own, else one of the session's, the run's and the prompt's."""
        own = self.request.params.seed
        return (self.samples[index][1] if own is None else own + index) % MAX_SEED
