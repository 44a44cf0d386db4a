"""Graded episodes become groups, and groups become an advantage for every call.

Owns: which trajectories are compared with each other, whose calls they train, what the algorithm is shown of them,
which groups take part in the update and why not. Does not know: token trees, how the loss adds up, models.

An advantage belongs to a call: one number for all of its tokens, or one for each.

Legend: G trajectories of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from minirllm.algorithms import Algorithm, Group, roles
from minirllm.config import Config
from minirllm.types import Episode, Step, Trajectory

Value = float | Sequence[float]  # of a call's tokens: one for all of them, or one for each


@dataclass
class Member:
    """One trajectory in its group. `calls` are those it is trained on, `tokens` how many these sampled."""

    episode: Episode
    trajectory: Trajectory
    reward: float
    calls: dict[str, Step]  # by call id
    tokens: int
    fate: str = "trained"  # or why not: see `Batch.fate`
    advantages: dict[str, Value] = field(default_factory=dict)  # by call id
    weight: float = 0.0  # of each of its tokens in the loss; 0: it is not trained on
    index: int = -1  # among the batch's trajectories
    role: int = 0  # whose algorithm it has


def members(episode: Episode, config: Config) -> list[Member]:
    """The trajectories of a graded episode. A call that two of them claim is trained in the first only."""
    found, claimed = [], set[str]()
    for trajectory in episode.trajectories:
        reward = episode.reward if trajectory.reward is None else trajectory.reward
        assert reward is not None
        own = [step for step in trajectory.steps if step.node is not None and not step.auxiliary]
        calls = {step.id: step for step in own if step.id not in claimed}
        claimed |= calls.keys()
        tokens = sum(step.response_length for step in calls.values())
        cut = config.mask_truncated and any(step.finish_reason == "length" for step in calls.values())
        reward -= _overlong(max((step.response_length for step in calls.values()), default=0), config)
        member = Member(episode, trajectory, float(reward), calls, tokens, "truncated" if cut else "trained")
        member.role = roles.number(trajectory.name, config)
        found.append(member)
    return found


def _overlong(length: int, config: Config) -> float:
    """DAPO's soft punishment of a long answer (arXiv 2503.14476, eq. 13): 0 to 1 over the last `overlong_buffer`."""
    over = length - (config.max_tokens - config.overlong_buffer)
    return min(1.0, max(0, over) / config.overlong_buffer) if config.overlong_buffer else 0.0


def compare(every: Sequence[Member], config: Config, algorithm: Algorithm) -> tuple[list[Member], dict[str, float]]:
    """Sets every member's advantages, and the fate of those whose group teaches nothing. Returns the members that the
    update learns from, and the counts of groups by what became of them."""
    by_key: dict[tuple[str, str], list[Member]] = {}
    for member in every:
        by_key.setdefault((member.episode.task_id, member.trajectory.name), []).append(member)
    groups = list(by_key.values())
    kinds = dict.fromkeys(("with_signal", "too_easy", "too_hard", "uniform", "too_small"), 0)
    for group, advantages_G in zip(groups, _advantages(groups, config, algorithm), strict=True):
        rewards_G = np.array([member.reward for member in group])
        assert advantages_G.shape == rewards_G.shape, f"{advantages_G.shape} advantages for {rewards_G.shape} rewards"
        assert np.isfinite(advantages_G).all(), f"advantages {advantages_G} of rewards {rewards_G}"
        for member, advantage in zip(group, advantages_G.tolist(), strict=True):
            own = {id: step.advantage for id, step in member.calls.items()}
            member.advantages = {id: advantage if value is None else value for id, value in own.items()}
        signal = any(np.any(value) for member in group for value in member.advantages.values())
        kinds["with_signal" if signal else _why_none(group, config)] += 1
        for member in group:
            if not signal and config.kl_beta == 0 and member.fate == "trained":
                member.fate = "no_signal"
    metrics = {"groups": float(len(groups)), **{f"groups_{kind}": float(count) for kind, count in kinds.items()}}
    by_name: dict[str, list[float]] = {}
    for member in every:
        by_name.setdefault(member.trajectory.name, []).append(member.reward)
    metrics |= {f"reward/{name}": float(np.mean(rewards)) for name, rewards in by_name.items()}
    metrics |= {f"absent/{name}": 1.0 for name in roles.names(config) if every and name not in by_name}
    return [member for group in groups for member in group if member.tokens and member.fate == "trained"], metrics


def _why_none(group: Sequence[Member], config: Config) -> str:
    """Why a group has no signal, as its metric says it."""
    rewards = [member.reward for member in group]
    if len(group) < 2 <= config.group_size:
        return "too_small"  # too few of its rollouts could be graded
    return "too_easy" if min(rewards) >= 1 else "too_hard" if max(rewards) <= 0 else "uniform"


def _advantages(groups: list[list[Member]], config: Config, algorithm: Algorithm) -> list[np.ndarray]:
    """Of each group; those of one trajectory name are one batch to the algorithm."""
    found: dict[int, np.ndarray] = {}
    for name in {group[0].trajectory.name: None for group in groups}:
        where = [index for index, group in enumerate(groups) if group[0].trajectory.name == name]
        compared = [
            Group(
                np.array([member.reward for member in groups[i]]),
                np.array([member.tokens for member in groups[i]], np.int64),
                groups[i][0].role,
            )
            for i in where
        ]
        found |= dict(zip(where, algorithm.advantages(compared, config), strict=True))
    return [found[index] for index in range(len(groups))]
