"""Dr. GRPO: GRPO done right (arXiv 2503.20783): neither the group's spread nor a trajectory's length divides anything.

Owns: its advantage, and what it asks of the options. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minirllm.algorithms import Group, Loss, Tokens, centred, clipped, require_group
from minirllm.config import Config, refuse
from minirllm.errors import ConfigError


class DrGRPO:
    """Reward minus the group's mean; PPO-clipped; a token weighs the same in every trajectory and every batch."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for groups of one, and for an aggregation that divides by lengths."""
        require_group("Dr. GRPO", config)
        refuse("dr_grpo", config, "norm_std")
        if config.loss_aggregation != "constant":
            raise ConfigError(
                f"dr_grpo divides by a constant, but loss_aggregation is {config.loss_aggregation}: set "
                "loss_aggregation = constant, or algorithm = grpo."
            )

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """``r - mean``."""
        return [centred(group.rewards_G) for group in groups]

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """The clipped surrogate."""
        return clipped(tokens, config)
