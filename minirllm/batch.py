"""Episodes become micro-batches: groups, advantages, the weight of every token in the loss, packed forests.

Owns: grouping, which groups are skipped and why, loss aggregation, the ledger check, packing. Does not know: the model,
gradients, how tokens were sampled.

The loss of a step is ``sum over trained tokens of weight_T * loss_T``, whatever the number of micro-batches. A group
whose advantages are all zero teaches nothing: it is counted, takes no compute, and does not enter the totals that
weights are divided by (with ``kl_beta > 0`` it stays: its tokens still carry the KL gradient). By ``loss_aggregation``
the weight of a token is

- ``token``: 1 / trained tokens of the batch. Every token weighs the same.
- ``sequence``: 1 / (trajectories * trained tokens of its trajectory, all branches). Trajectories weigh the same.
- ``constant``: 1 / (trajectories * max_tokens). A token weighs the same in every batch.

Legend: T tokens of a forest, G trajectories of a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from minirllm.algorithms import Algorithm
from minirllm.config import Config
from minirllm.errors import LedgerError
from minirllm.tree import Forest, Spans, concatenate, merge, unfold
from minirllm.types import Episode, Trajectory

#: What sessions and rollouts counted in ``Episode.metrics`` that a step's metrics add up.
COUNTED = ("branches", "rerendered", "unprovable", "edited", "reasked", "replayed", "aborted", "unclaimed_calls")


@dataclass
class Batch:
    """What one update learns from: `forests` are the micro-batches; `metrics` says what was used, what not, and why."""

    forests: list[Forest] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _Member:
    """One trajectory in its group. `calls` are the call ids it is trained on, `tokens` how many those sampled."""

    episode: Episode
    trajectory: Trajectory
    reward: float
    calls: set[str]
    tokens: int
    advantage: float = 0.0
    weight: float = 0.0  # of each of its tokens


def build(episodes: Sequence[Episode], config: Config, algorithm: Algorithm, version: int) -> Batch:
    """The batch of one step, a function of the episodes' contents: they may come in any order.

    Trajectories of one task with one name are a group; a trajectory without a reward of its own has its episode's.
    Episodes without a reward are counted and left out. `version` is the policy's: LedgerError when a token was sampled
    by other weights or has no finite logprob.
    """
    episodes = sorted(episodes, key=lambda episode: (episode.task_id, episode.rollout_idx))
    metrics = _episode_metrics(episodes)
    groups: dict[tuple[str, str], list[_Member]] = {}
    for episode in episodes:
        if episode.reward is not None:
            for member in _members(episode):
                groups.setdefault((episode.task_id, member.trajectory.name), []).append(member)
    kept = [
        member
        for group in _learnable(list(groups.values()), config, algorithm, metrics)
        for member in group
        if member.tokens
    ]
    _weigh(kept, config)
    by_task: dict[str, list[_Member]] = {}
    for member in kept:
        by_task.setdefault(member.episode.task_id, []).append(member)
    forests = [forest for members in by_task.values() for forest in _forests(members, config, version)]
    if config.packing == "paths":
        micro_batches = [row for forest in forests for row in unfold(forest)]
    else:
        micro_batches = _pack(forests, config.micro_batch_tokens)
    trained, total = sum(member.tokens for member in kept), sum(map(len, micro_batches))
    metrics |= {
        "trajectories": float(len(kept)),
        "micro_batches": float(len(micro_batches)),
        "trained_tokens": float(trained),
        "context_tokens": float(total - trained),
        "tokens": float(total),
        # tokens of one path at a time, over tokens computed
        "prefix_saving": sum(map(_unfolded, forests)) / max(1, total),
    }
    return Batch(micro_batches, metrics)


def _members(episode: Episode) -> list[_Member]:
    """The trajectories of a graded episode. A call that two of them claim is trained in the first only."""
    lengths: Counter[str] = Counter()
    for node in episode.tree.nodes if episode.tree else ():
        if node.sampled and not node.aborted:
            lengths[node.call_id] += len(node.tokens)
    members, claimed = [], set[str]()
    for trajectory in episode.trajectories:
        reward = episode.reward if trajectory.reward is None else trajectory.reward
        assert reward is not None
        calls = {episode.tree.nodes[step.node].call_id for step in trajectory.steps if step.node is not None} - claimed
        claimed |= calls
        members.append(_Member(episode, trajectory, float(reward), calls, sum(lengths[call] for call in calls)))
    return members


def _learnable(
    groups: list[list[_Member]], config: Config, algorithm: Algorithm, metrics: dict[str, float]
) -> list[list[_Member]]:
    """Sets every member's advantage; returns the groups that take part in the update, counts the others by why not."""
    kinds = dict.fromkeys(("with_signal", "too_easy", "too_hard", "uniform", "too_small"), 0)
    learnable = []
    for group in groups:
        rewards_G = np.array([member.reward for member in group])
        advantages_G = algorithm.advantages(rewards_G, config)
        assert advantages_G.shape == rewards_G.shape, f"{advantages_G.shape} advantages for {rewards_G.shape} rewards"
        assert np.isfinite(advantages_G).all(), f"advantages {advantages_G} of rewards {rewards_G}"
        for member, advantage in zip(group, advantages_G.tolist(), strict=True):
            member.advantage = advantage
        if advantages_G.any():
            kinds["with_signal"] += 1
        elif len(group) < 2 <= config.group_size:
            kinds["too_small"] += 1  # too few of its rollouts could be graded
        else:
            kinds["too_easy" if rewards_G.min() >= 1 else "too_hard" if rewards_G.max() <= 0 else "uniform"] += 1
        if advantages_G.any() or config.kl_beta > 0:
            learnable.append(group)
    metrics |= {"groups": float(len(groups)), **{f"groups_{kind}": float(count) for kind, count in kinds.items()}}
    by_name: dict[str, list[float]] = {}
    for group in groups:
        by_name.setdefault(group[0].trajectory.name, []).extend(member.reward for member in group)
    metrics |= {f"reward/{name}": float(np.mean(rewards)) for name, rewards in by_name.items()}
    return learnable


