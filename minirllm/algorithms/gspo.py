"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071).

Owns: its ratio. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

import torch

from minirllm.algorithms import Loss, Tokens, clipped_surrogate, per_sequence_sum, require_group
from minirllm.algorithms.grpo import GRPO
from minirllm.config import Config
from minirllm.errors import ConfigError


class GSPO(GRPO):
    """GRPO's advantage; the ratio, and so the clip, is that of the whole trajectory."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for groups of one, and where a trajectory's tokens lie in several rows."""
        require_group("GSPO", config)
        if config.packing == "paths":
            raise ConfigError("gspo needs all tokens of a trajectory side by side: set packing = forest.")

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """The clipped surrogate at ``s = exp(mean over the trajectory of logprob - old)``.

        As in the paper's GSPO-token (eq. 13-15): token n has the value of s and the gradient of ``s log p(n)``; with
        ``loss_aggregation = sequence`` the sum over a trajectory is GSPO's own objective (eq. 5). Its clip bounds are
        far tighter than PPO's (the paper: 3e-4 below, 4e-4 above).
        """
        gap_N = per_sequence_sum(tokens.logprob_N.detach() - tokens.old_N, tokens.sequence_N)
        sequence_N = torch.exp(gap_N / per_sequence_sum(torch.ones_like(gap_N), tokens.sequence_N))
        ratio_N = sequence_N * torch.exp(tokens.logprob_N - tokens.logprob_N.detach())
        return clipped_surrogate(ratio_N, tokens, config)
