"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300).

Owns: its advantage. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minirllm.algorithms import Group, Loss, Tokens, centred, clipped, require_group
from minirllm.config import Config

EPSILON = 1e-6  # keeps the division finite, as in rLLM


class GRPO:
    """Reward minus the group's mean, over its standard deviation; PPO-clipped."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for groups of one."""
        require_group("GRPO", config)

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """``(r - mean) / (std + 1e-6)``, std over G, not G - 1; ``r - mean`` with ``norm_std = false``."""
        scales = [group.rewards_G.std() + EPSILON if config.norm_std else 1.0 for group in groups]
        return [centred(group.rewards_G) / scale for group, scale in zip(groups, scales, strict=True)]

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """The clipped surrogate."""
        return clipped(tokens, config)
