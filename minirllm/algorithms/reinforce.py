"""REINFORCE: the plain policy gradient (Williams 1992, doi 10.1007/BF00992696).

Owns: its advantage and loss. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minirllm.algorithms import Group, Loss, Tokens
from minirllm.config import Config, refuse


class REINFORCE:
    """The advantage is the reward itself: no baseline, no ratio, no clip. Groups of one are fine."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for options of a ratio or a baseline."""
        refuse("reinforce", config, "norm_std", "clip_low", "clip_high", "dual_clip")

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """The rewards."""
        return [np.asarray(group.rewards_G, dtype=np.float64) for group in groups]

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """``-A log p(token)``; gradient ``-A grad log p``, the ratio unused."""
        return -tokens.advantage_N * tokens.logprob_N, {}
