"""One update on the tiny model: equal to one sequence at a time, exact against the sampler, skipped when not finite."""

import asyncio
import copy
import json
import math

import numpy as np
import pytest
import torch

from minirllm.algorithms import create
from minirllm.batch import build
from minirllm.config import Config
from minirllm.errors import ConfigError
from minirllm.trainer import Trainer
from minirllm.tree import TokenTree
from minirllm.types import MOST, Completion, Episode, Step, Trajectory
from tests.sampled import TEMPERATURE, accumulate, lone_logprobs, plain_loss, relative, sampled_group


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("off", [0.0, 0.15])
def test_loss_and_gradient_equal_one_sequence_at_a_time(make_policy, rank, off):
    policy = make_policy(lora_rank=rank)
    episodes = sampled_group(policy, [1.0, 0.0, 0.0, 1.0, 0.5], off=off)
    config = policy.config
    wanted_loss, wanted = plain_loss(policy, episodes, config)
    for options in ({}, {"packing": "paths"}, {"micro_batch_tokens": 64}):
        config = Config(**{**config.to_dict(), **options})
        trainer = Trainer(policy, config, create("grpo"))
        batch = build(episodes, config, create("grpo"), policy.version)
        loss, found = accumulate(policy, trainer, batch)
        assert loss == pytest.approx(wanted_loss, rel=1e-6, abs=1e-7), options
        assert relative(found, wanted) < 1e-6, options
        assert all(value.abs().max() > 0 for value in found.values())


@pytest.mark.parametrize("determinism", ["auto", "fixed", "off"])
def test_two_threads_add_up_a_gradient_in_the_same_order_each_time(make_policy, determinism):
    """The first tokens of all rollouts have one parent: torch adds their gradients by atomics, in any order."""
    policy = make_policy(lora_rank=4, threads=2, determinism=determinism)
    rng, episodes = np.random.default_rng(0), []
    prompt = rng.integers(0, 256, 30).tolist()
    for index in range(24):  # 960 tokens x 64 numbers: enough for torch to use both threads
        tree, answer = TokenTree(), rng.integers(0, 256, 40).tolist()
        sample = Completion(answer, [-5.0] * len(answer), "length", policy.version, TEMPERATURE)
        node = tree.add(prompt, sample, str(index))
        steps = [Step(id=str(index), node=node, prompt_length=len(prompt), response_length=len(answer))]
        graded = {"task_id": "t", "rollout_idx": index, "reward": float(index % 3), "tree": tree}
        episodes.append(Episode(**graded, trajectories=[Trajectory(steps=steps)]))
    batch = build(episodes, Config(micro_batch_tokens=4096), create("grpo"), policy.version)
    trainer = Trainer(policy, policy.config, create("grpo"))
    found = [policy.lane.submit(accumulate, policy, trainer, batch).result() for _ in range(30)]
    different = {tuple(value.sum().item() for value in grads.values()) for _, grads in found}
    assert len(different) == 1
    assert not torch.are_deterministic_algorithms_enabled()


async def test_the_trainer_reproduces_the_sampler_bit_for_bit(make_policy):
    policy = await asyncio.to_thread(make_policy, lora_rank=4)
    if policy.level != "exact":
        pytest.skip(f"determinism level here: {policy.level}")
    batch = build(sampled_group(policy, [1.0, 0.0, 1.0, 0.0]), policy.config, create("grpo"), 0)
    for forest in batch.forests:
        logprob_T, *_ = policy.score(forest)
        assert np.array_equal(logprob_T.detach().numpy(), forest.logprob_T)
    metrics = await Trainer(policy, policy.config, create("grpo")).update(batch)
    for name in ("mismatch_max", "mismatch_mean", "mismatch_kl", "ratio_max", "clip_fraction"):
        assert metrics[name] == 0.0, name


async def test_update_moves_the_weights_towards_reward_and_counts_up(make_policy):
    policy = await asyncio.to_thread(make_policy, lora_rank=4, lr=1e-2, kl_beta=0.01)
    trainer = Trainer(policy, policy.config, create("grpo"))
    episodes = sampled_group(policy, [1.0, 0.0, 0.0, 1.0], turns=1)

    def likelihood():
        with torch.no_grad():
            return [
                lone_logprobs(policy, e.tree.ids(e.trajectories[0].steps[0].node))[20:].sum().item() for e in episodes
            ]

    before, sha = likelihood(), policy.weights_sha256()
    batch = build(episodes, policy.config, create("grpo"), 0)
    metrics = await trainer.update(batch)
    after = likelihood()
    assert [b > a for a, b in zip(before, after, strict=True)] == [True, False, False, True]
    assert (policy.version, trainer.step, trainer.problem, metrics["skipped"]) == (1, 1, "", 0.0)
    assert policy.weights_sha256() != sha
    assert all(parameter.grad is None for parameter in trainer.parameters.values())
    assert metrics["kl_reference"] > 0  # the adapter is busy, the base is not
    assert metrics["entropy"] > 0
    assert metrics["grad_norm"] > 0
    assert metrics["lr"] == 1e-2


