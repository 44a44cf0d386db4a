"""The batch of a step, with the KL to the base model as a part of the reward if the options say so.

Owns: scoring a step's calls with the frozen base model, what a call costs. Does not know: groups, losses, optimizers.

A trajectory's reward falls by ``kl_beta`` times the sum, over the tokens it is trained on, of an estimate of the KL at
each (`kl_estimator`): of the policy that sampled them, whose log-probabilities were captured. So it is charged before
advantages are made, to the whole trajectory, and not to the tokens one by one.

Legend: T tokens of a forest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minirllm import batch
from minirllm.ahead import History
from minirllm.algorithms.objective import in_reward, kl
from minirllm.batch import Batch
from minirllm.config import Config
from minirllm.grouping import COST
from minirllm.policy import Policy
from minirllm.trainer import Trainer
from minirllm.tree import Forest, Spans, merge, shares
from minirllm.types import Episode


async def build(step: int, episodes: Sequence[Episode], trainer: Trainer, history: History) -> Batch:
    """`batch.build` for `step`, with the metrics of the KL and of the weights that sampled its episodes."""
    config, standing = trainer.config, history.sampling(step).standing
    costs = await charge(episodes, trainer.policy, config) if in_reward(config) else {}
    learned = batch.build(episodes, config, trainer.algorithm, history.version, standing)
    learned.metrics |= costs | history.staleness(episodes)
    return learned


async def charge(episodes: Sequence[Episode], policy: Policy, config: Config) -> dict[str, float]:
    """Writes to each step what its tokens cost. Returns the metric ``kl_reference``, the mean of a token."""
    by_task: dict[str, list[Episode]] = {}
    for episode in sorted(episodes, key=lambda episode: (episode.task_id, episode.rollout_idx)):
        if episode.reward is not None:
            by_task.setdefault(episode.task_id, []).append(episode)
    total, count = 0.0, 0
    for graded in by_task.values():
        left = iter(graded)
        trees, limit = [episode.tree for episode in graded], config.micro_batch_tokens
        for forest, spans in shares(trees, merge, lambda share: len(share[0]), limit):
            kl_T = await policy.run(_kl, policy, forest, config)
            total, count = total + float(kl_T.sum()), count + int(forest.trained_T.sum())
            for found, episode in zip(spans, left, strict=False):
                _write(episode, found, config.kl_beta * kl_T)
    return {"kl_reference": total / count} if count else {}


def _kl(policy: Policy, forest: Forest, config: Config) -> np.ndarray:
    """Of the sampler from the base model, an estimate at each trained token, ``[T]`` float64; else 0, also where a
    log-probability is not finite: it is the ledger that ends the run for that (batch.py)."""
    logprob_T = torch.from_numpy(forest.logprob_T).to(policy.device)
    kl_T = kl(policy.score(forest, reference=True)[0] - logprob_T, config).double().cpu().numpy()
    return np.where(forest.trained_T & np.isfinite(kl_T), kl_T, 0.0)


def _write(episode: Episode, spans: Spans, cost_T: np.ndarray) -> None:
    costs: dict[str, float] = {}
    for node, (start, end) in spans.items():
        call = episode.tree.nodes[node].call_id
        costs[call] = costs.get(call, 0.0) + float(cost_T[start:end].sum())
    for step in episode.steps:
        step.metadata[COST] = costs.get(step.id, 0.0)
