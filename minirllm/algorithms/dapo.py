"""DAPO: Decoupled Clip and Dynamic sAmpling Policy Optimization (arXiv 2503.14476).

Of its four parts, clip-higher and the mean over tokens are options that it insists on; groups without a signal are left
out of every batch here, and replaced by others with `refill`; long answers are punished with `overlong_buffer`.

Owns: its advantage, and what it asks of the options. Does not know: trees, models, aggregation.
"""

from __future__ import annotations

from minirllm.algorithms import require_group
from minirllm.algorithms.grpo import GRPO
from minirllm.config import Config
from minirllm.errors import ConfigError


class DAPO(GRPO):
    """GRPO with a higher upper clip, a mean over tokens, no KL."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError for groups of one, and for options that make it plain GRPO."""
        require_group("DAPO", config)
        for wrong, instead in (
            (config.clip_high <= config.clip_low, "clip_high above clip_low"),
            (config.loss_aggregation != "token", "loss_aggregation = token"),
            (config.kl_beta > 0, "kl_beta = 0"),
            (not config.norm_std, "norm_std = true"),
        ):
            if wrong:
                raise ConfigError(f"dapo is defined with {instead}: set it so, or algorithm = grpo.")
