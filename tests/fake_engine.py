"""A session over an engine that says what it is told, and a check that the session recorded just that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from minirllm.models import tiny
from minirllm.renderer import Renderer
from minirllm.session import Session
from minirllm.types import Completion, Message, ModelReply, ModelRequest, SampledToken, SamplingParams, StopCheck

RENDERER = Renderer(tiny.build_tokenizer())
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def logprob(prompt: Sequence[int], seed: int, position: int) -> float:
    """A number that only this token of this call has."""
    digest = blake2b(repr((list(prompt), seed, position)).encode(), digest_size=4).digest()
    return -int.from_bytes(digest, "big") / 2**32


class FakeEngine:
    """Says `answer(prompt text, seed)`. With `hold`, each token waits for a `release`."""

    def __init__(self, answer: Callable[[str, int], str] | None = None, max_context: int = 4000, hold: bool = False):
        self.answer = answer or (lambda prompt, seed: f"answer {seed % 997}")
        self.max_context, self.vocab_size = max_context, len(RENDERER.tokenizer)
        self.calls: list[tuple[list[int], SamplingParams, int]] = []
        self.completions: list[tuple[list[int], Completion]] = []
        self.active = self.cancelled = 0
        self.failure: Exception | None = None
        self._permits = asyncio.Semaphore(0) if hold else None

    def release(self, tokens: int = 10_000) -> None:
        assert self._permits is not None
        for _ in range(tokens):
            self._permits.release()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def weights_changed(self) -> None: ...

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
        self.calls.append((list(prompt_ids), params, seed))
        self.active += 1
        try:
            text = self.answer(RENDERER.decode(list(prompt_ids)), seed)
            planned = [*RENDERER.encode(text), min(RENDERER.eos_ids)]
            ids: list[int] = []
            logprobs: list[float] = []
            reason = "length"
            for token in planned[: params.max_tokens]:
                await (self._permits.acquire() if self._permits else asyncio.sleep(0))
                if self.failure is not None:
                    raise self.failure
                ids.append(token)
                logprobs.append(logprob(prompt_ids, seed, len(ids)))
                if on_token is not None:
                    on_token(SampledToken(token, logprobs[-1]))
                if token in RENDERER.eos_ids or (stop is not None and stop(ids)):
                    reason = "stop"
                    break
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1
        completion = Completion(ids, logprobs, reason, 7, params.temperature)  # type: ignore[arg-type]
        self.completions.append((list(prompt_ids), completion))
        return completion


def session(engine: FakeEngine | None = None, **settings: Any) -> Session:
    settings = {"seed_parts": (0, "task", 1, 0), **settings}
    return Session("s", "key", engine or FakeEngine(), settings.pop("renderer", RENDERER), "model", **settings)


def chat(*texts: str, **fields: Any) -> ModelRequest:
    """A request whose messages alternate: user, assistant, user ..."""
    roles = ("user", "assistant")
    return ModelRequest(messages=[Message(roles[i % 2], text) for i, text in enumerate(texts)], **fields)


def said(reply: ModelReply) -> str:
    return reply.choices[0].message.content


async def ask(s: Session, request: ModelRequest) -> ModelReply:
    """A call whose answer reaches its client."""
    reply = await s.call(request)
    s.delivered(reply.id)
    return reply


def check(s: Session) -> None:
    """Every step names the tokens that the engine read and sampled, and its client was told what they say."""
    assert isinstance(s.engine, FakeEngine)
    seen = {(tuple(prompt), tuple(c.token_ids), tuple(c.logprobs)) for prompt, c in s.engine.completions}
    assert len(seen) == len(s.engine.completions)
    assert s.counters["drift"] == 0
    for step in s.steps:
        assert step.node is not None
        prompt, (ids, logprobs) = s.tree.prompt_ids(step.node), s.tree.response(step.node)
        assert (tuple(prompt), tuple(ids), tuple(logprobs)) in seen
        assert (step.prompt_length, step.response_length, step.weight_version) == (len(prompt), len(ids), 7)
