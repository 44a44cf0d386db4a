"""The engine over the plain Hugging Face module: continuous batching on the one copy of the weights.

Owns: the queue, which tokens run in the next forward, and delivery of what was sampled. Requests are admitted and leave
between forwards. One forward is one call on the device lane, so training and generation interleave without locks, and
has one version of the weights: a request may name one that the policy keeps.
Does not know: text, HTTP, sessions, the optimizer.

exact, off: a forward holds one token of every running sequence and prompt chunks of several others. At the exact level
a row has the same bits whatever it shares the forward with. fixed: a forward is one token in every slot, or one chunk
of one prompt, and prefixes are reused in whole chunks, so that no shape depends on the neighbours.

Legend: S slots, R decoded rows, n tokens of a chunk.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from minirllm.config import Config
from minirllm.engines.sampling import Ending, Rows, Samples, effective_temperature, is_special, key
from minirllm.engines.slots import OWN, Slots
from minirllm.engines.step import Chunk, Runner, Step
from minirllm.errors import ContextOverflow, EngineError, ModelError
from minirllm.policy import Policy
from minirllm.types import Completion, SampledToken, SamplingParams, StopCheck

ATTENDING = {"full_attention", "sliding_attention"}
IDLE_SHARE = 0.25  # idle slots between running ones, as a share of the running ones, before rows are moved together


@dataclass(eq=False, slots=True)
class _Request:
    prompt: np.ndarray
    params: SamplingParams
    key: int
    number: int  # in order of arrival
    future: asyncio.Future[SampledToken]  # the next token
    weights: int | None = None  # a kept version; None: the policy's own
    slot: int = -1
    ready: bool = False  # the last token was looked at and the sequence goes on
    cached: int = 0
    sampled: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """A step and whom it is for. Requests may leave while it runs, so the device thread sees only `step`."""

    step: Step
    prefilling: list[_Request]  # of step.chunks
    sampling: list[_Request]  # of step.rows


class HFEngine:
    """See `engines.Engine`."""

    def __init__(self, policy: Policy, config: Config):
        """Raises ModelError for a model with layers that are not attention over keys and values."""
        text = policy.model.config.get_text_config()
        other = set(getattr(text, "layer_types", None) or ()) - ATTENDING
        if other:
            raise ModelError(
                f"{type(policy.model).__name__} has {', '.join(sorted(other))} layers, which keep a state instead of "
                "keys: use a model whose layers all are attention, or another engine."
            )
        self.policy, self.config = policy, config
        self.fixed = policy.static_shapes
        self.max_context = min(config.max_context, policy.max_positions)
        self.vocab_size = policy.vocab_size
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []  # in order of arrival
        self._numbers = itertools.count()
        self._moves: list[tuple[str, tuple[int, ...]]] = []  # methods of the cache, by name
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ended: str | None = "the engine was not started"
        self._turn: int | None = None  # whose weights' forward was the last one
        self._prefilled: set[int | None] = set()  # weights whose last forward was a prefill

    # -- the protocol -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Allocate the cache and begin serving."""
        assert self._task is None, "started twice"
        self._runner = await self.policy.run(Runner, self.policy, self.config, self.max_context)
        chunk = self.config.prefill_chunk if self.fixed else 0
        self._slots = Slots(self._runner.slots, self._runner.capacity, chunk)
        self._ended = None
        self._task = asyncio.create_task(self._serve(), name="engine")
        self._task.add_done_callback(self._end)

    async def close(self) -> None:
        """End; requests in flight raise EngineError."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.policy.run(self._forget_runner)  # after the forward under way, if any

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        stop: StopCheck | None = None,
        on_token: Callable[[SampledToken], None] | None = None,
        weights: int | None = None,
    ) -> Completion:
        """See `engines.Engine`. What `stop` and `on_token` raise is raised here, and ends this request only."""
        room = self.max_context - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(self.max_context, len(prompt_ids))
        if self._ended is not None:
            raise EngineError(self._ended)
        assert len(prompt_ids) > 0, "an empty prompt has no last token to continue"
        ending = Ending(params, self.policy.eos_ids, room, stop)
        temperature, version = effective_temperature(params.temperature), self.policy.version
        version = version if weights is None else weights
        future: asyncio.Future[SampledToken] = asyncio.get_running_loop().create_future()
        request = _Request(np.array(prompt_ids, np.int64), params, key(seed), next(self._numbers), future, weights)
        tokens: list[SampledToken] = []
        self._waiting.append(request)
        self._wake.set()
        try:
            reason = None
            while reason is None:
                token = await request.future
                tokens.append(token)
                request.sampled.append(token.id)
                if on_token is not None:
                    on_token(token)
                reason = ending.reason(request.sampled)
                if reason is None:
                    request.future = asyncio.get_running_loop().create_future()
                    request.ready = True
                    self._wake.set()
        finally:
            self._remove(request)
        top = [token.top for token in tokens] if params.top_logprobs else []
        logprobs = [token.logprob for token in tokens]
        return Completion(request.sampled, logprobs, reason, version, temperature, top, request.cached)

    def _forget_runner(self) -> None:
        del self._runner

    def weights_changed(self) -> None:
        """See `engines.Engine`. Raises EngineError when requests to the policy's own weights are in flight."""
        flying = sum(request.weights is None for request in [*self._waiting, *self._running])
        if flying:
            raise EngineError(f"the weights changed while {flying} requests were in flight: update between generations")
        if self._ended is None:
            self._slots.forget(~np.isin(self._slots.weights_S, list(self.policy.kept)))

    # -- the scheduler, on the event loop ---------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            plan = self._plan()
            if plan is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._deliver(plan, await self.policy.run(self._runner.run, plan.step))
            await asyncio.sleep(0)  # every request looks at its token (they were woken first) before the next step

    def _end(self, task: asyncio.Task[None]) -> None:
        """The scheduler is over: closed, or the device lane failed. Nobody may wait for it any more."""
        cause = None if task.cancelled() else task.exception()
        self._ended = (
            "the engine was closed" if cause is None else f"the engine failed: {type(cause).__name__}: {cause}"
        )
        for request in [*self._waiting, *self._running]:
            if not request.future.done():
                error = EngineError(self._ended)
                error.__cause__ = cause
                request.future.set_exception(error)

    def _remove(self, request: _Request) -> None:
        """Finished or cancelled: out of the queue or out of its slot, at once."""
        if request.slot >= 0:
            self._slots.give_back(request)
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        self._wake.set()

    def _plan(self) -> _Plan | None:
        """The next forward, or None when there is nothing to do."""
        self._admit()
        stored_S, running = self._slots.stored_S, self._next()
        decode = [r for r in running if r.ready]
        kept = [r for r in running if not r.sampled and not r.ready and stored_S[r.slot] == len(r.prompt)]
        prefill = [r for r in running if stored_S[r.slot] < len(r.prompt)]
        if not self.fixed:
            self._close_up(decode)
        elif prefill and (self._turn not in self._prefilled or not decode):
            prefill, decode = prefill[:1], []
        else:
            prefill = []
        chunks = self._chunks(prefill)
        (self._prefilled.add if chunks else self._prefilled.discard)(self._turn)
        if not (decode or chunks or kept):
            return None
        decode.sort(key=lambda r: r.slot)
        for request in decode:
            request.ready = False
        sampling = [*decode, *(r for r, chunk in zip(prefill, chunks, strict=False) if chunk.ends), *kept]
        moves, self._moves = self._moves, []
        step = Step(
            moves,
            np.array([r.slot for r in decode], np.int64),
            np.array([r.sampled[-1] for r in decode], np.int64),
            np.array([stored_S[r.slot] for r in decode], np.int64),
            chunks,
            [r.slot for r in kept],
            _rows(sampling),
            self._turn,
        )
        return _Plan(step, prefill[: len(chunks)], sampling)

    def _next(self) -> list[_Request]:
        """Those of the next forward's weights: it has one version of them, and versions take turns."""
        versions = list(dict.fromkeys(r.weights for r in self._running if r.ready or not r.sampled))
        if versions:
            last = versions.index(self._turn) if self._turn in versions else -1
            self._turn = versions[(last + 1) % len(versions)]
        return [r for r in self._running if r.weights == self._turn]

    def _chunks(self, prefill: list[_Request]) -> list[Chunk]:
        """The next prompt tokens of the first requests, up to the budget of one forward."""
        chunks, budget = [], self.config.prefill_chunk
        for request in prefill:
            start = int(self._slots.stored_S[request.slot])
            token_n = request.prompt[start : start + budget]
            chunks.append(Chunk(request.slot, start, token_n, start + len(token_n) == len(request.prompt)))
            budget -= len(token_n)
            if budget == 0:
                break
        return chunks

    def _admit(self) -> None:
        """First come, first served, but a request waits while another prefills a prefix it can share.

        Of those that come together the longest take the lowest slots: attention runs over a range of slots, and so the
        rows that reach into the later tiles lie side by side, for as long as all grow by one token a step."""
        for request in sorted(list(self._waiting)[: len(self._slots.free)], key=lambda r: -len(r.prompt)):
            weights = OWN if request.weights is None else request.weights
            placement = self._slots.place(request.prompt, weights)
            if placement is None:
                continue
            if placement.source != placement.target:
                self._moves.append(("copy", (placement.source, placement.target, placement.reused)))
            self._slots.take(request, placement, request.prompt, weights)
            request.cached = placement.reused
            self._waiting.remove(request)
            self._running.append(request)
        self._running.sort(key=lambda r: r.number)

    def _close_up(self, decode: list[_Request]) -> None:
        """Move rows together when too many idle slots lie between them: attention runs over all from first to last."""
        taken = sorted(r.slot for r in decode)
        others = {r.slot for r in self._running if r.weights != self._turn}  # whose rows would then lie apart
        while taken and taken[-1] - taken[0] + 1 > len(taken) * (1 + IDLE_SHARE) + 1:
            last = taken.pop()
            hole = next((slot for slot in range(taken[0], last) if slot not in taken and slot not in others), None)
            if hole is None:
                break
            length = int(max(self._slots.stored_S[last], self._slots.stored_S[hole]))
            self._moves.append(("swap", (last, hole, length)))
            self._slots.exchange(last, hole)
            taken = sorted([*taken, hole])

    def _deliver(self, plan: _Plan, samples: Samples | None) -> None:
        slots = self._slots
        for request, chunk in zip(plan.prefilling, plan.step.chunks, strict=True):
            if request.slot >= 0:
                slots.stored_S[request.slot] = chunk.start + len(chunk.token_n)
        for request in plan.sampling[: len(plan.step.slot_R)]:
            if request.slot >= 0:
                slots.stored_S[request.slot] += 1
        if samples is None:
            return
        for i, request in enumerate(plan.sampling):
            if request.slot < 0 or request.future.done():  # cancelled while the forward ran
                continue
            if not math.isfinite(samples.logprobs[i]):
                slots.forget(request.slot)
                self._moves.append(("erase", (request.slot,)))
                error = EngineError("the model computed a probability that is not a finite number")
                request.future.set_exception(error)
                continue
            slots.append(request.slot, samples.token_ids[i])
            request.future.set_result(SampledToken(samples.token_ids[i], samples.logprobs[i], samples.top.get(i, ())))


def _rows(requests: list[_Request]) -> Rows:
    return Rows(
        np.array([effective_temperature(r.params.temperature) for r in requests], np.float32),
        np.array([r.key for r in requests], np.uint64),
        np.array([len(r.sampled) for r in requests], np.int64),
        [(i, r.params, r.sampled) for i, r in enumerate(requests) if is_special(r.params)],
    )
