"""The engine over the plain Hugging Face module: continuous batching on the one copy of the weights.

Owns: the queue, which tokens run in the next forward, and delivery of what was sampled. Requests are admitted and leave
between forwards. One forward is one call on the device lane, so training and generation interleave without locks.
Does not know: text, HTTP, sessions, the optimizer.

exact: one packed forward holds a token of every running sequence and prompt chunks of several waiting ones; attention
and head are the same bits whatever they share the forward with. fixed: a forward is either `slots` rows of one token or
one constant-length chunk of one prompt, and prefixes are reused in whole chunks, so no shape depends on the neighbours.

Legend: T packed tokens, N sampled rows, E hidden size, S slots.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from minirllm import attention
from minirllm.attention import Layout
from minirllm.config import Config
from minirllm.engines.cache import Decode, Packed, Prefill, Shapes, SlotCache
from minirllm.engines.graph import DecodeGraph
from minirllm.engines.sampling import Ending, Rows, Samples, effective_temperature, is_special, key, sample
from minirllm.engines.slots import Slots
from minirllm.errors import ContextOverflow, EngineError, ModelError
from minirllm.policy import Policy
from minirllm.types import Completion, SampledToken, SamplingParams, StopCheck

CPU_SLOTS, MOST_SLOTS = 32, 256
ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
IDLE_SHARE = 0.25  # idle slots between running ones, as a share of the running ones, before rows are moved together


@dataclass(eq=False, slots=True)
class _Request:
    prompt: np.ndarray
    params: SamplingParams
    key: int
    number: int  # in order of arrival
    future: asyncio.Future[SampledToken]  # the next token
    slot: int = -1
    ready: bool = False  # the last token was looked at and the sequence goes on
    cached: int = 0
    sampled: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Chunk:
    """Consecutive prompt tokens of one request. `ends`: the last of them is the prompt's last."""

    request: _Request
    slot: int
    start: int
    token_n: np.ndarray
    ends: bool


