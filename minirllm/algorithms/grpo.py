"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300); without the division, Dr. GRPO's (arXiv 2503.20783).

Owns: its advantage. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

import numpy as np
import torch

from minirllm.algorithms import add_kl, centred, clipped_surrogate, require_group
from minirllm.config import Config

EPSILON = 1e-6  # keeps the division finite, as in rLLM


class GRPO:
    """Reward minus the group's mean, over its standard deviation; PPO-clipped."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for groups of one."""
        require_group("GRPO", config)

    def advantages(self, rewards_G: np.ndarray, config: Config) -> np.ndarray:
        """``(r - mean) / (std + 1e-6)``, std over G, not G - 1; ``r - mean`` with ``norm_std = false``."""
        centred_G = centred(rewards_G)
        return centred_G / (rewards_G.std() + EPSILON) if config.norm_std else centred_G

    def loss(
        self,
        logprob_N: torch.Tensor,
        old_logprob_N: torch.Tensor,
        advantage_N: torch.Tensor,
        reference_N: torch.Tensor | None,
        config: Config,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The clipped surrogate plus ``kl_beta`` times the KL to the base model."""
        loss_N, metrics = clipped_surrogate(logprob_N, old_logprob_N, advantage_N, config)
        return add_kl(loss_N, metrics, logprob_N, reference_N, config)
