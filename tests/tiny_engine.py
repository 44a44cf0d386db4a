"""The engine on the tiny model, at both levels, for tests.

Owns: the `policy` fixture and how tests ask. Does not know: any test.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from minirllm.config import Config
from minirllm.engines.hf import HFEngine
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.types import Completion, SamplingParams

LEVELS = ("exact", "fixed")
FREE = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(name="policy", scope="module", params=LEVELS)
def policy_at_each_level(request: pytest.FixtureRequest) -> Iterator[Policy]:
    model, tokenizer = tiny.build()
    made = Policy(model, tokenizer, config(determinism="fixed" if request.param == "fixed" else "auto"))
    if made.level != request.param:
        pytest.skip(f"this machine's arithmetic is not {request.param}")
    yield made
    made.close()


def config(**options: Any) -> Config:
    return Config(
        **{"model": "tiny", "lora_rank": 0, "threads": 1, "slots": 8, "max_context": 600, "prefill_chunk": 64} | options
    )


@asynccontextmanager
async def serving(policy: Policy, **options: Any) -> AsyncIterator[HFEngine]:
    engine = HFEngine(policy, config(**options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


class Lane:
    """The policy, but a forward waits for a permit and runs in the loop's own thread: every order can be repeated."""

    def __init__(self, real: Policy):
        self.real, self.permits = real, asyncio.Semaphore(1)  # one: for the allocation at the start

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        await self.permits.acquire()
        return fn(*args)


def prompts(count: int, low: int, high: int, seed: int = 0, vocabulary: int = 256) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(vocabulary) for _ in range(chance.randrange(low, high))] for _ in range(count)]


def same(a: Completion, b: Completion) -> bool:
    return (a.token_ids, a.logprobs, a.finish_reason) == (b.token_ids, b.logprobs, b.finish_reason)


async def alone(engine: HFEngine, prompt: list[int], seed: int, params: SamplingParams = FREE) -> Completion:
    engine.weights_changed()  # nothing to reuse
    return await engine.generate(prompt, params, seed)


async def together(engine: HFEngine, all_prompts: list[list[int]], params: SamplingParams = FREE) -> list[Completion]:
    return await asyncio.gather(*[engine.generate(p, params, i) for i, p in enumerate(all_prompts)])


def watch(engine: HFEngine, look: Callable[[Any], None]) -> None:
    """`look` at every step before it runs."""
    forward = engine._runner.run

    def watched(step: Any) -> Any:
        look(step)
        return forward(step)

    engine._runner.run = watched
