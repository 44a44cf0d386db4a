"""Algorithms: rewards of a group in, advantages and a loss per token out. Pick one by name, or as ``module:attr``.

Owns: the protocol, the name table, and the pieces every algorithm shares (group baseline, PPO clip, KL estimate); each
exists once, here. Does not know: models, trees, batches, how the loss per token is aggregated (batch.py).

Legend: G trajectories of one group, N trained tokens. Value n is about token n: `logprob_N[n]` is log p(token n).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from minirllm.config import Config, find
from minirllm.errors import ConfigError


class Algorithm(Protocol):
    """Stateless: two formulas and a check of the options they need."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError, before anything is run, when nothing can be learned with these options."""

    def advantages(self, rewards_G: np.ndarray, config: Config) -> np.ndarray:
        """``[G]`` float64. All zero means: nothing to learn from this group."""

    def loss(
        self,
        logprob_N: torch.Tensor,
        old_logprob_N: torch.Tensor,
        advantage_N: torch.Tensor,
        reference_N: torch.Tensor | None,
        config: Config,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of each token ``[N]``, to be minimised, and named values per token ``[N]``, detached, for metrics.

        `logprob_N` carries the gradient; `old_logprob_N` is what the sampler captured; `reference_N` is the frozen base
        model's, given exactly when ``config.kl_beta > 0``.
        """


ALGORITHMS: dict[str, str] = {
    "grpo": "minirllm.algorithms.grpo:GRPO",
    "rloo": "minirllm.algorithms.rloo:RLOO",
    "reinforce": "minirllm.algorithms.reinforce:REINFORCE",
}


def create(name: str) -> Algorithm:
    """The algorithm called `name`, or the class or instance at ``module:attr``. ConfigError when there is none."""
    found = find("algorithm", name, ALGORITHMS)
    algorithm: Algorithm = found() if isinstance(found, type) else found
    for method in ("validate", "advantages", "loss"):
        if not callable(getattr(algorithm, method, None)):
            raise ConfigError(f"Algorithm {name!r} has no method {method}(); see minirllm.algorithms.Algorithm.")
    return algorithm


def require_group(name: str, config: Config) -> None:
    """Raises ConfigError when `config` gives an algorithm with a group baseline groups of one."""
    if config.group_size < 2:
        raise ConfigError(
            f"{name} learns from the differences within a group, so nothing can be learned with "
            f"group_size = {config.group_size}: set group_size to 2 or more, or algorithm to reinforce."
        )


def centred(rewards_G: np.ndarray) -> np.ndarray:
    """Rewards minus their mean; exact zeros, without rounding dust, when all are equal."""
    if np.ptp(rewards_G) == 0:
        return np.zeros(len(rewards_G))
    return rewards_G - rewards_G.mean()


def clipped_surrogate(
    logprob_N: torch.Tensor, old_logprob_N: torch.Tensor, advantage_N: torch.Tensor, config: Config
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped objective per token, negated (arXiv 1707.06347, eq. 7; two bounds as in DAPO, 2503.14476).

    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprob - old)``. A token's gradient is zero
    exactly where the second term is the smaller one.
    """
    ratio_N = torch.exp(logprob_N - old_logprob_N)
    free_N = ratio_N * advantage_N
    bound_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage_N
    return -torch.minimum(free_N, bound_N), {"clip_fraction": (bound_N < free_N).float()}


def add_kl(
    loss_N: torch.Tensor,
    metrics: dict[str, torch.Tensor],
    logprob_N: torch.Tensor,
    reference_N: torch.Tensor | None,
    config: Config,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Adds ``kl_beta`` times the k3 estimate of KL(policy || reference), ``e^d - d - 1`` with d = reference - logprob.

    Non-negative per token and unbiased under the policy (arXiv 2402.03300, eq. 4). Without a reference nothing changes.
    """
    if reference_N is None:
        return loss_N, metrics
    difference_N = reference_N - logprob_N
    kl_N = torch.exp(difference_N) - difference_N - 1
    return loss_N + config.kl_beta * kl_N, {**metrics, "kl_reference": kl_N.detach()}
