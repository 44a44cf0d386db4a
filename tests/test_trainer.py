"""One update on the tiny model: equal to one sequence at a time, exact against the sampler, skipped when not finite."""

import asyncio
import copy
import json
import math

import numpy as np
import pytest
import torch

from minirllm.algorithms import Group, create
from minirllm.algorithms.grpo import GRPO
from minirllm.attention import ForestLayout
from minirllm.batch import build
from minirllm.config import Config
from minirllm.errors import ConfigError
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.trainer import Trainer, learning_rate, rehearse, validate
from minirllm.tree import TokenTree
from minirllm.types import Completion, Episode, Step, Trajectory

TEMPERATURE = 0.8


@pytest.fixture
def make_policy():
    """Policies of a fresh tiny model with a busy adapter (a new one's B is zero, and A would get no gradient)."""
    made = []

    def make(**options):
        model, tokenizer = tiny.build(seed=1)
        policy = Policy(model, tokenizer, Config(model="tiny", **options))
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in policy.trainable().items():
                if ".lora_B." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        made.append(policy)
        return policy

    yield make
    for policy in made:
        policy.close()


def lone_logprobs(policy, ids):
    """Log p(token) ``[L - 1]`` of tokens 1.. of one sequence, by itself: what the sampler captures."""
    ids = torch.tensor(ids)
    hidden = policy.hidden(ids, torch.arange(len(ids)), ForestLayout([[(0, len(ids))]]))
    rows = policy.logprobs(policy.logits(hidden[:-1]), torch.full((len(ids) - 1,), TEMPERATURE))
    return rows.gather(1, ids[1:, None])[:, 0]


def sampled_group(policy, rewards, turns=2, off=0.0, task="a", seed=3):
    """Rollouts of `turns` calls each from one prompt, random answers; logprobs as captured, `off` added to each."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 256, 21).tolist()
    episodes = []
    for index, reward in enumerate(rewards):
        tree, steps, ids, node = TokenTree(), [], list(prompt), None
        for turn in range(turns):
            answer = rng.integers(0, 256, 3 + index + turn).tolist()
            with torch.no_grad():
                logprobs = (lone_logprobs(policy, ids + answer)[len(ids) - 1 :] + off).tolist()
            node = tree.add(
                ids, Completion(answer, logprobs, "stop", policy.version, TEMPERATURE), f"{index}.{turn}", after=node
            )
            lengths = {"prompt_length": len(ids), "response_length": len(answer)}
            steps.append(Step(id=f"{index}.{turn}", node=node, **lengths))
            ids = [*ids, *answer, 10, 11 + turn]
        episodes.append(
            Episode(
                id=f"{task}:{index}",
                task_id=task,
                rollout_idx=index,
                reward=reward,
                tree=tree,
                trajectories=[Trajectory(steps=steps)],
            )
        )
    return episodes


def gradients(policy):
    return {name: parameter.grad.clone() for name, parameter in policy.trainable().items()}


def accumulate(policy, trainer, batch):
    """Loss and gradients of the batch, without a step."""
    losses = [trainer._accumulate(forest)["loss"] for forest in batch.forests]
    found = gradients(policy)
    trainer.optimizer.zero_grad()
    return sum(losses), found


def plain_loss(policy, episodes, config):
    """The definition: plain transformers attention, one trajectory and token at a time. Returns (loss, gradients)."""
    algorithm = create(config.algorithm)
    group = Group(np.array([episode.reward for episode in episodes]), np.ones(len(episodes), np.int64))
    (advantages,) = algorithm.advantages([group], config)
    base = policy.model.get_base_model() if config.lora_rank else policy.model
    total = sum(len(node.tokens) for episode in episodes for node in episode.tree.nodes if node.sampled)
    base.set_attn_implementation("eager")
    losses = []
    for episode, advantage in zip(episodes, advantages, strict=True):
        tree = episode.tree
        ids = torch.tensor(tree.ids(episode.trajectories[0].steps[-1].node))
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE
        logprobs = torch.log_softmax(logits, -1)
        for step in episode.trajectories[0].steps:
            start = len(tree.prompt_ids(step.node))
            for offset, (token, old) in enumerate(zip(*tree.response(step.node), strict=True)):
                ratio = torch.exp(logprobs[start + offset - 1, token] - old)
                clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
                losses.append(-torch.minimum(ratio * advantage, clipped * advantage) / total)
    loss = torch.stack(losses).sum()
    loss.backward()
    base.set_attn_implementation("minirllm")
    found = gradients(policy)
    policy.model.zero_grad()
    return loss.item(), found


def relative(found, wanted):
    """Norm of the difference over the norm, of all gradients as one vector."""
    difference = torch.cat([(found[name] - wanted[name]).flatten() for name in wanted]).double().norm()
    return (difference / torch.cat([value.flatten() for value in wanted.values()]).double().norm()).item()


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
    found = [policy._lane.submit(accumulate, policy, trainer, batch).result() for _ in range(30)]
    different = {tuple(value.sum().item() for value in grads.values()) for _, grads in found}
    assert len(different) == 1
    assert not torch.are_deterministic_algorithms_enabled()


async def test_the_trainer_reproduces_the_sampler_bit_for_bit(make_policy):
    policy = await asyncio.to_thread(make_policy, lora_rank=4)
    if policy.level != "exact":
        pytest.skip(f"determinism level here: {policy.level}")
    batch = build(sampled_group(policy, [1.0, 0.0, 1.0, 0.0]), policy.config, create("grpo"), 0)
    for forest in batch.forests:
        logprob_T, _ = policy.score(forest)
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kl_estimator": "k2"}, "kl_estimator has no effect with kl_beta = 0"),
        ({"dual_clip": 0.5}, "dual_clip must be above 1, or 0 for off"),
        ({"overlong_buffer": 500, "max_tokens": 256}, "overlong_buffer is a part of max_tokens = 256, got 500"),
    ],
)
def test_options_of_the_loss_without_effect_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(Config(**options))


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


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_training_without_temperature_is_refused(make_policy, temperature: float) -> None:
    policy = make_policy(temperature=temperature)
    with pytest.raises(ConfigError, match="temperature = "):
        Trainer(policy, policy.config, create("grpo"))
