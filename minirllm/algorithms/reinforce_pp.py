"""REINFORCE++ and its form with a baseline (arXiv 2501.03262): the whole batch, not the group, sets the scale.

Owns: their advantages. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minirllm.algorithms import Group, Loss, Tokens, centred, clipped, require_group
from minirllm.config import Config, refuse

EPSILON = 1e-8  # added to the variance


class ReinforcePP:
    """Rewards whitened over all tokens of the batch; PPO-clipped. Groups of one are fine."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for the option of a group's spread."""
        refuse("reinforce_pp", config, "norm_std")

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """``(r - mean) / sqrt(var + 1e-8)``; mean and unbiased variance over tokens, each with its reward."""
        return whitened([group.rewards_G for group in groups], groups)

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """The clipped surrogate."""
        return clipped(tokens, config)


class ReinforcePPBaseline(ReinforcePP):
    """The group's mean is taken off first; then as REINFORCE++."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for groups of one."""
        require_group("REINFORCE++ with a baseline", config)
        refuse("reinforce_pp_baseline", config, "norm_std")

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """As `ReinforcePP.advantages`, of ``r - mean of its group``."""
        return whitened([centred(group.rewards_G) for group in groups], groups)


def whitened(values: Sequence[np.ndarray], groups: Sequence[Group]) -> list[np.ndarray]:
    """`values` with mean 0 and variance 1 over the tokens of all trajectories; exact zeros when all are equal."""
    value_M = np.concatenate([np.empty(0), *values])
    count_M = np.concatenate([np.empty(0), *(group.tokens_G for group in groups)])
    total = count_M.sum()
    if total < 2 or np.ptp(value_M[count_M > 0]) == 0:
        return [np.zeros(len(value_G)) for value_G in values]
    mean = (count_M * value_M).sum() / total
    variance = (count_M * (value_M - mean) ** 2).sum() / (total - 1)
    return [(value_G - mean) / np.sqrt(variance + EPSILON) for value_G in values]
