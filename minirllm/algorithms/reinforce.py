"""REINFORCE: the plain policy gradient (Williams 1992, doi 10.1007/BF00992696).

Owns: its advantage and loss. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

import numpy as np
import torch

from minirllm.algorithms import add_kl
from minirllm.config import Config


class REINFORCE:
    """The advantage is the reward itself: no baseline, no ratio, no clip. Groups of one are fine."""

    def validate(self, config: Config) -> None:
        """Nothing to refuse."""

    def advantages(self, rewards_G: np.ndarray, config: Config) -> np.ndarray:
        """The rewards."""
        return np.asarray(rewards_G, dtype=np.float64)

    def loss(
        self,
        logprob_N: torch.Tensor,
        old_logprob_N: torch.Tensor,
        advantage_N: torch.Tensor,
        reference_N: torch.Tensor | None,
        config: Config,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """``-A log p(token)`` plus ``kl_beta`` times the KL; gradient ``-A grad log p``, `old_logprob_N` unused."""
        return add_kl(-advantage_N * logprob_N, {}, logprob_N, reference_N, config)