async def test_a_step_that_is_not_finite_is_skipped_dumped_and_said(make_policy, tmp_path):
    policy = await asyncio.to_thread(make_policy, lora_rank=4)
    trainer = Trainer(policy, policy.config, create("grpo"), tmp_path / "skipped")
    batch = build(sampled_group(policy, [1.0, 0.0]), policy.config, create("grpo"), 0)
    batch.forests[0].advantage_T[batch.forests[0].trained_T] = math.nan
    sha = policy.weights_sha256()
    metrics = await trainer.update(batch)
    assert metrics["skipped"] == 1.0
    assert (policy.weights_sha256(), policy.version, trainer.step) == (sha, 0, 1)
    path = tmp_path / "skipped" / "skipped_step_000001.json"
    assert trainer.problem.startswith("Step 1 was skipped: its loss is nan")
    assert str(path) in trainer.problem
    assert json.loads(path.read_text())[0]["token_T"] == batch.forests[0].token_T.tolist()
    assert all(parameter.grad is None for parameter in trainer.parameters.values())
    assert not trainer.optimizer.state


async def test_nothing_to_learn_from_leaves_weights_and_version(make_policy):
    policy = await asyncio.to_thread(make_policy, lora_rank=4)
    trainer = Trainer(policy, policy.config, create("grpo"))
    sha = policy.weights_sha256()
    metrics = await trainer.update(build(sampled_group(policy, [1.0, 1.0]), policy.config, create("grpo"), 0))
    assert (metrics["skipped"], metrics["grad_norm"], policy.version, trainer.step) == (0.0, 0.0, 0, 1)
    assert policy.weights_sha256() == sha


@pytest.mark.parametrize("rank", [0, 4])
def test_gradient_checkpointing_gives_the_same_bits_and_is_off_afterwards(make_policy, rank):
    policy = make_policy(lora_rank=rank)
    batch = build(sampled_group(policy, [1.0, 0.0]), policy.config, create("grpo"), 0)
    plain = accumulate(policy, Trainer(policy, policy.config, create("grpo")), batch)
    calls = []
    handle = policy._decoder.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    config = Config(**{**policy.config.to_dict(), "gradient_checkpointing": True})
    checkpointed = accumulate(policy, Trainer(policy, config, create("grpo")), batch)
    handle.remove()
    assert len(calls) == 2 * len(batch.forests)  # once forward, once again in backward
    assert checkpointed[0] == plain[0]
    assert all(torch.equal(checkpointed[1][name], value) for name, value in plain[1].items())
    assert not any(
        module.training or getattr(module, "gradient_checkpointing", False) for module in policy.model.modules()
    )


async def test_clipping_bounds_the_step_and_zero_turns_it_off(make_policy):
    policy = await asyncio.to_thread(make_policy, lora_rank=0, lr=0.0)
    batch = build(sampled_group(policy, [1.0, 0.0]), policy.config, create("grpo"), 0)
    moments = []
    for clip in (1e-3, 0.0):
        trainer = Trainer(policy, Config(**{**policy.config.to_dict(), "grad_clip": clip}), create("grpo"))
        batch = copy.deepcopy(batch)
        norm = (await trainer.update(batch))["grad_norm"]
        tensors, _ = trainer.state_dict()
        moments.append(
            math.sqrt(
                sum(
                    float(value.double().square().sum())
                    for name, value in tensors.items()
                    if name.startswith("exp_avg/")
                )
            )
        )
    assert moments[0] == pytest.approx(
        0.1 * 1e-3, rel=1e-2
    )  # exp_avg after one step is (1 - 0.9) x the clipped gradient
    assert moments[1] == pytest.approx(0.1 * norm, rel=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_training_without_temperature_is_refused(make_policy, temperature: float) -> None:
    policy = make_policy(temperature=temperature)
    with pytest.raises(ConfigError, match="temperature = "):
        Trainer(policy, policy.config, create("grpo"))


def test_training_an_adapter_that_is_scaled_away_is_refused(make_policy):
    with pytest.raises(ConfigError, match=r"^lora_alpha = 0 takes the adapter out of the model"):
        Trainer(make_policy(lora_rank=4), Config(lora_rank=4, lora_alpha=0), create("grpo"))


@pytest.mark.parametrize(
    "options",
    [
        {"lr": MOST},
        {"clip_high": MOST},
        {"dual_clip": MOST},
        {"correction": "token", "correction_cap": MOST},
        {"correction": "mask", "correction_cap": MOST},
        {"kl_beta": MOST},
        {"entropy_bonus": MOST},
        {"weight_decay": MOST},
        {"grad_clip": MOST},
    ],
    ids=str,
)
async def test_the_largest_number_that_an_option_may_be_is_counted_with(make_policy, options):
    """It is learned with, or the step is skipped and said so."""
    policy = await asyncio.to_thread(make_policy, lora_rank=4)
    config = Config(lora_rank=4, **options)
    trainer = Trainer(policy, config, create("grpo"))
    metrics = await trainer.update(build(sampled_group(policy, [1.0, 0.0]), config, create("grpo"), policy.version))
    assert metrics["skipped"] == bool(trainer.problem)
