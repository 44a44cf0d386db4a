"""Algorithms: rewards of groups in, advantages and a loss per token out. Pick one by name, or as ``module:attr``.

Owns: the protocol, the name table, and the pieces that algorithms share (group baseline, PPO clip); each exists once,
here. Does not know: models, trees, batches, what is added to an algorithm's loss (objective.py), how the loss per token
is aggregated (batch.py).

Legend: G trajectories of one group, N trained tokens of a micro-batch. Value n is about token n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from minirllm.algorithms.own import Own
from minirllm.config import Config, find
from minirllm.errors import ConfigError


class Group(NamedTuple):
    """The trajectories that are compared with each other: those of one task with one name."""

    rewards_G: np.ndarray  # float64
    tokens_G: np.ndarray  # int64: how many tokens each sampled in its calls
    role: int = 0  # whose algorithm they have (roles.py)


@dataclass(frozen=True)
class Tokens:
    """What a loss is a function of. Only `logprob_N` and `divergence_N` carry a gradient."""

    logprob_N: torch.Tensor  # log p(token) of the policy now
    old_N: torch.Tensor  # as the sampler captured it; with a correction, of the policy as the update began
    advantage_N: torch.Tensor
    sequence_N: torch.Tensor  # int64: which trajectory of the batch
    role_N: torch.Tensor  # int64: whose algorithm it has (roles.py)
    divergence_N: torch.Tensor | None = None  # from a teacher's distribution, with a gradient, too; distill only


Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]  # of each token [N], and values per token [N] for the metrics


class Algorithm(Protocol):
    """Stateless: two formulas and a check of the options they need."""

    def validate(self, config: Config) -> None:
        """Raises ConfigError, before anything is run, when nothing can be learned with these options."""

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """``[G]`` float64 for each group of a step. All zero means: nothing to learn from this group."""

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """The loss of each token ``[N]``, to be minimised, and values per token ``[N]``, detached, for the metrics."""


ALGORITHMS: dict[str, str] = {
    "grpo": "minirllm.algorithms.grpo:GRPO",
    "dr_grpo": "minirllm.algorithms.dr_grpo:DrGRPO",
    "dapo": "minirllm.algorithms.dapo:DAPO",
    "gspo": "minirllm.algorithms.gspo:GSPO",
    "cispo": "minirllm.algorithms.cispo:CISPO",
    "sapo": "minirllm.algorithms.sapo:SAPO",
    "rloo": "minirllm.algorithms.rloo:RLOO",
    "reinforce": "minirllm.algorithms.reinforce:REINFORCE",
    "gpg": "minirllm.algorithms.gpg:GPG",
    "prpo": "minirllm.algorithms.prpo:PRPO",
    "reinforce_pp": "minirllm.algorithms.reinforce_pp:ReinforcePP",
    "reinforce_pp_baseline": "minirllm.algorithms.reinforce_pp:ReinforcePPBaseline",
    "distill": "minirllm.algorithms.distill:Distill",
}


def create(name: str) -> Algorithm:
    """The algorithm called `name`, or the class or instance at ``module:attr``. ConfigError when there is none."""
    found = find("algorithm", name, ALGORITHMS)
    algorithm: Algorithm = found() if name in ALGORITHMS else Own(name, found)
    return algorithm


# ---- what options must be ----


def require_group(name: str, config: Config) -> None:
    """Raises ConfigError when `config` gives an algorithm with a group baseline groups of one."""
    if config.group_size < 2:
        raise ConfigError(
            f"{name} learns from the differences within a group, so nothing can be learned with "
            f"group_size = {config.group_size}: set group_size to 2 or more, or algorithm to reinforce."
        )


# ---- advantages ----


def centred(rewards_G: np.ndarray) -> np.ndarray:
    """Rewards minus their mean; exact zeros, without rounding dust, when all are equal."""
    if np.ptp(rewards_G) == 0:
        return np.zeros(len(rewards_G))
    return np.asarray(rewards_G - rewards_G.mean())


# ---- losses ----


def clipped(tokens: Tokens, config: Config) -> Loss:
    """The clipped surrogate at the ratio of each token: the loss of GRPO and its kin."""
    return clipped_surrogate(torch.exp(tokens.logprob_N - tokens.old_N), tokens, config)


def clipped_surrogate(ratio_N: torch.Tensor, tokens: Tokens, config: Config) -> Loss:
    """PPO's clipped objective per token, negated (arXiv 1707.06347, eq. 7; two bounds as in DAPO, 2503.14476).

    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``. A token's gradient is zero exactly where the second term is
    the smaller one. With ``dual_clip = c > 0`` a bad token costs at most ``-c A``, however far its ratio ran away
    (arXiv 1912.09729, eq. 5).
    """
    free_N = ratio_N * tokens.advantage_N
    bound_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * tokens.advantage_N
    gain_N = torch.minimum(free_N, bound_N)
    metrics = {"clip_fraction": (bound_N < free_N).float()}
    if config.dual_clip:
        least_N = config.dual_clip * tokens.advantage_N
        held_N = (tokens.advantage_N < 0) & (gain_N < least_N)
        gain_N = torch.where(held_N, least_N, gain_N)
        metrics["dual_clip_fraction"] = held_N.float()
    return -gain_N, metrics


def per_sequence_sum(value_N: torch.Tensor, sequence_N: torch.Tensor) -> torch.Tensor:
    """For each token the sum of `value_N` over the tokens of its trajectory, ``[N]``."""
    count = int(sequence_N.max()) + 1 if len(value_N) else 0
    return value_N.new_zeros(count).index_add(0, sequence_N, value_N)[sequence_N]
