"""GPG: Group Policy Gradient (arXiv 2504.02546): no ratio, no clip; groups that teach nothing weaken no others.

Of the paper's choices those it recommends: ``F_norm = 1``, and ``alpha = B / (B - M)`` for M of B samples in groups
without a signal, which here is that such groups do not enter the mean (batch.py; with the KL or an entropy bonus in the
loss they do).

Owns: its advantage. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minirllm.algorithms import Group, centred, require_group
from minirllm.algorithms.reinforce import REINFORCE
from minirllm.config import Config, refuse


class GPG(REINFORCE):
    """REINFORCE's loss; the advantage is the reward minus the group's mean."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for groups of one, and for options of a ratio or a group's spread."""
        require_group("GPG", config)
        refuse("gpg", config, "norm_std", "clip_low", "clip_high", "dual_clip")

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """``r - mean``."""
        return [centred(group.rewards_G) for group in groups]