@dataclass(slots=True)
class _Step:
    """One call on the device lane. The device thread reads the arrays only: a request may leave while the forward runs.

    `requests` get a token each, in this order: decoded rows (by slot), prompts that end in a chunk, kept ends."""

    moves: list[tuple[str, tuple[int, ...]]]  # methods of the cache, in order
    chunks: list[_Chunk]
    requests: list[_Request]
    rows: Rows
    slot_R: np.ndarray  # decoded rows
    token_R: np.ndarray
    position_R: np.ndarray
    kept: list[int]  # slots of prompts that were found whole in the cache


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
        self.fixed = policy.level == "fixed"
        self.max_context = min(config.max_context, policy.max_positions)
        self.vocab_size = policy.vocab_size
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []  # in order of arrival
        self._numbers = itertools.count()
        self._moves: list[tuple[str, tuple[int, ...]]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ended: str | None = "the engine was not started"
        self._prefill_next = True

    # -- the protocol -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Allocate the cache and begin serving."""
        assert self._task is None, "started twice"
        slots, capacity = await self.policy.run(self._allocate)
        self._slots = Slots(slots, capacity, self.config.prefill_chunk if self.fixed else 0)
        self._ended = None
        self._task = asyncio.create_task(self._serve(), name="engine")
        self._task.add_done_callback(self._end)

    async def close(self) -> None:
        """End; requests in flight raise EngineError."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        await self.policy.run(self._release_memory)  # also: the forward under way, if any, is over

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        stop: StopCheck | None = None,
        on_token: Callable[[SampledToken], None] | None = None,
    ) -> Completion:
        """See `engines.Engine`. What `stop` and `on_token` raise is raised here, and ends this request only."""
        room = self.max_context - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(self.max_context, len(prompt_ids))
        if self._ended is not None:
            raise EngineError(self._ended)
        assert len(prompt_ids) > 0, "an empty prompt has no last token to continue"
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        ending = Ending(params, self.policy.eos_ids, limit, stop)
        temperature, version = effective_temperature(params.temperature), self.policy.version
        future: asyncio.Future[SampledToken] = asyncio.get_running_loop().create_future()
        request = _Request(np.array(prompt_ids, np.int64), params, key(seed), next(self._numbers), future)
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

    def weights_changed(self) -> None:
        """Drop every cached prefix. Raises EngineError when requests are in flight."""
        flying = len(self._waiting) + len(self._running)
        if flying:
            raise EngineError(f"the weights changed while {flying} requests were in flight: update between generations")
        if self._ended is None:
            self._slots.forget()

    # -- the scheduler, on the event loop ---------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            step = self._plan()
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._deliver(step, await self.policy.run(self._execute, step))
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

    def _plan(self) -> _Step | None:
        """The next forward, or None when there is nothing to do."""
        self._admit()
        stored_S = self._slots.stored_S
        decode = [r for r in self._running if r.ready]
        kept = [r for r in self._running if not r.sampled and not r.ready and stored_S[r.slot] == len(r.prompt)]
        prefill = [r for r in self._running if stored_S[r.slot] < len(r.prompt)]
        if not self.fixed:
            self._close_up(decode)
        elif prefill and (self._prefill_next or not decode):
            decode = []
        else:
            prefill = []
        chunks = self._chunks(prefill[:1] if self.fixed else prefill)
        self._prefill_next = not chunks
        if not (decode or chunks or kept):
            return None
        decode.sort(key=lambda r: r.slot)
        moves, self._moves = self._moves, []
        for request in decode:
            request.ready = False
        requests = [*decode, *(chunk.request for chunk in chunks if chunk.ends), *kept]
        return _Step(
            moves,
            chunks,
            requests,
            Rows(
                np.array([effective_temperature(r.params.temperature) for r in requests], np.float32),
                np.array([r.key for r in requests], np.uint64),
                np.array([len(r.sampled) for r in requests], np.int64),
                [(i, r.params, r.sampled) for i, r in enumerate(requests) if is_special(r.params)],
            ),
            np.array([r.slot for r in decode], np.int64),
            np.array([r.sampled[-1] for r in decode], np.int64),
            np.array([stored_S[r.slot] for r in decode], np.int64),
            [r.slot for r in kept],
        )

    def _chunks(self, prefill: list[_Request]) -> list[_Chunk]:
        """Prompt tokens of several requests, first come first served, up to the budget of one forward."""
        chunks, budget = [], self.config.prefill_chunk
        for request in prefill:
            start = int(self._slots.stored_S[request.slot])
            token_n = request.prompt[start : start + budget]
            budget -= len(token_n)
            if len(token_n):
                ends = start + len(token_n) == len(request.prompt)
                chunks.append(_Chunk(request, request.slot, start, token_n, ends))
        return chunks

    def _admit(self) -> None:
        """First come, first served, but a request waits while another prefills a prefix it can share.

        Of those that come together the longest take the lowest slots: attention runs over a range of slots, and so the
        rows that reach into the later tiles lie side by side, for as long as all grow by one token a step."""
        for request in sorted(list(self._waiting)[: len(self._slots.free)], key=lambda r: -len(r.prompt)):
            placement = self._slots.place(request.prompt)
            if placement is None:
                continue
            if placement.source != placement.target:
                self._moves.append(("copy", (placement.source, placement.target, placement.reused)))
            self._slots.take(request, placement, request.prompt)
            request.cached = placement.reused
            self._waiting.remove(request)
            self._running.append(request)
        self._running.sort(key=lambda r: r.number)

    def _close_up(self, decode: list[_Request]) -> None:
        """Move rows together when too many idle slots lie between them: attention runs over all from first to last."""
        taken = sorted(r.slot for r in decode)
        while taken and taken[-1] - taken[0] + 1 > len(taken) * (1 + IDLE_SHARE) + 1:
            last = taken.pop()
            hole = next(slot for slot in range(taken[0], last) if slot not in taken)
            length = int(max(self._slots.stored_S[last], self._slots.stored_S[hole]))
            self._moves.append(("swap", (last, hole, length)))
            self._slots.exchange(last, hole)
            taken = sorted([*taken, hole])

    def _deliver(self, step: _Step, samples: Samples | None) -> None:
        slots = self._slots
        for chunk in step.chunks:
            if chunk.request.slot >= 0:
                slots.stored_S[chunk.slot] = chunk.start + len(chunk.token_n)
        for request in step.requests[: len(step.slot_R)]:
            if request.slot >= 0:
                slots.stored_S[request.slot] += 1
        if samples is None:
            return
        for i, request in enumerate(step.requests):
            if request.slot < 0 or request.future.done():  # cancelled while the forward ran
                continue
            if not math.isfinite(samples.logprobs[i]):
                slots.forget(request.slot)
                self._moves.append(("erase", (request.slot,)))
                request.future.set_exception(
                    EngineError("the model computed a probability that is not a finite number")
                )
                continue
            slots.append(request.slot, samples.token_ids[i])
            request.future.set_result(SampledToken(samples.token_ids[i], samples.logprobs[i], samples.top.get(i, ())))

    # -- the forward, on the device lane ----------------------------------------------------------------------------

    @torch.no_grad()
    def _allocate(self) -> tuple[int, int]:
        """(slots, capacity). Run the largest training batch once before, so that what is free really is."""
        policy, device, shapes = self.policy, self.policy.device, Shapes()
        position_T = torch.arange(4, device=device)
        hidden_TE = policy.hidden(position_T, position_T, shapes)
        assert shapes.layers, f"the model was not loaded with attn_implementation={attention.IMPLEMENTATION!r}"
        whole = -self.max_context % self.config.prefill_chunk if self.fixed else 0  # the last chunk is padded, too
        capacity = self.max_context + whole + -(self.max_context + whole) % attention.TILE
        slots = self.config.slots or CPU_SLOTS
        if not self.config.slots and device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            slots = max(1, min(MOST_SLOTS, int(free * 0.8) // (shapes.bytes_per_position() * capacity)))
        self._cache = SlotCache(shapes, slots, capacity, device)
        self._end_SE = torch.zeros(
            slots, hidden_TE.shape[-1], dtype=hidden_TE.dtype, device=device
        )  # at each prompt's end
        self._graph = DecodeGraph(policy, self._cache) if self.fixed and device.type == "cuda" else None
        return slots, capacity

    def _release_memory(self) -> None:
        del self._cache, self._end_SE, self._graph

    @torch.no_grad()
    def _execute(self, step: _Step) -> Samples | None:
        for method, slots in step.moves:
            getattr(self._cache, method)(*slots)
            if method == "copy":
                self._end_SE[slots[1]] = self._end_SE[slots[0]]
            elif method == "swap":
                self._end_SE[list(slots[:2])] = self._end_SE[[slots[1], slots[0]]]
        if self.fixed and len(step.slot_R):
            hidden_NE = self._decode_all_slots(step)
        elif step.chunks or len(step.slot_R):
            hidden_NE = self._packed(step)
        else:
            hidden_NE = self._end_SE[:0]
        if not step.requests:
            return None
        hidden_NE = torch.cat([hidden_NE, self._end_SE[step.kept]])
        N = len(hidden_NE)
        if self.fixed:
            hidden_NE = F.pad(hidden_NE, (0, 0, 0, self._cache.slots - N))
        return sample(self.policy.logits(hidden_NE)[:N], step.rows, self.policy.logprobs)

    def _packed(self, step: _Step) -> torch.Tensor:
        """One forward over rows and chunks. Returns hidden states ``[N, E]`` of the rows and of the prompts that end
        here, and keeps the latter."""
        tokens, positions, rows = [step.token_R], [step.position_R], len(step.slot_R)
        parts: list[tuple[int, Layout]] = []
        if rows:
            slot_R, position_R = self._on_device(step.slot_R), self._on_device(step.position_R)
            reach = [
                (int(slots[0]), int(slots[-1]) + 1)
                for start in range(0, int(step.position_R.max()) + 1, attention.TILE)
                for slots in [step.slot_R[step.position_R >= start]]
            ]
            parts.append((rows, Decode(self._cache, slot_R, position_R, position_R, reach)))
        picked, at = list(range(rows)), rows
        for chunk in step.chunks:
            count = len(chunk.token_n)
            length = self.config.prefill_chunk if self.fixed else count
            tokens.append(np.pad(chunk.token_n, (0, length - count)))
            positions.append(np.arange(chunk.start, chunk.start + length))
            parts.append((length, Prefill(self._cache, chunk.slot, chunk.start, length)))
            if chunk.ends:
                picked.append(at + count - 1)
            at += length
        token_T, position_T = self._on_device(np.concatenate(tokens)), self._on_device(np.concatenate(positions))
        hidden_NE = self.policy.hidden(token_T, position_T, Packed(parts))[picked]
        if len(picked) > rows:
            self._end_SE[[chunk.slot for chunk in step.chunks if chunk.ends]] = hidden_NE[rows:]
        return hidden_NE

    def _decode_all_slots(self, step: _Step) -> torch.Tensor:
        """Every slot is a row. Idle ones write where no sequence ever reads: a window's last token is never stored."""
        S, C = self._cache.slots, self._cache.capacity
        token_S, position_S, write_S = np.zeros(S, np.int64), np.zeros(S, np.int64), np.full(S, C - 1)
        token_S[step.slot_R], position_S[step.slot_R], write_S[step.slot_R] = (
            step.token_R,
            step.position_R,
            step.position_R,
        )
        token, position, write = self._on_device(token_S), self._on_device(position_S), self._on_device(write_S)
        if self._graph is not None:
            return self._graph(token, position, write)[step.slot_R]
        reach = [(0, S)] * (int(position_S.max()) // attention.TILE + 1)
        layout = Decode(self._cache, self._on_device(np.arange(S)), position, write, reach)
        return self.policy.hidden(token, position, layout)[step.slot_R]

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.policy.device)
