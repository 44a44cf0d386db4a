"""CISPO: Clipped IS-weight Policy Optimization (MiniMax-M1, arXiv 2506.13585).

Owns: its loss. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

import torch

from minirllm.algorithms import Loss, Tokens, require_group
from minirllm.algorithms.grpo import GRPO
from minirllm.config import Config, refuse


class CISPO(GRPO):
    """GRPO's advantage; the ratio is a clipped weight without a gradient, so that no token ever drops out."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for groups of one, and for a bound that it does not have."""
        require_group("CISPO", config)
        refuse("cispo", config, "dual_clip")

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """``-clip(r, 1 - clip_low, 1 + clip_high) A log p(token)``, r without a gradient (eq. 4-5)."""
        ratio_N = torch.exp(tokens.logprob_N.detach() - tokens.old_N)
        weight_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
        metrics = {"clip_fraction": (weight_N != ratio_N).float()}
        return -weight_N * tokens.advantage_N * tokens.logprob_N, metrics
