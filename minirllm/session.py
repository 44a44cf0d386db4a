"""One rollout's conversations with the model: match, extend, generate, record.

Owns: `Session`: prompt tokens of a request, sampling rules, seeds, answers given again, the tokens that are recorded.
Does not know: torch, HTTP, wire formats, chat templates, rewards.

A request is matched by its messages, not by its connection: it continues the longest earlier call whose request and
answer it repeats. Parallel calls, sub-agents and edited histories match other calls or none, and become branches of the
token tree. Whatever happens, the tokens recorded are those that the model read and sampled.

A request equal to one whose answer was lost on the way gets that answer (clients ask again when they lose patience or
the connection). Equal to one that is still being answered, or was, it is a new sample.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from minirllm.conversation import Answer, Match
from minirllm.engines import Sampler
from minirllm.errors import ContextOverflow, EngineError, QuotaExceeded, RequestError, SessionClosed
from minirllm.inflight import Flight, OnDelta, Sample, identify, identity, prompt_digest, shown_tools
from minirllm.recorded import AnySession
from minirllm.renderer import Renderer
from minirllm.types import DEPTH, Choice, Completion, ModelReply, ModelRequest, SamplingParams

#: What `enforced` replaces, besides capping max_tokens. Stop strings and stop tokens stay the request's own.
ENFORCED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")

ABORTED_VERSION = -1  # the weight version of a sample that was cut off is not known


@dataclass(eq=False)
class Session(AnySession):
    """Everything that one rollout (or one served client) says to the model in this process."""

    engine: Sampler
    renderer: Renderer
    model: str
    _: KW_ONLY
    default_max_tokens: int = 256  # when a request has none; with `enforced`, the cap when that has none

    def __post_init__(self) -> None:
        super().__post_init__()
        self._raw: list[Answer] = []  # calls that had a raw prompt
        self._flights: list[Flight] = []  # not delivered yet
        self._depth: dict[str, int] = {}  # call id -> how many calls it continues
        self._sent: dict[bytes, set[int]] = {}  # digest of a prompt -> the `nth` of its answered and running requests

    async def call(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Answer one request. `on_delta` gets an empty delta once it is accepted, then the pieces as they are sampled.

        Cancelling the caller cancels the generation. Raises SessionClosed, QuotaExceeded, ContextOverflow or
        RequestError before any work, EngineError if the engine fails.
        """
        same = identity(request)
        flight = next((known for known in self._flights if known.lost and known.accepted.request == same), None)
        if flight is None:
            flight = self._begin(same)
        else:
            self.counters["replayed"] += 1
            flight.lost = False
        assert flight.task is not None
        flight.listen(on_delta)
        try:
            await asyncio.wait([flight.task])
        except asyncio.CancelledError:
            flight.lost = flight.done  # the answer came as its client left
            if not flight.done:
                self._abort(flight)
            raise
        if flight.task.cancelled():
            raise SessionClosed(f"Session {self.id!r} was closed during this call.")
        try:
            return flight.task.result()
        except EngineError as error:
            self.failure = error
            raise

    @property
    def max_context(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return self.engine.max_context

    def token_text(self, id: int) -> str:
        """The text of one token id."""
        return self.renderer.token_text(id)

    def count(self, request: ModelRequest) -> int:
        """How many tokens its prompt has; nothing is recorded."""
        _, prompt_ids, _ = self._chat(request) if request.messages is not None else self._completion(request)
        return len(prompt_ids)

    def waiting(self) -> str:
        """What its client waits for, and since when."""
        flying = [flight.began for flight in self._flights if not flight.done]
        what = f"{len(flying)} unanswered model call(s), the first" if flying else "no unanswered model call"
        return f"{what} since {time.monotonic() - min(flying, default=self._idle_since):.3g} s"

    def delivered(self, reply_id: str) -> None:
        """The answer with this `ModelReply.id` reached its client: an equal request is a new sample from now on."""
        self._flights = [flight for flight in self._flights if not (flight.done and flight.reply_id == reply_id)]

    def lost(self, reply_id: str) -> None:
        """The answer with this `ModelReply.id` did not reach its client: an equal request gets it."""
        for flight in self._flights:
            flight.lost = flight.lost or (flight.done and flight.reply_id == reply_id)

    def close(self) -> None:
        """End the session. Calls in flight are cancelled and recorded as aborted at once; later ones are refused."""
        self.closed = True
        for flight in list(self._flights):
            if not flight.done:
                self._abort(flight)
        self._flights = []

    # ---- a request before generation ----

    def _begin(self, request: ModelRequest) -> Flight:
        """Accept a request and start it. All refusals are raised from here, and leave no trace."""
        self._admit(request)
        match, prompt_ids, kind = self._chat(request) if request.messages is not None else self._completion(request)
        params, overridden = self._params(request, self._room(len(prompt_ids), request.n))
        if request.tool_choice not in ("auto", "none"):
            overridden["tool_choice"] = "auto"  # the model's tokens are its own: nothing forces a call
        depth = self._depth[match.parent.call_id] + 1 if match.parent else 0
        said = self._side_call(request) | ({} if self.weights is None else {DEPTH: depth})
        digest = prompt_digest(prompt_ids)
        taken = self._sent.setdefault(digest, set())
        nth = next(k for k in range(len(taken) + 1) if k not in taken)
        samples = [self._new_sample(request, prompt_ids, nth, index) for index in range(request.n)]
        self._depth |= {sample.call_id: depth for sample in samples}
        accepted = self._accept(request, match, kind, nth, said)
        taken.add(nth)
        flight = Flight(accepted, prompt_ids, params, overridden, (digest, nth), samples)
        flight.task = asyncio.create_task(self._answer(flight))
        flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its callers may be gone
        self._flights.append(flight)
        return flight

    def _chat(self, request: ModelRequest) -> tuple[Match, list[int], str]:
        """(what a chat request continues, its prompt ids, the counter for its kind)."""
        messages, tools = request.messages, shown_tools(request)
        assert messages, "dialects refuse an empty conversation"
        match = self._conversations.match(messages, tools)
        if match.parent is None:
            return match, self.renderer.prompt(messages, tools), "conversations"
        so_far = self.tree.ids(match.parent.node)
        extended = self.renderer.extend(so_far, messages[: -len(match.added)], match.added, tools)
        if extended is not None:
            assert extended[: len(so_far)] == so_far, "an extension begins with what it extends"
            return match, extended, "extended"
        kind = "rerendered" if self.renderer.history == "rerender" else "unprovable"
        return match, self.renderer.prompt(messages, tools), kind

    def _completion(self, request: ModelRequest) -> tuple[Match, list[int], str]:
        """The same for a raw prompt, which continues the longest raw call whose tokens it begins with."""
        prompt = request.prompt or []
        ids = self.renderer.encode(prompt, add_bos=True) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError("prompt must not be empty: there is nothing to continue.", "prompt")
        vocabulary = self.engine.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise RequestError(f"prompt: token id {wrong} is outside the vocabulary of {vocabulary} tokens.", "prompt")
        parent, length = None, 0
        for answer in sorted(self._raw, key=lambda answer: answer.call_id):
            so_far = self.tree.ids(answer.node)
            if len(so_far) > length and ids[: len(so_far)] == so_far:
                parent, length = answer, len(so_far)
        return Match(parent), ids, "extended" if parent else "conversations"

    def _room(self, prompt_length: int, n: int) -> int:
        """How many tokens may follow the prompt, in the window and in what is left of the quota."""
        room = self.engine.max_context - prompt_length
        if room < 1:
            raise ContextOverflow(self.engine.max_context, prompt_length)
        if (limit := self.max_tokens_total) is None:
            return room
        flying = [flight for flight in self._flights if not flight.done]
        taken = sum(len(f.samples) * (len(f.prompt_ids) + (f.params.max_tokens or 0)) for f in flying)
        share = (limit - self.tokens_used - taken) // n - prompt_length
        if share < 1:
            used = f"has used {self.tokens_used}, calls in flight may take {taken}, and this call needs more"
            raise QuotaExceeded(f"Session {self.id!r} may use {limit} tokens, {used}.")
        return min(room, share)

    def _params(self, request: ModelRequest, room: int) -> tuple[SamplingParams, dict[str, Any]]:
        """(what the engine is told, what of the request was replaced)."""
        asked, cap = request.params, self.default_max_tokens
        if self.enforced is None:
            temperature = asked.temperature if "temperature" in request.asked else self.default_temperature
            return replace(asked, temperature=temperature, max_tokens=min(asked.max_tokens or cap, room)), {}
        cap = self.enforced.max_tokens or cap
        values = {name: getattr(self.enforced, name) for name in ENFORCED}
        values["max_tokens"] = min(asked.max_tokens or cap, cap)
        sent = {name: getattr(asked, name) for name in values if name in request.asked}
        replaced = {name: values[name] for name in sent if sent[name] != values[name]}
        return replace(asked, **values | {"max_tokens": min(values["max_tokens"], room)}), replaced

    def _new_sample(self, request: ModelRequest, prompt_ids: list[int], nth: int, index: int) -> Sample:
        """One choice, its seed and call id a function of `seed_parts`, the prompt, `nth` and `index` alone."""
        call_id, seed = identify(self.seed_parts, prompt_digest(prompt_ids), nth, index)
        if self.enforced is None and request.params.seed is not None:
            seed = (request.params.seed + index) % 2**63
        stops, raw = request.params.stop, request.messages is None
        stream = self.renderer.stream(shown_tools(request), stops, raw=raw, prompt_ids=prompt_ids)
        return Sample(call_id, seed, stream)

    # ---- generation, and what is recorded of it ----

    async def _answer(self, flight: Flight) -> ModelReply:
        """Sample all choices at once. They are recorded together when all are there, or as aborted."""
        jobs = [asyncio.create_task(self._generate(flight, index)) for index in range(len(flight.samples))]
        choices: list[Choice] = []
        try:
            completions = await asyncio.gather(*jobs)
            assert not flight.aborted, "the engine swallowed a cancellation"
            choices = [self._record(flight, index, completion) for index, completion in enumerate(completions)]
        finally:
            for job in jobs:
                job.cancel()
            if not choices:
                self._abort(flight)
        return ModelReply(flight.reply_id, self.model, int(self.clock()), flight.prompt_ids, choices, flight.overridden)

    async def _generate(self, flight: Flight, index: int) -> Completion:
        sample = flight.samples[index]
        weights = None if self.weights is None else await self.weights(self._depth[sample.call_id])
        async with self._streams:
            completion = await self.engine.generate(
                flight.prompt_ids,
                flight.params,
                sample.seed,
                stop=self.renderer.stop_check(flight.params.stop),
                on_token=lambda token: flight.token(index, token),
                weights=weights,
            )
        self._idle_since = time.monotonic()
        if completion.finish_reason == "abort" or not completion.token_ids:
            raise EngineError("The engine ended a call without an answer.")
        assert len(sample.tokens) == len(completion.token_ids), "the engine reports every token"
        flight.finish(index)
        return completion

    def _record(self, flight: Flight, index: int, completion: Completion) -> Choice:
        """A finished choice becomes a node of the token tree, a step, and an answer that requests can continue."""
        request, parent = flight.accepted.request, flight.accepted.match.parent
        call_id, message = flight.samples[index].call_id, flight.samples[index].message()
        reason = "tool_calls" if message.tool_calls and completion.finish_reason == "stop" else completion.finish_reason
        node = self.tree.add(flight.prompt_ids, completion, call_id, parent.node if parent else None)
        answer = Answer(call_id, node, shown_tools(request), message)
        if request.messages is None:
            self._raw.append(answer)
        told = {"prompt_length": len(flight.prompt_ids), "response_length": len(completion.token_ids)}
        told |= {"node": node, "weight_version": completion.weight_version}
        self._keep(flight.accepted, index, answer, {}, finish_reason=reason, params=flight.params, **told)
        ids, logprobs = self.tree.response(node)
        tools, stops, raw = shown_tools(request), request.params.stop, request.messages is None
        read = self.renderer.parse(ids, tools, stops, raw=raw, prompt_ids=flight.prompt_ids)
        self.counters["drift"] += flight.drifts(index, list(zip(ids, logprobs, strict=True)), read)
        return Choice(index, call_id, message, completion, reason, flight.samples[index].stream.stopped)

    def _abort(self, flight: Flight) -> None:
        """Cancel it, record what was sampled as aborted, and forget the request: sent again, it gets the same seeds."""
        if flight.aborted:
            return
        flight.aborted = True
        if flight.task is not None and flight.task is not asyncio.current_task():
            flight.task.cancel()
        self._flights = [known for known in self._flights if known is not flight]
        digest, nth = flight.nth
        self._sent[digest].discard(nth)
        self.counters["aborted"] += len(flight.samples)
        parent = flight.accepted.match.parent
        for sample in flight.samples:
            ids, logprobs = [token.id for token in sample.tokens], [token.logprob for token in sample.tokens]
            self.tokens_used += len(flight.prompt_ids) + len(ids)
            if ids:
                partial = Completion(ids, logprobs, "abort", ABORTED_VERSION, flight.params.temperature)
                self.tree.add(flight.prompt_ids, partial, sample.call_id, parent.node if parent else None)
