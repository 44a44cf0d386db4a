"""Several passes over a batch, and figures of a policy that has moved away from its sampler."""

import asyncio
import math

import numpy as np
import pytest

from minirllm.algorithms import create
from minirllm.algorithms.grpo import GRPO
from minirllm.batch import build
from minirllm.config import Config
from minirllm.trainer import Trainer
from tests.sampled import sampled_group


async def test_off_policy_figures_by_hand(make_policy):
    policy = await asyncio.to_thread(make_policy, lora_rank=4)
    batch = build(sampled_group(policy, [1.0, 0.0], off=-0.3), policy.config, create("grpo"), 0)
    metrics = await Trainer(policy, policy.config, create("grpo")).update(batch)
    assert metrics["mismatch_mean"] == pytest.approx(0.3, rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(0.3, rel=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx(math.exp(0.3) - 0.3 - 1, rel=1e-3)
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.3) - 1, rel=1e-4)
    positive = sum(forest.trained_T[forest.advantage_T > 0].sum() for forest in batch.forests)
    assert metrics["clip_fraction"] == pytest.approx(positive / batch.metrics["trained_tokens"])  # 1.35 > 1.28


async def test_ratios_that_differ_by_hand(make_policy):
    """All 1 but one 2: the sum is N + 1, of squares N + 3."""
    policy = await asyncio.to_thread(make_policy, lora_rank=4)
    batch = build(sampled_group(policy, [1.0, 0.0]), policy.config, create("grpo"), 0)
    forest, count = batch.forests[0], batch.metrics["trained_tokens"]
    forest.logprob_T[np.flatnonzero(forest.trained_T)[0]] -= math.log(2)
    metrics = await Trainer(policy, policy.config, create("grpo")).update(batch)
    assert metrics["effective_sample"] == pytest.approx((count + 1) ** 2 / (count * (count + 3)), rel=1e-4)
    assert metrics["ratio_off"] == pytest.approx(1 / count, rel=1e-3)


async def test_a_later_pass_that_is_not_finite_ends_the_update(make_policy):
    class Breaks(GRPO):
        calls = 0

        def loss(self, tokens, config):
            self.calls += 1
            loss_N, metrics = super().loss(tokens, config)
            return loss_N * (math.nan if self.calls > 1 else 1), metrics

    policy = await asyncio.to_thread(make_policy, lora_rank=4, inner_epochs=3, micro_batch_tokens=4096)
    trainer, before = Trainer(policy, policy.config, Breaks()), policy.weights_sha256()
    batch = build(sampled_group(policy, [1.0, 0.0]), policy.config, create("grpo"), 0)
    metrics = await trainer.update(batch)
    assert (trainer.algorithm.calls, metrics["skipped"], policy.version) == (2, 1.0, 1)
    assert policy.weights_sha256() != before
    assert "The weights stay with what its earlier passes taught." in trainer.problem


async def test_inner_epochs_are_steps_against_the_captured_logprobs(make_policy):
    """With two, the second step sees the ratio that the first one made; what it does to the weights is AdamW's."""
    once, twice = [await asyncio.to_thread(make_policy, lora_rank=4, lr=1e-2, inner_epochs=count) for count in (1, 2)]
    episodes = sampled_group(once, [1.0, 0.0, 0.0, 1.0], turns=1)
    batch = build(episodes, once.config, create("grpo"), 0)
    first = Trainer(once, once.config, create("grpo"))
    alone = await first.update(batch)
    metrics = await Trainer(twice, twice.config, create("grpo")).update(batch)
    assert (twice.version, once.version) == (1, 1)
    assert {name: metrics[name] for name in ("loss", "mismatch_max", "grad_norm")} == {
        name: alone[name] for name in ("loss", "mismatch_max", "grad_norm")
    }
    assert metrics["ratio_max"] == alone["ratio_max"] < 1e-4 < metrics["last/ratio_max"]
    assert metrics["last/loss"] < metrics["loss"]
    assert "last/loss" not in alone
    assert not {"last/entropy", "last/grad_norm"} & metrics.keys()  # how far it moved, and no more
    again = await first.update(batch)  # a second step on the same captured logprobs is just that
    assert again["ratio_max"] == metrics["last/ratio_max"]
    assert once.weights_sha256() == twice.weights_sha256()


async def test_mini_batches_are_steps_on_whole_tasks_each_a_mean_of_its_own(make_policy):
    """Three tasks in two parts are two updates, of one task and of two, that both start from what was sampled."""
    cut, alone = [await asyncio.to_thread(make_policy, lora_rank=4, lr=1e-2, mini_batches=n) for n in (2, 1)]
    tasks = [sampled_group(cut, [1.0, 0.0, 0.5], task=name, seed=seed) for seed, name in enumerate("abc")]
    batch = build([e for task in tasks for e in task], cut.config, create("grpo"), 0)
    assert [len({int(i) for f in part for i in f.sequence_T[f.trained_T]}) for part in batch.parts] == [3, 6]
    metrics = await Trainer(cut, cut.config, create("grpo")).update(batch)
    trainer = Trainer(alone, alone.config, create("grpo"))
    parts = [
        build([e for task in some for e in task], alone.config, create("grpo"), 0) for some in (tasks[:1], tasks[1:])
    ]
    first, second = [await trainer.update(part) for part in parts]
    assert cut.weights_sha256() == alone.weights_sha256()
    assert (metrics["loss"], metrics["last/loss"]) == (first["loss"], second["loss"])
    assert metrics["ratio_max"] < 1e-4 < metrics["last/ratio_max"]
    assert cut.version == 1


def test_every_part_of_a_batch_weighs_one_and_no_task_is_cut(make_policy):
    policy = make_policy(lora_rank=4, micro_batch_tokens=64)
    episodes = [e for seed, name in enumerate("abcde") for e in sampled_group(policy, [1.0, 0.0], task=name, seed=seed)]
    episodes += sampled_group(policy, [1.0, 1.0], task="f", seed=9)  # nothing to learn from
    for count, sizes in ((1, [10]), (2, [4, 6]), (5, [2] * 5), (7, [2] * 5)):
        for aggregation in ("token", "sequence"):
            config = Config(mini_batches=count, micro_batch_tokens=64, loss_aggregation=aggregation)
            parts = build(episodes, config, create("grpo"), 0).parts
            trained = [np.concatenate([f.sequence_T[f.trained_T] for f in part]) for part in parts]
            assert [len(set(of.tolist())) for of in trained] == sizes
            assert [sum(f.weight_T.sum() for f in part) for part in parts] == pytest.approx([1.0] * len(sizes))
