"""Corrections of a batch that other weights have sampled, against the gradient of one that these would have."""

import asyncio
import math

import numpy as np
import pytest
import torch

from minirllm import head
from minirllm.algorithms import create
from minirllm.attention import ForestLayout
from minirllm.batch import Batch, build
from minirllm.config import Config
from minirllm.trainer import Trainer
from minirllm.tree import TokenTree, merge
from minirllm.types import Completion
from tests.sampled import TEMPERATURE, gradients, relative, sampled_group

PROMPT = [5, 17, 3, 90]


def every_answer(policy):
    """A forest of all answers of one token there are, each weighing what the policy gives it: an expectation."""
    ids, trees = torch.tensor(PROMPT), []
    with torch.no_grad():
        hidden = policy.hidden(ids, torch.arange(len(ids)), ForestLayout([[(0, len(ids))]]))
        logprobs = head.logprobs(policy.logits(hidden[-1:]), torch.tensor([TEMPERATURE]))[0].tolist()
    for token, logprob in enumerate(logprobs):
        trees.append(TokenTree())
        trees[-1].add(PROMPT, Completion([token], [logprob], "stop", policy.version, TEMPERATURE), str(token))
    forest = merge(trees)[0]
    at = forest.trained_T
    forest.sequence_T[at] = forest.token_T[at]
    forest.weight_T[at] = np.exp(forest.logprob_T[at])
    reward = np.cos(forest.token_T[at])  # any will do
    forest.advantage_T[at] = reward - (forest.weight_T[at] * reward).sum()
    return forest


def gradient(policy, forest, algorithm, **options):
    trainer = Trainer(policy, Config(**{**policy.config.to_dict(), **options}), create(algorithm))
    trainer._accumulate(forest)
    found = gradients(policy)
    trainer.optimizer.zero_grad()
    return found


async def gaps(policy, *kinds):
    """Answers of before an update, against the gradient of answers of after it: (distance by algorithm and correction,
    mean change of a log-probability)."""
    stale = every_answer(policy)
    await Trainer(policy, policy.config, create("reinforce")).update(Batch([[stale]]))
    now = every_answer(policy)
    wanted, at = gradient(policy, now, "reinforce"), now.trained_T
    assert stale.token_T.tolist() == now.token_T.tolist()
    moved = float(np.abs(stale.logprob_T - now.logprob_T)[at] @ now.weight_T[at])
    return {
        (algorithm, kind): relative(gradient(policy, stale, algorithm, correction=kind), wanted)
        for algorithm in ("reinforce", "grpo", "cispo")
        for kind in kinds
    }, moved


async def test_corrections_bring_stale_answers_closer_to_the_gradient_on_policy(make_policy):
    """Figures of larger updates are in LOG.md: the more weights the cap touches, the less of the gap is closed."""
    policy = await asyncio.to_thread(make_policy, lora_rank=4, lr=3e-4)
    found, moved = await gaps(policy, "off", "token", "sequence", "mask")
    assert 0.1 < moved < 0.3
    for algorithm in ("reinforce", "grpo", "cispo"):
        assert found[algorithm, "off"] > 0.1, found
        for kind in ("token", "sequence", "mask"):
            assert found[algorithm, kind] < 1e-4, (algorithm, kind, found)  # no weight is beyond the cap


async def test_weights_beyond_the_cap_leave_a_part_of_the_gap(make_policy):
    policy = await asyncio.to_thread(make_policy, lora_rank=4, lr=5e-4)
    found, _ = await gaps(policy, "off", "token")
    for algorithm in ("reinforce", "grpo", "cispo"):
        assert 0.01 < found[algorithm, "token"] < found[algorithm, "off"] / 3, found


