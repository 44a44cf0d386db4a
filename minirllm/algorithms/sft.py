"""Supervised fine-tuning: the likelihood of given answers. Not in the table: it takes no rewards (see minirllm.sft).

Owns: its loss. Does not know: where answers come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minirllm.algorithms import Group, Loss, Tokens
from minirllm.config import FIELDS, Config, refuse

WITH_EFFECT = (
    "model", "max_context", "history", "tool_syntax", "date", "steps", "batch_size", "seed", "lr", "lr_schedule",
    "warmup_steps", "weight_decay", "grad_clip", "lora_rank", "lora_alpha", "lora_targets", "gradient_checkpointing",
    "micro_batch_tokens", "packing", "engine", "determinism", "threads", "device", "eval_every", "save_every",
    "keep_checkpoints", "runs_dir", "run", "trackers",
)  # fmt: skip


class SFT:
    """Cross-entropy; every token of every answer weighs the same."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for the options of rollouts and of rewards."""
        refuse("sft", config, *(name for name in FIELDS if name not in WITH_EFFECT))

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """Ones: whatever is given is good."""
        return [np.ones(len(group.rewards_G)) for group in groups]

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """``-log p(token)``."""
        return -tokens.logprob_N, {}
