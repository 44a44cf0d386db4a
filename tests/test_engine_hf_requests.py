"""The engine's requests: how they end, leave and fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from minirllm.engines.hf import HFEngine
from minirllm.errors import ContextOverflow, EngineError, ModelError
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.types import SampledToken, SamplingParams
from tests.tiny_engine import FREE, alone, config, policy_at_each_level, prompts, same, serving, together  # noqa: F401

# -- ends ------------------------------------------------------------------------------------------------------------


async def test_stops(policy: Policy) -> None:
    (prompt,) = prompts(1, 30, 31, seed=10)
    async with serving(policy) as engine:
        free = await engine.generate(prompt, FREE, 3)
        at = free.token_ids.index(free.token_ids[7])
        by_id = await engine.generate(prompt, SamplingParams(stop_token_ids=(free.token_ids[7],), ignore_eos=True), 3)
        by_text = await engine.generate(prompt, FREE, 3, stop=lambda ids: len(ids) == 5)
        window = await engine.generate(prompt, SamplingParams(ignore_eos=True), 3)
        one = await engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True), 3)
        eos = sorted(policy.eos_ids)[0]
        until_end = await asyncio.gather(
            *[engine.generate(prompt, SamplingParams(max_tokens=400), seed) for seed in range(8)]
        )
    assert (free.finish_reason, len(free.token_ids)) == ("length", 20)
    assert (by_id.finish_reason, by_id.token_ids) == ("stop", free.token_ids[: at + 1])
    assert (by_text.finish_reason, by_text.token_ids) == ("stop", free.token_ids[:5])
    assert (window.finish_reason, len(window.token_ids)) == ("length", 600 - 30)
    assert window.token_ids[:20] == free.token_ids
    assert one.token_ids == free.token_ids[:1]
    ended = [c for c in until_end if c.finish_reason == "stop"]
    assert ended
    assert all(c.token_ids[-1] in policy.eos_ids and c.token_ids.count(eos) == 1 for c in ended)


async def test_the_longest_prompt_and_one_more(policy: Policy) -> None:
    (prompt,) = prompts(1, 600, 601, seed=11)
    async with serving(policy) as engine:
        last = await engine.generate(prompt[:599], FREE, 0)
        with pytest.raises(ContextOverflow) as caught:
            await engine.generate(prompt, FREE, 0)
        neighbours = await together(engine, [prompt[:599], *prompts(3, 5, 9)])  # beside a slot that is full to the end
    assert len(last.token_ids) == 1
    assert last.finish_reason == "length"
    assert (caught.value.limit, caught.value.got) == (600, 600)
    assert same(neighbours[0], last)


async def test_the_models_own_limit_counts(policy: Policy) -> None:
    assert HFEngine(policy, config(max_context=2 * tiny.MAX_POSITIONS)).max_context == tiny.MAX_POSITIONS


async def test_tokens_are_told_in_order_and_top_logprobs_are_given(policy: Policy) -> None:
    told: list[SampledToken] = []
    async with serving(policy) as engine:
        params = SamplingParams(max_tokens=6, top_logprobs=3, ignore_eos=True)
        got = await engine.generate([5, 6, 7], params, 1, on_token=told.append)
        plain = await engine.generate([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True), 1)
    assert [t.id for t in told] == got.token_ids
    assert [t.logprob for t in told] == got.logprobs
    assert [t.top for t in told] == got.top_logprobs
    assert same(got, plain)
    assert plain.top_logprobs == []
    for top, token, logprob in zip(got.top_logprobs, got.token_ids, got.logprobs, strict=True):
        assert len(top) == 3
        assert top[0][1] >= top[1][1] >= top[2][1]
        assert dict(top).get(token, logprob) == logprob


async def test_greedy_and_truncated_rows_beside_sampled_ones(policy: Policy) -> None:
    kinds = [
        SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=8, top_k=1, ignore_eos=True),
        SamplingParams(max_tokens=8, top_p=0.8, min_p=0.01, ignore_eos=True),
        SamplingParams(max_tokens=8, frequency_penalty=2.0, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=1.5, ignore_eos=True),
    ]
    (prompt,) = prompts(1, 40, 41, seed=12)
    async with serving(policy) as engine:
        apart = [await alone(engine, prompt, 1, params) for params in kinds]
        joined = await asyncio.gather(*[engine.generate(prompt, params, 1) for params in kinds])
    assert all(same(a, b) for a, b in zip(apart, joined, strict=True))
    assert joined[1].token_ids == joined[0].token_ids
    assert joined[1].logprobs == [0.0] * 8
    assert len({tuple(c.token_ids) for c in joined}) == 4


# -- leaving and failing ---------------------------------------------------------------------------------------------


async def test_cancelling_frees_the_row_at_once_and_leaves_the_others_alone(policy: Policy) -> None:
    asked = prompts(10, 20, 200, seed=13)
    async with serving(policy, slots=4) as engine:
        apart = [await alone(engine, prompt, i) for i, prompt in enumerate(asked)]
        engine.weights_changed()
        begun = asyncio.Event()
        endless = SamplingParams(ignore_eos=True)
        doomed = [
            asyncio.create_task(engine.generate(p, endless, 0, on_token=lambda _: begun.set()))
            for p in prompts(6, 20, 300, seed=14)
        ]
        tasks = [asyncio.create_task(engine.generate(prompt, FREE, i)) for i, prompt in enumerate(asked)]
        await begun.wait()
        assert len(engine._running) == 4
        for task in doomed:  # some decode, some prefill, some wait
            task.cancel()
        await asyncio.wait(doomed)
        assert all(task.cancelled() for task in doomed)
        stay = len(apart) + len(doomed)  # the number of the first; some may have taken the free rows already
        assert all(request.number >= stay for request in engine._running)
        assert all(owner is None or owner.number >= stay for owner in engine._slots.owner)
        assert all(same(a, b) for a, b in zip(apart, await asyncio.gather(*tasks), strict=True))


async def test_an_error_in_a_callback_ends_that_request_only(policy: Policy) -> None:
    def broken(_: SampledToken) -> None:
        raise ZeroDivisionError

    async with serving(policy) as engine:
        results = await asyncio.gather(
            engine.generate([1, 2], FREE, 0), engine.generate([3, 4], FREE, 0, on_token=broken), return_exceptions=True
        )
        assert engine._running == []
    assert len(results[0].token_ids) == 20
    assert isinstance(results[1], ZeroDivisionError)


async def test_a_failing_device_fails_every_request_and_says_why(policy: Policy) -> None:
    engine = HFEngine(policy, config(slots=2))
    await engine.start()
    calls = 0
    forward = engine._runner.run

    def failing(step: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return forward(step)

    engine._runner.run = failing
    results = await asyncio.gather(*[engine.generate([i], FREE, i) for i in range(5)], return_exceptions=True)
    assert [type(r) for r in results] == [EngineError] * 5
    assert all("RuntimeError: out of memory" in str(r) for r in results)
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate([1], FREE, 0)
    await engine.close()


async def test_a_probability_that_is_no_number_fails_its_request_and_leaves_no_trace(policy: Policy) -> None:
    async with serving(policy, slots=1) as engine:
        want = await engine.generate([4, 5, 6], FREE, 0)
        poison = engine._runner.end_SE.clone()
        embedding = policy.model.get_input_embeddings().weight
        kept = embedding[9].detach().clone()
        with torch.no_grad():
            embedding[9] = float("nan")
        with pytest.raises(EngineError, match="not a finite number"):
            await engine.generate([9, 5, 6], FREE, 0)
        with torch.no_grad():
            embedding[9] = kept
        assert not torch.equal(poison, engine._runner.end_SE)
        assert same(await engine.generate([4, 5, 6], FREE, 0), want)  # in the same, only, slot


async def test_close_ends_requests_in_flight(policy: Policy) -> None:
    engine = HFEngine(policy, config())
    with pytest.raises(EngineError, match="not started"):
        await engine.generate([1], FREE, 0)
    await engine.start()
    tasks = [asyncio.create_task(engine.generate([i], SamplingParams(ignore_eos=True), 0)) for i in range(12)]
    await asyncio.sleep(0.05)
    await engine.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(r) for r in results] == ["the engine was closed"] * 12
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([1], FREE, 0)


async def test_a_model_with_a_state_instead_of_keys_is_refused(policy: Policy) -> None:
    policy.model.config.layer_types = ["full_attention", "linear_attention"]
    try:
        with pytest.raises(ModelError, match="linear_attention"):
            HFEngine(policy, config())
    finally:
        del policy.model.config.layer_types


# -- versions of the weights -----------------------------------------------------------------------------------------


async def test_requests_to_several_versions_at_once_have_the_bits_of_each_alone(policy: Policy) -> None:
    """Equal prompts to three versions, in one engine at one time; no version takes over what another has computed."""
    before = {name: parameter.detach().clone() for name, parameter in policy.trainable().items()}
    asked, digest = prompts(3, 90, 200, seed=21), policy.weights_sha256()
    try:
        for _ in range(2):
            policy.keep()
            policy.version += 1
            with torch.no_grad():
                for parameter in policy.trainable().values():
                    parameter.mul_(1.01)
        apart = {}
        for weights in (0, 1, None):
            async with serving(policy) as engine:  # it has cached nothing of other weights
                for seed, prompt in enumerate(asked):
                    apart[weights, seed] = await engine.generate(prompt, FREE, seed, weights=weights)
        async with serving(policy) as engine:
            joined = await asyncio.gather(
                *[engine.generate(asked[seed], FREE, seed, weights=weights) for weights, seed in apart]
            )
            again = await engine.generate(asked[2], FREE, 2, weights=1)
            flying = asyncio.create_task(engine.generate(asked[0], FREE, 0, weights=1))
            await asyncio.sleep(0)
            engine.weights_changed()  # not those that it asks
            await flying
        assert all(same(a, b) for a, b in zip(apart.values(), joined, strict=True))
        assert [c.weight_version for c in joined] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert len({tuple(c.logprobs) for c in joined}) == 9
        assert same(again, apart[1, 2])
        assert same(flying.result(), apart[1, 0])
        with policy.weights_of(0):
            assert all(torch.equal(policy.model.get_parameter(name), before[name]) for name in before)
        assert policy.weights_sha256() != digest
    finally:
        policy.kept.clear()
        policy.version = 0
        with torch.no_grad():
            for name, parameter in policy.trainable().items():
                parameter.copy_(before[name])
