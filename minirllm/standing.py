"""How the tasks stand: what the steps before showed of each, and which ones a step takes for it.

Owns: the running means, the curriculum, the bounds of difficulty. Does not know: episodes, advantages, weights.

A standing is a value: `after` gives the next. It holds nothing but what finished steps showed, and is saved with them,
so which tasks a step takes is a function of what lies before it, and a resumed run goes on with the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from minirllm.config import Config
from minirllm.errors import ConfigError
from minirllm.types import Task

T = TypeVar("T")
LEAST = 0.05  # added to a task's weight in the curriculum, so that none is forgotten
Means = Mapping[str, float]


@dataclass(frozen=True)
class Standing:
    """Running means: those of the newest step count for `running_rate`, all before them for the rest."""

    reward: Means = field(default_factory=dict)  # by group, for ``baseline = task``
    solved: Means = field(default_factory=dict)  # by task: the share of its graded rollouts that was correct

    def after(self, reward: Means, solved: Means, config: Config) -> Standing:
        """The next one, when a step's groups and tasks had these means. What no option asks for is not kept."""
        chosen = config.curriculum != "off" or _bounded(config)
        return Standing(
            _moved(self.reward, reward, config) if config.baseline == "task" else {},
            _moved(self.solved, solved, config) if chosen else {},
        )

    def baseline(self, group: str) -> float:
        """What its trajectories may be expected to earn: its running mean; of a new group that of all of its role."""
        role = group.partition(":")[0] + ":"
        known = [mean for other, mean in self.reward.items() if other.startswith(role)]
        return self.reward.get(group, sum(known) / len(known) if known else 0.0)


NOTHING = Standing()  # is known before the first step


def _moved(means: Means, new: Means, config: Config) -> dict[str, float]:
    old = {key: means.get(key, value) for key, value in new.items()}  # of what is new the first counts whole
    return {**means, **{key: old[key] + config.running_rate * (value - old[key]) for key, value in new.items()}}


def _bounded(config: Config) -> bool:
    return (config.solve_rate_low, config.solve_rate_high) != (0.0, 1.0)


def validate(config: Config) -> None:
    """Raises ConfigError for bounds that are none, and a rate without effect."""
    low, high = config.solve_rate_low, config.solve_rate_high
    if low > high:
        raise ConfigError(f"No task is solved at least {low:g} and at most {high:g}: lower solve_rate_low.")
    unused = config.curriculum == "off" and config.baseline == "group" and not _bounded(config)
    if unused and config.running_rate != Config.running_rate:
        raise ConfigError("running_rate has no effect: neither curriculum, baseline nor bounds of solve rates are set.")


def size(config: Config, tasks: int) -> int:
    """How many tasks a step takes: its own, and behind them those that may replace them (`refill`)."""
    return min((config.batch_size + config.spare_tasks) * (1 + config.refill), tasks)


def schedule(tasks: Sequence[T], config: Config, step: int) -> list[T]:
    """The tasks, or whatever they are, of step 1, 2, ...: each epoch is a new permutation drawn from (seed, epoch); a
    step repeats none, and no two steps of an epoch share one."""
    count = size(config, len(tasks))
    epoch, place = divmod(step - 1, len(tasks) // count)
    order = np.random.default_rng([config.seed, epoch]).permutation(len(tasks))
    return [tasks[i] for i in order[place * count : (place + 1) * count]]


def choose(tasks: Sequence[Task], config: Config, step: int, standing: Standing) -> list[Task]:
    """The tasks of a step. Those whose solve rate is out of bounds are passed over while there are others; a curriculum
    draws from the rest by weight, without putting back."""
    inside = within(tasks, config, standing)
    if config.curriculum == "off":
        return schedule(inside, config, step)
    rate_M = np.array([standing.solved.get(task.id, 0.5) for task in inside])
    weight_M = (rate_M * (1 - rate_M) if config.curriculum == "learnable" else 1 - rate_M) + LEAST
    random = np.random.default_rng([config.seed, step, 1])  # the 1: not the numbers of an epoch
    drawn = random.choice(len(inside), size(config, len(inside)), replace=False, p=weight_M / weight_M.sum())
    return [inside[i] for i in drawn]


def within(tasks: Sequence[Task], config: Config, standing: Standing) -> list[Task]:
    """Those within the bounds, in their order, with the nearest ones beyond if there are not enough for a step."""

    def beyond(task: Task) -> float:
        rate = standing.solved.get(task.id, config.solve_rate_low)  # one that was never tried is within
        return max(config.solve_rate_low - rate, rate - config.solve_rate_high, 0.0)

    enough = min(config.batch_size + config.spare_tasks, len(tasks))
    limit = sorted(map(beyond, tasks))[enough - 1]
    return [task for task in tasks if beyond(task) <= limit]
