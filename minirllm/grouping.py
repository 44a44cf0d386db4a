"""Graded episodes become groups, and groups become an advantage for every call.

Owns: which trajectories are compared with each other, whose calls they train, what the algorithm is shown of them,
which groups take part in the update and why not. Does not know: token trees, how the loss adds up, models.

An advantage belongs to a call: one number for all of its tokens, or one for each.

Legend: G trajectories of a group, K calls of a trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from minirllm import standing
from minirllm.algorithms import Algorithm, Group, credit, objective, roles
from minirllm.config import Config, find
from minirllm.errors import ConfigError, UserError, Users
from minirllm.returns import means
from minirllm.standing import Standing
from minirllm.store import plain
from minirllm.types import Episode, Step, Trajectory

Key = Callable[[Episode, Trajectory], str]  # those of one key are compared with each other
KEYS = {"task": f"{__name__}:by_task"}
COST = "kl_cost"  # in the metadata of a step: what the KL of its tokens takes from the reward (penalty.py)
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
    targets: dict[str, int] = field(default_factory=dict)  # by call id: where its teacher's distributions begin
    weight: float = 0.0  # of each of its tokens in the loss; 0: it is not trained on
    index: int = -1  # among the batch's trajectories
    role: int = 0  # whose algorithm it has
    group: str = ""  # whom it is compared with


def validate(config: Config, algorithm: Algorithm) -> None:
    """Raises ConfigError for what `group_by` and `credit` cannot be, and for options of theirs that have no effect."""
    key_of(config)
    standing.validate(config)
    with Users(f"advantages of algorithm {config.algorithm}{config.roles and f' or {config.roles}'}: "):
        credit.validate(config, algorithm.all if isinstance(algorithm, roles.ByRole) else [algorithm])


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
        reward -= sum(step.metadata.get(COST, 0.0) for step in calls.values()) if objective.in_reward(config) else 0.0
        reward -= _overlong(max((step.response_length for step in calls.values()), default=0), config)
        member = Member(episode, trajectory, float(reward), calls, tokens, "truncated" if cut else "trained")
        member.role = roles.number(trajectory.name, config)
        found.append(member)
    return found


def _overlong(length: int, config: Config) -> float:
    """DAPO's soft punishment of a long answer (arXiv 2503.14476, eq. 13): 0 to 1 over the last `overlong_buffer`."""
    over = length - (config.max_tokens - config.overlong_buffer)
    return min(1.0, max(0, over) / config.overlong_buffer) if config.overlong_buffer else 0.0


def compare(
    every: Sequence[Member], config: Config, algorithm: Algorithm, before: Standing
) -> tuple[list[Member], dict[str, float]]:
    """Sets every member's advantages, and the fate of those whose group teaches nothing. Returns the members that the
    update learns from, and the counts of groups by what became of them."""
    groups = _groups(every, config)
    _share(groups, config, algorithm, before)
    replaced = config.refill or config.spare_tasks  # what has no signal is left to others
    stays = objective.without_reward(config) and not replaced
    kinds = dict.fromkeys(("with_signal", "too_easy", "too_hard", "uniform", "too_small"), 0)
    for group in groups:
        small = len(group) < config.min_group_size
        signal = not small and any(map(has_signal, group))
        kinds["with_signal" if signal else "too_small" if small else _why_none(group, config)] += 1
        for member in group:
            if member.fate in ("trained", "no_signal"):
                member.fate = "too_small" if small else "trained" if signal or stays else "no_signal"
    metrics = {"groups": float(len(groups)), **{f"groups_{kind}": float(count) for kind, count in kinds.items()}}
    by_name = means((member.trajectory.name, member.reward) for member in every)
    metrics |= {f"reward/{name}": mean for name, mean in by_name.items()}
    metrics |= {f"absent/{name}": 1.0 for name in roles.names(config) if every and name not in by_name}
    if config.credit == "trajectory":  # the calls' own rewards are not looked at
        rewarded = sum(bool(step.reward) for member in every for step in member.calls.values())
        metrics |= {"step_rewards_unused": float(rewarded)} if rewarded else {}
    return [member for group in groups for member in group if member.tokens and member.fate == "trained"], metrics


