"""RLOO: REINFORCE with a leave-one-out baseline (arXiv 2402.14740).

Owns: its advantage. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minirllm.algorithms import Group, Loss, Tokens, centred, clipped, require_group
from minirllm.config import Config, refuse


class RLOO:
    """Each reward minus the mean of the others; PPO-clipped."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for groups of one."""
        require_group("RLOO", config)
        refuse("rloo", config, "norm_std")

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """``r_i - mean of r_j, j != i``, that is ``G / (G - 1) * (r - mean)``; 0 for a lone reward."""
        sizes = [len(group.rewards_G) for group in groups]
        return [centred(group.rewards_G) * (G / max(1, G - 1)) for group, G in zip(groups, sizes, strict=True)]

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """The clipped surrogate, at ratio 1 the policy gradient."""
        return clipped(tokens, config)
