"""SAPO: Soft Adaptive Policy Optimization (arXiv 2511.20347): a smooth gate in place of the clip.

Owns: its loss. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

import torch

from minirllm.algorithms import Loss, Tokens, require_group
from minirllm.algorithms.grpo import GRPO
from minirllm.config import Config, refuse

TAU_GOOD, TAU_BAD = 1.0, 1.05  # the paper's: a bad token's gradient fades faster as the ratio leaves 1


class SAPO(GRPO):
    """GRPO's advantage; the further a token's ratio is from 1, the less it teaches."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for groups of one, and for the bounds of a clip."""
        require_group("SAPO", config)
        refuse("sapo", config, "clip_low", "clip_high", "dual_clip")

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """``-(4 / tau) sigmoid(tau (r - 1)) A``: its derivative for r is ``-4 p (1 - p) A``, with p the sigmoid: -A at
        r = 1, and falling on both sides."""
        tau_N = torch.full_like(tokens.advantage_N, TAU_BAD).masked_fill(tokens.advantage_N > 0, TAU_GOOD)
        ratio_N = torch.exp(tokens.logprob_N - tokens.old_N)
        gate_N = torch.sigmoid(tau_N * (ratio_N - 1))
        return -4 / tau_N * gate_N * tokens.advantage_N, {"gate": (4 * gate_N * (1 - gate_N)).detach()}
