"""Entropy bonus, the KL in the reward, and a KL that is steered: on the tiny model."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from minirllm import checkpoint, penalty
from minirllm.ahead import History
from minirllm.algorithms import create
from minirllm.batch import build
from minirllm.trainer import Trainer
from tests.sampled import TEMPERATURE, accumulate, lone_logprobs, plain_gradients, relative, sampled_group

GRPO = create("grpo")


def plain_entropy(policy, episodes):
    """Mean entropy over all sampled tokens, by plain attention one call at a time, and its gradients."""

    def mean():
        entropies = []
        for episode in episodes:
            for step in episode.trajectories[0].steps:
                ids, start = episode.tree.ids(step.node), step.prompt_length
                logits = policy.model(input_ids=torch.tensor(ids)[None], use_cache=False).logits[0, start - 1 : -1]
                logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
                entropies.append(-(logprobs.exp() * logprobs).sum(-1))
        return torch.cat(entropies).mean()

    return plain_gradients(policy, mean)


@pytest.mark.parametrize("rank", [0, 4])
def test_an_entropy_bonus_adds_the_gradient_of_the_entropy_over_the_whole_vocabulary(make_policy, rank):
    policy = make_policy(lora_rank=rank)
    episodes = sampled_group(policy, [1.0, 0.0, 0.5])
    mean, slope = plain_entropy(policy, episodes)
    batch = build(episodes, policy.config, GRPO, 0)
    (loss, without), (raised, with_bonus) = [
        accumulate(policy, Trainer(policy, replace(policy.config, entropy_bonus=bonus), GRPO), batch)
        for bonus in (0.0, 0.5)
    ]
    assert raised == pytest.approx(loss - 0.5 * mean, rel=1e-5)
    assert (
        relative({n: with_bonus[n] - without[n] for n in slope}, {n: -0.5 * value for n, value in slope.items()}) < 1e-4
    )


async def test_where_rewards_are_equal_a_bonus_raises_the_entropy(make_policy):
    policy = await asyncio.to_thread(make_policy, lora_rank=4, lr=1e-2, entropy_bonus=0.01)
    episodes = sampled_group(policy, [1.0, 1.0, 1.0])
    trainer, before = Trainer(policy, policy.config, GRPO), plain_entropy(policy, episodes)[0]
    metrics = await trainer.update(build(episodes, policy.config, GRPO, 0))
    assert metrics["entropy"] == pytest.approx(before, rel=1e-5)
    assert plain_entropy(policy, episodes)[0] > before + 0.01


def charged(policy, episodes, **options):
    """(metrics, what each episode's calls cost)."""
    metrics = asyncio.run(penalty.charge(episodes, policy, replace(policy.config, **options)))
    return metrics, [[step.metadata["kl_cost"] for step in e.trajectories[0].steps] for e in episodes]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_call_costs_the_sum_of_its_tokens_kl_whatever_the_micro_batches(make_policy, rank):
    policy = make_policy(lora_rank=rank, kl_beta=0.1, kl_in="reward")
    if not rank:
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    episodes = sampled_group(policy, [1.0, 0.0, None])
    wanted, tokens = {name: [] for name in ("k1", "k2", "k3")}, 0
    for episode in episodes[:2]:
        for step in episode.trajectories[0].steps:
            with policy.frozen():
                reference = lone_logprobs(policy, episode.tree.ids(step.node))[step.prompt_length - 1 :]
            d = reference.double().numpy() - np.array(episode.tree.response(step.node)[1])
            assert np.abs(d).max() > 1e-3
            tokens += len(d)
            for name, values in (("k1", -d), ("k2", d**2 / 2), ("k3", np.exp(d) - d - 1)):
                wanted[name].append(values.sum())
    for name, sums in wanted.items():
        for limit in (16, 640):
            options = {"kl_estimator": name, "micro_batch_tokens": limit}
            metrics, costs = charged(policy, episodes[:2], **options)
            assert np.concatenate(costs).tolist() == pytest.approx(
                [0.1 * value for value in sums], rel=1e-3, abs=1e-6
            ), options
            assert metrics["kl_reference"] == pytest.approx(sum(sums) / tokens, rel=1e-3), options
    assert asyncio.run(penalty.charge(episodes[2:], policy, policy.config)) == {}  # no grade, no reward to charge


def test_the_kl_in_the_reward_becomes_an_advantage_and_leaves_the_loss_alone(make_policy):
    policy = make_policy(lora_rank=4, kl_beta=0.1, kl_in="reward", norm_std=False)
    episodes = sampled_group(policy, [1.0, 1.0])
    _, costs = charged(policy, episodes)
    batch = build(episodes, policy.config, GRPO, 0)
    half = (sum(costs[0]) - sum(costs[1])) / 2
    found = {float(a) for forest in batch.forests for a in forest.advantage_T[forest.trained_T]}
    assert sorted(found) == pytest.approx(sorted([-half, half]))
    calls, score = [], policy.score
    policy.score = lambda forest, **more: calls.append(more) or score(forest, **more)
    accumulate(policy, Trainer(policy, policy.config, GRPO), batch)
    assert not any(call.get("reference") for call in calls)


def test_a_steered_kl_goes_on_where_a_checkpoint_left_it(make_policy, tmp_path):
    options = {"lora_rank": 4, "lr": 1e-2, "kl_beta": 0.5, "kl_target": 1e-4}
    straight, stopped = make_policy(**options), make_policy(**options)
    episodes = sampled_group(straight, [1.0, 0.0], turns=1)
    trainer = Trainer(straight, straight.config, GRPO)
    batch = build(episodes, straight.config, GRPO, 0)
    first = asyncio.run(trainer.update(batch))
    assert first["kl_beta"] == 0.5
    assert first["kl_reference"] > 1e-3
    checkpoint.save(tmp_path, 1, straight, trainer, {})
    second = asyncio.run(trainer.update(batch))
    assert second["kl_beta"] == pytest.approx(0.5 * 1.02)
    resumed = Trainer(stopped, stopped.config, GRPO)
    checkpoint.load(tmp_path / "step_000001", stopped, resumed)
    again = asyncio.run(resumed.update(batch))
    assert {**again, "seconds_train": 0} == {**second, "seconds_train": 0}
    assert stopped.weights_sha256() == straight.weights_sha256()
    assert resumed.config.kl_beta == trainer.config.kl_beta == pytest.approx(0.5 * 1.02**2)


@pytest.mark.parametrize("before", [{"kl_beta": 0.5, "kl_target": 1e-4}, {}])
def test_a_run_resumed_with_another_kl_beta_is_steered_from_that(make_policy, tmp_path, before):
    policy = make_policy(lora_rank=4, **before)
    trainer = Trainer(policy, policy.config, GRPO)
    asyncio.run(trainer.update(build(sampled_group(policy, [1.0, 0.0]), policy.config, GRPO, 0)))
    checkpoint.save(tmp_path, 1, policy, trainer, {})
    resumed = Trainer(policy, replace(policy.config, kl_beta=0.2, kl_target=1e-4), GRPO)
    checkpoint.load(tmp_path / "step_000001", policy, resumed)
    assert resumed.config.kl_beta == 0.2


async def test_the_kl_in_the_reward_steers_too_and_a_skipped_step_does_not(make_policy):
    options = {"lora_rank": 4, "kl_beta": 0.1, "kl_in": "reward", "kl_target": 1e-4}
    policy = await asyncio.to_thread(make_policy, **options)
    episodes = sampled_group(policy, [1.0, 0.0])
    trainer, history = Trainer(policy, policy.config, GRPO), History(policy, policy.config)
    await history.add(0)
    for episode in episodes:
        episode.metadata["step"] = 1
    batch = await penalty.build(1, episodes, trainer, history)
    await trainer.update(batch)
    assert trainer.config.kl_beta == pytest.approx(0.1 * 1.02)
    batch.forests[0].advantage_T[batch.forests[0].trained_T] = math.nan
    skipped = await trainer.update(batch)
    assert (skipped["skipped"], skipped["kl_beta"]) == (1.0, trainer.config.kl_beta)
