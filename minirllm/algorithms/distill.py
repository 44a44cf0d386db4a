"""On-policy distillation: what is learned of each token is what a teacher thinks of it (see minirllm.teachers).

Owns: its loss, which options go with it. Does not know: who the teacher is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minirllm.algorithms import Group, Loss, Tokens, clipped
from minirllm.config import Config, refuse
from minirllm.errors import ConfigError

AT_URL = ("teacher_model", "teacher_tokenizer", "key_env")  # of a teacher that is asked over HTTP
OPTIONS = ("teacher", *AT_URL, "teacher_top_k", "privileged")
WITHOUT_EFFECT = ("norm_std", "overlong_buffer", "credit", "group_by", "kl_in", "refill", "spare_tasks", "baseline")


def is_url(teacher: str) -> bool:
    """Is it asked over HTTP?"""
    return teacher.startswith(("http://", "https://"))


class Distill:
    """The reverse KL to the teacher: its advantages per token, PPO-clipped, or its distribution as the target."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for the options of rewards, and for what the teacher lacks or has no use for."""
        if not config.teacher:
            raise ConfigError("Who teaches? Give --teacher a model, a run, a checkpoint or a URL, or base or self.")
        if config.teacher == "self" and not config.privileged:
            raise ConfigError("teacher = self thinks as the student does: tell it more with --privileged.")
        refuse("distill", config, *WITHOUT_EFFECT)
        if config.teacher_top_k:
            refuse("distill by teacher_top_k", config, "clip_low", "clip_high", "dual_clip", "correction")
        if not is_url(config.teacher):
            refuse(f"teacher = {config.teacher}, which is no URL", config, *AT_URL)
        if config.temperature != 1:
            raise ConfigError(f"distill compares distributions at temperature 1, got {config.temperature:g}: leave it.")

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """Zeros: rewards are shown, and teach nothing. The teacher's stand in their place (`Step.advantage`)."""
        return [np.zeros(len(group.rewards_G)) for group in groups]

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """The clipped surrogate of the teacher's advantages; or the KL(policy || teacher) over its likely tokens."""
        if tokens.divergence_N is not None:
            return tokens.divergence_N, {"divergence": tokens.divergence_N.detach()}
        return clipped(tokens, config)
