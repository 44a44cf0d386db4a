"""PRPO as rLLM has it (github.com/rllm-org/rllm): rewards normalised over the whole batch of a role, group or not.

The paper of this name (arXiv 2601.07182) is something else: it needs a model that rewards single steps.

Owns: its advantage. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minirllm.algorithms import Group, Loss, Tokens, centred, clipped
from minirllm.algorithms.grpo import EPSILON
from minirllm.config import Config, refuse


class PRPO:
    """Reward minus the mean of all trajectories, over their standard deviation; PPO-clipped. Groups of one are fine."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for the option of a group's spread."""
        refuse("prpo", config, "norm_std")

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """``(r - mean) / (std + 1e-6)``, over all trajectories, each counted once, whatever its length."""
        rewards_M = np.concatenate([np.empty(0), *(group.rewards_G for group in groups)])
        if not len(rewards_M):
            return []
        whitened_M = centred(rewards_M) / (rewards_M.std() + EPSILON)
        return np.split(whitened_M, np.cumsum([len(group.rewards_G) for group in groups])[:-1])

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """The clipped surrogate."""
        return clipped(tokens, config)
