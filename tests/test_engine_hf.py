"""The engine: a completion depends on weights, prompt, params and seed only, to the bit."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM

from minirllm import attention, tree
from minirllm.config import Config
from minirllm.engines import cache, sampling
from minirllm.engines.hf import HFEngine
from minirllm.engines.step import MOST_SLOTS, affordable
from minirllm.errors import EngineError
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.types import SamplingParams
from tests.tiny_engine import FREE, alone, config, policy_at_each_level, prompts, same, serving, together, watch  # noqa: F401


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
        ran: list[int] = []
        watch(engine, lambda step: ran.extend(len(chunk.token_n) for chunk in step.chunks))
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
    plain = with_sdpa(policy.model)
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
    logprob_T, *_ = policy.score(forest)  # with gradient, as in training
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
@pytest.mark.parametrize("determinism", ["auto", "fixed"])
async def test_smollm2_among_others_with_a_cached_prefix_and_in_training(smollm2: Any, determinism: str) -> None:
    settings = Config(lora_rank=0, threads=1, slots=6, max_context=512, prefill_chunk=128, determinism=determinism)
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
        logprob_T, *_ = await policy.run(policy.score, forest)
    gap = (logprob_T - torch.from_numpy(forest.logprob_T)).detach().abs().max().item()
    assert gap == 0 if policy.level == "exact" else gap <= 1e-4
    await asyncio.to_thread(policy.close)


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
        moves: list[str] = []
        spans: list[tuple[int, int]] = []  # (rows, slots from the first to the last) of each decode

        def look(step: Any) -> None:
            moves.extend(name for name, _ in step.moves)
            if len(step.slot_R):
                spans.append((len(step.slot_R), int(step.slot_R[-1] - step.slot_R[0]) + 1))

        watch(engine, look)
        joined = await asyncio.gather(*[engine.generate(p, params[i], i) for i, p in enumerate(asked)])
    assert all(same(a, b) for a, b in zip(apart, joined, strict=True))
    assert "swap" in moves
    assert max(rows for rows, _ in spans) > 3
    assert (3, 3) in spans
    assert all(width <= 1.25 * rows + 1 for rows, width in spans)


async def test_with_fixed_shapes_nothing_has_another_shape(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes, leaves and is reused: forwards of one token in each slot or of one chunk, heads of all slots."""
    if policy.level != "fixed":
        pytest.skip("the exact level needs no fixed shapes")
    forwards, heads, sampled = set[int](), set[int](), set[int]()
    hidden, logits, logprobs = policy.hidden, policy.logits, sampling.logprobs
    asked = prompts(14, 1, 330, seed=16)
    asked += [asked[0], asked[1], [*asked[2], *asked[3]][:500]]
    async with serving(policy) as engine:
        monkeypatch.setattr(policy, "hidden", lambda t, *args: (forwards.add(len(t)), hidden(t, *args))[1])
        monkeypatch.setattr(policy, "logits", lambda h: (heads.add(len(h)), logits(h))[1])
        monkeypatch.setattr(sampling, "logprobs", lambda x, t: (sampled.add(len(x)), logprobs(x, t))[1])
        tasks = [asyncio.create_task(engine.generate(p, FREE, i)) for i, p in enumerate(asked)]
        await tasks[0]
        tasks[5].cancel()
        await asyncio.wait(tasks)
        again = await alone(engine, asked[7], 7)
    assert same(tasks[7].result(), again)
    assert (forwards, heads, sampled) == ({8, 64}, {8}, {8})


async def test_arithmetic_that_breaks_the_promise_is_noticed_at_the_start(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact: a cache that shows every key. Fixed: a row that depends on the longest one beside it."""
    method, instead = {"exact": ("_mask", "fixed"), "fixed": ("_weigh", "off")}[policy.level]
    right = getattr(cache.Decode, method)

    def wrong(self: cache.Decode, *args: Any) -> torch.Tensor:
        return right(self, *args) * (0 if method == "_mask" else 1 + 1e-6 * len(self.reach))

    monkeypatch.setattr(cache.Decode, method, wrong)
    with pytest.raises(EngineError, match=f"determinism = {instead}"):
        await HFEngine(policy, config()).start()


async def test_off_promises_nothing_and_works(policy: Policy) -> None:
    off = await asyncio.to_thread(Policy, tiny.build()[0], policy.tokenizer, config(determinism="off"))
    asked = prompts(12, 1, 200, seed=17)
    async with serving(off) as engine:
        got = await together(engine, asked, SamplingParams(max_tokens=12, temperature=0))
    async with serving(policy) as engine:
        want = await together(engine, asked, SamplingParams(max_tokens=12, temperature=0))
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    await asyncio.to_thread(off.close)


def test_slots_that_fit_the_free_memory_by_hand() -> None:
    assert affordable(1000, 100) == 8  # a fifth stays for activations
    assert affordable(50, 100) == 1
    assert affordable(10**12, 100) == MOST_SLOTS


@pytest.mark.gpu
@pytest.mark.parametrize("determinism", ["fixed", "off"])
async def test_on_cuda_alone_and_among_others(determinism: str) -> None:
    policy = await asyncio.to_thread(Policy, tiny.build()[0].cuda(), tiny.build()[1], config(determinism=determinism))
    asked = prompts(32, 1, 330)
    async with serving(policy) as engine:
        apart = [await alone(engine, prompt, i) for i, prompt in enumerate(asked)]
        engine.weights_changed()
        joined = await together(engine, asked)
        assert engine._runner.graph is not None
    assert len({tuple(a.token_ids) for a in joined}) == 32
    assert determinism == "off" or all(same(a, b) for a, b in zip(apart, joined, strict=True))
    await asyncio.to_thread(policy.close)


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


def with_sdpa(model: Any) -> LlamaForCausalLM:
    plain = LlamaForCausalLM._from_config(
        model.config.__class__(**model.config.to_dict()), attn_implementation="sdpa"
    ).eval()
    plain.load_state_dict(model.state_dict())
    plain.generation_config.eos_token_id = model.config.eos_token_id
    return plain
