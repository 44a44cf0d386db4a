"""The scripted engine: known content, real ids, and the logprobs that sampling would have captured."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from minirllm.config import Config
from minirllm.engines.hf import HFEngine
from minirllm.engines.scripted import ScriptedEngine
from minirllm.errors import ConfigError, ContextOverflow, EngineError
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.types import SampledToken, SamplingParams

CONFIG = Config(model="tiny", lora_rank=0, threads=1, slots=2, max_context=200)


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    made = Policy(*tiny.build(), CONFIG)
    yield made
    made.close()


async def started(policy: Policy, script: object) -> ScriptedEngine:
    engine = ScriptedEngine(policy, CONFIG, script)
    await engine.start()
    return engine


async def test_replies_in_order_end_with_the_end_token(policy: Policy) -> None:
    engine = await started(policy, ["hi", [65, 66]])
    told: list[SampledToken] = []
    first = await engine.generate([1, 2], SamplingParams(), 0, on_token=told.append)
    second = await engine.generate([3], SamplingParams(), 0)
    assert first.token_ids == [*b"hi", policy.tokenizer.eos_token_id]
    assert first.finish_reason == "stop"
    assert [t.id for t in told] == first.token_ids
    assert second.token_ids == [65, 66]
    assert engine.prompts == [[1, 2], [3]]
    with pytest.raises(EngineError, match="no reply left for call 3"):
        await engine.generate([4], SamplingParams(), 0)


async def test_logprobs_are_those_of_sampling(policy: Policy) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, top_logprobs=2, ignore_eos=True)
    real = HFEngine(policy, CONFIG)
    await real.start()
    want = await real.generate([5, 6, 7], params, 1)
    await real.close()
    engine = await started(policy, [want.token_ids])
    got = await engine.generate([5, 6, 7], params, 1)
    assert got.token_ids == want.token_ids
    if policy.level == "exact":
        assert got.logprobs == want.logprobs
        assert got.top_logprobs == want.top_logprobs
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)


async def test_replies_by_what_the_prompt_contains(policy: Policy) -> None:
    engine = await started(policy, {"cat": ["meow", "purr"], "dog": ["woof"]})
    asked = [list(text.encode()) for text in ("a dog", "a cat", "the cat")]
    got = await asyncio.gather(*[engine.generate(ids, SamplingParams(), 0) for ids in asked])
    assert [bytes(c.token_ids[:-1]) for c in got] == [b"woof", b"meow", b"purr"]
    with pytest.raises(EngineError, match="no reply left"):
        await engine.generate(list(b"a cow"), SamplingParams(), 0)


async def test_replies_by_a_function(policy: Policy) -> None:
    engine = await started(policy, lambda prompt: prompt.upper())
    assert bytes((await engine.generate(list(b"abc"), SamplingParams(), 0)).token_ids[:-1]) == b"ABC"


async def test_replies_end_where_sampling_would(policy: Policy) -> None:
    engine = await started(policy, ["abcdef"] * 4)
    cut = await engine.generate([1], SamplingParams(max_tokens=2), 0)
    stopped = await engine.generate([1], SamplingParams(stop_token_ids=(ord("c"),)), 0)
    by_text = await engine.generate([1], SamplingParams(), 0, stop=lambda ids: bytes(ids).endswith(b"cd"))
    full = await engine.generate([1] * 198, SamplingParams(), 0)
    assert (bytes(cut.token_ids), cut.finish_reason) == (b"ab", "length")
    assert (bytes(stopped.token_ids), stopped.finish_reason) == (b"abc", "stop")
    assert (bytes(by_text.token_ids), by_text.finish_reason) == (b"abcd", "stop")
    assert (bytes(full.token_ids), full.finish_reason) == (b"ab", "length")
    with pytest.raises(ContextOverflow):
        await engine.generate([1] * 200, SamplingParams(), 0)


async def test_an_empty_reply_and_a_closed_engine(policy: Policy) -> None:
    engine = await started(policy, [[]])
    got = await engine.generate([1], SamplingParams(), 0)
    assert (got.token_ids, got.logprobs, got.finish_reason) == ([], [], "stop")
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([1], SamplingParams(), 0)


def test_no_script_is_an_error(policy: Policy) -> None:
    with pytest.raises(ConfigError, match="no script"):
        ScriptedEngine(policy, CONFIG)
