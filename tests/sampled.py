"""Groups that the tiny model has sampled, and what a trainer must make of them."""

import contextlib

import numpy as np
import pytest
import torch

from minirllm.algorithms import Group, create
from minirllm.attention import ForestLayout
from minirllm.config import Config
from minirllm.head import logprobs
from minirllm.models import tiny
from minirllm.policy import Policy
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
    rows = logprobs(policy.logits(hidden[:-1]), torch.full((len(ids) - 1,), TEMPERATURE))
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


@contextlib.contextmanager
def plain_attention(policy):
    """Transformers' own in place of ours."""
    base = policy.model.get_base_model() if policy.config.lora_rank else policy.model
    base.set_attn_implementation("eager")
    try:
        yield
    finally:
        base.set_attn_implementation("minirllm")


def plain_gradients(policy, value):
    """(value, gradients) of `value`, a function of the policy's weights, with plain attention."""
    with plain_attention(policy):
        result = value()
        result.backward()
    found = gradients(policy)
    policy.model.zero_grad()
    return result.item(), found


def plain_loss(policy, episodes, config):
    """The definition: plain transformers attention, one trajectory and token at a time. Returns (loss, gradients)."""
    algorithm = create(config.algorithm)
    group = Group(np.array([episode.reward for episode in episodes]), np.ones(len(episodes), np.int64))
    (advantages,) = algorithm.advantages([group], config)
    total = sum(len(node.tokens) for episode in episodes for node in episode.tree.nodes if node.sampled)

    def loss():
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
        return torch.stack(losses).sum()

    return plain_gradients(policy, loss)


def relative(found, wanted):
    """Norm of the difference over the norm, of all gradients as one vector."""
    difference = torch.cat([(found[name] - wanted[name]).flatten() for name in wanted]).double().norm()
    return (difference / torch.cat([value.flatten() for value in wanted.values()]).double().norm()).item()
