"""Supervised fine-tuning: the likelihood of given answers. Not in the table: it takes no rewards (see minirllm.sft).

Owns: its loss. Does not know: where answers come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minirllm.algorithms import Group, Loss, Tokens, refuse
from minirllm.config import Config

WITHOUT_EFFECT = (
    "algorithm", "roles", "group_size", "lag", "temperature", "max_tokens", "norm_std", "inner_epochs",
    "mini_batches", "clip_low", "clip_high", "dual_clip", "correction", "correction_cap", "kl_beta", "kl_in",
    "kl_estimator", "kl_target", "entropy_bonus", "overlong_buffer", "mask_truncated", "loss_aggregation", "group_by",
    "credit", "discount", "state_weight", "min_group_size", "drop_reasons", "spare_rollouts", "spare_tasks", "refill",
    "teacher", "teacher_model", "teacher_tokenizer", "teacher_top_k", "privileged", "baseline", "curriculum",
    "solve_rate_low", "solve_rate_high", "running_rate",
)  # fmt: skip


class SFT:
    """Cross-entropy; every token of every answer weighs the same."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for the options of sampling and of rewards."""
        refuse("sft", config, *WITHOUT_EFFECT)

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """Ones: whatever is given is good."""
        return [np.ones(len(group.rewards_G)) for group in groups]

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """``-log p(token)``."""
        return -tokens.logprob_N, {}
