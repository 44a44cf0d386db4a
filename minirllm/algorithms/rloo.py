"""RLOO: REINFORCE with a leave-one-out baseline (arXiv 2402.14740).

Owns: its advantage. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

import numpy as np
import torch

from minirllm.algorithms import add_kl, centred, clipped_surrogate, require_group
from minirllm.config import Config


class RLOO:
    """Each reward minus the mean of the others; PPO-clipped."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for groups of one."""
        require_group("RLOO", config)

    def advantages(self, rewards_G: np.ndarray, config: Config) -> np.ndarray:
        """``r_i - mean of r_j, j != i``, that is ``G / (G - 1) * (r - mean)``; 0 for a lone reward."""
        return centred(rewards_G) * (len(rewards_G) / max(1, len(rewards_G) - 1))

    def loss(
        self,
        logprob_N: torch.Tensor,
        old_logprob_N: torch.Tensor,
        advantage_N: torch.Tensor,
        reference_N: torch.Tensor | None,
        config: Config,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The clipped surrogate, at ratio 1 the policy gradient, plus ``kl_beta`` times the KL to the base model."""
        loss_N, metrics = clipped_surrogate(logprob_N, old_logprob_N, advantage_N, config)
        return add_kl(loss_N, metrics, logprob_N, reference_N, config)