def _weigh(members: Sequence[_Member], config: Config) -> None:
    """Sets the weight of each member's tokens; the module's docstring has the three formulas."""
    total = sum(member.tokens for member in members)
    for member in members:
        member.weight = {
            "token": 1 / total,
            "sequence": 1 / (len(members) * member.tokens),
            "constant": 1 / (len(members) * config.max_tokens),
        }[config.loss_aggregation]


def _forests(members: Sequence[_Member], config: Config, version: int) -> list[Forest]:
    """One task's trajectories as one forest, or as the fewest even shares of its rollouts that fit micro_batch_tokens.

    Each share repeats the prompt. A single rollout that does not fit stays whole.
    """
    rollouts: dict[int, list[_Member]] = {}
    for member in members:
        rollouts.setdefault(id(member.episode), []).append(member)
    rows = list(rollouts.values())
    forests = [_forest(rows, version)]
    shares = -(-len(forests[0]) // config.micro_batch_tokens)
    while len(forests) < len(rows) and max(map(len, forests)) > config.micro_batch_tokens:
        edges = np.linspace(0, len(rows), min(shares, len(rows)) + 1).astype(int).tolist()
        forests = [_forest(rows[a:b], version) for a, b in pairwise(edges)]
        shares += 1
    return forests


def _forest(rollouts: Sequence[Sequence[_Member]], version: int) -> Forest:
    """These rollouts of one task (the members of each) merged, with advantages and weights filled in."""
    owners = [{call: member for member in members for call in member.calls} for members in rollouts]
    forest, spans = merge([members[0].episode.tree for members in rollouts], owners)
    for members, owner, found in zip(rollouts, owners, spans, strict=True):
        _check(members[0].episode, found, version)
        for node, (start, end) in found.items():
            member = owner[members[0].episode.tree.nodes[node].call_id]
            forest.advantage_T[start:end] = member.advantage
            forest.weight_T[start:end] = member.weight
    return forest


def _check(episode: Episode, trained: Spans, version: int) -> None:
    """The ledger: every trained token has a finite captured logprob and was sampled by the weights it will update."""
    for index in trained:
        node = episode.tree.nodes[index]
        where = f"Episode {episode.id}, call {node.call_id}"
        if node.weight_version != version:
            raise LedgerError(
                f"{where}: sampled by weights of version {node.weight_version}, but the policy is at version {version}."
            )
        logprobs = np.array(node.logprobs, np.float64)
        if len(logprobs) != len(node.tokens) or not np.isfinite(logprobs).all():
            bad = np.flatnonzero(~np.isfinite(logprobs))
            at = int(bad[0]) if len(bad) else min(len(logprobs), len(node.tokens))
            position = len(episode.tree.ids(node.parent)) + at
            value = logprobs[at] if at < len(logprobs) else "missing"
            raise LedgerError(
                f"{where}, token at position {position}: its logprob is {value}, expected a finite number."
            )


def _unfolded(forest: Forest) -> int:
    """Tokens of all root-to-leaf paths, each counted by itself."""
    leaves = np.setdiff1d(np.arange(len(forest.node_end_N)), forest.node_parent_N)
    return int((forest.position_T[forest.node_end_N[leaves] - 1] + 1).sum())


def _pack(forests: Sequence[Forest], limit: int) -> list[Forest]:
    """Neighbours joined, in order, as long as a micro-batch stays within `limit` tokens."""
    packed: list[list[Forest]] = []
    for forest in forests:
        if packed and sum(map(len, packed[-1])) + len(forest) <= limit:
            packed[-1].append(forest)
        else:
            packed.append([forest])
    return [pack[0] if len(pack) == 1 else concatenate(pack) for pack in packed]


def _episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """What happened, over all episodes; rewards and signals over those that could be graded."""
    graded = [episode for episode in episodes if episode.reward is not None]
    rewards = np.array([episode.reward for episode in graded], np.float64)
    steps = [step for episode in episodes for trajectory in episode.trajectories for step in trajectory.steps]
    metrics = {
        "episodes": float(len(episodes)),
        "ungraded": float(len(episodes) - len(graded)),
        "calls": float(len(steps)),
        "truncated": float(sum(step.finish_reason == "length" for step in steps)),
        "malformed_tool_calls": float(sum(step.response is not None and step.response.malformed for step in steps)),
        **{name: float(sum(episode.metrics.get(name, 0) for episode in episodes)) for name in COUNTED},
    }
    if graded:
        metrics |= {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
    why = Counter(episode.termination_reason.value for episode in episodes if episode.reward is None)
    metrics |= {f"ungraded/{reason}": float(count) for reason, count in sorted(why.items())}
    return metrics | {f"signal/{name}": value for name, value in mean_signals(graded).items()}


def mean_signals(episodes: Iterable[Episode]) -> dict[str, float]:
    """Each signal's mean over the episodes that have it, by name."""
    signals: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.signals.items():
            signals.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(signals.items())}