@pytest.mark.parametrize("epochs", [1, 2])
async def test_what_the_same_weights_sampled_needs_no_correction(make_policy, epochs):
    """On the exact level every weight is exactly 1, and the run has the same bits as without a correction."""
    ended = {}
    for kind in ("off", "token", "sequence", "mask"):
        policy = await asyncio.to_thread(make_policy, lora_rank=4, lr=1e-2, inner_epochs=epochs, correction=kind)
        if policy.level != "exact":
            pytest.skip(f"determinism level here: {policy.level}")
        batch = build(sampled_group(policy, [1.0, 0.0, 0.0, 1.0]), policy.config, create("grpo"), 0)
        metrics = await Trainer(policy, policy.config, create("grpo")).update(batch)
        assert (metrics["ratio_max"], metrics["clip_fraction"]) == (0.0, 0.0)
        assert (metrics.get("correction", 1.0), metrics.get("correction_capped", 0.0)) == (1.0, 0.0)
        assert ("correction" in metrics) == (kind != "off")
        ended[kind] = policy.weights_sha256()
    assert len(set(ended.values())) == 1


async def test_with_mini_batches_the_proximal_policy_is_that_of_before_the_first(make_policy):
    """The second part's ratio has moved with the first part's step, and its weight has not."""
    policy = await asyncio.to_thread(make_policy, lora_rank=4, lr=1e-2, mini_batches=2, correction="token")
    episodes = [e for name in "ab" for e in sampled_group(policy, [1.0, 0.0], off=-0.3, task=name)]
    batch = build(episodes, policy.config, create("grpo"), 0)
    trainer, weights, original = Trainer(policy, policy.config, create("grpo")), [], Trainer._accumulate
    trainer._accumulate = lambda *given: weights.append(original(trainer, *given)) or weights[-1]
    metrics = await trainer.update(batch)
    assert [w["correction"] / w["tokens"] for w in weights] == pytest.approx([math.exp(0.3)] * 2, rel=1e-4)
    assert metrics["clip_fraction"] == 0 < metrics["last/clip_fraction"]


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ({}, 1),
        ({"correction": "token"}, 1),
        ({"inner_epochs": 2}, 2),
        ({"inner_epochs": 2, "correction": "token"}, 3),  # the proximal policy is scored before it moves
    ],
)
async def test_one_pass_costs_no_second_forward(make_policy, options, forwards):
    policy = await asyncio.to_thread(make_policy, lora_rank=4, micro_batch_tokens=4096, **options)
    batch = build(sampled_group(policy, [1.0, 0.0]), policy.config, create("grpo"), 0)
    calls, score = [], policy.score
    policy.score = lambda forest, **more: calls.append(forest) or score(forest, **more)
    await Trainer(policy, policy.config, create("grpo")).update(batch)
    assert len(calls) == forwards


async def test_the_first_step_has_ratio_one_whoever_sampled_and_later_ones_move_away_from_it(make_policy):
    """Captured log-probabilities that are off by 0.3 are weighed, not clipped; what moves in an epoch is clipped."""
    policy = await asyncio.to_thread(make_policy, lora_rank=4, lr=1e-2, inner_epochs=2, correction="token")
    batch = build(sampled_group(policy, [1.0, 0.0], off=-0.3), policy.config, create("grpo"), 0)
    metrics = await Trainer(policy, policy.config, create("grpo")).update(batch)
    assert metrics["correction"] == pytest.approx(math.exp(0.3), rel=1e-4)
    assert metrics["clip_fraction"] == 0
    assert metrics["mismatch_mean"] == pytest.approx(0.3, rel=1e-4)  # of the sampler, as ever
    assert metrics["last/clip_fraction"] > 0


@pytest.mark.parametrize("rank", [0, 4])
def test_a_correction_scales_the_gradient(make_policy, rank):
    """All captured log-probabilities off by the same: the gradient is the one without, times the weight."""
    policy = make_policy(lora_rank=rank)
    reinforce, right, wrong = create("reinforce"), *(sampled_group(policy, [1.0, 0.5], off=off) for off in (0.0, -0.3))
    right, wrong = (build(episodes, policy.config, reinforce, 0).forests for episodes in (right, wrong))
    wanted = gradient(policy, right[0], "reinforce")
    for kind, weight in (("off", 1.0), ("token", math.exp(0.3)), ("mask", math.exp(0.3))):
        found = gradient(policy, wrong[0], "reinforce", correction=kind)
        assert relative(found, {name: value * weight for name, value in wanted.items()}) < 1e-4
    masked = gradient(policy, wrong[0], "reinforce", correction="mask", correction_cap=1.2)
    assert all(value.abs().max() == 0 for value in masked.values())
