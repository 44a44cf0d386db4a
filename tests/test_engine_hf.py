"""The engine: a completion depends on weights, prompt, params and seed only, to the bit; queueing, leaving, failing."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM

from minirllm import attention, tree
from minirllm.config import Config
from minirllm.engines.hf import HFEngine
from minirllm.errors import ContextOverflow, EngineError, ModelError
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.types import Completion, SampledToken, SamplingParams

LEVELS = ("exact", "fixed")
FREE = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module", params=LEVELS)
def policy(request: pytest.FixtureRequest) -> Iterator[Policy]:
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


# -- one completion, whatever else happens --------------------------------------------------------------------------


async def test_alone_and_among_others_are_the_same_bits(policy: Policy) -> None:
    """32 requests over 8 slots: other slots, other neighbours, waiting, eviction, prompts over a tile edge."""
    asked = prompts(32, 1, 330)
    async with serving(policy) as engine:
        apart = [await alone(engine, prompt, i) for i, prompt in enumerate(asked)]
        engine.weights_changed()
        joined = await together(engine, asked)
    assert all(same(a, b) for a, b in zip(apart, joined, strict=True))
    assert all(math.isfinite(p) and p <= 0 for a in joined for p in a.logprobs)
    assert len({tuple(a.token_ids) for a in joined}) == 32


async def test_chunk_and_slot_counts_change_no_bits_at_the_exact_level(policy: Policy) -> None:
    if policy.level != "exact":
        pytest.skip("fixed shapes depend on both")
    asked = prompts(6, 100, 300, seed=1)
    results = []
    for slots, chunk in ((8, 64), (3, 512), (1, 100)):
        async with serving(policy, slots=slots, prefill_chunk=chunk) as engine:
            results.append(await together(engine, asked))
    assert all(same(a, b) and same(a, c) for a, b, c in zip(*results, strict=True))


async def test_a_cached_prefix_changes_no_bits(policy: Policy) -> None:
    chunk = 64
    first, other = prompts(2, 200, 201, seed=2)
    async with serving(policy) as engine:
        want = await alone(engine, first, 5)
        grown = [*first, *want.token_ids, *other[:70]]
        branch = [*first[:150], *other]
        fresh = [await alone(engine, p, 5) for p in (first, grown, branch)]
        engine.weights_changed()
        await engine.generate(first, FREE, 5)
        again = [await engine.generate(p, FREE, 5) for p in (first, grown, branch)]
    assert [c.cached_tokens for c in fresh] == [0, 0, 0]
    stored = 200 + FREE.max_tokens - 1  # the last sampled token was never stored
    assert [c.cached_tokens for c in again] == (
        [200, stored, 150] if policy.level == "exact" else [200, 200 // chunk * chunk, 150 // chunk * chunk]
    )
    assert all(same(a, b) for a, b in zip(fresh, again, strict=True))


async def test_a_group_prefills_its_prompt_once(policy: Policy) -> None:
    (prompt,) = prompts(1, 300, 301, seed=3)
    async with serving(policy) as engine:
        apart = [await alone(engine, prompt, i) for i in range(8)]
        engine.weights_changed()
        ran = _count_prefilled(engine)
        group = await together(engine, [prompt] * 8)
    assert all(same(a, b) for a, b in zip(apart, group, strict=True))
    assert sorted(c.cached_tokens for c in group) == [0, *[300] * 7]
    assert sum(ran) == 300
    assert len({tuple(c.token_ids) for c in group}) == 8


async def test_prompts_with_a_common_beginning_wait_for_it(policy: Policy) -> None:
    (common,) = prompts(1, 192, 193, seed=4)
    asked = [[*common, *tail] for tail in prompts(4, 10, 30, seed=5)]
    async with serving(policy) as engine:
        apart = [await alone(engine, prompt, i) for i, prompt in enumerate(asked)]
        engine.weights_changed()
        joined = await together(engine, asked)
    assert all(same(a, b) for a, b in zip(apart, joined, strict=True))
    assert sorted(c.cached_tokens for c in joined) == [0, 192, 192, 192]


async def test_the_next_turn_continues_in_place(policy: Policy) -> None:
    """A conversation among others: each turn prefills only what is new."""
    if policy.level != "exact":
        pytest.skip("fixed shapes reuse whole prompt chunks only")
    (prompt,) = prompts(1, 100, 101, seed=6)
    async with serving(policy) as engine:
        for turn in range(3):
            answers = await asyncio.gather(
                engine.generate(prompt, FREE, turn), *[engine.generate(p, FREE, 0) for p in prompts(3, 20, 40, turn)]
            )
            assert answers[0].cached_tokens == (
                0 if turn == 0 else len(prompt) - 6
            )  # 5 new tokens and the one not stored
            prompt = [*prompt, *answers[0].token_ids, 1, 2, 3, 4, 5]


async def test_new_weights_reuse_nothing(policy: Policy) -> None:
    (prompt,) = prompts(1, 150, 151)
    async with serving(policy) as engine:
        await engine.generate(prompt, FREE, 0)
        engine.weights_changed()
        assert (await engine.generate(prompt, FREE, 0)).cached_tokens == 0


async def test_weights_may_not_change_under_a_request(policy: Policy) -> None:
    async with serving(policy) as engine:
        task = asyncio.create_task(engine.generate([1], FREE, 0))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="1 requests were in flight"):
            engine.weights_changed()
        await task


async def test_greedy_is_what_generate_does(policy: Policy) -> None:
    plain = _with_sdpa(policy.model)
    async with serving(policy) as engine:
        got = await together(engine, asked := prompts(6, 3, 280, seed=7), SamplingParams(max_tokens=24, temperature=0))
    for prompt, completion in zip(asked, got, strict=True):
        ids = torch.tensor([prompt])
        out = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert completion.token_ids == out[0, len(prompt) :].tolist()
        assert completion.temperature == 0


async def test_captured_logprobs_are_the_trainers(policy: Policy) -> None:
    """Bitwise at the exact level, to 1e-4 with fixed shapes; in the forest of all rollouts, at two temperatures."""
    (prompt,) = prompts(1, 270, 271, seed=8)
    params = [
        SamplingParams(max_tokens=n, temperature=t, ignore_eos=True)
        for n, t in ((1, 1.0), (30, 1.0), (9, 0.7), (17, 1.0))
    ]
    async with serving(policy) as engine:
        got = await asyncio.gather(*[engine.generate(prompt, p, i) for i, p in enumerate(params)])
    trees = []
    for i, completion in enumerate(got):
        trees.append(tree.TokenTree())
        trees[-1].add(prompt, completion, f"call{i}")
    forest, _ = tree.merge(trees)
    logprob_T, _ = policy.score(forest)  # with gradient, as in training
    trained = torch.from_numpy(forest.trained_T)
    gap = (logprob_T.detach() - torch.from_numpy(forest.logprob_T))[trained].abs().max().item()
    assert int(trained.sum()) == 57
    assert gap == 0 if policy.level == "exact" else gap <= 1e-4


async def test_sliding_windows(policy: Policy) -> None:
    """Both ways of running; bits are compared where the shapes are fixed, because these sizes have no exact level."""
    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    settings = [Gemma3TextConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2) for _ in range(2)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma3ForCausalLM._from_config(settings[0], attn_implementation=attention.IMPLEMENTATION).eval()
    plain = Gemma3ForCausalLM._from_config(settings[1], attn_implementation="sdpa").eval()
    plain.load_state_dict(model.state_dict())
    mine = await asyncio.to_thread(
        Policy, model, policy.tokenizer, config(determinism="fixed" if policy.level == "fixed" else "off")
    )
    asked = prompts(5, 3, 290, seed=9)
    async with serving(mine, max_context=400) as engine:
        got = await together(engine, asked, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        apart = await alone(engine, asked[-1], 4, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert apart.token_ids == got[-1].token_ids
    assert policy.level == "exact" or same(apart, got[-1])
    for prompt, completion in zip(asked, got, strict=True):
        ids = torch.tensor([prompt])
        out = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert completion.token_ids == out[0, len(prompt) :].tolist()
    await asyncio.to_thread(mine.close)


@pytest.mark.slow
async def test_smollm2_among_others_with_a_cached_prefix_and_in_training(smollm2: Any) -> None:
    settings = Config(lora_rank=0, threads=1, slots=6, max_context=512, prefill_chunk=128)
    policy = await asyncio.to_thread(Policy, smollm2.model, smollm2.tokenizer, settings)
    text = "Name three rivers in Europe and say which is the longest. " * 3
    asked = [smollm2.tokenizer.encode(text[i:]) for i in range(8)]
    asked[7] = asked[0]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine = HFEngine(policy, settings)
    await engine.start()
    apart = [await alone(engine, asked[i], i, params) for i in (0, 3)]
    engine.weights_changed()
    joined = await together(engine, asked, params)
    again = await engine.generate(asked[3], params, 3)
    await engine.close()
    assert same(apart[0], joined[0])
    assert same(apart[1], joined[3])
    assert same(apart[1], again)
    trees = [tree.TokenTree() for _ in joined]
    for i, completion in enumerate(joined):
        trees[i].add(asked[i], completion, f"call{i}")
    forest, _ = tree.merge(trees)
    with torch.no_grad():
        logprob_T, _ = await policy.run(policy.score, forest)
    gap = (logprob_T - torch.from_numpy(forest.logprob_T)).detach().abs().max().item()
    assert gap == 0 if policy.level == "exact" else gap <= 1e-4
    await asyncio.to_thread(policy.close)


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
    assert HFEngine(policy, config(max_context=10_000)).max_context == tiny.MAX_POSITIONS


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
        assert engine._running == []
        assert [s for s, owner in enumerate(engine._slots.owner) if owner] == []
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


async def test_idle_slots_between_rows_are_closed_up(policy: Policy) -> None:
    """Rows that end early leave holes; the others are moved together and go on with the same bits."""
    if policy.level != "exact":
        pytest.skip("with fixed shapes every slot is a row")
    asked = prompts(8, 20, 60, seed=15)
    lengths = [3, 40, 3, 3, 3, 3, 40, 40]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    async with serving(policy) as engine:
        apart = [await alone(engine, asked[i], i, params[i]) for i in range(8)]
        engine.weights_changed()
        moves, spans = _record(engine)
        joined = await asyncio.gather(*[engine.generate(p, params[i], i) for i, p in enumerate(asked)])
    assert all(same(a, b) for a, b in zip(apart, joined, strict=True))
    assert "swap" in moves
    assert max(rows for rows, _ in spans) > 3
    assert (3, 3) in spans
    assert all(width <= 1.25 * rows + 1 for rows, width in spans)


@pytest.mark.gpu
async def test_the_captured_decode_step_gives_the_eager_tokens() -> None:
    model, tokenizer = tiny.build()
    policy = await asyncio.to_thread(Policy, model.cuda(), tokenizer, config(device="cuda"))
    asked = prompts(12, 1, 200)
    async with serving(policy, slots=8) as engine:
        assert engine._runner.graph is not None
        captured = await together(engine, asked)
        engine.weights_changed()
        engine._runner.graph = None
        assert all(same(a, b) for a, b in zip(captured, await together(engine, asked), strict=True))
    await asyncio.to_thread(policy.close)


# -- what the tests look at -----------------------------------------------------------------------------------------


def _with_sdpa(model: Any) -> LlamaForCausalLM:
    plain = LlamaForCausalLM._from_config(
        model.config.__class__(**model.config.to_dict()), attn_implementation="sdpa"
    ).eval()
    plain.load_state_dict(model.state_dict())
    plain.generation_config.eos_token_id = model.config.eos_token_id
    return plain


def _watch(engine: HFEngine, look: Callable[[Any], None]) -> None:
    forward = engine._runner.run

    def watched(step: Any) -> Any:
        look(step)
        return forward(step)

    engine._runner.run = watched


def _count_prefilled(engine: HFEngine) -> list[int]:
    ran: list[int] = []
    _watch(engine, lambda step: ran.extend(len(chunk.token_n) for chunk in step.chunks))
    return ran


def _record(engine: HFEngine) -> tuple[list[str], list[tuple[int, int]]]:
    """Names of the cache's moves, and (rows, slots from the first to the last) of each decode."""
    moves: list[str] = []
    spans: list[tuple[int, int]] = []

    def look(step: Any) -> None:
        moves.extend(name for name, _ in step.moves)
        if len(step.slot_R):
            spans.append((len(step.slot_R), int(step.slot_R[-1] - step.slot_R[0]) + 1))

    _watch(engine, look)
    return moves, spans
