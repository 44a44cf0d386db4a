"""The optimizer by hand, its schedule, and what a rehearsal takes."""

import asyncio
import math

import pytest
import torch

from minirllm.algorithms import create
from minirllm.batch import build
from minirllm.config import Config
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.trainer import Trainer, learning_rate, rehearse
from tests.sampled import accumulate, sampled_group


@pytest.mark.parametrize("rank", [0, 4])
def test_a_rehearsal_is_the_largest_micro_batch_and_changes_nothing(make_policy, monkeypatch, rank):
    policy = make_policy(lora_rank=rank, micro_batch_tokens=64, max_context=200, kl_beta=0.1)
    sha, run = policy.weights_sha256(), []
    accumulate = Trainer._accumulate

    def watched(self, forest):
        sums = accumulate(self, forest)
        moved = all(parameter.grad is not None for parameter in self.parameters.values())
        run.append((len(forest), int(forest.trained_T.sum()), moved))
        return sums

    monkeypatch.setattr(Trainer, "_accumulate", watched)
    rehearse(policy, policy.config)
    rehearse(policy, Config(**{**policy.config.to_dict(), "micro_batch_tokens": 300, "algorithm": "gspo"}))
    assert run == [(200, 199, True), (300, 299, True)]  # a rollout longer than a micro-batch stays whole
    assert (policy.weights_sha256(), policy.version) == (sha, 0)
    assert all(parameter.grad is None for parameter in policy.trainable().values())


@pytest.mark.gpu
def test_what_a_rehearsal_took_is_not_offered_to_the_engine():
    model, tokenizer = tiny.build()
    policy = Policy(model.cuda(), tokenizer, Config(model="tiny", device="cuda", lora_rank=0, max_context=2048))
    before = torch.cuda.mem_get_info()[0]
    rehearse(policy, policy.config)
    peak = torch.cuda.max_memory_allocated()
    assert before - torch.cuda.mem_get_info()[0] > 0
    assert torch.cuda.memory_reserved() >= peak > torch.cuda.memory_allocated()
    policy.close()


@pytest.mark.gpu
def test_on_cuda_a_gradient_has_the_same_bits_each_time():
    model, tokenizer = tiny.build()
    policy = Policy(model.cuda(), tokenizer, Config(model="tiny", device="cuda", lora_rank=4))
    batch = build(sampled_group(policy, [1.0, 0.0, 0.0, 1.0, 0.5] * 4), policy.config, create("grpo"), 0)
    trainer = Trainer(policy, policy.config, create("grpo"))
    first, *others = [accumulate(policy, trainer, batch)[1] for _ in range(10)]
    assert all(torch.equal(other[name], value) for other in others for name, value in first.items())
    policy.close()


def test_learning_rate_by_hand():
    def rates(schedule):
        return [learning_rate(step, Config(lr=1.0, steps=6, warmup_steps=2, lr_schedule=schedule)) for step in range(7)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates("linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    assert rates("cosine") == pytest.approx([0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0])


async def test_adamw_with_weight_decay_by_hand(make_policy):
    policy = await asyncio.to_thread(make_policy, lora_rank=0, lr=0.01, weight_decay=0.1, grad_clip=0.0)
    trainer = Trainer(policy, policy.config, create("grpo"))
    batch = build(sampled_group(policy, [1.0, 0.0]), policy.config, create("grpo"), 0)
    _, gradient = accumulate(policy, trainer, batch)
    before = {name: parameter.detach().clone() for name, parameter in policy.trainable().items()}
    await trainer.update(batch)
    for name, parameter in policy.trainable().items():  # at the first step the moments' ratio is g / (|g| + eps)
        wanted = before[name] * (1 - 0.01 * 0.1) - 0.01 * gradient[name] / (gradient[name].abs() + 1e-8)
        assert torch.allclose(parameter.detach(), wanted, atol=1e-6), name