def has_signal(member: Member) -> bool:
    """Is there anything to learn from it?"""
    return any(np.any(value) for value in member.advantages.values())


def _why_none(group: Sequence[Member], config: Config) -> str:
    """Why a group has no signal, as its metric says it."""
    rewards = [member.reward for member in group]
    if len(group) < 2 <= config.group_size:
        return "too_small"  # too few of its rollouts could be graded
    return "too_easy" if min(rewards) >= 1 else "too_hard" if max(rewards) <= 0 else "uniform"


def key_of(config: Config) -> Key:
    """What `group_by` names. Raises ConfigError when it names no function."""
    key: Key = find("group_by", config.group_by, KEYS)
    if not callable(key):
        raise ConfigError(f"group_by {config.group_by!r} is not a function (episode, trajectory) -> text.")
    return key


def by_task(episode: Episode, trajectory: Trajectory) -> str:
    """Those of one task with one name."""
    return json.dumps([episode.task_id, trajectory.name])


def _groups(every: Sequence[Member], config: Config) -> list[list[Member]]:
    """In the order of their first members. Trajectories of two algorithms are never in one."""
    key, found = key_of(config), dict[str, list[Member]]()
    for member in every:
        with Users(f"group_by {config.group_by}: "):
            text = key(member.episode, member.trajectory)
        if not isinstance(text, str):
            raise UserError(f"group_by {config.group_by} must return a text, got {text!r}.")
        member.group = f"{member.role}:{text}"
        found.setdefault(member.group, []).append(member)
    return list(found.values())


def _share(groups: Sequence[list[Member]], config: Config, algorithm: Algorithm, before: Standing) -> None:
    """Sets the advantages of every member's calls. Groups of one trajectory name are one batch to the algorithm."""
    share = credit.of(config)
    for name in {group[0].trajectory.name: None for group in groups}:
        batch = [group for group in groups if group[0].trajectory.name == name]
        role = batch[0][0].role
        whose = f"advantages of algorithm {[config.algorithm, *roles.names(config).values()][role]}"

        def compared(values: Sequence[credit.Values], role: int = role, whose: str = whose) -> list[np.ndarray]:
            shown = [Group(np.array(values_G), np.array(tokens_G, np.int64), role) for values_G, tokens_G in values]
            with Users(f"{whose}: "):
                found = algorithm.advantages(shown, config)
                return _fitting(found, [len(values_G) for values_G, _ in values], whose)

        paths = [[_path(member, config, before) for member in group] for group in batch]
        every = [member for group in batch for member in group]
        with Users(f"credit {config.credit}: "):
            found = [value_K for group in share(paths, compared, config) for value_K in group]
            found = _fitting(found, [len(member.calls) for member in every], f"credit {config.credit}")
        for member, value_K in zip(every, found, strict=True):
            member.advantages = {
                step.id: value if step.advantage is None else step.advantage
                for step, value in zip(member.calls.values(), value_K.tolist(), strict=True)
            }


def _fitting(found: Sequence[np.ndarray], counts: Sequence[int], who: str) -> list[np.ndarray]:
    """`found`, as many finite numbers each as `counts` has it. Raises UserError, naming `who` gave them."""
    arrays = [np.asarray(values, np.float64) for values in found]
    shapes = [values.shape for values in arrays]
    if shapes != [(count,) for count in counts] or not all(np.isfinite(values).all() for values in arrays):
        got = f"got {[values.tolist() for values in arrays]!r:.200}"
        raise UserError(f"{who}: lists of {', '.join(map(str, counts))} finite numbers were to be returned, {got}.")
    return arrays


def _path(member: Member, config: Config, before: Standing) -> credit.Path:
    """What the ways of credit know of a trajectory. A call's state is the `input` of its agent, else its prompt."""
    steps, tree = list(member.calls.values()), member.episode.tree
    states: list[str] = []
    if config.credit != "trajectory":
        seen = [tree.prompt_ids(step.node) if step.input is None else plain(step.input) for step in steps]
        states = [json.dumps(state) for state in seen]
    rewards_K = np.array([step.reward for step in steps], np.float64)
    reward = member.reward - (before.baseline(member.group) if config.baseline == "task" else 0.0)
    return credit.Path(reward, rewards_K, np.array([step.response_length for step in steps], np.int64), states)
